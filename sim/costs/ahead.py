"""Steps that are prepared while the one before runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from sim.costs.base import pricer_of

if TYPE_CHECKING:
    from sim.costs.base import CostModel, StepCost
    from sim.scheduler.batch import BatchShape

SCHEDULE_REQUEST_S: Final = 15e-6
"""Seconds that the engine core spends on a request in a call of its scheduler and in
processing its output: 8 to 10 and 5 to 7 us of vLLM 0.33's own, with 8 to 256 requests,
on one core of an AMD EPYC; 25 us a step beside it are within `step_overhead_s`. Two
A100 whose scheduler ran beside the GPU took 10.6 to 13.3 us a request and step less
(vLLM, pull request 23914; 32 to 256 at once)."""


class HostAhead:
    """Asynchronous scheduling: the host's part of a step is a stage of its own.

    While a step runs, the host schedules and prepares the next one, so a step of many
    takes as long as the longer of both::

        host   schedule: 15 us a request; prepare and launch: step_overhead_s
        GPU    kernels; sampling and copying back: request_overhead_s a request

    Detokenising is the front end's, which is another process: it delays what clients
    see (`sim.results.front_end`) and no step.

    Parameters
    ----------
    model
        Prices steps. Its ``host_part_s(num_rows)`` says how long the host works on a
        batch of so many requests; without it nothing is hidden.
    """

    first_stage_is_host: ClassVar[bool] = True

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._host_part_s = getattr(model, "host_part_s", None)
        pricer = pricer_of(model)
        if pricer is not None:
            self.columns = pricer.columns
        self.prepare_s = 0.0 if self._host_part_s is None else self._host_part_s(0)

    def step(self, shape: BatchShape) -> StepCost:
        return self.model.step(shape)

    def stage_times(self, shape: BatchShape) -> list[tuple[float, float]]:
        """Return seconds of the host, and on the way to each GPU, and of it.

        All stages of a pipeline are told of a batch at once, and prepare it while the
        ones before it compute.
        """
        num_rows = shape.num_decodes + shape.num_prefills
        host_s = self.split(self.prepare_s, num_rows)[0]
        stages = getattr(self.model, "stage_times", None)
        times = (
            [(0.0, self.model.step(shape).total_s)] if stages is None else stages(shape)
        )
        return [
            (0.0, host_s),
            *((sent_s, self.split(total_s, 0)[1]) for sent_s, total_s in times),
        ]

    def split(self, total_s: float, num_rows: int) -> tuple[float, float]:
        """Return what a step of so many requests takes of the host, and of the GPU."""
        if self._host_part_s is None:
            return 0.0, total_s
        prepare_s = min(self.prepare_s, total_s)
        return prepare_s + SCHEDULE_REQUEST_S * num_rows, total_s - prepare_s

    def describe(self) -> dict[str, Any]:
        if self._host_part_s is None:
            return self.model.describe() | {"host_ahead": False}
        schedule = {
            "value": SCHEDULE_REQUEST_S,
            "unit": "s/request",
            "source": "vLLM 0.33's own scheduler, timed on one core of an AMD EPYC; "
            "11 to 13 us on two A100 (vLLM, pull request 23914)",
            "interval": [11e-6, 17e-6],
        }
        hidden = {"prepare_s": self.prepare_s, "schedule_request_s": schedule}
        return self.model.describe() | {"host_ahead": True, "hidden": hidden}
