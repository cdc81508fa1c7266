"""Runs that had no part in anything, and what the scheduler's time makes of them."""

from __future__ import annotations

from statistics import median
from typing import Final

import pytest

from tests.truth.unseen import (
    FULL,
    OSS,
    QWEN_MOE,
    QWEN_MOE_H100,
    QWEN_SMALL,
    QWEN_TINY,
    ROOMY,
    SMALL,
    Unseen,
)


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
    assert -25.0 <= min(QWEN_TINY.errors()) <= max(QWEN_TINY.errors()) <= -18.0
    assert middle(QWEN_SMALL.errors()) <= 3.0
    assert 16.0 <= QWEN_MOE_H100.errors()[0] <= 21.0


NO_START: Final = {"moe_layer_latency_s": 0.0}


@pytest.mark.slow
def test_experts_kernels_have_a_start() -> None:
    """Tables of kernels say so, and two runs; a third was too slow without it."""
    ours, without = OSS.errors(), OSS.errors(NO_START)
    assert max(map(abs, ours)) <= 8.0
    assert middle(ours) <= 4.5
    assert min(without) <= -30.0
    for near, far in zip(QWEN_MOE.errors(), QWEN_MOE.errors(NO_START), strict=True):
        assert far + 9.0 <= near <= -14.0
