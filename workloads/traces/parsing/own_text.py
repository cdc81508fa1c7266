"""Traces whose prompts are each text of their own: rows to columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.columns import RequestColumns, SpecIterator
from workloads.traces.parsing.order import columns_in_arrival_order

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

Row = tuple[float, int, int, int]
"""``(time, line_number, num_prompt_tokens, num_output_tokens)``."""


def own_text_requests(path: str | Path, rows: Iterable[Row]) -> SpecIterator:
    """Return requests that share nothing, in arrival order, the first at 0 s.

    Parameters
    ----------
    path
        File they come from, for messages.
    rows
        Times in seconds, floats.

    Raises
    ------
    TraceFormatError
        If there are no rows.

    Warns
    -----
    WorkloadWarning
        If the rows are not sorted by time; they are sorted.
    """
    times_s, prompts, outputs = columns_in_arrival_order(path, *_table(rows, float))
    return SpecIterator(RequestColumns(times_s - times_s[0], prompts, outputs))


def own_text_requests_ns(path: str | Path, rows: Iterable[Row]) -> SpecIterator:
    """Return `own_text_requests` of times in nanoseconds, ints below 2**63."""
    times_ns, prompts, outputs = columns_in_arrival_order(path, *_table(rows, int))
    times_s = (times_ns - times_ns[0]) / 1e9  # each rounded once, up to 104 days
    return SpecIterator(RequestColumns(times_s, prompts, outputs))


def _table(rows: Iterable[Row], time_type: type) -> tuple[NDArray[Any], ...]:
    """Return rows as columns: times, line numbers, prompt and output lengths."""
    import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

    names = ("line", "prompt", "output")
    fields = [("time", np.dtype(time_type)), *((name, np.int64) for name in names)]
    table: NDArray[np.void] = np.fromiter(rows, dtype=fields)
    return tuple(table[name].copy() for name, _ in fields)
