"""A run whose requests come while it goes on, on a clock that follows the real one."""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from sim.engine.clock import SCRAPE_PRIORITY, At
from sim.errors import ConfigError
from sim.scheduler.base import schedules_groups
from sim.scheduler.request import RequestStatus
from sim.serving.text import PromptIds
from sim.simulation.run import Simulation
from sim.simulation.workload import make_workload
from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sim.config.tables import RunConfig
    from sim.engine.clients import Client, Server
    from sim.results.run import Results
    from sim.scheduler.request import Request

CLIENT_LEFT = "the client left"
"""Reason of a request whose connection was closed."""


class LiveRun(Simulation):
    """One engine that waits for requests; `specs` grows as they come."""

    def __init__(self, config: RunConfig) -> None:
        if config.fleet is not None or config.engine.data_parallel_size > 1:
            raise ConfigError(
                "kvsim serve runs one engine; remove the fleet and "
                "engine.data_parallel_size"
            )
        self.taken: list[RequestSpec] = []
        super().__init__(config, stepwise=True, specs=self.taken)
        if schedules_groups(self.scheduler):
            raise ConfigError(
                f"kvsim serve needs a scheduler of single requests, got "
                f"'{config.engine.scheduler}'; take v1"
            )

    def _is_pulled(self) -> bool:
        return False

    def _arrivals(self, engine: Server, client: Client) -> Generator[Any, Any, None]:
        self.client = client
        yield self.env.event()  # arrivals are handed over from outside


class Stream:
    """One request on its way to a client.

    Parameters
    ----------
    request
        The engine's.

    Attributes
    ----------
    num_told
        Output tokens that the client knows of.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_told = 0
        self.changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self.request.status.is_finished

    async def tokens(self) -> int:
        """Wait for tokens or the end; return the output tokens so far."""
        while not self.is_done and self.request.num_output_tokens <= self.num_told:
            self.changed.clear()
            await self.changed.wait()
        self.num_told = self.request.num_output_tokens
        return self.num_told


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

    Attributes
    ----------
    drift_s
        Most real seconds that an event came late.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        speed: float = 1.0,
        now: Callable[[], float] = monotonic,
    ) -> None:
        if not 0 < speed < inf:
            raise ConfigError(f"--speed takes a number above 0, got {speed}")
        self.run = LiveRun(config)
        self.ids = PromptIds(config.engine.block_size)
        self.speed = speed
        self.drift_s = 0.0
        self._now = now
        self._started_s = now()
        self._streams: dict[int, Stream] = {}
        self._stirred = asyncio.Event()
        source = make_workload(config.workload, config.seed).requests()
        self._lengths = [spec.num_output_tokens for spec in source[:4096]] or [128]

    @property
    def max_model_len(self) -> int:
        return self.run.capacity.max_model_len

    def usual_length(self) -> int:
        """Return the length of an answer that ends by itself, by the workload."""
        return self._lengths[len(self.run.taken) % len(self._lengths)]

    def advance(self) -> None:
        """Let everything happen that is due by now."""
        env = self.run.env
        now_s = max((self._now() - self._started_s) * self.speed, env.now)
        due_s = env.peek()
        if due_s < now_s:
            self.drift_s = max(self.drift_s, (now_s - due_s) / self.speed)
        env.run(until=At(env, now_s, SCRAPE_PRIORITY))
        for request_id, stream in list(self._streams.items()):
            if stream.is_done or stream.request.num_output_tokens > stream.num_told:
                stream.changed.set()
            if stream.is_done:
                del self._streams[request_id]

    def submit(self, text: str, num_output_tokens: int, *, limit: int | None) -> Stream:
        """Hand over a request that arrives now."""
        self.advance()
        run = self.run
        spec = RequestSpec(
            request_id=len(run.taken),
            arrival_s=run.env.now,
            prompt=self.ids.segments(text),
            num_output_tokens=num_output_tokens,
            output_segment=self.ids.new_id(),
            max_tokens=limit,
        )
        run.taken.append(spec)
        (request,) = run.client.factory.samples(spec)
        stream = Stream(request)
        self._streams[request.request_id] = stream
        run.engine.submit(request)
        self._stirred.set()
        return stream

    def abort(self, stream: Stream) -> None:
        """Withdraw a request whose client has left."""
        self.advance()
        self.run.engine.abort(stream.request, CLIENT_LEFT)
        self._stirred.set()

    async def drive(self) -> None:
        """Follow the wall clock until cancelled."""
        while True:
            self._stirred.clear()
            self.advance()
            due_s = self.run.env.peek()
            wait_s = None
            if due_s < inf:
                passed_s = self._now() - self._started_s
                wait_s = max(0.0, due_s / self.speed - passed_s)
            try:
                await asyncio.wait_for(self._stirred.wait(), wait_s)
            except TimeoutError:
                continue

    def finish(self) -> Results:
        """Withdraw what is unfinished, end the run and return its results."""
        for stream in list(self._streams.values()):
            self.run.engine.abort(stream.request, CLIENT_LEFT)
        self.run.engine.close_arrivals()
        self.run.num_requests = len(self.run.taken)
        return self.run.run()


def is_refused(request: Request) -> bool:
    """Whether the engine rejected a request."""
    return request.status is RequestStatus.FINISHED_REJECTED
