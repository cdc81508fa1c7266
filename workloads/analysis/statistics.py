"""What a workload is like: rates, burstiness, lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workloads.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from workloads.spec import RequestSpec

PEAK_WINDOW_S = 60.0
DISPERSION_WINDOWS_S = (1.0, 10.0, 60.0)
_LEAST_WINDOWS = 10
"""Fewer say nothing of a variance."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What the statistics read of the requests: float64 and int64, shape ``(n,)``."""

    arrival_s: NDArray[np.float64]
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ArrivalStatistics:
    """How requests come.

    ``None`` stands where there are too few requests, or too short a span, to say.
    """

    num_requests: int
    span_s: float
    """From the first arrival to the last."""
    mean_rate: float | None
    """Requests per second: gaps over the span."""
    peak_rate: float | None
    """Requests per second of the busiest of the whole 60 s windows from the first
    arrival on; None below two windows."""
    gap_cv: float | None
    """Coefficient of variation of the gaps: 1 for Poisson arrivals, above for
    bursts."""
    dispersion: dict[str, float]
    """Variance over mean of the arrivals in whole windows, by their length in
    seconds: 1 for Poisson arrivals; windows of which there are fewer than ten are
    left out."""


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Lengths in tokens; percentiles are interpolated."""

    total: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: int


def columns_of(requests: Sequence[RequestSpec]) -> Columns:
    """Return arrivals and lengths as arrays."""
    if isinstance(requests, RequestColumns):
        return Columns(
            requests.arrival_s, requests.num_prompt_tokens, requests.num_output_tokens
        )
    num = len(requests)
    return Columns(
        np.fromiter((r.arrival_s for r in requests), np.float64, num),
        np.fromiter((r.num_prompt_tokens for r in requests), np.int64, num),
        np.fromiter((r.num_output_tokens for r in requests), np.int64, num),
    )


def arrival_statistics(arrival_s: NDArray[np.float64]) -> ArrivalStatistics:
    """Return how requests come.

    Parameters
    ----------
    arrival_s
        Arrival times in seconds, never falling; at least one.
    """
    span_s = float(arrival_s[-1] - arrival_s[0])
    gaps_s = np.diff(arrival_s)
    per_minute = window_counts(arrival_s, PEAK_WINDOW_S)
    return ArrivalStatistics(
        num_requests=len(arrival_s),
        span_s=span_s,
        mean_rate=len(gaps_s) / span_s if span_s else None,
        peak_rate=float(per_minute.max()) / PEAK_WINDOW_S
        if len(per_minute) > 1
        else None,
        gap_cv=float(gaps_s.std() / gaps_s.mean()) if span_s else None,
        dispersion={
            f"{window_s:g}": float(counts.var() / counts.mean())
            for window_s in DISPERSION_WINDOWS_S
            if len(counts := window_counts(arrival_s, window_s)) >= _LEAST_WINDOWS
        },
    )


def window_counts(arrival_s: NDArray[np.float64], window_s: float) -> NDArray[np.int64]:
    """Return the arrivals in each whole window of the span, from the first on."""
    since_s = arrival_s - arrival_s[0]
    num_windows = int(since_s[-1] // window_s)
    index = (since_s // window_s).astype(np.int64)
    return np.bincount(index[index < num_windows], minlength=num_windows)


def length_statistics(lengths: NDArray[np.int64]) -> LengthStatistics:
    """Return the statistics of lengths in tokens; at least one."""
    p50, p90, p99 = np.quantile(lengths, (0.5, 0.9, 0.99)).tolist()
    mean = float(lengths.mean())
    return LengthStatistics(int(lengths.sum()), mean, p50, p90, p99, int(lengths.max()))


def rank_correlation(
    first: NDArray[np.int64], second: NDArray[np.int64]
) -> float | None:
    """Return Spearman's rho, ties at their mean rank; None where one never varies."""
    ranks = [_ranks(values) for values in (first, second)]
    if any(rank.std() == 0 for rank in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: NDArray[np.int64]) -> NDArray[np.float64]:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = ends - (counts - 1) / 2.0
    return means[where]
