"""Chains in formats that know a session as a row of requests, each after the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from workloads.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.spec import RequestSpec


class Link(NamedTuple):
    """How a request is written where a session is a row."""

    session_id: int | None
    follows: bool
    """Whether it is sent after the end of the last request of its session."""


def links(requests: Sequence[RequestSpec]) -> list[Link]:
    """Return how each request is written.

    A request that waits for one that is not the last of its session (two wait for the
    same, say) cannot be written so, and arrives at its earliest. A chain without a
    session gets a number that no session has.
    """
    if isinstance(requests, RequestColumns):
        return [Link(None, False)] * len(requests)
    session_ids = [request.session_id for request in requests]
    waited_for = {request.previous_id for request in requests}
    next_number = max((id_ for id_ in session_ids if id_ is not None), default=-1) + 1
    latest: dict[int, int] = {}
    found: list[Link] = []
    for index, request in enumerate(requests):
        session_id, previous_id = request.session_id, request.previous_id
        if session_id is None and previous_id is not None:
            session_id = found[previous_id].session_id
        elif session_id is None and index in waited_for:
            session_id, next_number = next_number, next_number + 1
        follows = (
            previous_id is not None
            and session_id is not None
            and latest.get(session_id) == previous_id
        )
        if session_id is not None:
            latest[session_id] = index
        found.append(Link(session_id, follows))
    return found


def chain_losses(requests: Sequence[RequestSpec], found: Sequence[Link]) -> list[str]:
    """Return what of the chains is lost, a line each."""
    pairs = list(zip(requests, found, strict=True))
    unwritten = sum(
        request.previous_id is not None and not link.follows for request, link in pairs
    )
    named = sum(
        request.session_id is None and link.session_id is not None
        for request, link in pairs
    )
    lines = []
    if unwritten:
        lines.append(
            f"that {unwritten} of {len(requests)} requests wait for another than the "
            "last of their session (they arrive at their earliest)"
        )
    if named:
        lines.append(
            f"that {named} of {len(requests)} requests had no session id (a chain "
            "needs one here)"
        )
    return lines
