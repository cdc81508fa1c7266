"""``requests.csv``: one line a request, seconds on one clock.

Columns: `arrival_s` (sent), `queued_s` (entered the engine; `arrival_s` stands for it
where it is missing), `first_token_s`, `last_token_s`, `prompt_tokens`, `output_tokens`;
optional `cached_tokens`, `preemptions`. Others are ignored, but for `index`, which says
the order of the workload where the lines are in another. Zero is anywhere. A request
that failed has empty cells for what did not happen.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.studies.validation.observed import (
    MeasuredError,
    Observed,
    ObservedRequests,
    TimeSeries,
    column,
    counts,
)

if TYPE_CHECKING:
    from pathlib import Path

    from sim.studies.validation.observed import Floats, Ints

_ENGINE_COLUMNS: Final = ("engine", "engine_id", "dp_rank", "replica")
"""Columns that say which of several engines served a request."""


def read_requests_csv(text: str, path: Path) -> Observed:
    rows = _rows(text, path)
    arrival_s = column(rows, "queued_s" if "queued_s" in rows else "arrival_s", path)
    first_s = column(rows, "first_token_s", path)
    last_s = column(rows, "last_token_s", path)
    _check_times(arrival_s, first_s, last_s, path)
    order = _order(rows, path)

    def in_order(values: Any) -> Any:
        return None if values is None else values[order]

    return Observed(
        source=f"requests of {path.name}",
        begins_at_queue="queued_s" in rows,
        requests=ObservedRequests(
            num_prompt_tokens=in_order(counts(rows, "prompt_tokens", path)),
            num_output_tokens=in_order(_output_tokens(rows, last_s, path)),
            ttft_s=in_order(first_s - arrival_s),
            e2el_s=in_order(last_s - arrival_s),
            arrival_s=in_order(arrival_s),
            num_cached_tokens=in_order(_optional(rows, "cached_tokens", path)),
            num_preemptions=in_order(_optional(rows, "preemptions", path)),
            engine=in_order(_engines(rows)),
        ),
    )


def _check_times(
    arrival_s: Floats, first_s: Floats, last_s: Floats, path: Path
) -> None:
    """Refuse requests that end before they begin, and a run in which none ended."""
    unknown = np.flatnonzero(np.isnan(arrival_s))
    if len(unknown):
        raise MeasuredError(f"{path}: row {unknown[0] + 1} has no arrival; remove it")
    for name, before, after in (
        ("first_token_s", arrival_s, first_s),
        ("last_token_s", first_s, last_s),
        ("last_token_s", arrival_s, last_s),
    ):
        wrong = np.flatnonzero(after < before)
        if len(wrong):
            i = int(wrong[0])
            raise MeasuredError(
                f"{path}: {name} of row {i + 1} is {after[i]:g} s, before what comes "
                f"first ({before[i]:g} s); mend the row, or empty its times if the "
                "request failed"
            )
    if np.isnan(last_s).all():
        raise MeasuredError(
            f"{path}: last_token_s is empty in every row: no request was served, and "
            "there is nothing to compare"
        )


def _order(rows: dict[str, list[Any]], path: Path) -> Ints:
    """Return the places of the rows in the order of `index`, if there is one."""
    if "index" not in rows:
        return np.arange(len(next(iter(rows.values()))))
    index = counts(rows, "index", path)
    if len(np.unique(index)) < len(index):
        raise MeasuredError(
            f"{path}: index has the same number twice; one row a request, or no index"
        )
    return np.argsort(index, kind="stable")


def _engines(rows: dict[str, list[Any]]) -> Ints | None:
    """Return the number of the engine of each row; None where they are of one."""
    for name in _ENGINE_COLUMNS:
        _, numbers = np.unique(np.array(rows.get(name, ()), str), return_inverse=True)
        if len(numbers) and numbers.max():
            return numbers.astype(np.int64)
    return None


def _output_tokens(rows: dict[str, list[Any]], last_s: Floats, path: Path) -> Ints:
    """Return the output tokens: at least one where a request was served."""
    served = ~np.isnan(last_s)
    if "output_tokens" in rows:
        pairs = zip(rows["output_tokens"], served, strict=True)
        cells = [cell if ok or cell else "0" for cell, ok in pairs]
        rows = rows | {"output_tokens": cells}
    found = counts(rows, "output_tokens", path)
    wrong = np.flatnonzero(served & (found == 0))
    if len(wrong):
        raise MeasuredError(
            f"{path}: output_tokens of row {wrong[0] + 1} must be 1 or more, as the "
            "request has a last token; mend the row, or empty its times if it failed"
        )
    return found


def read_timeseries(path: Path) -> TimeSeries:
    """Read the engine's state over time.

    Columns: `t` (seconds on the requests' clock), and any of `running`, `waiting`,
    `swapped` (not among `waiting`), `kv_cache_pct` (percent). A KV usage that is 0 or
    empty throughout was not recorded, and is left out.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise MeasuredError(f"'{path}' cannot be read: {reason}") from error
    rows = _rows(text, path)
    time_s = column(rows, "t", path)
    if np.isnan(time_s).any() or (np.diff(time_s) <= 0.0).any():
        raise MeasuredError(f"{path}: t must ascend from row to row; sort the file")
    states = {
        name: column(rows, name, path) if name in rows else None
        for name in ("running", "waiting", "swapped", "kv_cache_pct")
    }
    if all(values is None for values in states.values()):
        raise MeasuredError(
            f"{path}: there is no column running, waiting or kv_cache_pct; it has "
            f"{', '.join(rows)[:200]}"
        )
    usage = states["kv_cache_pct"]
    if usage is not None and not np.nan_to_num(usage).any():
        usage = None
    if usage is not None and float(np.nanmax(usage)) > 100.0:
        raise MeasuredError(
            f"{path}: kv_cache_pct must be a percentage up to 100; got "
            f"{float(np.nanmax(usage)):g}"
        )
    return TimeSeries(
        time_s=time_s,
        num_running=states["running"],
        num_waiting=states["waiting"],
        num_swapped=states["swapped"],
        kv_cache_usage=None if usage is None else usage / 100.0,
    )


def _rows(text: str, path: Path) -> dict[str, list[Any]]:
    reader = csv.reader(io.StringIO(text))
    try:
        header = [name.strip() for name in next(reader, [])]
        lines = [line for line in reader if line]
    except csv.Error as error:
        raise MeasuredError(f"{path} is no CSV: {error}; write it again") from error
    if twice := sorted(name for name in set(header) if header.count(name) > 1):
        raise MeasuredError(f"{path}: two columns are called '{twice[0]}'; remove one")
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
