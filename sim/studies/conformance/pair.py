"""The step loop of a decision workload for two engines: one prefills, one decodes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from sim.scheduler.sglang import SGLANG
from sim.studies.conformance.driver import (
    DecisionDriver,
    SteppedEngine,
    aborts_of,
    make_request,
    make_scheduler,
    requests_of,
)
from sim.studies.conformance.played_pair import (
    ConsumerWorker,
    Messages,
    PairPace,
    ProducerWorker,
)
from sim.studies.conformance.sglang import SglangDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.scheduler.log.lines import Line
    from sim.scheduler.request import Request
    from sim.studies.conformance.requests import DecisionRequest
    from sim.studies.conformance.workload import DecisionWorkload


def driver_of(
    workload: DecisionWorkload,
    *,
    check: bool = False,
    make: Callable[[DecisionWorkload], Any] = make_scheduler,
) -> DecisionDriver | PairDriver | SglangDriver:
    """Return what steps through a workload.

    Parameters
    ----------
    workload
        Of one engine, or of a pair.
    check
        Whether schedulers prove their invariants after every call.
    make
        Constructs what decides, for a workload of one engine.

    Raises
    ------
    SchedulerError
        If the engine cannot be configured so.
    """
    if workload.generation == SGLANG.name and make is make_scheduler:
        return SglangDriver(workload, check=check)
    if workload.pair is None:
        return DecisionDriver(workload, check=check, scheduler=make(workload))
    return PairDriver(workload, check=check, make=make)


class PairDriver:
    """Steps a producer and a consumer through a workload, one after the other.

    Parameters
    ----------
    workload
        One that has a `pair`.
    check
        Whether schedulers prove their invariants after every call.
    make
        Constructs the scheduler of either engine.
    """

    def __init__(
        self,
        workload: DecisionWorkload,
        *,
        check: bool = False,
        make: Callable[[DecisionWorkload], Any] = make_scheduler,
    ) -> None:
        pair = workload.pair
        assert pair is not None
        self._pace: PairPace = pair
        messages = Messages()
        prefill, decode = workload.side("prefill"), workload.side("decode")
        self._raw = workload.requests
        self._prompts = requests_of(_first_tokens(prefill))
        for prompt in self._prompts.values():
            prompt.kv_transfer_params = {"do_remote_decode": True}
        self._held: dict[str, list[int]] = {}  # blocks on the producer
        self._decoded: dict[str, Request] = {}
        self._on_way: list[tuple[int, int]] = []  # due step, place in the workload
        self._arrivals = deque(enumerate(workload.requests))
        self._aborts = aborts_of(workload, self._prompts)
        self._max_model_len = getattr(decode.engine, "max_model_len", 0)
        self._producer, self._consumer = (
            SteppedEngine(
                side,
                make(side),
                self._prompts,
                is_left_alone=self._is_left_alone,
                check=check,
                worker=worker,
            )
            for side, worker in (
                (prefill, ProducerWorker(pair, messages)),
                (decode, ConsumerWorker(pair, messages)),
            )
        )

    @property
    def scheduler(self) -> object:
        """That of the consumer."""
        return self._consumer.scheduler

    @property
    def num_steps(self) -> int:
        return self._producer.num_steps + self._consumer.num_steps

    @property
    def num_preemptions(self) -> int:
        return self._producer.num_preemptions + self._consumer.num_preemptions

    @property
    def ending(self) -> str:
        return self._producer.ending or self._consumer.ending or "done"

    def lines(self) -> Iterator[Line]:
        """Run the workload, and yield a line for each call of either engine."""
        producer, consumer, step = self._producer, self._consumer, 0
        while self._arrivals or self._on_way or _works(producer) or _works(consumer):
            if not (_works(producer) or _works(consumer)):
                step = max(step, self._next_due())
            while self._arrivals and self._arrivals[0][1].arrival_step <= step:
                _, raw = self._arrivals.popleft()
                producer.scheduler.add_request(self._prompts[raw.id])
            self._route(step)
            aborted = self._abort_due(step)
            for engine, letter in ((producer, "P"), (consumer, "D")):
                if _works(engine):
                    line: Line = {"t": step, "e": letter}
                    line |= (
                        engine.call(step, aborted[letter])
                        if engine.is_due
                        else engine.process(step)
                    )
                    yield line
                    if engine.ending:
                        return
                    if engine is producer:
                        self._send_on(step, line.get("fin", ()))
            step += 1

    def _next_due(self) -> int:
        dues = [due for due, _ in self._on_way]
        if self._arrivals:
            dues.append(self._arrivals[0][1].arrival_step)
        return min(dues)

    def _is_left_alone(self) -> bool:
        return not (self._arrivals or self._on_way or self._aborts)

    def _send_on(self, step: int, finished: list[str]) -> None:
        """Put prompts that were computed on their way to the consumer."""
        places = {raw.id: place for place, raw in enumerate(self._raw)}
        for name in finished:
            delay = self._raw[places[name]].route_delay
            due = step + 1 + (self._pace.route_delay if delay is None else delay)
            self._held[name] = self._producer.scheduler.block_ids(self._prompts[name])
            if name not in self._pace.lost:
                self._on_way.append((due, places[name]))

    def _route(self, step: int) -> None:
        """Let requests reach the consumer that are due."""
        due = sorted(each for each in self._on_way if each[0] <= step)
        self._on_way = [each for each in self._on_way if each[0] > step]
        for _, place in due:
            raw = self._raw[place]
            request = make_request(place, raw, self._max_model_len)
            request.kv_transfer_params = {
                "do_remote_prefill": True,
                "remote_block_ids": self._held.pop(raw.id),
            }
            self._decoded[raw.id] = request
            self._consumer.scheduler.add_request(request)

    def _abort_due(self, step: int) -> dict[str, list[str]]:
        """Abort what is due, wherever it is; return the names by engine."""
        aborted: dict[str, list[str]] = {"P": [], "D": []}
        while self._aborts and self._aborts[0][0] <= step:
            name = self._aborts.popleft()[2]
            prompt, decoded = self._prompts[name], self._decoded.get(name)
            if not prompt.status.is_finished:
                self._producer.scheduler.abort(prompt)
                aborted["P"].append(name)
            elif decoded is not None and not decoded.status.is_finished:
                self._consumer.scheduler.abort(decoded)
                aborted["D"].append(name)
            else:
                place = prompt.request_id
                self._on_way = [each for each in self._on_way if each[1] != place]
        return aborted


def _works(engine: SteppedEngine) -> bool:
    return engine.is_due or engine.awaits_output


def _first_tokens(workload: DecisionWorkload) -> DecisionWorkload:
    """Return a workload whose requests end with their first token, for a consumer."""
    requests: list[DecisionRequest] = [
        raw.model_copy(
            update={
                "output_len": 1,
                "stop_after": None,
                "branch_output_lens": None,
            }
        )
        for raw in workload.requests
    ]
    return workload.model_copy(update={"requests": requests})
