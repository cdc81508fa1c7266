"""The search for a threshold, on functions whose threshold is known."""

from __future__ import annotations

from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.studies.planning.search.threshold import find_threshold


@given(
    threshold=st.floats(0.01, 1000.0),
    guess=st.floats(0.01, 1000.0),
    slope=st.floats(0.2, 30.0),
)
def test_smooth_margins_are_found(threshold: float, guess: float, slope: float) -> None:
    """Seven trials reach as far as 1e6 times the guess, and the line leads three.

    Where it leaves a little more than half, a few halvings follow: each ends with
    half of what was left, and rounding decides whether that will do.
    """
    found = find_threshold(lambda r: slope * log(r / threshold), guess, tolerance=0.01)
    assert found.rate == pytest.approx(threshold, rel=0.01)
    assert len(found.tried) <= 15


def test_a_line_that_is_straight_closes_the_bracket_at_once() -> None:
    """The end lies as far beyond the crossing as it may, whatever rounding says."""
    found = find_threshold(lambda r: log(r / 0.45), 891.0, tolerance=0.01)
    assert len(found.tried) == 10


@given(threshold=st.floats(0.1, 100.0), guess=st.floats(0.1, 100.0))
def test_a_cliff_is_found_by_halving(threshold: float, guess: float) -> None:
    found = find_threshold(
        lambda r: inf if r > threshold else -1.0, guess, step=1.04, tolerance=0.01
    )
    assert found.rate == pytest.approx(threshold, rel=0.01)
    assert len(found.tried) <= 24


def test_a_near_guess_takes_few_trials() -> None:
    found = find_threshold(lambda r: 5 * log(r / 10.3), 10.0, step=1.04, tolerance=0.02)
    assert found.rate == pytest.approx(10.3, rel=0.01)
    assert len(found.tried) <= 3


def test_each_rate_is_tried_once() -> None:
    found = find_threshold(lambda r: (r / 7.0) ** 8 - 1.0, 1.0)
    rates = [rate for rate, _ in found.tried]
    assert len(set(rates)) == len(rates)


@pytest.mark.parametrize(
    ("sign", "bound", "rate"), [(-1, "high", 9.0), (1, "low", 2.0)]
)
def test_bounds_end_the_search(sign: float, bound: str, rate: float) -> None:
    found = find_threshold(lambda _: sign, 5.0, bounds=(2.0, 9.0))
    assert (found.at_bound, found.rate) == (bound, rate)


@given(
    threshold=st.floats(9.0, 11.0),
    slope=st.floats(0.5, 30.0),
    known=st.floats(0.75, 1.33),
)
def test_a_slope_that_is_known_to_a_third_saves_trials(
    threshold: float, slope: float, known: float
) -> None:
    found = find_threshold(
        lambda r: slope * log(r / threshold), 10.0, tolerance=0.02, slope=slope * known
    )
    assert found.rate == pytest.approx(threshold, rel=0.02)
    assert len(found.tried) <= 3


@given(threshold=st.floats(5.0, 20.0), slope=st.floats(0.5, 40.0))
def test_a_slope_that_is_wrong_leads_astray_no_further(
    threshold: float, slope: float
) -> None:
    """Below a cliff margins are flat, and a slope says nothing."""
    found = find_threshold(
        lambda r: inf if r > threshold else -1.0, 10.0, tolerance=0.02, slope=slope
    )
    assert found.rate == pytest.approx(threshold, rel=0.02)
