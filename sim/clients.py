"""Clients: SimPy processes that hand requests to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from cache.tokens import RunTokens, SegmentTokens
from sim.clock import ARRIVAL_PRIORITY, At
from sim.generation_groups import chosen_parents
from sim.request import Request

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    import simpy

    from cache.tokens import TokenIds, TokenRuns
    from sim.engine import Engine
    from workloads.spec import RequestSpec


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
        return self._request(
            spec,
            SegmentTokens(spec.prompt, spec.output_segment),
            num_sequences=spec.num_sequences,
            use_beam_search=spec.beam_width > 1,
        )

    def samples(self, spec: RequestSpec) -> list[Request]:
        """Return a request for each sample, as V1 fans them out.

        Source: vLLM 0.11.2, ``vllm/v1/engine/parallel_sampling.py``
        (`ParentRequest`).
        """
        first = SegmentTokens(spec.prompt, spec.output_segment)
        tokens = [first] + [
            SegmentTokens(spec.prompt, first.output(branch, 0)[0])
            for branch in range(1, spec.best_of)
        ]
        return [self._request(spec, each) for each in tokens]

    def beam_step(
        self, spec: RequestSpec, runs: TokenRuns, arrival_s: float
    ) -> Request:
        """Return the request that asks for the next token of one beam."""
        return self._request(
            spec,
            RunTokens(runs.copy()),
            arrival_s=arrival_s,
            num_prompt_tokens=len(runs),
            max_output_tokens=1,
            oracle_num_tokens=len(runs) + 1,
        )

    def _request(self, spec: RequestSpec, tokens: TokenIds, **changes: Any) -> Request:
        num_prompt_tokens = changes.get("num_prompt_tokens", spec.num_prompt_tokens)
        max_output_tokens = changes.get("max_output_tokens", spec.max_tokens)
        max_num_tokens = self.max_model_len
        if max_output_tokens is not None:
            max_num_tokens = min(max_num_tokens, num_prompt_tokens + max_output_tokens)
        facts: dict[str, Any] = {
            "request_id": self._next_id,
            "arrival_s": spec.arrival_s,
            "num_prompt_tokens": num_prompt_tokens,
            "tokens": tokens,
            "max_num_tokens": max_num_tokens,
            "oracle_num_tokens": num_prompt_tokens + spec.num_output_tokens,
            "priority": spec.priority,
            "max_output_tokens": max_output_tokens,
            "beam_seed": spec.request_id,
            "beam_percent": round(100 * spec.beam_switch_share),
            "parent_id": spec.request_id,
        }
        self._next_id += 1
        return Request(**(facts | changes))


class GroupClient:
    """Hands samples and beams over as one request: the generations before V1."""

    def __init__(self, factory: RequestFactory) -> None:
        self.factory = factory

    def submit(self, engine: Engine, spec: RequestSpec) -> simpy.Process | None:
        """See `Client.submit`."""
        engine.submit(self.factory.group(spec))
        return None

    def num_requests(self, specs: Iterable[RequestSpec]) -> int:
        """See `Client.num_requests`."""
        return sum(1 for _ in specs)


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

    def num_requests(self, specs: Iterable[RequestSpec]) -> int:
        """See `Client.num_requests`."""
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
        if spec.max_tokens is not None:
            most = min(most, spec.max_tokens)
        return max(1, min(most, room))

    def _beam_search(
        self, engine: Engine, spec: RequestSpec
    ) -> Generator[simpy.Event, Any, None]:
        text = SegmentTokens(spec.prompt, spec.output_segment)
        beams = [text.prompt()]
        for position in range(self._num_positions(spec)):
            requests = [
                self.factory.beam_step(spec, runs, engine.env.now) for runs in beams
            ]
            yield engine.env.all_of([_submitted(engine, each) for each in requests])
            if any(not request.num_output_tokens for request in requests):
                return  # one was rejected: a longer prompt would be as well
            parents = [0] * spec.beam_width
            if position:
                parents = chosen_parents(requests[0], position, spec.beam_width)
            extended = []
            for branch, parent in enumerate(parents):
                runs = beams[parent].copy()
                runs.append(*text.output(branch, position))
                extended.append(runs)
            beams = extended


def _submitted(engine: Engine, request: Request) -> simpy.Event:
    """Hand over a request; the event is its end, whatever that is."""
    ended = engine.env.event()
    request.on_end = ended.succeed
    engine.submit(request)
    return ended


class Client(Protocol):
    """How a workload's request becomes requests of the engine."""

    def submit(self, engine: Engine, spec: RequestSpec) -> simpy.Process | None:
        """Hand over a request; a process if there is more to come of it."""
        ...

    def num_requests(self, specs: Iterable[RequestSpec]) -> int:
        """Return how many requests the engine will see."""
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
