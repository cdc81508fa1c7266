"""Where a run forgets that it began empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sim.results.table import ResultTable

NUM_BINS = 100
MAX_SHARE = 0.25
"""Most of a run that is given up: what starts later than that is traffic, not start."""


def numbers_in_system(requests: ResultTable) -> NDArray[np.float64]:
    """Return how many requests were in the system, at even times to the last arrival.

    Returns
    -------
    NDArray[np.float64]
        Shape ``(NUM_BINS,)``.
    """
    arrival_s = np.sort(requests["arrival_s"])
    finish_s = requests["finish_s"]
    finish_s = np.sort(finish_s[~np.isnan(finish_s)])
    times_s = arrival_s[-1] * np.arange(1, NUM_BINS + 1) / NUM_BINS
    arrived = np.searchsorted(arrival_s, times_s, side="right")
    gone = np.searchsorted(finish_s, times_s, side="right")
    numbers: NDArray[np.float64] = (arrived - gone).astype(np.float64)
    return numbers


def warmup_share(runs: Sequence[NDArray[np.float64]]) -> float:
    """Return the share of a run to leave out, by MSER on the mean of several runs.

    The truncation that leaves the smallest standard error of the mean of what remains
    (White, 1997): too short a warm-up leaves a slope, too long a one leaves little.

    Parameters
    ----------
    runs
        `numbers_in_system` of runs of the same traffic with other seeds, which
        average out the bursts.

    Returns
    -------
    float
        From 0 to `MAX_SHARE`.
    """
    mean = np.mean(np.stack(list(runs)), axis=0)
    candidates = range(int(len(mean) * MAX_SHARE) + 1)
    errors = [_squared_error(mean[first:]) for first in candidates]
    return int(np.argmin(errors)) / len(mean)


def _squared_error(values: NDArray[np.float64]) -> float:
    return float(((values - values.mean()) ** 2).sum() / len(values) ** 2)
