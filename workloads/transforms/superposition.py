"""More of the same traffic: shifted copies of a trace laid over each other.

Two ways to raise the rate of a trace. *Compression* divides all times: the same users
act faster, and bursts become as many times denser. *Superposition* has more users that
each act as recorded, at other times of the day: the rate is the same, but bursts of one
copy fall between those of another, so that the sum is smoother the more copies there
are, and tends to a Poisson process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workloads._numpy import np
from workloads.arrivals.base import MAX_REQUESTS
from workloads.errors import WorkloadError
from workloads.requests.chains import in_order
from workloads.requests.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from workloads.draws.streams import Streams
    from workloads.spec import RequestSpec, Segment


def superposed(
    requests: Sequence[RequestSpec],
    num_copies: float,
    streams: Streams,
    copies_share_text: bool = False,
) -> Sequence[RequestSpec]:
    """Return shifted copies of requests, laid over each other.

    Each copy but the first is shifted by a random time, around the end: what is moved
    beyond the span comes in at its start. The span is the time of the last request that
    waits for none plus the mean gap. Follow-ups move with the request that began their
    chain; the time from one to the next is kept.

    Of 2.4 copies the third holds each chain with probability 0.4: thinning at random is
    the inverse of superposition, and leaves the rate 2.4 times as high, on average.
    With `copies_share_text` the prompts of all copies are the same text, as if of the
    same users; else each copy's text is its own. Generated text is always a copy's
    own.

    Columns give columns, unless copies share text; their texts are numbered anew, those
    of other first copies keep their ids. Streams are ``"superposition_offsets"`` and
    ``"superposition_thinning"``.
    """
    _check_size(len(requests), num_copies)
    if isinstance(requests, RequestColumns) and not copies_share_text:
        return _columns(requests, num_copies, streams)
    return _list(requests, num_copies, streams, copies_share_text)


def _columns(
    columns: RequestColumns, num_copies: float, streams: Streams
) -> RequestColumns:
    num = len(columns)
    copies = _copies(columns.arrival_s, num_copies, streams)
    times_s = np.concatenate([times_s for times_s, _ in copies])
    rows = np.concatenate([np.arange(num)[is_kept] for _, is_kept in copies])
    order = times_s.argsort(kind="stable")
    return columns.rearranged(rows[order], times_s[order])


def _list(
    requests: Sequence[RequestSpec],
    num_copies: float,
    streams: Streams,
    copies_share_text: bool,
) -> list[RequestSpec]:
    roots = roots_of(requests)
    root_ids = [
        request.request_id for request in requests if request.previous_id is None
    ]
    begun_s = np.array([requests[root].arrival_s for root in root_ids])
    apart = CopyNames(requests, copies_share_text)
    copied: list[RequestSpec] = []
    for copy, (times_s, is_kept) in enumerate(_copies(begun_s, num_copies, streams)):
        kept = [root for root, keep in zip(root_ids, is_kept, strict=True) if keep]
        begins_s = dict(zip(kept, times_s.tolist(), strict=True))
        copied += [
            apart.copy(request, copy, begins_s[root])
            for request, root in zip(requests, roots, strict=True)
            if root in begins_s
        ]
    return in_order(copied)


def _copies(
    begun_s: NDArray[np.float64], num_copies: float, streams: Streams
) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Return the arrivals of each copy, and of which rows.

    Chains begin at `begun_s`.
    """
    num = len(begun_s)
    span_s = float(begun_s[-1]) * (1 + 1 / num)
    rng = streams.generator("superposition_offsets")
    copies = []
    for copy in range(math.ceil(num_copies)):
        offset_s = rng.random() * span_s if copy else 0.0
        times_s = begun_s + offset_s
        times_s[times_s >= span_s] -= span_s if copy else 0.0
        is_kept = begun_s >= 0  # all
        share = min(1.0, num_copies - copy)
        if share < 1:
            is_kept = streams.generator("superposition_thinning").random(num) < share
        copies.append((times_s[is_kept].clip(min=0), is_kept))
    if not any(len(times_s) for times_s, _ in copies):
        raise WorkloadError(
            f"a workload needs at least one request; {num_copies:g} copies of {num} "
            "leave none; raise rate_scale, or scale_by compression"
        )
    return copies


class CopyNames:
    """Keeps the names of copies apart: of requests, sessions and texts."""

    def __init__(self, requests: Sequence[RequestSpec], share_text: bool) -> None:
        texts = {segment for request in requests for segment, _ in request.prompt}
        texts |= {request.output_segment for request in requests}
        sessions = {r.session_id for r in requests if r.session_id is not None}
        self.num_requests = len(requests)
        # Counted on from the largest: added to large ones, 64 bits would not do.
        first = 1 + max(sessions, default=0)
        self.sessions = {id_: first + i for i, id_ in enumerate(sorted(sessions))}
        self.num_texts = 1 + max(texts) // 2
        self.share_text = share_text

    def copy(self, request: RequestSpec, copy: int, begin_s: float) -> RequestSpec:
        """Return the request as one of a copy; of a follow-up the time is unused."""
        first = copy * self.num_requests
        session, previous = request.session_id, request.previous_id
        if copy and session is not None:
            session = self.sessions[session] + (copy - 1) * len(self.sessions)
        return request._replace(
            request_id=first + request.request_id,
            arrival_s=begin_s,
            prompt=self._prompt(request.prompt, copy),
            output_segment=request.output_segment + 2 * copy * self.num_texts,
            session_id=session,
            previous_id=None if previous is None else first + previous,
        )

    def _prompt(self, prompt: tuple[Segment, ...], copy: int) -> tuple[Segment, ...]:
        """Return the copy's text. Even ids are of prompts, odd ones generated."""
        if not copy:
            return prompt
        more = 2 * copy * self.num_texts
        if not self.share_text:
            return tuple([(segment + more, tokens) for segment, tokens in prompt])
        return tuple([(s + more if s % 2 else s, tokens) for s, tokens in prompt])


def roots_of(requests: Sequence[RequestSpec]) -> list[int]:
    """Return for each request the id of the one that began its chain."""
    roots: list[int] = []
    for request in requests:
        previous_id = request.previous_id
        roots.append(len(roots) if previous_id is None else roots[previous_id])
    return roots


def _check_size(num_requests: int, num_copies: float) -> None:
    if math.ceil(num_copies) * num_requests > MAX_REQUESTS:
        raise WorkloadError(
            f"a workload may hold {MAX_REQUESTS} requests; {num_copies:g} copies of "
            f"{num_requests} are more; lower rate_scale or limit"
        )
