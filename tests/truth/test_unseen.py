"""Runs that had no part in anything, and what the scheduler's time makes of them."""

from __future__ import annotations

from statistics import median
from typing import Final

import pytest

from tests.truth.unseen import (
    FULL,
    LLAMA_PIECES,
    NO_LAUNCHES,
    NO_NORM,
    NO_PIECES,
    OSS,
    OSS_H200,
    PIECES,
    QWEN_4B,
    QWEN_MOE,
    QWEN_MOE_H100,
    QWEN_PIECES,
    QWEN_SMALL,
    QWEN_TINY,
    ROOMY,
    SMALL,
    WHOLE,
    Unseen,
)


def middle(errors: list[float]) -> float:
    return median(map(abs, errors))


@pytest.mark.parametrize(("run", "at_most"), [(ROOMY, 7.0), (FULL, 8.0)])
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
    assert -21.0 <= SMALL.errors()[0] <= -17.0
    assert -10.0 <= min(QWEN_TINY.errors()) <= max(QWEN_TINY.errors()) <= -4.0
    assert 6.0 <= min(QWEN_SMALL.errors()) <= max(QWEN_SMALL.errors()) <= 15.0
    assert 25.0 <= QWEN_MOE_H100.errors()[0] <= 28.0
    assert 13.0 <= LLAMA_PIECES.errors()[0] <= 15.5
    assert -8.0 <= WHOLE.errors()[0] <= -6.0
    assert -33.0 <= PIECES.errors()[0] <= -30.0
    errors = OSS_H200.errors()
    assert -18.0 <= errors[0] < errors[1] < errors[2] < errors[3] <= 24.0


@pytest.mark.slow
@pytest.mark.parametrize(("run", "index"), [(QWEN_MOE_H100, 0), (OSS_H200, 3)])
def test_published_choices_of_experts_bring_long_steps_nearer(
    run: Unseen, index: int
) -> None:
    """By what is published of the model; steps that are short otherwise get shorter."""
    published = run.errors({"moe_routing_correlation": run.correlation})
    assert abs(published[index]) <= 9.0 <= run.errors()[index] - 10.0
    correlated = WHOLE.errors({"moe_routing_correlation": WHOLE.correlation})
    assert correlated[0] <= -14.0


@pytest.mark.slow
def test_the_same_traffic_takes_what_it_took_with_graphs_in_pieces_and_whole() -> None:
    """Nothing was fitted to whole graphs; pieces are one of four sources."""
    whole_ms = (5.02, 5.09, 5.39, 6.14)
    assert max(map(abs, QWEN_PIECES.errors())) <= 4.0
    for point, error, whole in zip(
        QWEN_PIECES.points, QWEN_PIECES.errors(NO_PIECES), whole_ms, strict=True
    ):
        assert abs(point.measured * (1.0 + error / 100.0) / whole - 1.0) <= 0.035


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "by"),
    [
        *((ROOMY, 0.0), (FULL, 0.4), (QWEN_TINY, 2.0), (QWEN_MOE, 8.0)),
        *((PIECES, 4.0), (QWEN_SMALL, -13.0), (QWEN_MOE_H100, -8.0)),
    ],
)
def test_what_graphs_in_pieces_take_elsewhere_brings_older_releases_nearer(
    run: Unseen, by: float
) -> None:
    """By what pairs of other runs say; two were right or too long without it."""
    for near, far in zip(run.errors(), run.errors(NO_PIECES), strict=True):
        assert abs(near) <= abs(far) - by


@pytest.mark.slow
def test_the_launches_of_other_hosts_bring_a_small_model_nearer() -> None:
    """26 us, in which it has no part; models of 1.5B and more wait for nothing.

    Decodes of 0.6B in pieces would wait as long as their pieces take the GPU.
    """
    assert abs(SMALL.errors()[0]) <= abs(SMALL.errors(NO_LAUNCHES)[0]) - 6.0
    alone = QWEN_TINY.errors(NO_PIECES)
    neither = QWEN_TINY.errors(NO_PIECES | NO_LAUNCHES)
    for near, far in zip(alone, neither, strict=True):
        assert abs(near) <= abs(far) - 6.0


@pytest.mark.slow
@pytest.mark.parametrize("run", [QWEN_SMALL, QWEN_4B, QWEN_PIECES, LLAMA_PIECES])
def test_launches_leave_larger_models_alone(run: Unseen) -> None:
    for ours, without in zip(run.errors(), run.errors(NO_LAUNCHES), strict=True):
        assert ours == pytest.approx(without, abs=0.3)


@pytest.mark.slow
def test_launches_of_experts_bring_many_gpus_nearer() -> None:
    """On eight GPUs prompts beyond the graphs wait; on two and four nothing does."""
    near, far = OSS.errors(), OSS.errors(NO_LAUNCHES)
    assert near[5:] == pytest.approx(far[5:], abs=0.3)
    assert sum(map(abs, near[:5])) <= sum(map(abs, far[:5])) - 2.0


@pytest.mark.slow
@pytest.mark.parametrize("run", [SMALL, QWEN_4B, QWEN_MOE])
def test_a_norm_of_queries_and_keys_brings_runs_nearer(run: Unseen) -> None:
    """Of 2 us a layer, which none of them had a part in; those of 1.7B are too
    long without it.

    Decodes of 0.6B wait for their host, which the norm does not bind.
    """
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
        assert far + 9.0 <= near <= -4.0
