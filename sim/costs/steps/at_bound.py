"""A cost model at a bound of another: every step as short, or as long, as it may be."""

from __future__ import annotations

from bisect import bisect_right
from math import isnan, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.costs.base import StepCost, pricer_of
from sim.costs.parts import FLAG, HI, LO
from sim.costs.pricing import steady_of
from sim.costs.steps.ahead import HostAhead
from sim.costs.steps.pipeline import PipelineCost
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from sim.costs.base import Bound, CostModel


class AtBound:
    """A cost model whose steps take `lo_s` or `hi_s` of another's.

    The errors of kernels are common to all steps, so all steps move together. Parts
    are scaled so that they still add up; where the model knows no bounds, a step is
    what it was.
    """

    def __init__(self, model: CostModel, bound: Bound) -> None:
        self.model = model
        self.bound = bound
        self._place = LO if bound == "lo" else HI
        # Others price more than the fields of a shape: which chunks verify drafts.
        self._pricer = pricer_of(model)
        if self._pricer is not None:
            self.columns = self._columns

    def step(self, shape: BatchShape) -> StepCost:
        cost = self.model.step(shape)
        bound_s: float = cost[self._place]
        total_s = cost.total_s
        if isnan(bound_s) or bound_s == total_s:
            return cost._replace(lo_s=total_s, hi_s=total_s)
        # a step without length is refused by the engine
        scale = bound_s / total_s if total_s else 0.0
        parts = [part * scale for part in cost.parts]
        flag = cost.extrapolated
        return StepCost._make((bound_s, *parts, flag, bound_s, bound_s))

    def stage_times(self, shape: BatchShape) -> list[tuple[float, float]]:
        """Return the times of a pipeline's stages; see `sim.costs.steps.pipeline`."""
        cost = self.model.step(shape)
        bound_s: float = cost[self._place]
        if not isinstance(self.model, PipelineCost | HostAhead):
            return [(0.0, cost.total_s if isnan(bound_s) else bound_s)]
        scale = 1.0 if isnan(bound_s) else bound_s / cost.total_s
        times = self.model.stage_times(shape)
        return [(sent_s * scale, stage_s * scale) for sent_s, stage_s in times]

    @property
    def first_stage_is_host(self) -> bool:
        return isinstance(self.model, HostAhead)

    def batch_total(self, *shape: int) -> float:
        cost = self.model.step(BatchShape(*shape))
        bound_s: float = cost[self._place]
        return cost.total_s if isnan(bound_s) else bound_s

    def decode_total(self, num_decodes: int) -> Callable[[int], float]:
        steady = steady_of(self.model, num_decodes) if num_decodes else None
        if steady is None or steady.launching_s:
            total = self.batch_total
            return lambda context: total(num_decodes, context, 0, 0, 0, 0)
        gemm_s, head_s, allreduce_s, host_s, lines, _, *squares, _, _ = steady
        firsts = [line.first for line in lines]
        is_hi = self.bound == "hi"
        square, sign = squares[is_hi], 1.0 if is_hi else -1.0
        slopes = [(*line[1:4], line[5 + is_hi]) for line in lines]

        def at_bound(context: int) -> float:
            value_s, slope_s, start, share = slopes[bisect_right(firsts, context) - 1]
            decode_s = value_s + slope_s * (context - start)
            half_s = decode_s * share
            total_s = gemm_s + decode_s + head_s + allreduce_s + host_s
            return total_s + sign * sqrt(square + half_s * half_s)

        return at_bound

    def _columns(self, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
        assert self._pricer is not None
        found = np.array(self._pricer.columns(shapes).T)
        total_s, bound_s = found[0], found[self._place]
        bound_s = np.where(np.isnan(bound_s), total_s, bound_s)
        moved = bound_s != total_s
        scale = np.divide(bound_s, total_s, out=np.zeros(len(total_s)), where=moved)
        found[1:FLAG, moved] *= scale[moved]
        found[0] = found[LO] = found[HI] = bound_s
        return found.T

    def describe(self) -> dict[str, Any]:
        return self.model.describe() | {"bounds": False, "bound": self.bound}
