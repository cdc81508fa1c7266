"""Steps of an engine that is slower for a while: throttled, or beside a neighbour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.costs.ahead import HostAhead
from sim.costs.base import StepCost, own_method, pricer_of
from sim.costs.parts import FLAG
from sim.costs.pipeline import PipelineCost
from sim.costs.pricing import batch_total_of
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from sim.costs.base import CostModel


def slowed(cost: StepCost, factor: float) -> StepCost:
    """Return the cost of a step that takes `factor` times as long."""
    parts = [part * factor for part in cost.parts]
    return StepCost._make(
        (
            cost.total_s * factor,
            *parts,
            cost.extrapolated,
            cost.lo_s * factor,
            cost.hi_s * factor,
        )
    )


class Slowed:
    """A cost model whose steps take `factor` times as long as another's.

    Parameters
    ----------
    model
        Prices the steps of an engine that is well.

    Attributes
    ----------
    factor
        Above 0. Only an engine's own model may change it, between two steps and when
        all steps so far have been priced (`StepLog.flush`).
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.factor = 1.0
        self._batch_total = batch_total_of(model)

    def step(self, shape: BatchShape) -> StepCost:
        return slowed(self.model.step(shape), self.factor)

    def stage_times(self, shape: BatchShape) -> list[tuple[float, float]]:
        """Return the times of a pipeline's stages; see `sim.costs.pipeline`."""
        factor = self.factor
        if not isinstance(self.model, PipelineCost | HostAhead):
            return [(0.0, self.model.step(shape).total_s * factor)]
        times = self.model.stage_times(shape)
        return [(sent_s * factor, stage_s * factor) for sent_s, stage_s in times]

    @property
    def first_stage_is_host(self) -> bool:
        return isinstance(self.model, HostAhead)

    def batch_total(self, *shape: int) -> float:
        return self._batch_total(*shape) * self.factor

    def decode_total(self, num_decodes: int) -> Callable[[int], float]:
        own = own_method(self.model, "decode_total")
        if own is None:
            total = self.batch_total
            return lambda context: total(num_decodes, context, 0, 0, 0, 0)
        price: Callable[[int], float] = own(num_decodes)
        return lambda context: price(context) * self.factor

    def columns(self, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
        pricer = pricer_of(self.model)
        if pricer is None:
            rows = [self.step(BatchShape(*shape)) for shape in shapes.tolist()]
            return np.array(rows, np.float64).reshape(len(rows), len(StepCost._fields))
        found = np.array(pricer.columns(shapes))
        flags = found[:, FLAG].copy()
        found *= self.factor
        found[:, FLAG] = flags
        return found

    def describe(self) -> dict[str, Any]:
        return self.model.describe()
