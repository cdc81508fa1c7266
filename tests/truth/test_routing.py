"""Strategies of llm-d's benchmarks: their order, and what exact prefixes gain."""

from __future__ import annotations

from statistics import mean

import pytest

from tests.truth.routing import (
    APPROXIMATE,
    EIGHT,
    FOUR,
    LOAD,
    PRECISE,
    RANDOM,
    Fleet,
)

pytestmark = pytest.mark.slow

MOST_APART = 0.25
"""Of the ratio of precise to approximate routing, relative."""


def means(of_rates: dict[str, dict[float, float]]) -> dict[str, float]:
    """Return output tokens/s, the mean over all stages, as the reports give it."""
    return {router: mean(found.values()) for router, found in of_rates.items()}


def of_routers(fleet: Fleet) -> tuple[dict[str, float], dict[str, float]]:
    """Return what was measured and what is simulated, over the ladder of rates."""
    measured = {
        router: {rate: found[router] for rate, found in fleet.measured().items()}
        for router in fleet.routers
    }
    simulated = {router: fleet.simulated(router) for router in fleet.routers}
    return means(measured), means(simulated)


@pytest.fixture(scope="module")
def eight() -> tuple[dict[str, float], dict[str, float]]:
    return of_routers(EIGHT)


def gain_over_blind(found: dict[str, float]) -> float:
    """Return what approximate prefixes gain over the better of the two without."""
    return found[APPROXIMATE] / max(found[LOAD], found[RANDOM])


@pytest.mark.timeout(900)
def test_strategies_of_eight_engines_rank_as_measured(
    eight: tuple[dict[str, float], dict[str, float]],
) -> None:
    measured, simulated = eight
    for found in eight:
        assert found[PRECISE] > 1.2 * found[APPROXIMATE]
        assert gain_over_blind(found) > 1.2
    assert gain_over_blind(simulated) == pytest.approx(
        gain_over_blind(measured), rel=MOST_APART
    )
    ratio = measured[PRECISE] / measured[APPROXIMATE]
    assert simulated[PRECISE] / simulated[APPROXIMATE] == pytest.approx(
        ratio, rel=MOST_APART
    )


@pytest.mark.timeout(900)
@pytest.mark.xfail(
    strict=True,
    reason="1.26 for a measured 1.57 since answers have the 1,000 tokens of their"
    " profile: blind routing is a third to two fifths too quick",
)
def test_approximate_prefixes_of_eight_engines_gain_two_fifths(
    eight: tuple[dict[str, float], dict[str, float]],
) -> None:
    assert min(map(gain_over_blind, eight)) > 1.4


def test_prefixes_of_four_engines_gain_as_much_as_measured() -> None:
    measured, simulated = of_routers(FOUR)
    for found in (measured, simulated):
        by_prefix = min(found[PRECISE], found[APPROXIMATE])
        assert by_prefix > 1.5 * max(found[LOAD], found[RANDOM])
    ratio = measured[PRECISE] / measured[APPROXIMATE]
    assert simulated[PRECISE] / simulated[APPROXIMATE] == pytest.approx(
        ratio, rel=MOST_APART
    )
