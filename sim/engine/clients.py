"""Clients: SimPy processes that hand requests to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from cache.tokens import SegmentTokens
from sim.engine.clock import ARRIVAL_PRIORITY, At
from sim.engine.group_sampling import chosen_parents
from sim.scheduler.request import RequestStatus
from workloads.requests.columns import largest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    import simpy

    from sim.engine.requests import RequestFactory
    from sim.scheduler.request import Request
    from workloads.spec import RequestSpec

_SERVED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class Server(Protocol):
    """A server that clients hand requests to: one engine, or several as one."""

    @property
    def env(self) -> simpy.Environment:
        """The clock."""
        ...

    @property
    def stop_requested(self) -> bool:
        """Whether the run ends early."""
        ...

    def submit(self, request: Request) -> None:
        """Hand over a request that arrives now."""
        ...

    def abort(self, request: Request, reason: str) -> None:
        """Withdraw a request, if it is unfinished."""
        ...

    def close_arrivals(self) -> None:
        """Say that nothing will arrive any more."""
        ...


class GroupClient:
    """Hands samples and beams over as one request: the generations before V1."""

    def __init__(self, factory: RequestFactory) -> None:
        self.factory = factory

    def submit(self, engine: Server, spec: RequestSpec) -> simpy.Process | None:
        engine.submit(self.factory.group(spec))
        return None

    def ask(
        self, engine: Server, spec: RequestSpec
    ) -> Generator[simpy.Event, Any, bool]:
        request = self.factory.group(spec)
        yield _submitted(engine, request)
        return request.status in _SERVED

    def num_requests(self, specs: Sequence[RequestSpec]) -> int:
        return len(specs)


class FanOutClient:
    """Hands every sample over as a request of its own, and beams token by token: V1.

    V1 has no beam search in the engine. Its front end asks for one token of each beam,
    chooses, and asks again with the longer prompts, relying on prefix caching. Source:
    vLLM 0.11.2, ``vllm/entrypoints/openai/serving_engine.py`` (`beam_search`).
    """

    def __init__(self, factory: RequestFactory) -> None:
        self.factory = factory

    def submit(self, engine: Server, spec: RequestSpec) -> simpy.Process | None:
        if spec.beam_width > 1:
            return engine.env.process(self._beam_search(engine, spec))
        for request in self.factory.samples(spec):
            engine.submit(request)
        return None

    def ask(
        self, engine: Server, spec: RequestSpec
    ) -> Generator[simpy.Event, Any, bool]:
        """See `Client.ask`; all samples are waited for."""
        if spec.beam_width > 1:
            return (yield from self._beam_search(engine, spec))
        requests = self.factory.samples(spec)
        yield engine.env.all_of([_submitted(engine, each) for each in requests])
        return all(request.status in _SERVED for request in requests)

    def num_requests(self, specs: Sequence[RequestSpec]) -> int:
        if largest(specs, "best_of") == largest(specs, "beam_width") == 1:
            return len(specs)
        return sum(
            spec.best_of
            if spec.beam_width == 1
            else 1 + spec.beam_width * (self._num_positions(spec) - 1)
            for spec in specs
        )

    def _num_positions(self, spec: RequestSpec) -> int:
        """Output tokens of a beam, at least the one that is asked for."""
        room = self.factory.max_model_len - spec.num_prompt_tokens
        most = spec.num_output_tokens
        limit = spec.output_limit
        if limit is not None:
            most = min(most, limit)
        return max(1, min(most, room))

    def _beam_search(
        self, engine: Server, spec: RequestSpec
    ) -> Generator[simpy.Event, Any, bool]:
        text = SegmentTokens(spec.prompt, spec.output_segment)
        beams = [text.prompt()]
        for position in range(self._num_positions(spec)):
            requests = [
                self.factory.beam_step(spec, runs, engine.env.now) for runs in beams
            ]
            yield engine.env.all_of([_submitted(engine, each) for each in requests])
            if any(not request.num_output_tokens for request in requests):
                return False  # one was rejected: a longer prompt would be as well
            parents = [0] * spec.beam_width
            if position:
                parents = chosen_parents(requests[0], position, spec.beam_width)
            extended = []
            for branch, parent in enumerate(parents):
                runs = beams[parent].copy()
                runs.append(*text.output(branch, position))
                extended.append(runs)
            beams = extended
        return True


def _submitted(engine: Server, request: Request) -> simpy.Event:
    """Hand over a request; the event is its end, whatever that is."""
    ended = engine.env.event()
    request.on_end = ended.succeed
    engine.submit(request)
    return ended


class Client(Protocol):
    """How a workload's request becomes requests of the engine."""

    factory: RequestFactory

    def submit(self, engine: Server, spec: RequestSpec) -> simpy.Process | None:
        """Hand over a request; a process if there is more to come of it."""
        ...

    def ask(
        self, engine: Server, spec: RequestSpec
    ) -> Generator[simpy.Event, Any, bool]:
        """Hand over a request and wait for its end; True if all of it was answered."""
        ...

    def num_requests(self, specs: Sequence[RequestSpec]) -> int:
        """Return how many requests the engine will see."""
        ...


def open_loop(
    env: simpy.Environment,
    engine: Server,
    specs: Iterable[RequestSpec],
    client: Client,
) -> Generator[simpy.Event, Any, None]:
    """Submit each request at its arrival time, whatever the engine does.

    Parameters
    ----------
    specs
        In order of arrival; drawn one at a time, so a generator will do.
    client
        From the workload's requests to the engine's.
    """
    going_on = []
    for spec in specs:
        if engine.stop_requested:
            break
        if spec.arrival_s > env.now:
            yield At(env, spec.arrival_s, ARRIVAL_PRIORITY)
        process = client.submit(engine, spec)
        if process is not None:
            going_on.append(process)
    if going_on:
        yield env.all_of(going_on)
    engine.close_arrivals()


def hand_over(
    env: simpy.Environment, engine: Server, requests: Iterable[Request]
) -> Generator[simpy.Event, Any, None]:
    """Do as `open_loop` with requests of the engine, in order of arrival."""
    for request in requests:
        if engine.stop_requested:
            break
        if request.arrival_s > env._now:
            yield At(env, request.arrival_s, ARRIVAL_PRIORITY)
        engine.submit(request)
    engine.close_arrivals()
