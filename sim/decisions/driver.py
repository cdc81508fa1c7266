"""The step loop of a decision workload: no clock, no cost, one call a step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from sim.decisions.engines import make_request, make_scheduler
from sim.decisions.logs import GroupLog, Line, StepLog, V1Log, preemptions
from sim.decisions.workload import MAX_LEN
from sim.errors import SwapSpaceError
from sim.generation import sample
from sim.generation_groups import sampler_for
from sim.scheduler.v1 import V1Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.decisions.workload import DecisionWorkload
    from sim.engine import Sampler
    from sim.request import Request


class DecisionDriver:
    """Steps a scheduler through a workload as the reference's driver does.

    Parameters
    ----------
    workload
        Requests by step, and the engine.
    check
        Prove the scheduler's invariants after every call and every output.

    Raises
    ------
    SchedulerError
        If the engine's arguments do not fit together.

    Attributes
    ----------
    num_steps, num_preemptions
        So far.
    ending
        ``"done"``, ``"stalled"`` or ``"swap_oom"``, once the log has ended.
    """

    def __init__(self, workload: DecisionWorkload, *, check: bool = False) -> None:
        self.scheduler = make_scheduler(workload)
        self.names = [raw.id for raw in workload.requests]
        self.check = check
        self.num_steps = 0
        self.num_preemptions = 0
        self.ending = ""
        max_model_len = getattr(workload.engine, "max_model_len", MAX_LEN)
        requests = [
            make_request(index, raw, max_model_len)
            for index, raw in enumerate(workload.requests)
        ]
        self._arrivals = deque(
            (raw.arrival_step, request)
            for raw, request in zip(workload.requests, requests, strict=True)
        )
        self._aborts = deque(
            sorted(
                (
                    (max(raw.abort_step, raw.arrival_step), raw.id, request)
                    for raw, request in zip(workload.requests, requests, strict=True)
                    if raw.abort_step is not None
                ),
                key=lambda due: due[:2],
            )
        )
        self._log: StepLog
        self._sample: Sampler
        if isinstance(self.scheduler, V1Scheduler):
            self._log = V1Log(self.scheduler, self.names)
            self._sample = sample
        else:
            self._log = GroupLog(self.scheduler, self.names, workload.generation)
            self._sample = sampler_for(self.scheduler)

    def lines(self) -> Iterator[Line]:
        """Run the workload, and yield a line for each scheduler call."""
        step = 0
        while self._arrivals or self._is_busy():
            if not self._is_busy():
                step = max(step, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= step:
                self.scheduler.add_request(self._arrivals.popleft()[1])
            aborted = self._abort_due(step)
            if self._is_busy():
                line = {"t": step} | ({"abort": aborted} if aborted else {})
                yield line | self._step(step)
                if self.ending:
                    return
            step += 1
        self.ending = "done"

    def _is_busy(self) -> bool:
        scheduler = self.scheduler
        return bool(
            scheduler.num_waiting or scheduler.num_running or scheduler.num_swapped
        )

    def _abort_due(self, step: int) -> list[str]:
        aborted = []
        while self._aborts and self._aborts[0][0] <= step:
            _, name, request = self._aborts.popleft()
            if not request.status.is_finished:
                self.scheduler.abort(request)
                aborted.append(name)
        return aborted

    def _step(self, step: int) -> Line:
        """Call the scheduler once and let the output appear."""
        scheduler = self.scheduler
        self.num_steps += 1
        try:
            output = scheduler.schedule(float(step))
        except SwapSpaceError:
            self.ending = "swap_oom"
            partial: Any = scheduler.partial_output  # type: ignore[union-attr]
            return {"error": "swap_oom", "preempt": preemptions(partial, self.names)}
        self._prove()
        self.num_preemptions += len(output.preemptions)
        line = self._log.batch(output) | self._log.queues()
        finished = self._sample(output, step, float(step))
        scheduler.update(finished)
        self._prove()
        if finished:
            line["fin"] = [self.names[request.request_id] for request in finished]
        line["free_end"] = self._log.free()
        idle = not (output.scheduled or output.ignored or output.preemptions)
        if idle and not self._arrivals and not self._has_aborts():
            line["stalled"] = True
            self.ending = "stalled"
        return line

    def _has_aborts(self) -> bool:
        """Whether an abort of an unfinished request is still to come."""
        return any(not self._is_done(request) for _, _, request in self._aborts)

    @staticmethod
    def _is_done(request: Request) -> bool:
        return request.status.is_finished

    def _prove(self) -> None:
        if self.check:
            self.scheduler.check()
