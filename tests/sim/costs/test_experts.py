"""How many experts a batch touches: closed forms against every choice there is."""

import itertools
from math import comb, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs.experts.routed import touched_experts, touched_experts_spread


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
