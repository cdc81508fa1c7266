"""LLMServingSim workloads: JSON lines, a request or an agent's session a line."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads.chains import in_order
from workloads.spec import RequestSpec, Segment
from workloads.traces.parsing.bad_lines import BadLines
from workloads.traces.parsing.files import trace_path
from workloads.traces.parsing.history import extended
from workloads.traces.parsing.order import in_arrival_order
from workloads.traces.parsing.own_text import own_text_requests_ns
from workloads.traces.parsing.token_trie import TokenTrie
from workloads.traces.parsing.values import (
    json_lines,
    length_problem,
    missing_problem,
    session_numbers,
    whole_problem,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workloads.traces.parsing.token_trie import Tokens

MAX_NS = 9 * 10**18
"""Some 285 years; times since 1970 pass."""
_MAX_TOKEN_ID = 2**62
_CALL_KEYS = ("input_toks", "output_toks")


class _Call(NamedTuple):
    """One call of the model."""

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
        """Return the requests in arrival order, the first at 0 s.

        Raises
        ------
        WorkloadError, TraceFormatError
            If the file cannot be read; if a line breaks the format, with file and line.

        Warns
        -----
        WorkloadWarning
            If the rows are not sorted by time (they are sorted), or lines were left
            out.
        """
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
    """Yield the parsed rows in file order."""
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
    """Return what is wrong with the call or calls of a line."""
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
    """Return what is wrong with a call, or None if it is right."""
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
    """Return requests in order of arrival with prompts and outputs named.

    Parameters
    ----------
    requests
        As of `_sent`.
    calls
        By the place that `output_segment` is.
    assume_history
        See `LlmServingSimTraceReader`.
    """
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
