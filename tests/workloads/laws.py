"""Distances from a law, and burstiness, for tests of laws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from workloads import RequestSpec


def ks_distance(probabilities: NDArray[np.float64]) -> float:
    """Return sqrt(n) times the largest distance from the uniform law.

    Of a sample that follows the law whose distribution function gave the
    probabilities it is above 1.63 once in a hundred samples, above 1.95 once in a
    thousand (Kolmogorov).
    """
    ordered = np.sort(probabilities)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((ordered - steps[:-1]).max(), (steps[1:] - ordered).max())
    return float(distance * len(ordered) ** 0.5)


def exponential_distance(gaps: NDArray[np.float64], mean: float = 1.0) -> float:
    """Return the `ks_distance` of gaps from the exponential law."""
    return ks_distance(-np.expm1(-gaps / mean))


def variation(values: NDArray[np.float64]) -> float:
    """Return the coefficient of variation."""
    return float(values.std() / values.mean())


def counts(
    times_s: NDArray[np.float64], window_s: float, end_s: float | None = None
) -> NDArray[np.int64]:
    """Return the arrivals of each whole window."""
    num = int((times_s[-1] if end_s is None else end_s) / window_s)
    windows = (times_s / window_s).astype(np.int64)
    return np.bincount(windows, minlength=num)[:num]


def dispersion(
    times_s: NDArray[np.float64], window_s: float, end_s: float | None = None
) -> float:
    """Return the index of dispersion: variance over mean of `counts`."""
    per_window = counts(times_s, window_s, end_s)
    return float(per_window.var() / per_window.mean())


def spearman(x: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """Return the rank correlation, ties at their mean rank."""
    ranks = np.asarray(np.corrcoef(_ranks(x), _ranks(y)))
    return float(ranks[0, 1])


def arrivals_of(requests: Iterable[RequestSpec]) -> NDArray[np.float64]:
    return np.array([request.arrival_s for request in requests])


def _ranks(values: NDArray[np.int64]) -> NDArray[np.float64]:
    _, inverse, tied = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (tied.cumsum() - (tied - 1) / 2)[inverse]
    return ranks
