from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import LENGTHS, LengthDistribution, WorkloadError
from workloads.copula import coupled
from workloads.lengths import (
    FixedLength,
    LognormalLength,
    QuantileLength,
    UniformLength,
    normal_quantile,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

lengths = st.integers(1, 10**9)
pairs = st.tuples(lengths, lengths).map(sorted)


@st.composite
def tables(draw: st.DrawFn) -> QuantileLength:
    inner = draw(st.lists(st.floats(0.001, 0.999), unique=True, max_size=8))
    size = len(inner) + 2
    values = draw(st.lists(st.floats(1, 1e9), min_size=size, max_size=size))
    return QuantileLength([0, *sorted(inner), 1], sorted(values))


distributions = st.one_of(
    st.builds(FixedLength, lengths),
    pairs.map(lambda pair: UniformLength(*pair)),
    st.builds(LognormalLength, st.floats(1, 1e9), st.floats(0, 10)),
    st.builds(
        lambda median, sigma, ends: LognormalLength(median, sigma, *ends),
        st.floats(1, 1e9),
        st.floats(0, 10),
        pairs,
    ),
    tables(),
)


def quantiles(distribution: LengthDistribution, *u: float) -> list[int]:
    tokens: list[int] = distribution.quantile(np.array(u)).tolist()
    return tokens


def uniforms(size: int = 200_000, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).random(size)


@given(distributions, st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_quantiles_are_lengths_and_never_fall(
    distribution: LengthDistribution, probabilities: list[float]
) -> None:
    tokens = distribution.quantile(np.array([0.0, *sorted(probabilities), 1.0]))
    assert tokens.dtype == np.int64
    assert tokens.shape == (len(probabilities) + 2,)
    assert tokens[0] >= 1
    assert tokens[-1] <= 10**9
    assert (np.diff(tokens) >= 0).all()


@given(distributions)
def test_any_shape(distribution: LengthDistribution) -> None:
    assert distribution.quantile(np.zeros((2, 3))).shape == (2, 3)
    assert distribution.quantile(np.zeros(0)).shape == (0,)


def test_fixed() -> None:
    assert quantiles(FixedLength(tokens=512), 0, 0.5, 1) == [512, 512, 512]


def test_uniform() -> None:
    dice = UniformLength(low=1, high=6)
    assert quantiles(dice, 0, 0.16, 0.17, 0.5, 0.99, 1) == [1, 1, 2, 4, 6, 6]
    _, counts = np.unique(dice.quantile(uniforms()), return_counts=True)
    assert counts / 200_000 == pytest.approx(1 / 6, rel=0.02)


def test_lognormal() -> None:
    distribution = LognormalLength(median=1000, sigma=0.5)
    assert quantiles(distribution, 0.5) == [1000]
    # The quantile at one standard deviation: 1000 * exp(0.5).
    assert quantiles(distribution, 0.8413447460685429) == [1649]
    tokens = distribution.quantile(uniforms())
    assert tokens.mean() == pytest.approx(1000 * math.exp(0.125), rel=0.01)
    variation = tokens.std() / tokens.mean()
    assert variation == pytest.approx(math.sqrt(math.exp(0.25) - 1), rel=0.02)


def test_lognormal_is_clipped() -> None:
    distribution = LognormalLength(median=100, sigma=2, min=10, max=1000)
    assert quantiles(distribution, 0, 0.01, 0.5, 0.99, 1) == [10, 10, 100, 1000, 1000]


def test_quantile_table() -> None:
    table = QuantileLength(probabilities=[0, 0.5, 1], values=[10, 20, 100])
    assert quantiles(table, 0, 0.25, 0.5, 0.75, 1) == [10, 15, 20, 60, 100]


def test_normal_quantile() -> None:
    z = normal_quantile(np.array([0.0, 0.025, 0.5, 0.975, 1.0]))
    assert z[1:4] == pytest.approx([-1.959963984540054, 0, 1.959963984540054])
    assert np.isfinite(z).all()


@pytest.mark.parametrize("rho", [-1.0, -0.7, -0.2, 0.0, 0.0727, 0.5, 0.9, 1.0])
def test_rank_correlation_is_achieved(rho: float) -> None:
    u, v = uniforms(seed=1), uniforms(seed=2)
    w = coupled(u, v, rho)
    ranks = np.corrcoef(u.argsort().argsort(), w.argsort().argsort())
    assert ranks[0, 1] == pytest.approx(rho, abs=0.01)
    assert (w >= 0).all()
    assert (w <= 1).all()
    # Still uniform: the coupling must not bend the second distribution.
    assert np.histogram(w, 10, (0, 1))[0] / 200_000 == pytest.approx(0.1, abs=0.004)


def test_no_correlation_is_the_limit_of_a_small_one() -> None:
    u, v = uniforms(100, seed=1), uniforms(100, seed=2)
    assert coupled(u, v, 0.0) is v
    assert coupled(u, v, 1e-9) == pytest.approx(v, abs=1e-8)


def test_coupling_at_the_ends_of_the_range() -> None:
    u = np.array([0.0, 1.0, 0.0, 1.0])
    v = np.array([0.0, 0.0, 1.0, 1.0])
    w = coupled(u, v, 0.3)
    assert ((w >= 0) & (w <= 1)).all()


@pytest.mark.parametrize(
    ("kind", "arguments", "rule"),
    [
        ("fixed", {"tokens": 0}, "tokens must be between 1 and"),
        ("fixed", {"tokens": -5}, "tokens must be between 1 and"),
        ("fixed", {"tokens": 10**9 + 1}, "tokens must be between 1 and"),
        ("fixed", {"tokens": 1.5}, "tokens must be an integer"),
        ("fixed", {"tokens": math.nan}, "tokens must be an integer"),
        ("fixed", {"tokens": "512"}, "tokens must be an integer"),
        ("fixed", {"tokens": True}, "tokens must be an integer"),
        ("uniform", {"low": 0, "high": 5}, "low must be between 1 and"),
        ("uniform", {"low": 5, "high": 4}, "low must be <= high; got low=5, high=4"),
        ("uniform", {"low": 1, "high": 2.5}, "high must be an integer"),
        ("lognormal", {"median": 0, "sigma": 1}, "median must be between 1 and"),
        ("lognormal", {"median": math.nan, "sigma": 1}, "median must be finite"),
        ("lognormal", {"median": 9, "sigma": -1}, "sigma must be between 0 and 10"),
        ("lognormal", {"median": 9, "sigma": math.inf}, "sigma must be finite"),
        ("lognormal", {"median": 9, "sigma": 1, "min": 0}, "min must be between 1"),
        ("lognormal", {"median": 9, "sigma": 1, "min": 5, "max": 4}, "min must be <="),
        ("lognormal", {"median": 9, "sigma": 1, "max": 0}, "max must be between 1"),
        ("quantiles", {"probabilities": [0, 1], "values": [1]}, "one length"),
        ("quantiles", {"probabilities": [1], "values": [1]}, "one length"),
        ("quantiles", {"probabilities": [], "values": []}, "one length"),
        ("quantiles", {"probabilities": [0, 0.9], "values": [1, 2]}, "from 0 to 1"),
        ("quantiles", {"probabilities": [0.1, 1], "values": [1, 2]}, "from 0 to 1"),
        (
            "quantiles",
            {"probabilities": [0, 0.5, 0.5, 1], "values": [1, 2, 3, 4]},
            "probabilities must rise; got 0.5 after 0.5 at index 2",
        ),
        (
            "quantiles",
            {"probabilities": [0, 0.5, 1], "values": [1, 3, 2]},
            "values must not fall; got 2.0 after 3.0 at index 2",
        ),
        ("quantiles", {"probabilities": [0, 1], "values": [0, 2]}, r"values\[0\] must"),
        (
            "quantiles",
            {"probabilities": [0, 1], "values": [1, 2e9]},
            r"values\[-1\] must be between 1 and 1e\+09",
        ),
        (
            "quantiles",
            {"probabilities": [0, math.nan, 1], "values": [1, 2, 3]},
            r"probabilities\[1\] must be finite; got nan",
        ),
        ("quantiles", {"probabilities": "01", "values": [1, 2]}, "must be a list"),
        ("quantiles", {"probabilities": [0, 1], "values": 5}, "must be a list"),
    ],
)
def test_bad_parameters(kind: str, arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rf"{rule}.*; ") as info:
        LENGTHS[kind](**arguments)
    assert "\n" not in str(info.value)
    assert "got " in str(info.value)


def test_registry() -> None:
    assert sorted(LENGTHS) == ["fixed", "lognormal", "quantiles", "uniform"]
    assert all(issubclass(kind, LengthDistribution) for kind in LENGTHS.values())
