"""LLMServingSim workloads: JSON lines, a request or an agent's session a line."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads.errors import WorkloadError
from workloads.requests.chains import in_order
from workloads.requests.columns import RequestColumns
from workloads.spec import RequestSpec, Segment
from workloads.traces.parsing.files import BadLines, trace_path
from workloads.traces.parsing.json_values import json_lines
from workloads.traces.parsing.requests import in_arrival_order, own_text_requests_ns
from workloads.traces.parsing.token_trie import TokenTrie
from workloads.traces.parsing.values import (
    length_problem,
    missing_problem,
    session_numbers,
    whole_problem,
)
from workloads.traces.writing import chain_losses, links, losses

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from workloads.spec import Segment
    from workloads.traces.parsing.token_trie import Tokens
    from workloads.traces.writing import Link


MAX_NS = 9 * 10**18
"""Some 285 years; times since 1970 pass."""
_MAX_TOKEN_ID = 2**62
_NS_PER_S = 10**9
_MAX_TOKENS = 2 * 10**8
"""Some 2 GB of digits."""
_CALL_KEYS = ("input_toks", "output_toks")


class _Call(NamedTuple):
    num_prompt_tokens: int
    num_output_tokens: int
    tool_ns: int
    """From the end of the call to the next of the session."""
    prompt_ids: Tokens[int] | None
    output_ids: Tokens[int] | None


class _Row(NamedTuple):
    """A line: calls, each after the one before."""

    arrival_ns: int
    line_number: int
    calls: tuple[_Call, ...]
    session: str | int | None


@dataclass(frozen=True, slots=True)
class LlmServingSimTraceReader:
    """Reader of LLMServingSim's workloads, flat and agentic, also mixed.

    A line with ``sub_requests`` is a session: each of them is sent when the one before
    has ended and its ``tool_duration_ns`` has passed. Where token ids are given, equal
    leading ids are an equal prefix, to the token; a prompt may also quote what was
    generated before, if the ids of that are given. Without token ids each prompt is
    text of its own.

    Parameters
    ----------
    path
        JSON-lines file, plain or compressed (gzip, zstd).
    assume_history
        Where a session has no token ids, take each prompt to begin with the prompt
        before and its answer, as far as it is long enough. An assumption: the file
        does not say so.
    skip_bad_lines
        Leave malformed lines out with a warning, instead of refusing the first; a
        session is one line.

    Raises
    ------
    WorkloadError
        If the path is neither text nor a path.

    Notes
    -----
    Times are in nanoseconds. Session ids that are all whole numbers are kept; others
    are numbered. Where the same text was generated twice, a prompt that quotes it
    quotes the first. Other keys are ignored.

    Source: github.com/casys-kaist/LLMServingSim, ``workloads/README.md``.
    """

    path: str | Path
    assume_history: bool = False
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))

    def read(self) -> Iterator[RequestSpec]:
        with BadLines(self.path, self.skip_bad_lines) as bad:
            rows = list(_rows(self.path, bad))
            if all(row.session is None and not row.calls[0].prompt_ids for row in rows):
                return own_text_requests_ns(
                    self.path, ((*row[:2], *row.calls[0][:2]) for row in rows)
                )
            rows = in_arrival_order(self.path, rows)
            calls = [call for row in rows for call in row.calls]
            return iter(_with_prompts(_sent(rows), calls, self.assume_history))


def _rows(path: str | Path, bad: BadLines) -> Iterator[_Row]:
    for number, entry in json_lines(path, bad):
        problem = (
            missing_problem(entry, ("arrival_time_ns",))
            or whole_problem("arrival_time_ns", entry["arrival_time_ns"], 0, MAX_NS)
            or _calls_problem(entry)
        )
        if problem:
            bad.refuse(number, problem)
            continue
        calls = tuple(map(_call, entry.get("sub_requests", (entry,))))
        session = entry["session_id"] if "sub_requests" in entry else None
        yield _Row(entry["arrival_time_ns"], number, calls, session)


def _calls_problem(entry: dict[str, Any]) -> str | None:
    if "sub_requests" not in entry:
        return _call_problem(entry)
    session, calls = entry.get("session_id"), entry["sub_requests"]
    if type(session) not in (str, int):
        rule = "session_id of sub_requests must be text or a whole number"
        return f"{rule}; got {session!r:.80}; mend or remove the line"
    if not isinstance(calls, list) or not calls:
        rule = "sub_requests must be a list of at least one object"
        return f"{rule}; got {str(calls)[:80]!r}; mend or remove the line"
    for position, call in enumerate(calls):
        problem = "must be an object; got no such; mend or remove the line"
        if isinstance(call, dict):
            tool_ns = call.get("tool_duration_ns", 0)
            problem = _call_problem(call) or (
                whole_problem("tool_duration_ns", tool_ns, 0, MAX_NS) or ""
            )
        if problem:
            return f"sub_requests[{position}]: {problem}"
    return None


def _call_problem(call: dict[str, Any]) -> str | None:
    return (
        missing_problem(call, _CALL_KEYS)
        or length_problem("input_toks", call["input_toks"])
        or length_problem("output_toks", call["output_toks"])
        or _ids_problem("input_tok_ids", call, call["input_toks"])
        or _ids_problem("output_tok_ids", call, call["output_toks"])
    )


def _ids_problem(name: str, call: dict[str, Any], num_tokens: int) -> str | None:
    ids = call.get(name)
    if ids is None or ids == []:
        return None  # they are optional
    if (
        not isinstance(ids, list)
        or set(map(type, ids)) != {int}
        or not 0 <= min(ids) <= max(ids) <= _MAX_TOKEN_ID
    ):
        rule = f"{name} must be a list of integers >= 0"
        return f"{rule}; got {str(ids)[:80]!r}; mend or remove the line"
    if len(ids) != num_tokens:
        rule = f"{name} must be one per token, {num_tokens}"
        return f"{rule}; got {len(ids)}; mend or remove the line"
    return None


def _call(call: dict[str, Any]) -> _Call:
    prompt_ids, output_ids = call.get("input_tok_ids"), call.get("output_tok_ids")
    return _Call(
        call["input_toks"],
        call["output_toks"],
        call.get("tool_duration_ns", 0),
        array("q", prompt_ids) if prompt_ids else None,
        array("q", output_ids) if output_ids else None,
    )


def _sent(rows: list[_Row]) -> list[RequestSpec]:
    """Return all calls in order of arrival; `output_segment` is the place in `rows`."""
    first_ns = rows[0].arrival_ns
    numbers = session_numbers([row.session for row in rows])
    requests: list[RequestSpec] = []
    for row, session_id in zip(rows, numbers, strict=True):
        tool_ns = None
        for call in row.calls:
            place = len(requests)
            requests.append(
                RequestSpec(
                    request_id=place,
                    arrival_s=(row.arrival_ns - first_ns) / 1e9,
                    prompt=(),
                    num_output_tokens=call.num_output_tokens,
                    output_segment=place,
                    session_id=session_id,
                    previous_id=None if tool_ns is None else place - 1,
                    delay_s=(tool_ns or 0) / 1e9,
                )
            )
            tool_ns = call.tool_ns
    return in_order(requests)


def _with_prompts(
    requests: list[RequestSpec], calls: list[_Call], assume_history: bool
) -> list[RequestSpec]:
    """Name prompts and outputs; `output_segment` is a place in `calls` before."""
    trie = TokenTrie()
    named: list[RequestSpec] = []
    for request in requests:
        call, output_segment = calls[request.output_segment], 2 * len(named) + 1
        prompt: tuple[Segment, ...]
        if call.prompt_ids is not None:
            prompt = trie.add_prompt(call.prompt_ids)
            if call.output_ids is not None:
                trie.add_output(prompt, output_segment, call.output_ids)
        elif assume_history and request.previous_id is not None:
            previous = named[request.previous_id]
            num_tokens = call.num_prompt_tokens
            prompt = extended(previous, trie.new_segment(), num_tokens)
        else:
            prompt = ((trie.new_segment(), call.num_prompt_tokens),)
        named.append(request._replace(prompt=prompt, output_segment=output_segment))
    return named


def extended(
    previous: RequestSpec, new_segment: int, num_tokens: int
) -> tuple[Segment, ...]:
    """Return the prompt before, its answer and new text, cut to `num_tokens`."""
    prompt: list[Segment] = []
    answer = (previous.output_segment, previous.num_output_tokens)
    for segment, num_segment_tokens in (*previous.prompt, answer):
        num_quoted = min(num_segment_tokens, num_tokens)
        if num_quoted:
            prompt.append((segment, num_quoted))
        num_tokens -= num_quoted
    if num_tokens:
        prompt.append((new_segment, num_tokens))
    return tuple(prompt)


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
        if self.make_up_token_ids:
            _check_size(requests)
        kept = ["sessions", "chains"] + ["prefixes"] * self.make_up_token_ids
        lines = losses(requests, kept)
        if lines and lines[0].startswith("which prompts"):
            lines[0] += ": make_up_token_ids=true keeps it"
        return lines + chain_losses(requests, links(requests))

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        ids = _TokenIds(requests) if self.make_up_token_ids else None
        if isinstance(requests, RequestColumns):
            rows: Iterable[list[RequestSpec]] = ([request] for request in requests)
            session_ids: Iterable[int | None] = repeat(None)
        else:
            found = links(requests)
            places = _chains(found)
            rows = ([requests[place] for place in row] for row in places)
            session_ids = (found[row[0]].session_id for row in places)
        for row, session_id in zip(rows, session_ids, strict=False):
            entry: dict[str, Any] = {"arrival_time_ns": _ns(row[0].arrival_s)}
            if session_id is None:
                entry |= _written(row[0], ids)
            else:
                entry["session_id"] = str(session_id)
                entry["sub_requests"] = _written_calls(row, ids)
            yield json.dumps(entry) + "\n"


def _chains(found: Sequence[Link]) -> list[list[int]]:
    """Return the places of each chain: a request that follows none, its follow-ups."""
    rows: list[list[int]] = []
    row_of: dict[int | None, list[int]] = {}
    for place, link in enumerate(found):
        if link.follows:
            row_of[link.session_id].append(place)
        else:
            row_of[link.session_id] = [place]
            rows.append(row_of[link.session_id])
    return rows


def _written_calls(
    row: Sequence[RequestSpec], ids: _TokenIds | None
) -> list[dict[str, Any]]:
    calls = [_written(request, ids) for request in row]
    delays_s = [request.delay_s for request in row[1:]]
    for call, delay_s in zip(calls, [*delays_s, 0.0], strict=True):
        call["tool_duration_ns"] = _ns(delay_s)
    return calls


def _ns(seconds: float) -> int:
    if seconds > MAX_NS / _NS_PER_S:
        raise WorkloadError(
            f"times must be below {MAX_NS / _NS_PER_S:g} s, to be 64-bit nanoseconds; "
            f"got {seconds!r}; write another format"
        )
    return round(seconds * _NS_PER_S)


def _check_size(requests: Iterable[RequestSpec]) -> None:
    num_tokens = sum(
        request.num_prompt_tokens + request.num_output_tokens for request in requests
    )
    if num_tokens > _MAX_TOKENS:
        raise WorkloadError(
            f"make_up_token_ids writes at most {_MAX_TOKENS} token ids; got "
            f"{num_tokens}; leave it out, or set limit"
        )


def _written(request: RequestSpec, ids: _TokenIds | None) -> dict[str, Any]:
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
        starts = self._starts
        return [
            token
            for segment, num_tokens in segments
            for token in range(starts[segment], starts[segment] + num_tokens)
        ]
