"""Steps that are prepared while the one before runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from sim.costs.base import pricer_of
from sim.costs.pricing import ends_ahead_of
from sim.costs.sources import scheduling_told
from sim.scheduler.generation import SCHEDULE_REQUEST_S, HostRule

if TYPE_CHECKING:
    from sim.costs.base import CostModel, DecodeEnds, ReadsPrefixesOnce, StepCost
    from sim.scheduler.batch import BatchShape

_V1: Final = HostRule(SCHEDULE_REQUEST_S)


class HostAhead:
    """Asynchronous scheduling: the host's part of a step is a stage of its own.

    While a step runs, the host schedules and prepares the next one, so a step of many
    takes as long as the longer of both::

        host   schedule: schedule_request_s a request; prepare: step_overhead_s
        GPU    kernels; sampling and copying back: request_overhead_s a request

    Detokenising is the front end's, which is another process: it delays what clients
    see (`sim.results.front_end`) and no step.

    Parameters
    ----------
    model
        Prices steps. Its ``host_part_s(num_rows)`` says how long the host works on a
        batch of so many requests; without it nothing is hidden. Its ``scheduling()``
        says what the scheduler takes of each (`sim.costs.sources`).
    """

    first_stage_is_host: ClassVar[bool] = True

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._host_part_s = getattr(model, "host_part_s", None)
        scheduling = getattr(model, "scheduling", None)
        self._scheduling = (
            scheduling_told(None, _V1) if scheduling is None else scheduling()
        )
        self._schedule_request_s = self._scheduling["value"]
        pricer = pricer_of(model)
        if pricer is not None:
            self.columns = pricer.columns
        self.prepare_s = 0.0 if self._host_part_s is None else self._host_part_s(0)

    def step(self, shape: BatchShape) -> StepCost:
        return self.model.step(shape)

    def stage_times(
        self, shape: BatchShape, total_s: float | None = None
    ) -> list[tuple[float, float]]:
        """Return seconds of the host, and on the way to each GPU, and of it.

        All stages of a pipeline are told of a batch at once, and prepare it while the
        ones before it compute. `total_s` is the price of the step where it is known, so
        that it is not asked for again.
        """
        num_rows = shape.num_decodes + shape.num_prefills
        host_s = self.split(self.prepare_s, num_rows)[0]
        stages = getattr(self.model, "stage_times", None)
        if stages is not None:
            times = stages(shape)
        elif total_s is None:
            times = [(0.0, self.model.step(shape).total_s)]
        else:
            times = [(0.0, total_s)]
        return [
            (0.0, host_s),
            *((sent_s, self.split(stage_s, 0)[1]) for sent_s, stage_s in times),
        ]

    @property
    def reads_prefixes_once(self) -> bool:
        return getattr(self.model, "reads_prefixes_once", False)

    def num_read_once(
        self, num_common_tokens: int, num_decodes: int, num_prefills: int
    ) -> int:
        """See `sim.costs.base.ReadsPrefixesOnce`, as of all that is read here."""
        model = cast("ReadsPrefixesOnce", self.model)
        return model.num_read_once(num_common_tokens, num_decodes, num_prefills)

    def reading_once(self, num_tokens: int) -> HostAhead:
        """See `sim.costs.base.ReadsPrefixesOnce`."""
        return HostAhead(cast("ReadsPrefixesOnce", self.model).reading_once(num_tokens))

    def split(self, total_s: float, num_rows: int) -> tuple[float, float]:
        """Return the host's and the GPU's seconds in a step of so many requests."""
        if self._host_part_s is None:
            return 0.0, total_s
        prepare_s = min(self.prepare_s, total_s)
        return prepare_s + self._schedule_request_s * num_rows, total_s - prepare_s

    def decode_ends(self, num_decodes: int) -> DecodeEnds:
        """Return the ends of steps of the same decodes; see `ends_ahead_of`."""
        host_s = self.split(self.prepare_s, num_decodes)[0]
        return ends_ahead_of(self.model, num_decodes, host_s, self.prepare_s)

    def describe(self) -> dict[str, Any]:
        if self._host_part_s is None:
            return self.model.describe() | {"host_ahead": False}
        hidden = {"prepare_s": self.prepare_s, "schedule_request_s": self._scheduling}
        return self.model.describe() | {"host_ahead": True, "hidden": hidden}
