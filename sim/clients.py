"""Clients: SimPy processes that hand requests to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.tokens import SegmentTokens
from sim.clock import ARRIVAL_PRIORITY, At
from sim.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    import simpy

    from sim.engine import Engine
    from workloads.spec import RequestSpec


def request_from_spec(spec: RequestSpec, max_model_len: int) -> Request:
    """Turn a workload's request into the engine's.

    Parameters
    ----------
    spec
        The workload's view, true output length included.
    max_model_len
        Longest sequence of the engine; bounds the output where the client states no
        ``max_tokens``.
    """
    num_prompt_tokens = spec.num_prompt_tokens
    max_num_tokens = max_model_len
    if spec.max_tokens is not None:
        max_num_tokens = min(max_num_tokens, num_prompt_tokens + spec.max_tokens)
    return Request(
        request_id=spec.request_id,
        arrival_s=spec.arrival_s,
        num_prompt_tokens=num_prompt_tokens,
        tokens=SegmentTokens(spec.prompt, spec.output_segment),
        max_num_tokens=max_num_tokens,
        oracle_num_tokens=num_prompt_tokens + spec.num_output_tokens,
        priority=spec.priority,
    )


def open_loop(
    env: simpy.Environment,
    engine: Engine,
    specs: Iterable[RequestSpec],
    make_request: Callable[[RequestSpec], Request],
) -> Generator[simpy.Event, Any, None]:
    """Submit each request at its arrival time, whatever the engine does.

    Parameters
    ----------
    specs
        In order of arrival; drawn one at a time, so a generator will do.
    make_request
        From the workload's request to the engine's.
    """
    for spec in specs:
        if engine.stop_requested:
            break
        if spec.arrival_s > env.now:
            yield At(env, spec.arrival_s, ARRIVAL_PRIORITY)
        engine.submit(make_request(spec))
    engine.close_arrivals()
