"""Agents' sessions of kv-cache-tester: prompts by the hashes of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any

from workloads._checks import MAX_TOKENS, positive, whole
from workloads.requests.chains import in_order
from workloads.spec import RequestSpec
from workloads.traces.parsing.files import BadLines, no_rows, trace_path, warn
from workloads.traces.parsing.json_values import json_lines
from workloads.traces.parsing.values import missing_problem, whole_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workloads.spec import Segment

_KEYS = ("block_size", "requests")
_REQUEST_KEYS = ("in", "out", "hash_ids")
_SUB_AGENT = "subagent"
_MOST_ID = 2**40


class _MalformedError(Exception):
    """A session that is none; the message says why."""


@dataclass(frozen=True, slots=True)
class KvCacheTesterTraceReader:
    """Reader of kv-cache-tester's recordings of coding agents, a session a line.

    A request is sent when the answer before has come and its recorded think time has
    passed. Sub-agents begin as long after the request before them as recorded. Sessions
    have no arrivals: all begin at once, or `interval_s` apart;
    ``max_concurrent_users`` says how many are at work.

    Parameters
    ----------
    path
        JSON lines, plain or compressed (gzip, zstd), ``hash_ids`` as runs
        ``[first id, count]``.
    num_sessions
        Read only so many, from the beginning.
    interval_s
        Seconds from the begin of a session to that of the next.
    max_context_tokens
        A session ends before its first request that is longer, output included; its
        sub-agents likewise. A warning says how many are left out or cut.
    skip_bad_lines
        Leave malformed lines out with a warning, instead of refusing the first.

    Raises
    ------
    WorkloadError
        If a parameter is out of range.

    Notes
    -----
    Ids mean nothing across sessions, so nothing is shared between them. What a prompt
    has beyond its whole blocks, and every answer, is text of its own: what an answer
    becomes in the next prompt has ids there. An answer without tokens counts as one
    token, the least that an engine generates.

    Source: github.com/callanjfox/kv-cache-tester.
    """

    path: str | Path
    num_sessions: int | None = None
    interval_s: float = 0.0
    max_context_tokens: int | None = None
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))
        remedy = "leave it out for no such limit"
        for name in ("num_sessions", "max_context_tokens"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1, MAX_TOKENS, remedy)
        if self.interval_s:
            positive("interval_s", self.interval_s, "give seconds, or 0")

    def read(self) -> Iterator[RequestSpec]:
        requests: list[RequestSpec] = []
        num_sessions = num_left_out = num_ended = 0
        with BadLines(self.path, self.skip_bad_lines) as bad:
            for line_number, entry in json_lines(self.path, bad):
                if num_sessions == self.num_sessions:
                    break
                session = _Session(self, num_sessions, len(requests))
                try:
                    session.add_all(entry)
                except _MalformedError as error:
                    bad.refuse(line_number, str(error))
                    continue
                requests += session.requests
                num_sessions += 1
                num_left_out += session.is_cut and not session.requests
                num_ended += session.is_cut
        if num_ended:
            warn(
                f"{self.path}: max_context_tokens of {self.max_context_tokens:,} left "
                f"out {num_left_out:,} of {num_sessions:,} sessions, and parts of "
                f"{num_ended - num_left_out:,}"
            )
        if not requests:
            raise no_rows(self.path)
        return iter(in_order(requests))


class _Session:
    """The requests of a session, in the order in which each can be sent."""

    def __init__(
        self, reader: KvCacheTesterTraceReader, number: int, first_id: int
    ) -> None:
        self._number = number
        self._arrival_s = number * reader.interval_s
        self._most = reader.max_context_tokens or MAX_TOKENS
        self._first_id = first_id
        self.requests: list[RequestSpec] = []
        self.is_cut = False

    def add_all(self, entry: dict[str, Any]) -> None:
        if problem := missing_problem(entry, _KEYS):
            raise _MalformedError(problem)
        size = entry["block_size"]
        if problem := whole_problem("block_size", size, 1, MAX_TOKENS):
            raise _MalformedError(problem)
        self._add_chain(entry["requests"], size, None, 0.0)

    def _add_chain(
        self, rows: Any, size: int, previous_id: int | None, delay_s: float
    ) -> None:
        """Add requests that follow one another, and sub-agents beside them."""
        if not isinstance(rows, list):
            raise _MalformedError(f"requests must be a list; got {str(rows)[:40]}")
        end_s = 0.0
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                raise _MalformedError(f"a request must be a table; got {str(row)[:40]}")
            at_s = _seconds(row, "t")
            if row.get("type") == _SUB_AGENT:
                self._add_chain(
                    row.get("requests"), size, previous_id, max(at_s - end_s, 0.0)
                )
                continue
            if problem := missing_problem(row, _REQUEST_KEYS):
                raise _MalformedError(problem)
            spec = self._request(row, size, previous_id, delay_s)
            if spec.num_prompt_tokens + spec.num_output_tokens > self._most:
                self.is_cut = True
                return
            self.requests.append(spec)
            previous_id, end_s = spec.request_id, at_s + _seconds(row, "api_time")
            delay_s = _next_delay_s(rows[index + 1 :])

    def _request(
        self, row: dict[str, Any], size: int, previous_id: int | None, delay_s: float
    ) -> RequestSpec:
        for name, least in (("in", 1), ("out", 0)):
            if problem := whole_problem(name, row[name], least, MAX_TOKENS):
                raise _MalformedError(problem)
        number = self._first_id + len(self.requests)
        return RequestSpec(
            request_id=number,
            arrival_s=self._arrival_s,
            prompt=self._prompt(row, size, number),
            num_output_tokens=max(row["out"], 1),
            output_segment=2 * number + 1,
            session_id=self._number,
            previous_id=previous_id,
            delay_s=delay_s,
        )

    def _prompt(
        self, row: dict[str, Any], size: int, number: int
    ) -> tuple[Segment, ...]:
        """Return runs of blocks as texts that begin with their first block.

        Runs that begin with one id are beginnings of one text, as ids that follow one
        another always stand for the same blocks.
        """
        segments: list[Segment] = []
        rest = row["in"]
        runs = row["hash_ids"]
        for run in runs if isinstance(runs, list) else [runs]:
            if not (
                isinstance(run, list)
                and len(run) == 2
                and all(type(each) is int and 0 <= each < _MOST_ID for each in run)
            ):
                raise _MalformedError(
                    f"hash_ids must be runs [first id, count]; got {str(run)[:40]}"
                )
            tokens = min(run[1] * size, rest)
            if tokens:
                segments.append((2 * _identity(self._number, 1 + run[0]), tokens))
                rest -= tokens
        if rest:
            segments.append((2 * _identity(number, 0), rest))
        return tuple(segments)


def _identity(first: int, second: int) -> int:
    """Return a number of its own for each pair: that of Cantor."""
    total = first + second
    return total * (total + 1) // 2 + second


def _seconds(row: dict[str, Any], name: str) -> float:
    value = row.get(name, 0.0)
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise _MalformedError(f"{name} must be seconds, at least 0; got {value!r}")
    return float(value)


def _next_delay_s(rows: list[Any]) -> float:
    """Return the think time of the next request that is no sub-agent's."""
    for row in rows:
        if isinstance(row, dict) and row.get("type") != _SUB_AGENT:
            return _seconds(row, "think_time")
    return 0.0
