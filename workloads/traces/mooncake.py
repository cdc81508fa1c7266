"""Mooncake traces: JSON lines with one hash id per block of the prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any

from workloads._checks import MAX_TOKENS, whole
from workloads.spec import RequestSpec, Segment
from workloads.traces.base import (
    format_error,
    in_arrival_order,
    length_problem,
    numbered_lines,
    trace_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")

_MAX_MS = 10**15
"""Some 30,000 years: times since 1970 in milliseconds pass, those in ns do not."""

_Row = tuple[float, int, tuple[Segment, ...], int]
"""``(timestamp_ms, line_number, prompt, num_output_tokens)``."""


@dataclass(frozen=True, slots=True)
class MooncakeTraceReader:
    """Reader of Mooncake's open traces, with prefix identity by hash ids.

    Each hash id ``h`` becomes the segment ``2 * h`` of ``block_tokens`` tokens, the
    last one of what is left::

        input_length 1300, hash_ids [7, 8, 40]
        prompt       (14, 512) (16, 512) (80, 276)

    so equal leading ids are an equal prefix. Other keys (``session_id``, ``delay``)
    are ignored.

    Parameters
    ----------
    path
        JSON-lines file, plain or gzipped.
    block_tokens
        Prompt tokens that one hash id stands for.

    Raises
    ------
    WorkloadError
        If ``block_tokens`` is no integer or below 1, or ``path`` no path.

    Notes
    -----
    ``timestamp`` is in milliseconds. The text generated for a request is a segment
    of its own, although a later turn of the conversation quotes it: the trace names
    it by a hash id there.

    Source: github.com/kvcache-ai/Mooncake, ``FAST25-release/traces``; Qin et al.,
    Mooncake, FAST 2025.
    """

    path: str | Path
    block_tokens: int = 512

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
            If the rows are not sorted by time; they are sorted.
        """
        rows = in_arrival_order(self.path, list(self._rows()))
        first_ms = rows[0][0]
        return (
            RequestSpec(
                request_id=index,
                arrival_s=(timestamp_ms - first_ms) / 1000,
                prompt=prompt,
                num_output_tokens=num_output_tokens,
                output_segment=2 * index + 1,
            )
            for index, (timestamp_ms, _, prompt, num_output_tokens) in enumerate(rows)
        )

    def _rows(self) -> Iterator[_Row]:
        """Yield the parsed rows in file order."""
        for number, line in numbered_lines(self.path):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                problem = f"a line must be one JSON object; got {line[-40:]!r} at its "
                problem += f"end ({error}); the file may be cut short"
                raise format_error(self.path, number, problem) from None
            problem_found = _problem(entry, self.block_tokens)
            if problem_found:
                raise format_error(self.path, number, problem_found)
            prompt = _segments(
                entry["hash_ids"], entry["input_length"], self.block_tokens
            )
            yield entry["timestamp"], number, prompt, entry["output_length"]


def _segments(
    hash_ids: list[int], num_tokens: int, block_tokens: int
) -> tuple[Segment, ...]:
    """Return the prompt's segments: full blocks, and one of what is left."""
    num_last = num_tokens - block_tokens * (len(hash_ids) - 1)
    full = [(2 * hash_id, block_tokens) for hash_id in hash_ids[:-1]]
    return (*full, (2 * hash_ids[-1], num_last))


def _problem(entry: Any, block_tokens: int) -> str | None:
    """Return what is wrong with a line, or None if it is right."""
    if not isinstance(entry, dict):
        return f"a line must be a JSON object; got {str(entry)[:80]!r}; mend the line"
    missing = [key for key in _KEYS if key not in entry]
    if missing:
        found = repr(", ".join(entry))[1:-1][:120] or "none"
        return f"keys must include {', '.join(missing)}; got {found}; rename them"
    return (
        _timestamp_problem(entry["timestamp"])
        or length_problem("input_length", entry["input_length"])
        or length_problem("output_length", entry["output_length"])
        or _ids_problem(entry["hash_ids"], entry["input_length"], block_tokens)
    )


def _timestamp_problem(value: object) -> str | None:
    # bool is an int to isinstance, and json reads NaN, Infinity and endless integers.
    if type(value) in (int, float) and 0 <= value <= _MAX_MS:  # type: ignore[operator]
        return None
    rule = f"timestamp must be a finite number of milliseconds from 0 to {_MAX_MS:g}"
    return f"{rule}; got {value!r:.80}; mend or remove the line"


def _ids_problem(value: object, num_tokens: int, block_tokens: int) -> str | None:
    if not isinstance(value, list) or not all(
        type(hash_id) is int and hash_id >= 0 for hash_id in value
    ):
        rule = "hash_ids must be a list of integers >= 0"
        return f"{rule}; got {str(value)[:80]!r}; mend or remove the line"
    num_blocks = -(-num_tokens // block_tokens)
    if len(value) != num_blocks:
        rule = f"hash_ids must be one per {block_tokens} tokens, {num_blocks} for"
        remedy = "mend the line or set block_tokens"
        return f"{rule} input_length {num_tokens}; got {len(value)}; {remedy}"
    return None
