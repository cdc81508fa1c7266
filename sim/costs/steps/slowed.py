"""Steps of an engine that is slower for a while: throttled, or beside a neighbour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from sim.costs.base import StepCost, own_method, pricer_of
from sim.costs.parts import FLAG
from sim.costs.pricing import batch_total_of
from sim.costs.steps.ahead import HostAhead
from sim.costs.steps.pipeline import PipelineCost

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from sim.costs.base import CostModel, ReadsPrefixesOnce
    from sim.scheduler.batch import BatchShape


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
        self._factor = 1.0
        self._reading: dict[int, Slowed] = {}
        self._batch_total = batch_total_of(model)
        # Others price more than the fields of a shape: which chunks verify drafts.
        self._pricer = pricer_of(model)
        if self._pricer is not None:
            self.columns = self._columns

    @property
    def factor(self) -> float:
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._factor = factor
        for each in self._reading.values():
            each.factor = factor

    @property
    def reads_prefixes_once(self) -> bool:
        return getattr(self.model, "reads_prefixes_once", False)

    def num_read_once(
        self, num_common_tokens: int, num_decodes: int, num_prefills: int
    ) -> int:
        """See `sim.costs.base.ReadsPrefixesOnce`, as of all that is read here."""
        model = cast("ReadsPrefixesOnce", self.model)
        return model.num_read_once(num_common_tokens, num_decodes, num_prefills)

    def reading_once(self, num_tokens: int) -> Slowed:
        """See `sim.costs.base.ReadsPrefixesOnce`."""
        if num_tokens not in self._reading:
            model = cast("ReadsPrefixesOnce", self.model).reading_once(num_tokens)
            made = self._reading[num_tokens] = Slowed(model)
            made.factor = self._factor
        return self._reading[num_tokens]

    def step(self, shape: BatchShape) -> StepCost:
        return slowed(self.model.step(shape), self.factor)

    def stage_times(self, shape: BatchShape) -> list[tuple[float, float]]:
        """Return the times of a pipeline's stages; see `sim.costs.steps.pipeline`."""
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

    def _columns(self, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
        assert self._pricer is not None
        found = np.array(self._pricer.columns(shapes))
        flags = found[:, FLAG].copy()
        found *= self.factor
        found[:, FLAG] = flags
        return found

    def describe(self) -> dict[str, Any]:
        return self.model.describe()
