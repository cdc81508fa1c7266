"""Steps that are prepared while the one before runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from sim.costs.base import CostModel, StepCost
    from sim.scheduler.batch import BatchShape


class HostAhead:
    """Asynchronous scheduling: the host's part of a step is a stage of its own.

    While a step runs, the host schedules and prepares the next one. What does not fit
    delays it. A step alone takes as long as without.

    Parameters
    ----------
    model
        Prices steps. Its ``host_part_s(num_rows)`` says how long the host works on a
        batch of so many requests; without it nothing is hidden.
    """

    first_stage_is_host: ClassVar[bool] = True

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._host_part_s = getattr(model, "host_part_s", None)

    def step(self, shape: BatchShape) -> StepCost:
        return self._model.step(shape)

    def stage_times(self, shape: BatchShape) -> list[tuple[float, float]]:
        """Return seconds of the host, and of the GPU; nothing is sent."""
        total_s = self._model.step(shape).total_s
        num_rows = shape.num_decodes + shape.num_prefills
        host_s = 0.0 if self._host_part_s is None else self._host_part_s(num_rows)
        host_s = min(host_s, total_s)
        return [(0.0, host_s), (0.0, total_s - host_s)]

    def describe(self) -> dict[str, Any]:
        hides = self._host_part_s is not None
        return self._model.describe() | {"host_ahead": hides}
