from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import (
    LENGTH_PAIRS,
    LENGTHS,
    LengthDistribution,
    LengthPairs,
    WorkloadError,
)
from workloads.draws.normal import coupled
from workloads.lengths import (
    CoupledLengths,
    EmpiricalLength,
    ExponentialLength,
    FixedLength,
    GammaLength,
    JointTraceLengths,
    LognormalLength,
    NormalLength,
    QuantileLength,
    TraceLength,
    UniformLength,
    ZipfLength,
    normal_quantile,
)
from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    st.builds(ExponentialLength, st.floats(1, 1e9)),
    pairs.map(lambda pair: ExponentialLength(100, *pair)),
    st.builds(GammaLength, st.floats(1, 1e9), st.floats(0.01, 10)),
    pairs.map(lambda pair: GammaLength(100, 1.5, *pair)),
    st.builds(NormalLength, st.floats(1, 1e9), st.floats(1e-9, 1e9)),
    st.builds(ZipfLength, st.floats(0, 10), st.integers(500, 900), st.integers(1, 500)),
    st.builds(EmpiricalLength, st.lists(lengths, min_size=1)),
    st.lists(st.tuples(lengths, st.floats(0.1, 9)), min_size=1).map(
        lambda seen: EmpiricalLength(*zip(*seen, strict=True))
    ),
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


class Trace:
    """A user's own reader of pairs of lengths."""

    def __init__(self, *seen: tuple[int, int]) -> None:
        self.seen = seen

    def read(self) -> Iterator[RequestSpec]:
        for i, (num_prompt_tokens, num_output_tokens) in enumerate(self.seen):
            prompt = ((2 * i, num_prompt_tokens),)
            yield RequestSpec(i, float(i), prompt, num_output_tokens, 2 * i + 1)


SEEN = Trace((30, 3), (10, 7), (30, 1), (20, 3))


def test_exponential() -> None:
    # Of mean 4 the answer ends with probability 1/4 after every token.
    distribution = ExponentialLength(mean=4.0)
    assert quantiles(distribution, 0.0, 0.24, 0.26, 0.43, 0.44, 0.57) == [
        *[1, 1, 2, 2, 3, 3]
    ]
    assert quantiles(ExponentialLength(mean=1), 0.0, 0.5, 1.0) == [1, 1, 1]
    clipped = ExponentialLength(mean=4.0, min=2, max=9)
    assert quantiles(clipped, 0.0, 0.44, 1.0) == [2, 3, 9]


def test_gamma() -> None:
    # Of variation 1 it is exponential: the median is the mean times ln 2.
    assert quantiles(GammaLength(mean=1000, cv=1.0), 0.5) == [693]
    assert quantiles(GammaLength(1000, 1.0, 10, 2000), 0, 0.5, 1) == [10, 693, 2000]


def test_normal() -> None:
    wide = NormalLength(mean=1000, std=100)
    assert quantiles(wide, 0.5, 0.8413447460685429) == [1000, 1100]
    # Half of what is left of it lies below the mean's upper quarter.
    half = NormalLength(mean=1000, std=100, min=1001)
    assert quantiles(half, 0.0, 0.5) == [1001, 1068]


def test_zipf() -> None:
    # 1/1 + 1/2 + 1/3 = 11/6: shares of 6/11, 3/11 and 2/11.
    distribution = ZipfLength(exponent=1.0, max=3)
    probabilities = (0, 0.54, 0.55, 0.81, 0.82, 1)
    assert quantiles(distribution, *probabilities) == [1, 1, 2, 2, 3, 3]
    flat = ZipfLength(exponent=0.0, min=5, max=8)
    assert quantiles(flat, 0, 0.26, 0.51, 0.76, 1) == [5, 6, 7, 8, 8]
    assert quantiles(ZipfLength(10.0, 10**7, 10**6), 0) == [10**6]


def test_empirical() -> None:
    once = EmpiricalLength([9, 5, 9, 1])
    assert quantiles(once, 0, 0.24, 0.25, 0.49, 0.5, 1) == [1, 1, 5, 5, 9, 9]
    counted = EmpiricalLength([9, 5, 7, 1], [2, 1, 0, 1])
    assert quantiles(counted, 0, 0.24, 0.25, 0.49, 0.5, 1) == [1, 1, 5, 5, 9, 9]
    never = EmpiricalLength([9, 5], [1, 0])
    assert quantiles(never, 0, 1) == [9, 9]


def test_lengths_of_a_trace() -> None:
    prompts = TraceLength(SEEN, "prompt_tokens")
    assert quantiles(prompts, 0, 0.24, 0.25, 0.5, 1) == [10, 10, 20, 30, 30]
    outputs = TraceLength(SEEN, "output_tokens")
    assert quantiles(outputs, 0, 0.25, 0.5, 0.75, 1) == [1, 3, 3, 7, 7]


def test_pairs_of_a_trace() -> None:
    u = np.array([0.0, 0.3, 0.5, 0.8, 1 - 2**-53])
    prompts, outputs = JointTraceLengths(SEEN).pairs(u, uniforms(5))
    assert prompts.tolist() == quantiles(TraceLength(SEEN, "prompt_tokens"), *u)
    assert outputs.tolist() == [7, 3, 1, 3, 3]


def test_a_trace_without_requests() -> None:
    with pytest.raises(WorkloadError, match=r"Trace yields none; check the file"):
        quantiles(TraceLength(Trace(), "prompt_tokens"), 0.5)


def test_coupled_lengths_are_the_two_distributions() -> None:
    u, v = uniforms(seed=1), uniforms(seed=2)
    one, other = UniformLength(1, 900), LognormalLength(100, 1.0)
    prompts, outputs = CoupledLengths(one, other, -0.4).pairs(u, v)
    assert prompts.tolist() == one.quantile(u).tolist()
    assert outputs.tolist() == other.quantile(coupled(u, v, -0.4)).tolist()
    _, apart = CoupledLengths(one, other).pairs(u, v)
    assert apart.tolist() == other.quantile(v).tolist()


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
        ("exponential", {"mean": 0.5}, "mean must be between 1 and"),
        ("exponential", {"mean": 5, "min": 3, "max": 2}, "min must be <= max"),
        ("gamma", {"mean": 0, "cv": 1}, "mean must be between 1 and"),
        ("gamma", {"mean": 5, "cv": 0}, "cv must be between 0.01 and 10"),
        ("gamma", {"mean": 5, "cv": 1, "min": 0}, "min must be between 1 and"),
        ("normal", {"mean": math.nan, "std": 1}, "mean must be finite"),
        ("normal", {"mean": 5, "std": 0}, "std must be between 1e-09 and"),
        ("normal", {"mean": 5, "std": 1, "max": 1.5}, "max must be an integer"),
        ("normal", {"mean": 5, "std": 1, "min": 90}, "must hold a millionth of"),
        ("zipf", {"exponent": -1, "max": 5}, "exponent must be between 0 and 10"),
        ("zipf", {"exponent": 1, "max": 10**8}, "max must be between 1 and 10000000"),
        ("zipf", {"exponent": 1, "max": 5, "min": 6}, "min must be <= max"),
        ("empirical", {"values": []}, "values must hold a length; got none"),
        ("empirical", {"values": 5}, "values must be a list"),
        ("empirical", {"values": [5, 0]}, r"values\[1\] must be between 1"),
        ("empirical", {"values": [5, 1.5]}, r"values\[1\] must be an integer"),
        ("empirical", {"values": [5], "counts": []}, "got 0 for 1 values"),
        ("empirical", {"values": [5], "counts": [-1]}, r"counts\[0\] must be between"),
        ("empirical", {"values": [5], "counts": [0]}, "counts must not all be 0; got"),
        ("trace", {"trace": 5, "column": "prompt_tokens"}, "trace must have the meth"),
        ("trace", {"trace": SEEN, "column": "tokens"}, "column must be one of prompt"),
    ],
)
def test_bad_parameters(kind: str, arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rf"{rule}.*; ") as info:
        LENGTHS[kind](**arguments)
    assert "\n" not in str(info.value)
    assert "got " in str(info.value)


def test_registry() -> None:
    assert sorted(LENGTHS) == [
        "empirical",
        "exponential",
        "fixed",
        "gamma",
        "lognormal",
        "normal",
        "quantiles",
        "trace",
        "uniform",
        "zipf",
    ]
    assert all(issubclass(kind, LengthDistribution) for kind in LENGTHS.values())
    assert sorted(LENGTH_PAIRS) == ["coupled", "joint_trace"]
    assert all(issubclass(kind, LengthPairs) for kind in LENGTH_PAIRS.values())


@pytest.mark.parametrize(
    ("kind", "arguments", "rule"),
    [
        ("joint_trace", {"trace": "t.csv"}, "trace must have the method read"),
        (
            "coupled",
            {"prompt_tokens": 5, "output_tokens": FixedLength(5)},
            "prompt_tokens must have the method quantile",
        ),
        (
            "coupled",
            {
                "prompt_tokens": FixedLength(5),
                "output_tokens": FixedLength(5),
                "rank_correlation": 1.5,
            },
            "rank_correlation must be between -1 and 1",
        ),
    ],
)
def test_bad_pairs(kind: str, arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^{rule}.*got .*; \w+"):
        LENGTH_PAIRS[kind](**arguments)


def test_a_length_that_was_never_counted_is_none() -> None:
    counted = EmpiricalLength([9, 1, 5], counts=[0, 2, 3])
    assert counted.values == (1, 5)
    assert counted.counts == (2, 3)
