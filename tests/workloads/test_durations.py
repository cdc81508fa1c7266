"""Durations and counts against their laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from workloads.draws.by_position import Draws
from workloads.draws.counts import COUNTS, MAX_COUNT
from workloads.draws.durations import DURATIONS, MAX_SECONDS
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError

UNIFORMS = Streams(1).generator("test").random(20_000)
EDGES = np.array([0.0, 1e-300, 0.5, np.nextafter(1, 0), 1.0])


def drawn(table: Any, kind: str, **parameters: Any) -> Any:
    return table[kind](**parameters).quantile(UNIFORMS)


@pytest.mark.parametrize(
    ("kind", "parameters", "law"),
    [
        ("exponential", {"mean_s": 12.0}, stats.expon(scale=12.0)),
        ("uniform", {"low_s": 2.0, "high_s": 9.0}, stats.uniform(2.0, 7.0)),
        (
            "lognormal",
            {"median_s": 15.0, "sigma": 0.8},
            stats.lognorm(0.8, scale=15.0),
        ),
    ],
)
def test_durations_follow_their_law(
    kind: str, parameters: dict[str, float], law: Any
) -> None:
    values = drawn(DURATIONS, kind, **parameters)
    assert stats.kstest(values, law.cdf).pvalue > 0.01
    assert stats.kstest(1.05 * values, law.cdf).pvalue < 0.01


def test_durations_are_cut() -> None:
    assert set(drawn(DURATIONS, "fixed", value_s=3)) == {3.0}
    assert drawn(DURATIONS, "exponential", mean_s=5.0, max_s=8.0).max() == 8.0
    cut = drawn(DURATIONS, "lognormal", median_s=5.0, sigma=2.0, min_s=1.0, max_s=9.0)
    assert (cut.min(), cut.max()) == (1.0, 9.0)
    assert np.median(cut) == pytest.approx(5.0, rel=0.05)


def test_geometric_counts_follow_their_law() -> None:
    values = drawn(COUNTS, "geometric", mean=4.0)
    numbers = np.bincount(values, minlength=40)[1:30]
    law = stats.geom(1 / 4).pmf(np.arange(1, 30))
    tail = len(values) - numbers.sum()
    expected = np.append(law, 1 - law.sum()) * len(values)
    assert stats.chisquare(np.append(numbers, tail), expected).pvalue > 0.01
    assert values.min() == 1
    assert drawn(COUNTS, "geometric", mean=4.0, max=6).max() == 6
    assert set(drawn(COUNTS, "geometric", mean=1)) == {1}


def test_uniform_counts_follow_their_law() -> None:
    numbers = np.bincount(drawn(COUNTS, "uniform", low=2, high=6))
    assert numbers[:2].tolist() == [0, 0]
    assert stats.chisquare(numbers[2:]).pvalue > 0.01
    assert set(drawn(COUNTS, "fixed", number=0)) == {0}


@pytest.mark.parametrize(
    "distribution",
    [
        DURATIONS["fixed"](value_s=2.5),
        DURATIONS["uniform"](low_s=0.0, high_s=4.0),
        DURATIONS["exponential"](mean_s=1e9),
        DURATIONS["lognormal"](median_s=100.0, sigma=10.0),
        COUNTS["fixed"](number=3),
        COUNTS["uniform"](low=0, high=5),
        COUNTS["geometric"](mean=10_000.0),
    ],
)
def test_quantiles_keep_the_contract_at_the_edges(distribution: Any) -> None:
    values = distribution.quantile(EDGES)
    assert values.shape == EDGES.shape
    assert (np.diff(values) >= 0).all()
    assert values.min() >= 0
    assert values.max() <= (MAX_COUNT if values.dtype.kind == "i" else MAX_SECONDS)


def test_every_kind_is_tried() -> None:
    assert set(DURATIONS) == {"fixed", "uniform", "exponential", "lognormal"}
    assert set(COUNTS) == {"fixed", "uniform", "geometric"}


@pytest.mark.parametrize(
    ("table", "kind", "parameters", "message"),
    [
        (DURATIONS, "fixed", {"value_s": -1}, "value_s must be between 0"),
        (DURATIONS, "fixed", {"value_s": float("nan")}, "value_s must be finite"),
        (DURATIONS, "uniform", {"low_s": 3, "high_s": 2}, "low_s must be <= high_s"),
        (DURATIONS, "exponential", {"mean_s": 1, "max_s": -1}, "max_s must be"),
        (DURATIONS, "lognormal", {"median_s": 1, "sigma": 11}, "sigma must be"),
        (
            DURATIONS,
            "lognormal",
            {"median_s": 1, "sigma": 1, "min_s": 3, "max_s": 2},
            "min_s must be <= max_s",
        ),
        (COUNTS, "fixed", {"number": 1.5}, "number must be an integer"),
        (COUNTS, "uniform", {"low": 3, "high": 2}, "low must be <= high"),
        (COUNTS, "geometric", {"mean": 0.5}, "mean must be between 1"),
        (COUNTS, "geometric", {"mean": 2, "max": 0}, "max must be between 1"),
    ],
)
def test_wrong_parameters_are_refused(
    table: Any, kind: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        table[kind](**parameters)


class Broken:
    def __init__(self, values: Any) -> None:
        self.values = values

    def quantile(self, u: Any) -> Any:
        del u
        return self.values


@pytest.mark.parametrize("role", ["lengths", "counts", "seconds"])
def test_broken_distributions_are_found_out(role: str) -> None:
    draw = getattr(Draws(Streams(0), 0, 2), role)
    with pytest.raises(WorkloadError, match=r"x must be .*mend Broken.quantile"):
        draw("x", Broken(np.array([1, 2, 3])))
    wrong = np.array([1, -1]) if role != "seconds" else np.array([1.0, np.nan])
    with pytest.raises(WorkloadError, match="x must be from"):
        draw("x", Broken(wrong))
    other = np.array([1.0, 2.0]) if role != "seconds" else np.array([1, 2])
    with pytest.raises(WorkloadError, match=r"x must be (integers|floats) of"):
        draw("x", Broken(other))
    with pytest.raises(WorkloadError, match="x must be an array; got list"):
        draw("x", Broken([1, 2]))
