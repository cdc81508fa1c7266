"""Runs that had no part in anything, and what the scheduler's time makes of them."""

from __future__ import annotations

from statistics import median
from typing import Final

import pytest

from tests.truth.unseen import (
    FULL,
    NO_NORM,
    OSS,
    QWEN_4B,
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
    assert -30.0 <= SMALL.errors()[0] <= -25.0
    assert -23.0 <= min(QWEN_TINY.errors()) <= max(QWEN_TINY.errors()) <= -17.0
    assert middle(QWEN_SMALL.errors()) <= 2.0
    assert 16.0 <= QWEN_MOE_H100.errors()[0] <= 21.0


@pytest.mark.slow
@pytest.mark.parametrize("run", [SMALL, QWEN_TINY, QWEN_4B, QWEN_MOE])
def test_a_norm_of_queries_and_keys_brings_runs_nearer(run: Unseen) -> None:
    """Of 2 us a layer, which none of them had a part in; those of 1.7B are as near."""
    for near, far in zip(run.errors(), run.errors(NO_NORM), strict=True):
        assert abs(near) <= abs(far) - 0.5


@pytest.mark.slow
def test_a_slow_host_would_make_a_small_model_right() -> None:
    """Kernels of so small a layer are as tables say; its first tokens are late, too."""
    slow = SMALL.errors({"launch_s": 60e-6})[0]
    assert abs(slow) <= 4.0


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
