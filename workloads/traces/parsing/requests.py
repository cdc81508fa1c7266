"""Rows of a trace as requests in order of arrival."""

from __future__ import annotations

from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from workloads._numpy import np
from workloads.requests.columns import RequestColumns, SpecIterator
from workloads.spec import RequestSpec, made
from workloads.traces.parsing.files import no_rows, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from workloads.spec import Segment

RowT = TypeVar("RowT", bound="tuple[Any, ...]")
Row = tuple[float, int, int, int]
"""``(time, line_number, num_prompt_tokens, num_output_tokens)``."""
_DEFAULTS = RequestSpec(0, 0.0, (), 1, 1)


def in_arrival_order(path: str | Path, rows: list[RowT]) -> list[RowT]:
    """Return rows ``(time, line_number, ...)`` by time; equal ones in file order."""
    if not rows:
        raise no_rows(path)
    return sorted(rows, key=itemgetter(0)) if warned_early(path, rows) else rows


def warned_early(path: str | Path, rows: Sequence[tuple[Any, ...]]) -> bool:
    """Warn if a row ``(time, line_number, ...)`` is earlier than one before it."""
    latest = rows[0][0]
    early_lines: list[int] = []
    for row in rows:
        if row[0] < latest:
            early_lines.append(row[1])
        else:
            latest = row[0]
    if early_lines:
        _warn_early(path, early_lines[0], len(early_lines), len(rows))
    return bool(early_lines)


def columns_in_arrival_order(
    path: str | Path,
    times: NDArray[Any],
    line_numbers: NDArray[np.int64],
    *columns: NDArray[Any],
) -> tuple[NDArray[Any], ...]:
    """Return ``(times, *columns)`` by time; equal ones in file order."""
    if not len(times):
        raise no_rows(path)
    early = np.flatnonzero(times < np.maximum.accumulate(times))
    if not len(early):
        return times, *columns
    _warn_early(path, int(line_numbers[early[0]]), len(early), len(times))
    order = times.argsort(kind="stable")
    return tuple(column[order] for column in (times, *columns))


def _warn_early(
    path: str | Path, line_number: int, num_early: int, num_rows: int
) -> None:
    warn(
        f"{path}:{line_number}: timestamps must not fall; {num_early} of "
        f"{num_rows} rows are earlier than one before them; sorted by time"
    )


def own_text_requests(path: str | Path, rows: Iterable[Row]) -> SpecIterator:
    """Return requests that share nothing; times are floats in seconds."""
    times_s, prompts, outputs = columns_in_arrival_order(path, *_table(rows, float))
    return SpecIterator(RequestColumns(times_s - times_s[0], prompts, outputs))


def own_text_requests_ns(path: str | Path, rows: Iterable[Row]) -> SpecIterator:
    """Return `own_text_requests` of times in nanoseconds, ints below 2**63."""
    times_ns, prompts, outputs = columns_in_arrival_order(path, *_table(rows, int))
    times_s = (times_ns - times_ns[0]) / 1e9  # each rounded once, up to 104 days
    return SpecIterator(RequestColumns(times_s, prompts, outputs))


def _table(rows: Iterable[Row], time_type: type) -> tuple[NDArray[Any], ...]:
    names = ("line", "prompt", "output")
    fields = [("time", np.dtype(time_type)), *((name, np.int64) for name in names)]
    table: NDArray[np.void] = np.fromiter(rows, dtype=fields)
    return tuple(table[name].copy() for name, _ in fields)


def sharing_specs(
    times_s: Sequence[float],
    prompts: Iterable[tuple[Segment, ...]],
    num_output_tokens: Iterable[int],
    session_ids: Iterable[int | None],
) -> Iterator[RequestSpec]:
    """Return requests that wait for no other, in the order given."""
    num = len(times_s)
    fields = (
        range(num),
        times_s,
        prompts,
        num_output_tokens,
        range(1, 2 * num, 2),
        *map(repeat, _DEFAULTS[5:11]),
        session_ids,
        *map(repeat, _DEFAULTS[12:]),
    )
    # Not strict: a value of all requests repeats without end.
    return map(made, zip(*fields, strict=False))


def own_prompts(lengths: Iterable[int]) -> Iterator[tuple[Segment, ...]]:
    return (((2 * i, num_tokens),) for i, num_tokens in enumerate(lengths))
