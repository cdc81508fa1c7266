"""Every step at a bound of its interval: a run whose kernels are all fast, or slow."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.costs.base import BatchShape, StepCost, own_method, pricer_of
from sim.costs.parts import FLAG, HI, LO, Memo

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from sim.costs.base import Bound, CostModel


class AtBound:
    """A cost model whose steps take `lo_s` or `hi_s` of another's.

    The errors of kernels are common to all steps, so all steps move together. Parts
    are scaled so that they still add up; where the model knows no bounds, a step is
    what it was.

    Parameters
    ----------
    model
        Whose steps.
    bound
        ``"lo"`` or ``"hi"``.
    """

    def __init__(self, model: CostModel, bound: Bound) -> None:
        self.model = model
        self.bound = bound
        self._place = LO if bound == "lo" else HI
        self._decode_totals: Memo[Callable[[int], float]] = Memo()

    def step(self, shape: BatchShape) -> StepCost:
        """Return the cost of a step of this shape, in seconds."""
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

    def batch_total(self, *shape: int) -> float:
        """Return ``total_s`` of a step that moves no blocks; see `StepPricer`."""
        cost = self.model.step(BatchShape(*shape))
        bound_s: float = cost[self._place]
        return cost.total_s if isnan(bound_s) else bound_s

    def decode_total(self, num_decodes: int) -> Callable[[int], float]:
        """Return ``total_s`` of steps of so many decodes; see `StepPricer`."""
        total = self._decode_totals.get(num_decodes)
        if total is None:
            total = self._decode_totals.keep(num_decodes, self._decodes(num_decodes))
        return total

    def _decodes(self, num_decodes: int) -> Callable[[int], float]:
        own = own_method(self.model, "decode_bound")
        if own is not None:
            found: Callable[[int], float] = own(num_decodes, self.bound)
            return found
        total = self.batch_total
        return lambda context: total(num_decodes, context, 0, 0, 0, 0)

    def columns(self, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return ``step()`` of each row; see `StepPricer`."""
        pricer = pricer_of(self.model)
        if pricer is None:
            rows = [self.step(BatchShape(*shape)) for shape in shapes.tolist()]
            return np.array(rows, np.float64).reshape(len(rows), len(StepCost._fields))
        found = np.array(pricer.columns(shapes).T)
        total_s, bound_s = found[0], found[self._place]
        bound_s = np.where(np.isnan(bound_s), total_s, bound_s)
        moved = bound_s != total_s
        scale = np.divide(bound_s, total_s, out=np.zeros(len(total_s)), where=moved)
        found[1:FLAG, moved] *= scale[moved]
        found[0] = found[LO] = found[HI] = bound_s
        return found.T

    def describe(self) -> dict[str, Any]:
        """Return what the model says of itself, and the bound."""
        return self.model.describe() | {"bounds": False, "bound": self.bound}
