"""Writer of LLMServingSim's format: requests and sessions of sub-requests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from workloads.columns import RequestColumns
from workloads.errors import WorkloadError
from workloads.traces.llmservingsim import MAX_NS
from workloads.traces.writing.losses import losses
from workloads.traces.writing.sessions_in_lines import chain_losses, links

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from workloads.spec import RequestSpec, Segment
    from workloads.traces.writing.sessions_in_lines import Link

_NS_PER_S = 10**9
_MAX_TOKENS = 2 * 10**8
"""Some 2 GB of digits."""


@dataclass(frozen=True, slots=True)
class LlmServingSimTraceWriter:
    """Writer of LLMServingSim's format, flat and, for sessions, agentic.

    Parameters
    ----------
    make_up_token_ids
        Write token ids that say which prompts share text, to the token. They are
        numbers of no vocabulary: good for simulators, not for a model. Otherwise no
        token ids are written.
    """

    make_up_token_ids: bool = False

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        """Return what the format cannot hold; see `TraceWriter`."""
        if self.make_up_token_ids:
            _check_size(requests)
        kept = ["sessions", "chains"] + ["prefixes"] * self.make_up_token_ids
        lines = losses(requests, kept)
        if lines and lines[0].startswith("which prompts"):
            lines[0] += ": make_up_token_ids=true keeps it"
        return lines + chain_losses(requests, links(requests))

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        """Yield the lines of the file; see `TraceWriter`."""
        ids = _TokenIds(requests) if self.make_up_token_ids else None
        if isinstance(requests, RequestColumns):
            rows: Iterable[list[RequestSpec]] = ([request] for request in requests)
            session_ids: Iterable[int | None] = repeat(None)
        else:
            found = links(requests)
            places = _rows(found)
            rows = ([requests[place] for place in row] for row in places)
            session_ids = (found[row[0]].session_id for row in places)
        for row, session_id in zip(rows, session_ids, strict=False):
            entry: dict[str, Any] = {"arrival_time_ns": _ns(row[0].arrival_s)}
            if session_id is None:
                entry |= _call(row[0], ids)
            else:
                entry["session_id"] = str(session_id)
                entry["sub_requests"] = _calls(row, ids)
            yield json.dumps(entry) + "\n"


def _rows(found: Sequence[Link]) -> list[list[int]]:
    """Return the places of requests, each that follows none with its follow-ups."""
    rows: list[list[int]] = []
    row_of: dict[int | None, list[int]] = {}
    for place, link in enumerate(found):
        if link.follows:
            row_of[link.session_id].append(place)
        else:
            row_of[link.session_id] = [place]
            rows.append(row_of[link.session_id])
    return rows


def _calls(row: Sequence[RequestSpec], ids: _TokenIds | None) -> list[dict[str, Any]]:
    """Return the sub-requests of a session."""
    calls = [_call(request, ids) for request in row]
    delays_s = [request.delay_s for request in row[1:]]
    for call, delay_s in zip(calls, [*delays_s, 0.0], strict=True):
        call["tool_duration_ns"] = _ns(delay_s)
    return calls


def _ns(seconds: float) -> int:
    """Return seconds in nanoseconds, as far as readers take them."""
    if seconds > MAX_NS / _NS_PER_S:
        raise WorkloadError(
            f"times must be below {MAX_NS / _NS_PER_S:g} s, to be 64-bit nanoseconds; "
            f"got {seconds!r}; write another format"
        )
    return round(seconds * _NS_PER_S)


def _check_size(requests: Iterable[RequestSpec]) -> None:
    """Refuse to make up more token ids than a file can hold."""
    num_tokens = sum(
        request.num_prompt_tokens + request.num_output_tokens for request in requests
    )
    if num_tokens > _MAX_TOKENS:
        raise WorkloadError(
            f"make_up_token_ids writes at most {_MAX_TOKENS} token ids; got "
            f"{num_tokens}; leave it out, or set limit"
        )


def _call(request: RequestSpec, ids: _TokenIds | None) -> dict[str, Any]:
    """Return a call of the model."""
    call: dict[str, Any] = {
        "input_toks": request.num_prompt_tokens,
        "output_toks": request.num_output_tokens,
    }
    if ids is not None:
        output = (request.output_segment, request.num_output_tokens)
        call["input_tok_ids"] = ids.of(request.prompt)
        call["output_tok_ids"] = ids.of((output,))
    return call


class _TokenIds:
    """A range of numbers for each segment, as long as it is known."""

    def __init__(self, requests: Iterable[RequestSpec]) -> None:
        lengths: dict[int, int] = {}
        for request in requests:
            output = (request.output_segment, request.num_output_tokens)
            for segment, num_tokens in (*request.prompt, output):
                lengths[segment] = max(lengths.get(segment, 0), num_tokens)
        self._starts: dict[int, int] = {}
        start = 0
        for segment, num_tokens in lengths.items():
            self._starts[segment] = start
            start += num_tokens

    def of(self, segments: Iterable[Segment]) -> list[int]:
        """Return the token ids of a text."""
        starts = self._starts
        return [
            token
            for segment, num_tokens in segments
            for token in range(starts[segment], starts[segment] + num_tokens)
        ]
