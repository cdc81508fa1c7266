"""The step loop of a decision workload for prefillers and decoders."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from sim.config.plug import build
from sim.fleet.pairs import PairRouter
from sim.fleet.routers import ROUTERS
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
from sim.studies.conformance.played_worker import (
    PlayedWorker,
    PlayedWorkers,
    WorkerPace,
)
from sim.studies.conformance.sglang import SglangDriver
from sim.studies.conformance.sglang_apart import side_driver
from workloads.draws.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.fleet.engines import Router
    from sim.scheduler.log.lines import Line
    from sim.scheduler.request import Request
    from sim.studies.conformance.played_worker import Worker
    from sim.studies.conformance.requests import DecisionRequest
    from sim.studies.conformance.workload import DecisionWorkload


def driver_of(
    workload: DecisionWorkload,
    *,
    check: bool = False,
    make: Callable[[DecisionWorkload], Any] = make_scheduler,
) -> DecisionDriver | PairDriver | SglangDriver:
    """Return the driver that steps through a workload.

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
        if workload.config.get("disaggregation_mode") is not None:
            return side_driver(workload, check=check)
        return SglangDriver(workload, check=check)
    if workload.pair is None:
        return DecisionDriver(workload, check=check, scheduler=make(workload))
    return PairDriver(workload, check=check, make=make)


class PairDriver:
    """Steps prefillers and decoders through a workload, one after the other.

    ::

        arrival --> a prefiller: the prompt and one token; its blocks are held
                        |
                        +--> a decoder: reads the blocks, and decodes

    A proxy chooses both, by routers of fleets.

    Parameters
    ----------
    workload
        One that has a `pair`.
    check
        Whether schedulers prove their invariants after every call.
    make
        Constructs the scheduler of each engine.
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
        prefill, decode = workload.sides("prefill"), workload.sides("decode")
        self._raw = workload.requests
        self._prompts = requests_of(_first_tokens(prefill[0]))
        self._decoded: dict[str, Request] = {}
        self._arrivals = deque(enumerate(workload.requests))
        self._aborts = aborts_of(workload, self._prompts)
        self._max_model_len = getattr(decode[0].engine, "max_model_len", 0)
        self._places: dict[str, int] = {}  # of engines, by the requests that they have
        self._decoders: dict[str, int] = {}  # of requests that are not there yet
        self._on_way: list[tuple[int, int]] = []  # due step, place in the workload
        self._parameters: dict[str, dict[str, Any]] = {}  # of requests on their way
        self._labels = _labels("P", len(prefill)) + _labels("D", len(decode))
        self._num_prefillers = len(prefill)
        self._router = _router_of(pair, len(prefill), len(decode))
        messages = [Messages() for _ in prefill]
        mail = {self._source(place): each for place, each in enumerate(messages)}
        workers: list[Worker] = [
            *(ProducerWorker(pair, each) for each in messages),
            *(ConsumerWorker(pair, mail) for _ in decode),
        ]
        self._engines = [
            SteppedEngine(
                side,
                make(side),
                self._prompts,
                is_left_alone=self._is_left_alone,
                check=check,
                worker=_with_tier(side, worker),
            )
            for side, worker in zip(prefill + decode, workers, strict=True)
        ]

    @property
    def scheduler(self) -> object:
        """That of the last decoder."""
        return self._engines[-1].scheduler

    @property
    def num_steps(self) -> int:
        return sum(engine.num_steps for engine in self._engines)

    @property
    def step(self) -> int:
        return max(engine.step for engine in self._engines)

    @property
    def num_preemptions(self) -> int:
        return sum(engine.num_preemptions for engine in self._engines)

    @property
    def ending(self) -> str:
        endings = [engine.ending for engine in self._engines if engine.ending]
        return endings[0] if endings else "done"

    def lines(self) -> Iterator[Line]:
        """Run the workload, and yield a line for each call of an engine."""
        engines, step = self._engines, 0
        while self._arrivals or self._on_way or any(map(_works, engines)):
            if not any(map(_works, engines)):
                step = max(step, self._next_due())
            while self._arrivals and self._arrivals[0][1].arrival_step <= step:
                self._arrive(step, *self._arrivals.popleft())
            self._route(step)
            aborted = self._abort_due(step)
            for place, engine in enumerate(engines):
                if not _works(engine):
                    continue
                line: Line = {"t": step, "e": self._labels[place]}
                line |= (
                    engine.call(step, aborted[place])
                    if engine.is_due
                    else engine.process(step)
                )
                yield line
                if engine.ending:
                    return
                self._note_ends(step, place, line)
            step += 1

    def _next_due(self) -> int:
        dues = [due for due, _ in self._on_way]
        if self._arrivals:
            dues.append(self._arrivals[0][1].arrival_step)
        return min(dues)

    def _is_left_alone(self) -> bool:
        return not (self._arrivals or self._on_way or self._aborts)

    def _source(self, place: int) -> str | None:
        """Return the name of a prefiller in requests; the only one has none."""
        return self._labels[place] if self._num_prefillers > 1 else None

    # -- the proxy ------------------------------------------------------------

    def _arrive(self, step: int, number: int, raw: DecisionRequest) -> None:
        """Send a prompt to a prefiller, or the request to its decoder at once."""
        prompt = self._prompts[raw.id]
        if self._pace.order == "decode_first":
            self._decoders[raw.id] = self._router.choose(prompt)
        if not raw.remote_prefill:
            self._on_way.append((step, number))
            return
        prompt.kv_transfer_params = {"do_remote_decode": True}
        place = self._places[raw.id] = self._router.choose_prefill(prompt)
        self._engines[place].scheduler.add_request(prompt)

    def _note_ends(self, step: int, place: int, line: Line) -> None:
        """Take note of requests that left an engine, and of prompts that go on."""
        is_prefiller = place < self._num_prefillers
        for name in line.get("fin", ()):
            self._leave(name)
            if is_prefiller:
                self._send_on(step, place, name)
        for name in line.get("errors", ()):
            self._leave(name)
            self._forget_decoder(name)

    def _leave(self, name: str) -> None:
        place = self._places.pop(name)
        self._router.ended(self._prompts[name], place)

    def _send_on(self, step: int, place: int, name: str) -> None:
        """Put a request on its way to a decoder, unless it is lost."""
        prompt = self._prompts[name]
        raw = self._raw[prompt.request_id]
        if name in self._pace.lost:
            self._forget_decoder(name)
            return
        self._parameters[name] = {
            "do_remote_prefill": True,
            "remote_block_ids": self._engines[place].scheduler.offered(prompt),
            "remote_engine": self._source(place),
        }
        delay = self._pace.route_delay if raw.route_delay is None else raw.route_delay
        self._on_way.append((step + 1 + delay, prompt.request_id))

    def _route(self, step: int) -> None:
        """Let requests reach a decoder that are due."""
        due = sorted(each for each in self._on_way if each[0] <= step)
        self._on_way = [each for each in self._on_way if each[0] > step]
        for _, number in due:
            raw = self._raw[number]
            request = make_request(number, raw, self._max_model_len)
            request.kv_transfer_params = self._parameters.pop(raw.id, None)
            self._decoded[raw.id] = request
            place = self._decoders.pop(raw.id, None)
            if place is None:
                place = self._router.choose(request)
            self._places[raw.id] = place
            self._engines[place].scheduler.add_request(request)

    def _forget_decoder(self, name: str) -> None:
        """Let go of the decoder that a request would have gone to."""
        if name in self._decoders:
            self._router.ended(self._prompts[name], self._decoders.pop(name))

    def _abort_due(self, step: int) -> list[list[str]]:
        """Abort requests that are due, wherever they are; return names by engine."""
        aborted: list[list[str]] = [[] for _ in self._engines]
        while self._aborts and self._aborts[0][0] <= step:
            name = self._aborts.popleft()[2]
            place = self._places.get(name)
            if place is None:
                number = self._prompts[name].request_id
                self._on_way = [each for each in self._on_way if each[1] != number]
            else:
                at_decoder = place >= self._num_prefillers
                request = (self._decoded if at_decoder else self._prompts)[name]
                self._engines[place].scheduler.abort(request)
                aborted[place].append(name)
                self._leave(name)
            self._forget_decoder(name)
        return aborted


def _labels(letter: str, number: int) -> list[str]:
    """Return the names of engines in a log."""
    if number == 1:
        return [letter]
    return [f"{letter}{place}" for place in range(number)]


def _router_of(pace: PairPace, num_prefillers: int, num_decoders: int) -> PairRouter:
    streams = Streams(0)

    def router(key: str, num_engines: int) -> Router:
        context = {
            "num_engines": num_engines,
            "stream": streams.generator(key.replace("_", " ")),
        }
        made: Router = build(
            ROUTERS, {"kind": getattr(pace, key)}, f"pd.{key}", context
        )
        return made

    return PairRouter(
        router("router", num_prefillers),
        router("decode_router", num_decoders),
        range(num_prefillers),
        range(num_prefillers, num_prefillers + num_decoders),
    )


def _with_tier(side: DecisionWorkload, worker: Worker) -> Worker:
    """Return the workers of an engine, which may have a CPU tier behind its pool."""
    engine: Any = side.engine
    if engine.offload is None:
        return worker
    return PlayedWorkers(PlayedWorker(engine.worker or WorkerPace()), worker)


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
