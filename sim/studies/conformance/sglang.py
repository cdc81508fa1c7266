"""The event loop of SGLang, step by step: no clock, one line an iteration."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Final

from sim.engine.sampling import InFlightSampler
from sim.errors import SchedulerError
from sim.scheduler.hosted.sglang import HostedSglang
from sim.scheduler.hosted.sglang_apart import HostedApart
from sim.scheduler.hosted.sglang_api import installed_sglang
from sim.scheduler.hosted.sglang_plans import HostedPlans
from sim.scheduler.log.lines import names_of
from sim.scheduler.log.sglang import SglangLog
from sim.scheduler.sglang.holdings import OutOfMemoryError
from sim.scheduler.sglang.scheduler import SglangScheduler
from sim.scheduler.sglang.settings import (
    FIRST_WITH_PLANS,
    Disaggregation,
    Settings,
    WindowPool,
)
from sim.studies.conformance.driver import make_request
from sim.studies.conformance.engines import SglangEngine
from sim.studies.conformance.stream_tokens import token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.scheduler.log.lines import Line
    from sim.scheduler.request import Request
    from sim.scheduler.sglang.requests import SglangOutput
    from sim.studies.conformance.workload import DecisionWorkload


class SglangDriver:
    """Steps the `sglang` scheduler through a workload as the reference's driver does.

    ::

        normal    schedule, run, process the result
        overlap   schedule, run, process the result of the step before

    Parameters
    ----------
    workload
        Of SGLang.
    check
        Whether the scheduler proves its invariants after every call.

    Attributes
    ----------
    scheduler
        What decides.
    num_steps, num_preemptions
        So far; retractions are preemptions.
    ending
        ``"done"``, ``"stalled"``, ``"died"`` or ``"cut"``, once the log has ended.
    """

    def __init__(self, workload: DecisionWorkload, *, check: bool = False) -> None:
        engine = workload.engine
        assert isinstance(engine, SglangEngine)
        settings = settings_of(workload)
        self.scheduler = self._kind(settings)
        self.num_steps = self.num_preemptions = 0
        self.ending = ""
        self._max_steps = engine.max_steps
        self._check = check
        self._requests = requests_of(workload, settings)
        self.names = list(self._requests)
        self._log = SglangLog(self.scheduler, self.names)
        self._sample = InFlightSampler(self.scheduler)
        self._results = deque[tuple[int, "SglangOutput"]]()
        self._arrivals = deque(
            (raw.arrival_step, self._requests[raw.id]) for raw in workload.requests
        )
        dues = [
            (raw.abort_step, raw.id)
            for raw in workload.requests
            if raw.abort_step is not None
        ]
        self._aborts = deque(sorted(dues))

    _kind: type[SglangScheduler] = SglangScheduler
    _most_idle = 3
    """Steps in which nothing moves before the engine is stalled."""

    def lines(self) -> Iterator[Line]:
        """Run the workload, and yield a line for each iteration of the event loop."""
        step, num_idle = 0, 0
        while step < self._max_steps:
            while self._arrivals and self._arrivals[0][0] <= step:
                self.scheduler.add_request(self._arrivals.popleft()[1])
            line: Line = {"t": step} | self._abort_due(step)
            try:
                line |= self._call(step)
            except OutOfMemoryError as error:
                self.ending = "died"
                yield line | self._log.evictions() | {"error": str(error)}
                return
            is_idle = line["mode"] == "idle"
            waits = bool(line["waiting"]) or not self._is_at_rest()
            num_idle = num_idle + 1 if is_idle and waits else 0
            if num_idle == self._most_idle and not (self._arrivals or self._aborts):
                self.ending = "stalled"
                yield line | {"stalled": True}
                return
            yield line
            step += 1
            if is_idle and not (waits or line["running"]):
                if not self._arrivals:
                    self.ending = "done"
                    return
                step = max(step, self._arrivals[0][0])
        self.ending = "cut"

    def _is_at_rest(self) -> bool:
        """Whether nothing stands in a queue beside the one of waiting requests."""
        return True

    def _abort_due(self, step: int) -> Line:
        refused = {each.request for each, _ in self.scheduler.queue.rejected}
        aborted = []
        while self._aborts and self._aborts[0][0] <= step:
            name = self._aborts.popleft()[1]
            request = self._requests[name]
            if request not in refused and self._abort(request):
                aborted.append(name)
        return {"abort": aborted} if aborted else {}

    def _abort(self, request: Request) -> bool:
        """Withdraw a request; return whether it was there to be withdrawn."""
        if request.status.is_finished:
            return False
        self.scheduler.abort(request)
        return True

    def _call(self, step: int) -> Line:
        """Call the scheduler, and process the result that is due."""
        output = self._schedule(step)
        line = self._log.batch(output) | self._log.queues()
        self._results.append((step, output))
        if len(self._results) == self.scheduler.max_concurrent_batches:
            of_step, result = self._results.popleft()
            self._update(of_step, result)
            if ended := self.scheduler.ended:
                line["fin"] = names_of(ended, self.names)
        return line | {"free_end": self._log.free()}

    def _schedule(self, step: int) -> SglangOutput:
        output = self.scheduler.schedule(float(step))
        self.num_steps += 1
        self.num_preemptions += len(output.preemptions)
        self._prove()
        return output

    def _update(self, step: int, result: SglangOutput) -> None:
        self.scheduler.update(self._sample(result, step, float(step)))
        self._prove()

    def _prove(self) -> None:
        if self._check:
            self.scheduler.check()


def hosted_lines(workload: DecisionWorkload) -> list[Line]:
    """Return the log that the installed SGLang's own event loop gives.

    Raises
    ------
    SchedulerError
        If no SGLang that we know is installed, or the settings do not fit together.
    """
    settings_of(workload)
    settings = workload.engine.model_dump()
    seeds = {raw.id: raw.out_seed for raw in workload.requests}
    requests = [
        {
            **raw.model_dump(
                include={
                    *("id", "arrival_step", "output_len", "ignore_eos", "abort_step"),
                }
            ),
            "prompt": [
                token(seed, index)
                for seed, length in raw.prompt
                for index in range(length)
            ],
            "priority": raw.priority if "priority" in raw.model_fields_set else None,
            "route_delay": raw.route_delay or 0,
            "transfer_delay": raw.transfer_delay or 0,
        }
        for raw in workload.requests
    ]
    makes_plans = int(installed_sglang().rpartition(".")[2]) >= FIRST_WITH_PLANS
    kind: type[HostedSglang] = HostedPlans if makes_plans else HostedSglang
    if settings["disaggregation_mode"] is not None:
        if not makes_plans:
            raise SchedulerError(
                "engines that only prefill, or only decode, can be hosted from SGLang "
                f"0.5.19 on, {installed_sglang()} is installed; install one of these"
            )
        kind = HostedApart
    hosted = kind(settings, requests, lambda name, at: token(seeds[name], at))
    return hosted.lines()


def settings_of(workload: DecisionWorkload) -> Settings:
    """Return the settings of the scheduler that a workload meets."""
    engine = workload.engine
    assert isinstance(engine, SglangEngine)
    mode, swa = engine.disaggregation_mode, engine.swa
    return Settings(
        **engine.model_dump(exclude=_NO_SETTINGS),
        engine_version=workload.engine_version,
        swa=None if swa is None else WindowPool(**swa.model_dump()),
        kv_transfer=(
            None
            if mode is None
            else Disaggregation(mode, engine.num_reserved_decode_tokens)
        ),
    )


_NO_SETTINGS: Final = {
    *("max_steps", "swa", "disaggregation_mode", "num_reserved_decode_tokens"),
}


def requests_of(workload: DecisionWorkload, settings: Settings) -> dict[str, Request]:
    """Construct the requests of a workload, by name and in order of arrival.

    Under priority scheduling one without a priority is the least urgent.
    """
    no_priority = 0
    if settings.enable_priority_scheduling:
        is_low_first = settings.schedule_low_priority_values_first
        no_priority = sys.maxsize if is_low_first else -sys.maxsize - 1
    found = {}
    for index, raw in enumerate(workload.requests):
        request = make_request(index, raw, settings.longest_request)
        request.arrival_s = 0.0  # steps are no seconds
        request.ignore_eos = raw.ignore_eos
        if "priority" not in raw.model_fields_set:
            request.priority = no_priority
        found[raw.id] = request
    return found
