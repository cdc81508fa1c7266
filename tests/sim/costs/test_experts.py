"""How many experts a batch touches: closed forms against every choice there is."""

import itertools
from math import comb, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs.experts.routed import (
    touched_alike,
    touched_experts,
    touched_experts_spread,
)
from sim.costs.roofline import RooflineCost
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model


def by_enumeration(num_experts, per_token, num_tokens):
    """Return mean and standard deviation over all choices, each as likely."""
    choices = list(itertools.combinations(range(num_experts), per_token))
    counts = [
        len(set().union(*tokens))
        for tokens in itertools.product(choices, repeat=num_tokens)
    ]
    mean = sum(counts) / len(counts)
    return mean, sqrt(sum((count - mean) ** 2 for count in counts) / len(counts))


@pytest.mark.parametrize(
    ("num_experts", "per_token", "num_tokens"),
    [(1, 1, 3), (2, 1, 1), (4, 1, 3), (4, 2, 3), (5, 2, 2), (5, 5, 2), (6, 3, 2)],
)
def test_closed_forms_are_exact(num_experts, per_token, num_tokens):
    mean, spread = by_enumeration(num_experts, per_token, num_tokens)
    assert comb(num_experts, per_token) >= 1
    found = touched_experts(num_experts, per_token, num_tokens)
    assert found == pytest.approx(mean)
    assert touched_experts_spread(num_experts, per_token, num_tokens) == pytest.approx(
        spread, abs=1e-7
    )


@given(
    st.integers(1, 512).flatmap(
        lambda e: st.tuples(st.just(e), st.integers(1, e), st.integers(0, 100_000))
    )
)
def test_more_tokens_touch_more_experts(case):
    num_experts, per_token, num_tokens = case
    few = touched_experts(num_experts, per_token, num_tokens)
    more = touched_experts(num_experts, per_token, num_tokens + 1)
    assert 0.0 <= few <= more <= num_experts
    spread = touched_experts_spread(num_experts, per_token, num_tokens)
    assert 0.0 <= spread <= num_experts / 2


def test_one_token_touches_what_it_takes_for_certain():
    assert touched_experts(128, 8, 1) == pytest.approx(8.0)
    assert touched_experts_spread(128, 8, 1) == pytest.approx(0.0, abs=1e-6)
    assert touched_experts(128, 8, 16) == pytest.approx(82.42, abs=0.01)
    assert touched_experts_spread(128, 8, 16) == pytest.approx(3.479, abs=0.001)


CORRELATIONS = st.floats(0.0, 0.99)
CASES = st.integers(2, 256).flatmap(
    lambda e: st.tuples(st.just(e), st.integers(1, e), st.integers(1, 10_000))
)


@given(CASES, CORRELATIONS)
def test_tokens_that_choose_alike_touch_fewer(case, correlation):
    num_experts, per_token, num_tokens = case
    free = touched_experts(num_experts, per_token, num_tokens)
    found = touched_alike(num_experts, per_token, num_tokens, correlation)
    more = touched_alike(num_experts, per_token, num_tokens + 1, correlation)
    assert per_token - 1e-6 <= found <= free + 1e-6 * num_experts
    assert found <= more + 1e-6 * num_experts
    assert touched_alike(num_experts, per_token, 1, correlation) == pytest.approx(
        per_token
    )


@pytest.mark.parametrize("correlation", [0.0, 1e-9, 2e-6])
def test_without_correlation_the_choice_is_free(correlation):
    found = touched_alike(128, 8, 16, correlation)
    assert found == pytest.approx(touched_experts(128, 8, 16), rel=1e-4)


@given(CASES, st.floats(0.001, 0.9))
def test_two_tokens_share_what_correlation_says(case, correlation):
    num_experts, per_token, _ = case
    mean = per_token / num_experts
    shared = per_token * (mean + (1.0 - mean) * correlation)
    found = touched_alike(num_experts, per_token, 2, correlation)
    assert found == pytest.approx(2 * per_token - shared, rel=1e-6)


@pytest.mark.parametrize("correlation", [0.03, 0.12, 0.29])
def test_touched_experts_of_a_beta_law_are_its_integral(correlation):
    """Each chosen by a share of the tokens: the mean over the law of all misses."""
    num_experts, per_token, num_tokens, parts = 128, 8, 16, 200_000
    whole = 1.0 / correlation - 1.0
    a, b = whole * per_token / num_experts, whole * (1.0 - per_token / num_experts)
    # by x = y^(1/a), which takes the pole at 0 away
    middles = [((i + 0.5) / parts) ** (1.0 / a) for i in range(parts)]
    weights = [(1.0 - x) ** (b - 1.0) for x in middles]
    pairs = zip(weights, middles, strict=True)
    missed = sum(weight * (1.0 - x) ** num_tokens for weight, x in pairs)
    expected = num_experts * (1.0 - missed / sum(weights))
    found = touched_alike(num_experts, per_token, num_tokens, correlation)
    assert found == pytest.approx(expected, rel=1e-3)


def step_s(**keys):
    """Return seconds of experts for ten tokens of Qwen3-30B-A3B on an H100."""
    model, gpu = load_model("Qwen/Qwen3-30B-A3B"), load_gpu("h100_sxm")
    return RooflineCost(model=model, gpu=gpu, **keys).experts.seconds(10)


def test_a_correlation_shortens_steps():
    assert step_s() == step_s(moe_routing_correlation=0)
    assert 0.5 < step_s(moe_routing_correlation=0.12) / step_s() < 0.8


@pytest.mark.parametrize("value", [1.0, -0.1, True, "a", float("nan")])
def test_a_correlation_that_is_none_is_told(value):
    with pytest.raises(ConfigError, match="moe_routing_correlation") as error:
        step_s(moe_routing_correlation=value)
    assert "\n" not in str(error.value)
