"""What of a request's knowledge a format cannot hold, said in a line each."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from workloads.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from workloads.spec import RequestSpec


_FIELDS: dict[str, tuple[str, Callable[[RequestSpec], bool]]] = {
    "sessions": (
        "session ids",
        lambda request: request.session_id is not None,
    ),
    "chains": (
        "that requests wait for the end of another (they arrive at their earliest)",
        lambda request: request.previous_id is not None,
    ),
    "delays": (
        "seconds that a user spends before a first request",
        lambda request: request.previous_id is None and request.delay_s > 0,
    ),
    "max_tokens": (
        "max_tokens that clients state",
        lambda request: request.max_tokens is not None,
    ),
    "priority": ("priorities", lambda request: request.priority != 0),
    "samples": (
        "parallel samples and beams",
        lambda request: (
            request.best_of != 1
            or request.beam_width != 1
            or request.beam_switch_share != 0
        ),
    ),
    "slo_class": (
        "service levels (slo_class)",
        lambda request: bool(request.slo_class),
    ),
}
"""By name: what it is, and whether a request has it."""


def losses(requests: Sequence[RequestSpec], kept: Collection[str]) -> list[str]:
    """Return what a format loses, a line each.

    Parameters
    ----------
    requests
        What is to be written.
    kept
        What the format holds, of ``prefixes``, ``start`` and the names of `_FIELDS`;
        every format holds arrivals, lengths and order.
    """
    lines = []
    if "prefixes" not in kept and (num := num_sharing(requests)):
        lines.append(f"which prompts share text ({_of(num, requests)})")
    lines += field_losses(requests, kept)
    if "start" not in kept and requests and requests[0].arrival_s:
        lines.append(
            f"time before the first arrival ({requests[0].arrival_s:g} s): a trace "
            "starts at 0"
        )
    return lines


def field_losses(requests: Sequence[RequestSpec], kept: Collection[str]) -> list[str]:
    """Return which fields a format loses, a line each."""
    names = [name for name in _FIELDS if name not in kept]
    if isinstance(requests, RequestColumns):
        # One value for all, mostly; and a request knows of no other field.
        names = [name for name in names if name not in ("sessions", "chains", "delays")]
    lines = []
    for name in names:
        what, has = _FIELDS[name]
        if num := sum(map(has, requests)):
            lines.append(f"{what} ({_of(num, requests)})")
    return lines


def num_sharing(requests: Sequence[RequestSpec]) -> int:
    """Return how many prompts hold text of another prompt, or of an answer."""
    if isinstance(requests, RequestColumns):
        return 0
    seen: dict[int, int] = {}
    for request in requests:
        segments = {segment for segment, _ in request.prompt}
        for segment in chain(segments, (request.output_segment,)):
            seen[segment] = seen.get(segment, 0) + 1
    return sum(
        any(seen[segment] > 1 for segment, _ in request.prompt) for request in requests
    )


def num_quoting(requests: Sequence[RequestSpec]) -> int:
    """Return how many prompts hold text that was generated for a request."""
    if isinstance(requests, RequestColumns):
        return 0
    generated = {request.output_segment for request in requests}
    return sum(
        any(segment in generated for segment, _ in request.prompt)
        for request in requests
    )


def _of(num: int, requests: Sequence[RequestSpec]) -> str:
    return f"{num} of {len(requests)} requests"
