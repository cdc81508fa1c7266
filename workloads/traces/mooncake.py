"""Mooncake traces: JSON lines with one hash id per block of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads._checks import MAX_TOKENS, whole
from workloads.chains import in_order
from workloads.spec import RequestSpec, Segment
from workloads.traces.parsing.bad_lines import BadLines
from workloads.traces.parsing.files import trace_path
from workloads.traces.parsing.order import in_arrival_order
from workloads.traces.parsing.specs import sharing_specs
from workloads.traces.parsing.values import (
    json_lines,
    length_problem,
    missing_problem,
    session_numbers,
    time_problem,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEYS = ("input_length", "output_length", "hash_ids")

_MAX_HASH = 2**64 - 1
_MAX_MS = 10**15
"""Some 30,000 years: times since 1970 in milliseconds pass, those in ns do not."""


class _Row(NamedTuple):
    """A line; of the two times, one is given."""

    timestamp_ms: float | None
    line_number: int
    prompt: tuple[Segment, ...]
    num_output_tokens: int
    session: str | int | None
    delay_ms: float | None


@dataclass(frozen=True, slots=True)
class MooncakeTraceReader:
    """Reader of Mooncake's open traces, with prefix identity by hash ids.

    Each hash id ``h`` becomes the segment ``2 * h`` of ``block_tokens`` tokens, the
    last one of what is left::

        input_length 1300, hash_ids [7, 8, 40]
        prompt       (14, 512) (16, 512) (80, 276)

    so equal leading ids are an equal prefix.

    A line with ``session_id`` belongs to that session. In the manner of multi-turn
    traces, a later line of a session may have ``delay`` instead of ``timestamp``: it is
    sent that many milliseconds after the answer to the line before ended. A line with
    ``timestamp`` arrives then, whatever its session does: it had waited for the answer
    when it was recorded. Further keys are ignored; lines with ``text_input`` or
    ``messages`` instead of lengths and ids are refused.

    Parameters
    ----------
    path
        JSON-lines file, plain or compressed (gzip, zstd).
    block_tokens
        Prompt tokens that one hash id stands for.
    full_blocks_only
        The ids name full blocks only; what a prompt has beyond is text of its own.
    skip_bad_lines
        Leave malformed lines out with a warning, instead of refusing the first. A
        follow-up then follows what is left of its session.

    Raises
    ------
    WorkloadError
        If ``block_tokens`` is no integer or below 1, or ``path`` no path.

    Notes
    -----
    Times are in milliseconds. The text generated for a request is a segment of its
    own, although a later turn of the conversation quotes it: the trace names it by a
    hash id there. Session ids that are all whole numbers are kept; others are numbered.

    Source: github.com/kvcache-ai/Mooncake, ``FAST25-release/traces``; Qin et al.,
    Mooncake, FAST 2025. ``session_id`` and ``delay``: trace replay of NVIDIA AIPerf
    (``mooncake_trace``) and Dynamo.
    """

    path: str | Path
    block_tokens: int = 512
    full_blocks_only: bool = False
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))
        remedy = "give the trace's block, 512 in the published ones"
        whole("block_tokens", self.block_tokens, 1, MAX_TOKENS, remedy)

    def read(self) -> Iterator[RequestSpec]:
        """Return the requests in arrival order, the first at 0 s.

        The whole file is checked before the first request is handed out.

        Raises
        ------
        WorkloadError
            If the file cannot be read.
        TraceFormatError
            If a line breaks the format; names file and line.

        Warns
        -----
        WorkloadWarning
            If the rows are not sorted by time (they are sorted), or lines were left
            out.
        """
        with BadLines(self.path, self.skip_bad_lines) as bad:
            rows = list(self._rows(bad))
            if self.full_blocks_only:
                rows = _with_own_rests(rows)
            if any(row.timestamp_ms is None for row in rows):
                return iter(self._chained(rows))
            return self._arrivals(rows)

    def _arrivals(self, rows: list[_Row]) -> Iterator[RequestSpec]:
        """Return rows that all have a timestamp as requests."""
        rows = in_arrival_order(self.path, rows)
        first_ms = rows[0].timestamp_ms or 0
        if all(row.session is None for row in rows):
            numbers: list[int | None] = [None] * len(rows)
        else:
            numbers = session_numbers([row.session for row in rows])
        times_s = [((row.timestamp_ms or 0) - first_ms) / 1000 for row in rows]
        return sharing_specs(
            times_s,
            [row.prompt for row in rows],
            [row.num_output_tokens for row in rows],
            numbers,
        )

    def _chained(self, rows: list[_Row]) -> list[RequestSpec]:
        """Return rows of which some follow others as requests."""
        starts = [row for row in rows if row.timestamp_ms is not None]
        first_ms = in_arrival_order(self.path, starts)[0].timestamp_ms
        assert first_ms is not None
        numbers = session_numbers([row.session for row in rows])
        latest: dict[int, int] = {}
        requests = []
        for index, (row, session_id) in enumerate(zip(rows, numbers, strict=True)):
            previous_id = None
            if row.timestamp_ms is None:
                assert session_id is not None
                previous_id = latest[session_id]
            request = RequestSpec(
                request_id=index,
                arrival_s=((row.timestamp_ms or first_ms) - first_ms) / 1000,
                prompt=row.prompt,
                num_output_tokens=row.num_output_tokens,
                output_segment=2 * index + 1,
                session_id=session_id,
                previous_id=previous_id,
                delay_s=(row.delay_ms or 0) / 1000,
            )
            if session_id is not None:
                latest[session_id] = index
            requests.append(request)
        return [
            request._replace(output_segment=2 * index + 1)
            for index, request in enumerate(in_order(requests))
        ]

    def _rows(self, bad: BadLines) -> Iterator[_Row]:
        """Yield the parsed rows in file order."""
        sessions: set[str | int] = set()
        for number, entry in json_lines(self.path, bad):
            problem = self._problem(entry, sessions)
            if problem:
                bad.refuse(number, problem)
                continue
            session = entry.get("session_id")
            if session is not None:
                sessions.add(session)
            yield _Row(
                entry.get("timestamp"),
                number,
                self._segments(entry["hash_ids"], entry["input_length"]),
                entry["output_length"],
                session,
                entry.get("delay"),
            )

    def _segments(self, hash_ids: list[int], num_tokens: int) -> tuple[Segment, ...]:
        """Return the prompt's segments: full blocks, and one of what is left."""
        block_tokens = self.block_tokens
        full = [(2 * hash_id, block_tokens) for hash_id in hash_ids[:-1]]
        num_last = num_tokens - block_tokens * len(full)
        if not self.full_blocks_only:
            return (*full, (2 * hash_ids[-1], num_last))
        if hash_ids:
            full.append((2 * hash_ids[-1], block_tokens))
            num_last -= block_tokens
        return (*full, (_OWN, num_last)) if num_last else tuple(full)

    def _problem(self, entry: dict[str, Any], sessions: set[str | int]) -> str | None:
        """Return what is wrong with a line, or None if it is right.

        Parameters
        ----------
        entry
            The line.
        sessions
            Those of the lines before.
        """
        return (
            _times_problem(entry, sessions)
            or length_problem("input_length", entry["input_length"])
            or length_problem("output_length", entry["output_length"])
            or self._ids_problem(entry["hash_ids"], entry["input_length"])
        )

    def _ids_problem(self, value: object, num_tokens: int) -> str | None:
        if not isinstance(value, list) or (
            value
            and (
                set(map(type, value)) != {int}
                or not 0 <= min(value) <= max(value) <= _MAX_HASH
            )
        ):
            rule = "hash_ids must be a list of integers >= 0 of 64 bits"
            return f"{rule}; got {str(value)[:80]!r}; mend or remove the line"
        block_tokens = self.block_tokens
        num_full, num_rest = divmod(num_tokens, block_tokens)
        num_blocks = num_full + (num_rest > 0 and not self.full_blocks_only)
        if len(value) != num_blocks:
            rule = f"hash_ids must be one per {block_tokens} tokens, {num_blocks} for"
            remedy = "mend the line or set block_tokens"
            if len(value) == num_full:
                remedy += " or full_blocks_only"
            return f"{rule} input_length {num_tokens}; got {len(value)}; {remedy}"
        return None


def _times_problem(entry: dict[str, Any], sessions: set[str | int]) -> str | None:
    """Return what is wrong with when a line is sent, or with what keys it has."""
    if entry.get("delay") is None:
        return (
            missing_problem(entry, ("timestamp", *_KEYS))
            or time_problem("timestamp", entry["timestamp"], "milliseconds", _MAX_MS)
            or _session_problem(entry.get("session_id"))
        )
    return (
        missing_problem(entry, _KEYS)
        or time_problem("delay", entry["delay"], "milliseconds", _MAX_MS)
        or _session_problem(entry.get("session_id"))
        or _follow_up_problem(entry, sessions)
    )


def _session_problem(value: object) -> str | None:
    if value is None or type(value) in (str, int):
        return None
    rule = "session_id must be text or a whole number"
    return f"{rule}; got {str(value)[:80]!r}; mend or remove the line"


def _follow_up_problem(entry: dict[str, Any], sessions: set[str | int]) -> str | None:
    """Return why a line with a delay cannot follow another."""
    if entry.get("timestamp") is not None:
        return "a line must have timestamp or delay; got both; remove one of them"
    session = entry.get("session_id")
    if session is None:
        return "a line with delay must have a session_id; got none; add timestamp"
    if session not in sessions:
        rule = "the first line of a session must have timestamp"
        return f"{rule}; got delay, session_id {session!r:.80}; give it a timestamp"
    return None


_OWN = -1
"""Stands for text of its own until all ids are known."""


def _with_own_rests(rows: list[_Row]) -> list[_Row]:
    """Return rows whose own text has ids that no block has."""
    largest = max((id_ for row in rows for id_, _ in row.prompt), default=0)
    first = largest + 2 - largest % 2
    return [
        row._replace(prompt=(*row.prompt[:-1], (first + 2 * index, row.prompt[-1][1])))
        if row.prompt[-1][0] == _OWN
        else row
        for index, row in enumerate(rows)
    ]
