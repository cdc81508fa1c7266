"""Rows of a trace in order of arrival, with a warning where they were not."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from workloads.traces.parsing.bad_lines import warn
from workloads.traces.parsing.files import no_rows

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

RowT = TypeVar("RowT", bound="tuple[Any, ...]")


def in_arrival_order(path: str | Path, rows: list[RowT]) -> list[RowT]:
    """Return rows sorted by their first field, with a warning where they were not.

    Parameters
    ----------
    path
        File they come from, for messages.
    rows
        Tuples that begin with ``(time, line_number)``, in file order.

    Returns
    -------
    list of tuple
        The same rows; equal times keep file order.

    Raises
    ------
    TraceFormatError
        If there are no rows.

    Warns
    -----
    WorkloadWarning
        If a time is earlier than one before it: first such line, and how many.
    """
    if not rows:
        raise no_rows(path)
    latest = rows[0][0]
    early_lines: list[int] = []
    for row in rows:
        if row[0] < latest:
            early_lines.append(row[1])
        else:
            latest = row[0]
    if not early_lines:
        return rows
    _warn_early(path, early_lines[0], len(early_lines), len(rows))
    return sorted(rows, key=itemgetter(0))


def columns_in_arrival_order(
    path: str | Path,
    times: NDArray[Any],
    line_numbers: NDArray[np.int64],
    *columns: NDArray[Any],
) -> tuple[NDArray[Any], ...]:
    """Return columns sorted by time, with a warning where they were not.

    Parameters
    ----------
    path
        File they come from, for messages.
    times, line_numbers
        Of each row in file order, shape ``(n,)``.
    columns
        Whatever else rows hold, of the same shape.

    Returns
    -------
    tuple of numpy.ndarray
        ``(times, *columns)``; equal times keep file order.

    Raises
    ------
    TraceFormatError
        If there are no rows.

    Warns
    -----
    WorkloadWarning
        As `in_arrival_order`.
    """
    import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

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
