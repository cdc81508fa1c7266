"""What was observed of a run, real or simulated, as far as its files say.

Every source gives some of it: per-request times, one state a second, or totals only.
What a source does not say is None and is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

"""Latencies that are compared, as `vllm bench serve` names them."""


class MeasuredError(UserError):
    """A file of measurements that cannot be read or does not fit the configuration."""


@dataclass(frozen=True, slots=True)
class ObservedRequests:
    """One entry a request, in the order of the workload; NaN where it was not served.

    All are arrays of shape (requests,).
    """

    num_prompt_tokens: Ints
    num_output_tokens: Ints
    ttft_s: Floats
    """From the moment the engine took the request in."""
    e2el_s: Floats
    arrival_s: Floats | None = None
    """When the engine took it in, on the workload's clock; None if nobody wrote it."""
    num_cached_tokens: Ints | None = None
    """Prompt tokens found in the prefix cache."""
    num_preemptions: Ints | None = None

    @property
    def num_requests(self) -> int:
        return len(self.ttft_s)

    @property
    def tpot_s(self) -> Floats:
        """Seconds a token after the first; NaN with fewer than two."""
        gaps = self.num_output_tokens - 1
        safe = np.where(gaps > 0, gaps, 1)
        seconds: Floats = np.where(gaps > 0, (self.e2el_s - self.ttft_s) / safe, np.nan)
        return seconds


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """The engine's state at moments of the workload's clock; arrays of one length."""

    time_s: Floats
    num_running: Floats | None = None
    num_waiting: Floats | None = None
    num_swapped: Floats | None = None
    """Waiting with their blocks on the CPU; apart from `num_waiting`."""
    kv_cache_usage: Floats | None = None
    """Between 0 and 1."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What one source, or several together, say of a run."""

    source: str
    """Kind and name of the file, for reports."""
    requests: ObservedRequests | None = None
    itl_s: Floats | None = None
    """All gaps between tokens, in any order."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Totals and statistics under the names of ``summary.json``, where the source has
    them itself; what follows from `requests` is computed instead."""
    series: TimeSeries | None = None
    notes: tuple[str, ...] = ()
    """What the reader of a report should know of the source, a sentence each."""
    warnings: tuple[str, ...] = ()
    """What is probably wrong with it, a sentence each."""


def column(
    rows: Mapping[str, Any], name: str, where: Path, *, least: float = 0.0
) -> Floats:
    """Return a column of numbers, none below `least`; NaN where it is empty."""
    if name not in rows:
        there = ", ".join(map(str, rows))
        raise MeasuredError(
            f"{where}: column '{name}' is missing; it has {there[:200]}"
        )
    values = np.empty(len(rows[name]))
    for i, value in enumerate(rows[name]):
        try:
            values[i] = float(value) if value not in (None, "") else np.nan
        except (TypeError, ValueError, OverflowError):
            values[i] = np.inf
        if not (np.isnan(values[i]) or least <= values[i] < np.inf):
            raise MeasuredError(
                f"{where}: {name} of row {i + 1} must be a number >= {least:g}; got "
                f"{str(value)[:40]!r}: {_remedy(name)}"
            )
    return values


def _remedy(name: str) -> str:
    if name in {"t", "arrival_s", "queued_s"}:
        return "give seconds on any clock"
    if name in {"first_token_s", "last_token_s"}:
        return "give seconds, or leave it empty if the request failed"
    return "mend or remove the row"


def counts(rows: Mapping[str, Any], name: str, where: Path) -> Ints:
    values = column(rows, name, where)
    wrong = np.flatnonzero(np.isnan(values) | (values != np.floor(values)))
    if len(wrong):
        raise MeasuredError(
            f"{where}: {name} of row {wrong[0] + 1} must be a whole number; got "
            f"{rows[name][wrong[0]]!r}: mend or remove the row"
        )
    return values.astype(np.int64)
