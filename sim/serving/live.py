"""A run whose requests come while it goes on, on a clock that follows the real one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import cache
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from sim.costs.steps.slowed import Slowed
from sim.engine.clock import SCRAPE_PRIORITY, At
from sim.errors import ConfigError
from sim.results.summary.warnings import rejections
from sim.scheduler.base import schedules_groups
from sim.serving.alarm import Alarm
from sim.serving.answer import Answer, EngineDeadError
from sim.serving.text import FIRST_ANSWER
from sim.simulation.arrivals import Arrivals
from sim.simulation.optional import all_of
from sim.simulation.run import Simulation
from sim.simulation.workload import make_workload
from workloads.spec import RequestSpec
from workloads.traces.kvsim import KvsimTraceWriter, request_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sim.config.tables import RunConfig
    from sim.costs.base import CostModel
    from sim.engine.clients import Client, Server
    from sim.engine.loop import Engine
    from sim.results.recording.recorder import Recording
    from sim.results.run import Results
    from sim.scheduler.request import Request
    from sim.serving.asked import Asked
    from sim.serving.text import Prompt
    from sim.simulation.pools import Pool

CLIENT_LEFT = "the client left"
"""Reason of a request whose connection was closed."""

LATE_S: Final = 0.1
"""Real seconds behind the clock from which the server says that it cannot keep up."""
_SAY_EVERY_S: Final = 5.0
_TURN_S: Final = 0.02
"""Real seconds after which clients have their turn, though the clock is behind."""
_PIECE_S: Final = 0.1
"""Simulated seconds at a time: an engine takes all steps up to the next event."""
_MOST_LENGTHS: Final = 4096


class RealArrivals(Arrivals):
    """Requests that are handed over from outside."""

    def begin(self, engine: Server) -> None:
        """Leave it to the clients."""


class LiveRun(Simulation):
    """A run that waits for requests; `taken` grows as they come."""

    def __init__(self, config: RunConfig) -> None:
        if config.fleet is not None:
            raise ConfigError("a served run is one engine; see `engines_of`")
        self.taken: list[RequestSpec] = []
        self.slowed: list[Slowed] = []
        super().__init__(config, stepwise=True, specs=self.taken)

    def _make_cost_model(self, pool: Pool) -> CostModel:
        engine = pool.engine
        has_lock = engine.data_parallel_size > 1 and pool.model.num_moe_layers
        if has_lock and engine.schedules_ahead:
            raise ConfigError(
                f"engine.async_scheduling: ranks that divide experts are served one "
                f"step at a time, got data_parallel_size "
                f"{engine.data_parallel_size} ahead; set it to false"
            )
        slowed = Slowed(super()._make_cost_model(pool))
        self.slowed.append(slowed)
        return slowed

    def _make_client(self) -> Client:
        self.client = self._client_of_engine()
        return self.client  # clients are real: they wait as they like

    def _make_arrivals(self, client: Client) -> Arrivals:
        return RealArrivals(
            *(self.env, self.config, self.specs, client),
            is_open_loop=False,
            is_plain=False,
        )

    def _check_rejections(self, recording: Recording) -> None:
        num_rejected, line = rejections(recording)
        if num_rejected:
            self.warnings.append(line)

    def handed_over(
        self,
        spec: RequestSpec,
        prompt: Prompt,
        tell: Callable[[Request, Prompt], object] | None,
    ) -> list[Request]:
        """Submit a request; return the engine's, one for each of its samples."""
        factory = self.client.factory
        if not schedules_groups(self.scheduler):
            requests = factory.samples(spec)
        else:
            requests = [factory.group(spec)]
        for request in requests:
            if tell is not None:
                tell(request, prompt)
            self.engine.submit(request)
        return requests * (spec.best_of // len(requests))

    @property
    def engines(self) -> list[Engine]:
        """The engine, or its data-parallel ranks."""
        return all_of(self.engine)


class LiveEngine:
    """Drives a run's events at the times of the wall clock.

    The clock of the run never passes the present: an event of it holds each stretch of
    steps back. What a client does happens at the present of the run.

    Parameters
    ----------
    config
        The engine; its workload says how long answers are that no client limits.
    speed
        Simulated seconds in a real one.
    now
        The wall clock, in seconds.
    arrivals
        File for the requests as they come; without it they are kept in memory.
    started_s
        When the clock of the run stood at 0, by default now.

    Attributes
    ----------
    drift_s
        Most real seconds that an event came late.
    on_late
        Called with seconds when the engine cannot keep up, every few seconds.
    fault
        What ended the engine, or None.
    num_aborted
        Requests whose clients left.
    num_flushes
        How often all prefixes were forgotten by order.
    withdrawn
        By request, how many tokens its client had then.
    on_request
        Called with each request of the engine and its prompt, just before it comes.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        speed: float = 1.0,
        now: Callable[[], float] = monotonic,
        arrivals: Path | None = None,
        started_s: float | None = None,
    ) -> None:
        if not 0 < speed < inf:
            raise ConfigError(f"--speed takes a number above 0, got {speed}")
        self.config = config
        self.run = LiveRun(config)
        self.speed = speed
        self.drift_s = 0.0
        self.on_late: Callable[[float], object] = _say_nothing
        self.fault: BaseException | None = None
        self.num_aborted = 0
        self.num_flushes = 0
        self.withdrawn: dict[int, int] = {}
        self.on_request: Callable[[Request, Prompt], object] | None = None
        self._late_s = 0.0
        self._said_s = -inf
        self._now = now
        self._halted_s: float | None = None
        self._answers: dict[int, Answer] = {}
        self._failed = asyncio.Event()
        self._alarm: Alarm | None = None
        self._next_turn: asyncio.Handle | None = None
        source = make_workload(config.workload, config.seed).requests()
        lengths = [spec.num_output_tokens for spec in source[:_MOST_LENGTHS]]
        self._lengths = lengths or [128]
        self._arrivals = None if arrivals is None else arrivals.open("w")
        if self._arrivals is not None:
            self._arrivals.writelines(KvsimTraceWriter().lines([]))
        env = self.run.env
        while env.peek() <= 0.0:  # what begins is not late
            env.step()
        self._started_s = now() if started_s is None else started_s

    @property
    def max_model_len(self) -> int:
        return self.run.capacity.max_model_len

    @property
    def block_size(self) -> int:
        return self.run.capacity.block_size

    @property
    def started_s(self) -> float:
        """When the clock of the run stood at 0, by the wall clock."""
        return self._started_s

    def start(self, started_s: float) -> None:
        """Let the clock of the run stand at 0 then; before anything has come."""
        if self.run.env.now > 0 or self.run.taken:
            raise RuntimeError("the clock of a served run is set before anything comes")
        self._started_s = started_s

    @property
    def is_halted(self) -> bool:
        return self._halted_s is not None

    @property
    def num_unfinished(self) -> int:
        """Answers that clients wait for."""
        return len(self._answers)

    def usual_length(self) -> int:
        """Return the length of an answer that ends by itself, by the workload."""
        return self._lengths[len(self.run.taken) % len(self._lengths)]

    def ends_by_itself(self, request: Request) -> bool:
        """Whether a request has an end of its own, before any limit."""
        return self.run.taken[request.parent_id].ends_at_stop

    def advance(self) -> None:
        """Let happen what is due by now, or the first of it where that is too much.

        Raises
        ------
        EngineDeadError
            If the engine has ended.
        """
        if self.fault is not None:
            raise EngineDeadError(str(self.fault))
        if self._halted_s is not None:
            return
        env, ended = self.run.env, list[int]()
        now_s = max((self._now() - self._started_s) * self.speed, env.now)
        due_s = env.peek()
        if due_s < now_s:
            self._be_late((now_s - due_s) / self.speed)
        turn_ends_s = self._now() + _TURN_S
        try:
            self._run_until(min(now_s, max(env.now, due_s) + _PIECE_S))
            while env.now < now_s and self._now() <= turn_ends_s:
                self._run_until(min(now_s, max(env.now, env.peek()) + _PIECE_S))
        except Exception as error:
            self.fail(error)
            raise
        # The newest first: one that waits for its first token does not wait for others.
        for number, answer in reversed(self._answers.items()):
            answer.stir()
            if answer.is_done:
                ended.append(number)
        for number in ended:
            del self._answers[number]

    def _run_until(self, time_s: float) -> None:
        env = self.run.env
        present = At(env, time_s, SCRAPE_PRIORITY)
        # `run(until=present)` would put the event back, which is due at once then.
        while not present.processed:
            env.step()

    def _be_late(self, late_s: float) -> None:
        self.drift_s = max(self.drift_s, late_s)
        self._late_s = max(self._late_s, late_s)
        now_s = self._now()
        if self._late_s >= LATE_S and now_s - self._said_s >= _SAY_EVERY_S:
            self.on_late(self._late_s)
            self._said_s, self._late_s = now_s, 0.0

    def fail(self, error: BaseException) -> None:
        """End the engine for a fault: all open answers are told."""
        self.fault = error
        for answer in self._answers.values():
            answer.fault = str(error) or type(error).__name__
            answer.stir()
        self._answers.clear()
        self._failed.set()

    def submit(self, prompts: Sequence[Prompt], asked: Asked) -> Answer:
        """Hand over what a client asks for; it arrives now."""
        self.advance()
        run = self.run
        requests = []
        for prompt in prompts:
            number = len(run.taken)
            spec = RequestSpec(
                request_id=number,
                arrival_s=run.env.now,
                prompt=prompt.segments,
                num_output_tokens=asked.num_output_tokens,
                output_segment=FIRST_ANSWER + number,
                max_tokens=asked.limit,
                priority=asked.priority,
                best_of=asked.num_samples,
                ends_at_stop=asked.ends_by_itself,
            )
            run.taken.append(spec)
            requests += run.handed_over(spec, prompt, self.on_request)
            if self._arrivals is not None:
                self._arrivals.write(request_line(number, spec))
                # It is on disk now; sessions are long, so little of it is kept.
                run.taken[-1] = _kept(spec.priority, spec.best_of, spec.ends_at_stop)
        answer = Answer(requests, len(prompts))
        if not answer.is_done:
            self._answers[requests[0].request_id] = answer
        self._wait()
        return answer

    def abort(self, answer: Answer) -> None:
        """Withdraw what a client has left behind."""
        if self.fault is not None:
            return
        self.advance()
        for request in dict.fromkeys(answer.requests):
            if not request.status.is_finished:
                self.num_aborted += 1
                number, num_tokens = request.parent_id, request.num_output_tokens
                had = self.withdrawn.get(number, 0)
                self.withdrawn[number] = max(had, num_tokens)
                self.run.engine.abort(request, CLIENT_LEFT)
        self._wait()

    def flush(self) -> None:
        """Let the file of arrivals hold all that has come."""
        if self._arrivals is not None:
            self._arrivals.flush()

    def slow(self, factor: float) -> None:
        """Let later steps take so many times as long."""
        self.advance()
        for recorder in self.run.recorder.of_rank:
            recorder.steps.flush()
        for slowed in self.run.slowed:
            slowed.factor = factor

    def halt(self) -> None:
        """Stand still: nothing happens, and the clock of the run stops."""
        self.advance()
        self._halted_s = self._now()

    def go_on(self) -> None:
        """Go on after `halt`."""
        if self._halted_s is not None:
            self._started_s += self._now() - self._halted_s
            self._halted_s = None
            self._wait()

    async def drive(self) -> None:
        """Follow the wall clock until cancelled, or until a fault, which is raised."""
        self._alarm = alarm = Alarm(self._turn)
        try:
            self._turn()
            await self._failed.wait()
        finally:
            self._alarm = None
            alarm.close()
        assert self.fault is not None
        raise self.fault

    def _turn(self) -> None:
        """Let happen what is due, and wait for what comes next."""
        self._next_turn = None
        if self.fault is None:
            with suppress(Exception):  # the driver is told by `fail`
                self.advance()
        self._wait()

    def _wait(self) -> None:
        """Have `_turn` called when the next event is due, if anything drives."""
        alarm = self._alarm
        if alarm is None or self.fault is not None or self._next_turn is not None:
            return
        due_s = inf if self._halted_s is not None else self.run.env.peek()
        wait_s = due_s / self.speed - (self._now() - self._started_s)
        if wait_s <= 0:  # clients have their turn before
            self._next_turn = asyncio.get_running_loop().call_soon(self._turn)
        elif wait_s < inf:
            alarm.set(wait_s)
        else:
            alarm.off()

    def finish(self, reason: str = CLIENT_LEFT) -> Results:
        """Withdraw what is unfinished, end the run and return its results."""
        if self._arrivals is not None:
            self._arrivals.close()
        if self.fault is not None:
            raise self.fault
        run = self.run
        for answer in self._answers.values():
            for request in dict.fromkeys(answer.requests):
                run.engine.abort(request, reason)
            answer.fault = "the engine has ended"
        run.engine.close_arrivals()
        run.num_requests = run.client.num_requests(run.taken) if run.taken else 0
        if self.drift_s >= LATE_S:
            run.warnings.append(
                f"the server could not keep up: events came up to {self.drift_s:.2f} s "
                "late; send less, or take a smaller --speed"
            )
        if self.num_flushes:
            run.warnings.append(
                f"the cache was flushed {self.num_flushes} times by order, which "
                "arrivals.jsonl does not say: a run of it finds more prefixes"
            )
        results = run.run()
        for answer in self._answers.values():
            answer.stir()
        self._answers.clear()
        return results


@cache
def _kept(priority: int, best_of: int, ends_at_stop: bool) -> RequestSpec:
    """Return the facts of a request that results and metrics ask for."""
    return RequestSpec(
        *(0, 0.0, ((0, 1),), 1, 1),
        priority=priority,
        best_of=best_of,
        ends_at_stop=ends_at_stop,
    )


def _say_nothing(late_s: float) -> None:
    """Let it pass."""
