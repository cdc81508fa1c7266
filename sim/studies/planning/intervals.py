"""How sure a number is that comes of a few runs."""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.streams import Streams

NUM_RESAMPLES = 2000


class Interval(NamedTuple):
    """A number and the interval around it."""

    value: float
    low: float
    high: float
    confidence: float
    """Probability that the interval holds what it is about, over repeated plans."""


def median_interval(values: Sequence[float], confidence: float) -> Interval:
    """Return the median, between two of the values.

    The exact interval of order statistics, which assumes nothing of the distribution:
    the median of the population lies between the k-th smallest and the k-th largest of
    n values with the probability that of n fair coins at least k show either face.

    Parameters
    ----------
    values
        Independent, at least one; as thresholds of different seeds.
    confidence
        What is wanted. With too few values the interval is all of them, and its own
        `confidence` says how little that is.
    """
    ranked = sorted(values)
    n = len(ranked)
    k = max(
        (k for k in range(1, n // 2 + 1) if _coverage(n, k) >= confidence), default=1
    )
    return Interval(
        float(np.median(ranked)), ranked[k - 1], ranked[n - k], _coverage(n, k)
    )


def _coverage(n: int, k: int) -> float:
    return 1 - 2 * sum(comb(n, i) for i in range(k)) / 2**n if n > 1 else 0.0


def bootstrap_interval(
    values: Sequence[float], confidence: float, streams: Streams, name: str
) -> Interval:
    """Return the median of runs and its percentile bootstrap interval.

    Parameters
    ----------
    values
        The same percentile, say, of runs with different seeds; at least one.
    confidence
        Probability that is wanted.
    streams
        Draws come from the stream ``"bootstrap"`` followed by `name`.
    name
        What the values are of.
    """
    known = np.asarray(values, dtype=np.float64)
    rng = streams.generator(f"bootstrap {name}")
    drawn = rng.integers(0, len(known), (NUM_RESAMPLES, len(known)))
    medians = np.median(known[drawn], axis=1)
    tails = (1 - confidence) / 2
    low, high = np.quantile(medians, [tails, 1 - tails])
    return Interval(float(np.median(known)), float(low), float(high), confidence)
