"""Runs that had no part in anything, and what the scheduler's time makes of them."""

from __future__ import annotations

from statistics import median

import pytest

from tests.truth.unseen import FULL, OSS, ROOMY, SMALL, Unseen


def middle(errors: list[float]) -> float:
    return median(map(abs, errors))


@pytest.mark.parametrize(("run", "at_most"), [(ROOMY, 10.0), (FULL, 11.5)])
def test_one_step_at_a_time_waits_for_its_scheduler(
    run: Unseen, at_most: float
) -> None:
    """15 us a request, timed elsewhere, bring every point nearer."""
    ours, without = run.errors(), run.errors({"schedule_request_s": 0.0})
    assert middle(ours) <= at_most
    assert middle(without) > middle(ours) + 2.0
    for near, far in zip(ours, without, strict=True):
        assert abs(near) <= abs(far)


@pytest.mark.slow
def test_where_we_are_wrong_is_as_the_page_says() -> None:
    assert -33.0 <= SMALL.errors()[0] <= -27.0
    errors = OSS.errors()
    assert -36.0 <= min(errors) <= -31.0
    assert 13.0 <= max(errors) <= 18.0
