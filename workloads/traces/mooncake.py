"""Mooncake traces: JSON lines with one hash id per block of the prompt."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads._checks import MAX_TOKENS, whole
from workloads.requests.chains import in_order
from workloads.requests.columns import RequestColumns
from workloads.spec import RequestSpec, Segment
from workloads.traces.parsing.files import BadLines, trace_path
from workloads.traces.parsing.json_values import json_lines
from workloads.traces.parsing.requests import in_arrival_order, sharing_specs
from workloads.traces.parsing.values import (
    length_problem,
    missing_problem,
    session_numbers,
    time_problem,
)
from workloads.traces.writing import (
    chain_losses,
    links,
    losses,
    num_quoting,
    num_sharing,
    scaled,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.spec import Segment

_KEYS = ("input_length", "output_length", "hash_ids")

_MAX_HASH = 2**64 - 1
_MAX_MS = 10**15
"""Some 30,000 years: times since 1970 in milliseconds pass, those in ns do not."""

_OWN = -1
"""Stands for text of its own until all ids are known."""
_Run = tuple[int, int, int]  # segment_id, first token, num_tokens


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
    last one of the rest::

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
        The ids name full blocks only; the rest of a prompt is text of its own.
    spread_arrivals
        Let requests of one timestamp arrive evenly until the next one, in the order of
        the file; the published times are those of a clock that ticks every three
        seconds.
    skip_bad_lines
        Leave malformed lines out with a warning, instead of refusing the first. A
        follow-up then follows the rest of its session.

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
    spread_arrivals: bool = False
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))
        remedy = "give the trace's block, 512 in the published ones"
        whole("block_tokens", self.block_tokens, 1, MAX_TOKENS, remedy)

    def read(self) -> Iterator[RequestSpec]:
        with BadLines(self.path, self.skip_bad_lines) as bad:
            rows = list(self._rows(bad))
            if self.full_blocks_only:
                rows = _with_own_rests(rows)
            if self.spread_arrivals:
                rows = _spread(rows)
            if any(row.timestamp_ms is None for row in rows):
                return iter(self._chained(rows))
            return self._arrivals(rows)

    def _arrivals(self, rows: list[_Row]) -> Iterator[RequestSpec]:
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
        sessions: set[str | int] = set()
        for number, entry in self._entries(bad):
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

    def _entries(self, bad: BadLines) -> Iterator[tuple[int, dict[str, Any]]]:
        return json_lines(self.path, bad)

    def _segments(self, hash_ids: list[int], num_tokens: int) -> tuple[Segment, ...]:
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


def _spread(rows: list[_Row]) -> list[_Row]:
    """Share out the time until the next timestamp; the last ones take the gap before.

    Examples
    --------
    >>> rows = [_Row(t, 1, (), 1, None, None) for t in (0, 0, 0, 3000, 3000, None)]
    >>> [row.timestamp_ms for row in _spread(rows)]
    [0.0, 1000.0, 2000.0, 3000.0, 4500.0, None]
    """
    num_at = Counter(row.timestamp_ms for row in rows if row.timestamp_ms is not None)
    times_ms = sorted(num_at)
    gaps_ms = [after - before for before, after in pairwise(times_ms)]
    gap_ms = dict(zip(times_ms, [*gaps_ms, *(gaps_ms[-1:] or [0.0])], strict=True))
    num_before: Counter[float] = Counter()
    spread = []
    for row in rows:
        if (time_ms := row.timestamp_ms) is None:
            spread.append(row)
            continue
        late_ms = gap_ms[time_ms] * num_before[time_ms] / num_at[time_ms]
        num_before[time_ms] += 1
        spread.append(row._replace(timestamp_ms=time_ms + late_ms))
    return spread


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


@dataclass(frozen=True, slots=True)
class MooncakeTraceWriter:
    """Writer of Mooncake's format, with ``session_id`` and ``delay`` for follow-ups.

    A block's hash id stands for its text: blocks of equal text have the same id. If
    every segment is a block (a Mooncake trace is so), the ids are those of the
    segments; otherwise they count up.

    Parameters
    ----------
    block_tokens
        Prompt tokens that one hash id stands for.

    Raises
    ------
    WorkloadError
        If ``block_tokens`` is no integer or below 1.
    """

    block_tokens: int = 512

    def __post_init__(self) -> None:
        remedy = "give a number of tokens, 512 in the published traces"
        whole("block_tokens", self.block_tokens, 1, MAX_TOKENS, remedy)

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        kept = ("prefixes", "sessions", "chains")
        lines = losses(requests, kept)
        if isinstance(requests, RequestColumns):
            return lines
        if num := num_quoting(requests):
            lines.insert(
                0, f"that {num} prompts quote what was generated for another request"
            )
        if num_sharing(requests) and not self._keeps_ids(requests):
            lines.insert(
                0, f"shared text that is no block of {self.block_tokens} tokens"
            )
        return lines + chain_losses(requests, links(requests))

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        ids = _BlockIds(self.block_tokens, self._keeps_ids(requests))
        for request, link in zip(requests, links(requests), strict=True):
            entry: dict[str, Any] = {}
            if not link.follows:
                entry["timestamp"] = scaled(request.arrival_s, 1000)
            entry["input_length"] = request.num_prompt_tokens
            entry["output_length"] = request.num_output_tokens
            entry["hash_ids"] = ids.of(request.prompt)
            if link.session_id is not None:
                entry["session_id"] = str(link.session_id)
            if link.follows:
                entry["delay"] = scaled(request.delay_s, 1000)
            yield json.dumps(entry) + "\n"

    def _keeps_ids(self, requests: Sequence[RequestSpec]) -> bool:
        """Whether every segment is a block, the last ones of prompts at most."""
        if isinstance(requests, RequestColumns):
            return False
        size = self.block_tokens
        return all(
            all(segment % 2 == 0 and num == size for segment, num in prompt[:-1])
            and prompt[-1][0] % 2 == 0
            and prompt[-1][1] <= size
            for prompt in (request.prompt for request in requests)
        )


class _BlockIds:
    """Hash ids of blocks by their text."""

    def __init__(self, block_tokens: int, keep: bool) -> None:
        self._block_tokens = block_tokens
        self._keep = keep
        self._ids: dict[tuple[tuple[int, ...], ...], int] = {}

    def of(self, prompt: tuple[Segment, ...]) -> list[int]:
        if self._keep:
            return [segment // 2 for segment, _ in prompt]
        return [
            self._ids.setdefault(_text_of(block), len(self._ids))
            for block in _blocks(prompt, self._block_tokens)
        ]


def _text_of(block: list[_Run]) -> tuple[tuple[int, ...], ...]:
    """Return a key that blocks share as far as both reach.

    How long the last run is does not matter: a block that ends earlier is the beginning
    of the other.
    """
    return (*block[:-1], block[-1][:2])


def _blocks(prompt: tuple[Segment, ...], size: int) -> Iterator[list[_Run]]:
    block: list[_Run] = []
    room = size
    for segment, num_tokens in prompt:
        first = 0
        while first < num_tokens:
            num = min(room, num_tokens - first)
            block.append((segment, first, num))
            first, room = first + num, room - num
            if not room:
                yield block
                block, room = [], size
    if block:
        yield block
