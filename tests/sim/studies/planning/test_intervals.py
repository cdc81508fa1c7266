"""Intervals hold what they promise, on samples whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from sim.studies.planning.phases.outcome import bootstrap_interval, median_interval
from workloads.draws.streams import Streams

NUM_PLANS, NUM_SEEDS = 400, 9


def test_median_lies_between_order_statistics() -> None:
    found = median_interval([9.0, 1.0, 5.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0], 0.95)
    assert (found.value, found.low, found.high) == (5.0, 2.0, 8.0)
    assert found.confidence == pytest.approx(1 - 2 * 10 / 512)


def test_too_few_values_say_how_little_they_know() -> None:
    found = median_interval([2.0, 3.0, 1.0], 0.95)
    assert (found.low, found.high) == (1.0, 3.0)
    assert found.confidence == pytest.approx(0.75)
    assert median_interval([2.0], 0.95).confidence == 0.0


def samples() -> np.ndarray:
    rng = Streams(5).generator("samples")
    return rng.lognormal(0.0, 0.5, (NUM_PLANS, NUM_SEEDS))


def test_order_statistics_cover_the_median() -> None:
    found = [median_interval(row.tolist(), 0.95) for row in samples()]
    covered = np.mean([each.low <= 1.0 <= each.high for each in found])
    assert 0.93 <= covered <= 0.99


def test_bootstrap_covers_the_median() -> None:
    streams = Streams(0)
    found = [
        bootstrap_interval(row.tolist(), 0.95, streams, str(i))
        for i, row in enumerate(samples())
    ]
    covered = np.mean([each.low <= 1.0 <= each.high for each in found])
    assert 0.91 <= covered <= 0.99
    again = bootstrap_interval(samples()[0].tolist(), 0.95, streams, "0")
    assert again == found[0]
