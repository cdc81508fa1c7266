"""``requests.csv``: one line a request, seconds on one clock.

Columns: `arrival_s` (sent), `queued_s` (entered the engine; `arrival_s` stands for it
where it is missing), `first_token_s`, `last_token_s`, `prompt_tokens`, `output_tokens`;
optional `scheduled_s`, `cached_tokens`, `preemptions`. Zero is the clock of the
workload. The lines are in the order of the workload.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.validation.observed import (
    MeasuredError,
    Observed,
    ObservedRequests,
    TimeSeries,
    column,
    counts,
)

if TYPE_CHECKING:
    from pathlib import Path


def read_requests_csv(text: str, path: Path) -> Observed:
    """Read per-request times.

    Raises
    ------
    MeasuredError
        When a column is missing, a value is no number, or a request ends before it
        begins.
    """
    rows = _rows(text, path)
    arrival_s = column(rows, "queued_s" if "queued_s" in rows else "arrival_s", path)
    first_s = column(rows, "first_token_s", path)
    last_s = column(rows, "last_token_s", path)
    for name, before, after in (
        ("first_token_s", arrival_s, first_s),
        ("last_token_s", first_s, last_s),
    ):
        wrong = np.flatnonzero(after < before)
        if len(wrong):
            i = int(wrong[0])
            raise MeasuredError(
                f"{path}: {name} of row {i + 1} is {after[i]:g} s, before what comes "
                f"first ({before[i]:g} s); mend or remove the row"
            )
    unknown = np.flatnonzero(np.isnan(arrival_s))
    if len(unknown):
        raise MeasuredError(f"{path}: row {unknown[0] + 1} has no arrival; remove it")
    return Observed(
        source=f"requests of {path.name}",
        requests=ObservedRequests(
            num_prompt_tokens=counts(rows, "prompt_tokens", path),
            num_output_tokens=counts(rows, "output_tokens", path),
            ttft_s=first_s - arrival_s,
            e2el_s=last_s - arrival_s,
            arrival_s=arrival_s,
            num_cached_tokens=_optional(rows, "cached_tokens", path),
            num_preemptions=_optional(rows, "preemptions", path),
        ),
    )


def read_timeseries(path: Path) -> TimeSeries:
    """Read the engine's state over time.

    Columns: `t` (seconds on the workload's clock), and any of `running`, `waiting`,
    `kv_cache_pct` (percent). A column that is 0 throughout while requests were running
    was not recorded, and is left out.

    Raises
    ------
    MeasuredError
        When it cannot be read, has no `t`, or time goes back.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise MeasuredError(f"'{path}' cannot be read: {reason}") from error
    rows = _rows(text, path)
    time_s = column(rows, "t", path)
    if np.isnan(time_s).any() or (np.diff(time_s) <= 0.0).any():
        raise MeasuredError(f"{path}: t must ascend from row to row; sort the file")
    states = {
        name: column(rows, name, path) if name in rows else None
        for name in ("running", "waiting", "kv_cache_pct")
    }
    usage = states["kv_cache_pct"]
    if usage is not None and not usage.any():
        usage = None
    if usage is not None and float(np.nanmax(usage)) > 100.0:
        raise MeasuredError(f"{path}: kv_cache_pct must be a percentage up to 100")
    return TimeSeries(
        time_s=time_s,
        num_running=states["running"],
        num_waiting=states["waiting"],
        kv_cache_usage=None if usage is None else usage / 100.0,
    )


def _rows(text: str, path: Path) -> dict[str, list[Any]]:
    reader = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(reader, [])]
    lines = [line for line in reader if line]
    for i, line in enumerate(lines):
        if len(line) != len(header):
            raise MeasuredError(
                f"{path}: row {i + 1} has {len(line)} cells, the header has "
                f"{len(header)}; the file may be cut off"
            )
    if not lines:
        raise MeasuredError(f"{path} has a header and no row; nothing was measured")
    return {name: [line[i] for line in lines] for i, name in enumerate(header)}


def _optional(rows: dict[str, list[Any]], name: str, path: Path) -> Any:
    return counts(rows, name, path) if name in rows else None
