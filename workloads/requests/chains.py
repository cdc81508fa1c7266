"""Chains: requests that wait for the end of another, and their order.

A follow-up names the request that must have ended (`RequestSpec.previous_id`) and the
time from then to its sending (`RequestSpec.delay_s`). Only a simulation knows when that
is; before, only the earliest time is known, had the request before taken no time at
all. Requests are ordered by it.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING

from workloads.errors import WorkloadError
from workloads.requests.chained import ChainedRequests, Gathering
from workloads.requests.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from workloads.spec import RequestSpec


def has_chains(requests: Sequence[RequestSpec]) -> bool:
    """Whether any request waits for the end of another; at once for columns."""
    if isinstance(requests, RequestColumns):
        return False
    if isinstance(requests, ChainedRequests):
        return bool((requests.previous >= 0).any())
    return any(request.previous_id is not None for request in requests)


def in_order(
    requests: Iterable[RequestSpec], rate_scale: float = 1.0, start_s: float = 0.0
) -> list[RequestSpec]:
    """Return requests in order of arrival, numbered from 0.

    They come in any order, each with an id of its own; equal arrivals stay in order of
    their ids. `start_s`, at most the first arrival, becomes time 0. Arrivals of
    requests that wait for none are divided by `rate_scale`; a follow-up arrives
    `delay_s` after the request before, as think times are people's and tools' and stay
    as they are.

    Raises
    ------
    WorkloadError
        If ids repeat, a previous request is missing or not smaller (a cycle), or a
        delay is negative or not finite.
    """
    arrivals_s: dict[int, float] = {}
    ordered = sorted(requests, key=attrgetter("request_id"))
    # Each in its place, so that of millions there are no two copies.
    for place, request in enumerate(ordered):
        _check(request, arrivals_s)
        if request.previous_id is None:
            arrival_s = (request.arrival_s - start_s) / rate_scale
        else:
            arrival_s = arrivals_s[request.previous_id] + request.delay_s
        arrivals_s[request.request_id] = arrival_s
        ordered[place] = request._replace(arrival_s=arrival_s)
    del arrivals_s
    ordered.sort(key=attrgetter("arrival_s"))  # stable: equal ones stay in order of ids
    _renumber(ordered)
    return ordered


def gathered(requests: Iterable[RequestSpec]) -> ChainedRequests:
    """Return requests in the order of `in_order`, as columns; none is an object."""
    gathering = Gathering()
    for request in requests:
        gathering.add(request)
    fault = gathering.first_fault()
    if fault is not None:
        request, before = fault
        _check(request, before)
    return gathering.in_order()


def renumbered(requests: Sequence[RequestSpec]) -> list[RequestSpec]:
    """Return requests numbered from 0, `previous_id` by the new numbers."""
    numbered = list(requests)
    _renumber(numbered)
    return numbered


def _renumber(requests: list[RequestSpec]) -> None:
    numbers = {request.request_id: number for number, request in enumerate(requests)}
    for place, request in enumerate(requests):
        previous_id = request.previous_id
        requests[place] = request._replace(
            request_id=numbers[request.request_id],  # the object that followers have
            previous_id=None if previous_id is None else numbers[previous_id],
        )


def _check(request: RequestSpec, before: Container[int]) -> None:
    name, previous_id = request.request_id, request.previous_id
    if name in before:
        raise WorkloadError(f"request_id must be unique; got {name} twice; renumber")
    if previous_id is not None and previous_id not in before:
        fault = "comes later" if previous_id >= name else "is missing"
        raise WorkloadError(
            f"previous_id must be a request before; got {previous_id} of request "
            f"{name}, which {fault}; keep whole chains, in order"
        )
    if not 0 <= request.delay_s < math.inf:
        raise WorkloadError(
            f"delay_s must be finite and >= 0; got {request.delay_s!r} of request "
            f"{name}; give seconds from the end of the request before"
        )
