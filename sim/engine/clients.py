"""Clients: SimPy processes that hand requests to an engine."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from cache.tokens import RunTokens, SegmentTokens
from sim.engine.clock import ARRIVAL_PRIORITY, At
from sim.engine.sampling_groups import chosen_parents
from sim.scheduler.request import Request, RequestStatus
from workloads.columns import largest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    import simpy

    from cache.tokens import TokenRuns
    from sim.engine.stepwise import Engine
    from workloads.spec import RequestSpec


_SERVED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class RequestFactory:
    """Turns a workload's requests into the engine's.

    Requests are numbered in the order in which they are made, which is the order of
    their arrival.

    Parameters
    ----------
    max_model_len
        Longest sequence of the engine; bounds the output where the client states no
        ``max_tokens``.
    """

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._next_id = 0

    def group(self, spec: RequestSpec) -> Request:
        """Return one request for all continuations of the prompt."""
        request = self._request(spec, spec.output_segment)
        request.num_sequences = spec.num_sequences
        request.use_beam_search = spec.beam_width > 1
        request.beam_seed = spec.request_id
        request.beam_percent = round(100 * spec.beam_switch_share)
        return request

    def samples(self, spec: RequestSpec) -> list[Request]:
        """Return a request for each sample, as V1 fans them out.

        Source: vLLM 0.11.2, ``vllm/v1/engine/parallel_sampling.py``
        (`ParentRequest`).
        """
        first = self._request(spec, spec.output_segment)
        if spec.best_of == 1:
            return [first]
        return [first] + [
            self._request(spec, first.tokens.output(branch, 0)[0])  # type: ignore[index]
            for branch in range(1, spec.best_of)
        ]

    def stream(self, specs: Iterable[RequestSpec]) -> Iterator[Request]:
        """Yield what `samples` returns for each in turn."""
        for spec in specs:
            if spec.best_of == 1:
                yield self._request(spec, spec.output_segment)
            else:
                yield from self.samples(spec)

    def beam_step(
        self, spec: RequestSpec, runs: TokenRuns, arrival_s: float
    ) -> Request:
        """Return the request that asks for the next token of one beam."""
        length = len(runs)
        request = Request(
            request_id=self._next_id,
            arrival_s=arrival_s,
            num_prompt_tokens=length,
            tokens=RunTokens(runs.copy()),
            max_num_tokens=min(self.max_model_len, length + 1),
            oracle_num_tokens=length + 1,
            priority=spec.priority,
            max_output_tokens=1,
            parent_id=spec.request_id,
        )
        request.beam_seed = spec.request_id
        request.beam_percent = round(100 * spec.beam_switch_share)
        self._next_id += 1
        return request

    def _request(self, spec: RequestSpec, output_segment: int) -> Request:
        num_prompt_tokens = spec.num_prompt_tokens
        max_num_tokens = self.max_model_len
        if spec.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, num_prompt_tokens + spec.max_tokens)
        request_id = self._next_id
        self._next_id = request_id + 1
        return Request(
            request_id=request_id,
            arrival_s=spec.arrival_s,
            num_prompt_tokens=num_prompt_tokens,
            tokens=SegmentTokens(spec.prompt, output_segment),
            max_num_tokens=max_num_tokens,
            oracle_num_tokens=num_prompt_tokens + spec.num_output_tokens,
            priority=spec.priority,
            max_output_tokens=spec.max_tokens,
            parent_id=spec.request_id,
        )


class GroupClient:
    """Hands samples and beams over as one request: the generations before V1."""

    def __init__(self, factory: RequestFactory) -> None:
        self.factory = factory

    def submit(self, engine: Engine, spec: RequestSpec) -> simpy.Process | None:
        """See `Client.submit`."""
        engine.submit(self.factory.group(spec))
        return None

    def ask(
        self, engine: Engine, spec: RequestSpec
    ) -> Generator[simpy.Event, Any, bool]:
        """See `Client.ask`."""
        request = self.factory.group(spec)
        yield _submitted(engine, request)
        return request.status in _SERVED

    def num_requests(self, specs: Sequence[RequestSpec]) -> int:
        """See `Client.num_requests`."""
        return len(specs)

    @staticmethod
    def why_stepwise(specs: Sequence[RequestSpec]) -> str | None:
        """See `Client.why_stepwise`: its groups are not those of V1."""
        del specs
        return "groups of sequences are scheduled stepwise"


class FanOutClient:
    """Hands every sample over as a request of its own, and beams token by token: V1.

    V1 has no beam search in the engine. Its front end asks for one token of each beam,
    chooses, and asks again with the longer prompts, relying on prefix caching. Source:
    vLLM 0.11.2, ``vllm/entrypoints/openai/serving_engine.py`` (`beam_search`).
    """

    def __init__(self, factory: RequestFactory) -> None:
        self.factory = factory

    def submit(self, engine: Engine, spec: RequestSpec) -> simpy.Process | None:
        """See `Client.submit`."""
        if spec.beam_width > 1:
            return engine.env.process(self._beam_search(engine, spec))
        for request in self.factory.samples(spec):
            engine.submit(request)
        return None

    def ask(
        self, engine: Engine, spec: RequestSpec
    ) -> Generator[simpy.Event, Any, bool]:
        """See `Client.ask`; all samples are waited for."""
        if spec.beam_width > 1:
            return (yield from self._beam_search(engine, spec))
        requests = self.factory.samples(spec)
        yield engine.env.all_of([_submitted(engine, each) for each in requests])
        return all(request.status in _SERVED for request in requests)

    def num_requests(self, specs: Sequence[RequestSpec]) -> int:
        """See `Client.num_requests`."""
        if largest(specs, "best_of") == largest(specs, "beam_width") == 1:
            return len(specs)
        return sum(
            spec.best_of
            if spec.beam_width == 1
            else 1 + spec.beam_width * (self._num_positions(spec) - 1)
            for spec in specs
        )

    @staticmethod
    def why_stepwise(specs: Sequence[RequestSpec]) -> str | None:
        """See `Client.why_stepwise`."""
        if largest(specs, "beam_width") > 1:
            return "beams: a beam's next request comes of the end of the one before"
        return None

    def _num_positions(self, spec: RequestSpec) -> int:
        """Output tokens of a beam, at least the one that is asked for."""
        room = self.factory.max_model_len - spec.num_prompt_tokens
        most = spec.num_output_tokens
        if spec.max_tokens is not None:
            most = min(most, spec.max_tokens)
        return max(1, min(most, room))

    def _beam_search(
        self, engine: Engine, spec: RequestSpec
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


def _submitted(engine: Engine, request: Request) -> simpy.Event:
    """Hand over a request; the event is its end, whatever that is."""
    ended = engine.env.event()
    request.on_end = ended.succeed
    engine.submit(request)
    return ended


class Client(Protocol):
    """How a workload's request becomes requests of the engine."""

    factory: RequestFactory

    def submit(self, engine: Engine, spec: RequestSpec) -> simpy.Process | None:
        """Hand over a request; a process if there is more to come of it."""
        ...

    def ask(
        self, engine: Engine, spec: RequestSpec
    ) -> Generator[simpy.Event, Any, bool]:
        """Hand over a request and wait for its end; True if all of it was answered."""
        ...

    def num_requests(self, specs: Sequence[RequestSpec]) -> int:
        """Return how many requests the engine will see."""
        ...

    @staticmethod
    def why_stepwise(specs: Sequence[RequestSpec]) -> str | None:
        """Return why the fast path is not exact for these requests, or None.

        A client without this method is served stepwise.
        """
        ...


def open_loop(
    env: simpy.Environment,
    engine: Engine,
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


class PulledArrivals:
    """The same open loop for an engine that pulls it.

    An event less per arrival: the engine asks when the next one comes, and takes it in
    when its own time has got there.

    Parameters
    ----------
    requests
        In order of arrival; drawn one at a time, one ahead.

    Attributes
    ----------
    upcoming
        The next request; None after the last.
    next_s
        Time of its arrival in seconds; infinite after the last.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._requests = iter(requests)
        self.upcoming = next(self._requests, None)
        self.next_s = inf if self.upcoming is None else self.upcoming.arrival_s

    def pop(self) -> Request:
        """Return the next request.

        Raises
        ------
        IndexError
            After the last.
        """
        request = self.upcoming
        if request is None:
            raise IndexError("there are no more arrivals")
        upcoming = self.upcoming = next(self._requests, None)
        self.next_s = inf if upcoming is None else upcoming.arrival_s
        return request
