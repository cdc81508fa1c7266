"""A real engine on a real GPU, whose cache was full: decisions, blocks and steps.

664 requests in a minute, the second half of which asks for three times what the first
does, on 3,500 blocks: 55 preemptions, usage up to 100 %.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.costs.measured.profile import read_profile
from sim.hardware.capacity import estimate_capacity
from sim.scheduler.batch import BatchShape
from tests.truth.h200 import (
    COSTS,
    PROFILE,
    measured_ms,
    our_steps,
    rows,
    run,
    said,
    step_s,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_the_pool_is_as_large_as_predicted() -> None:
    """Without the override the engine would have had 56,057 blocks."""
    assert said()["available_bytes"] // (2 << 20) - 1 <= 56057
    found = estimate_capacity(
        "meta-llama/Llama-3.1-8B",
        "h200_sxm",
        engine_version="0.26",
        gpu_memory_utilization=0.9,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
    )
    assert found.num_gpu_blocks == pytest.approx(56057, rel=0.003)
    assert found.num_gpu_blocks_low <= 56057 <= found.num_gpu_blocks_high


def test_every_step_is_the_engines() -> None:
    """Batches, contexts, chunks, queues and blocks of each call, and all victims."""
    victims: list[str] = []
    for (ours, preempted), theirs in zip(our_steps(), rows("steps"), strict=True):
        assert ours == {name: theirs[name] for name in ours}, theirs["scheduled_s"]
        victims += preempted
    assert len(rows("steps")) == 7988
    recorded = [str(request) for _, request, _ in said()["preemptions"]]
    assert victims == recorded
    assert len(victims) == 55


@pytest.mark.parametrize("path", sorted(PROFILE.parent.glob("*.json")), ids=str)
def test_the_profiles_are_whole(path: Path) -> None:
    """Each is of kernels that passed their check, on a device that is named."""
    provenance = read_profile(path).provenance
    assert provenance["device"]["name"] == "NVIDIA H200"
    checks = provenance["correctness"].values()
    assert checks
    assert all(each["error"] <= each["tolerance"] for each in checks)


@pytest.mark.parametrize("cost", list(COSTS))
def test_steps_of_decodes_take_what_they_took(cost: str) -> None:
    """One to 128 sequences alone; a request takes 5 us that nothing hides."""
    for num_decodes, context, measured_s in said()["plateaus"]:
        # the forty steps are those of contexts 1 to 40 tokens longer
        shape = BatchShape(num_decodes, num_decodes * (context + 20), 0, 0, 0, 0)
        assert step_s(COSTS[cost], shape) == pytest.approx(measured_s, rel=0.03)


@pytest.mark.parametrize("name", ["datasheet, {}", "its kernels measured"])
def test_lone_prompts_within_graphs_wait_for_the_host(name: str) -> None:
    """Launches between pieces had no part in the seconds of one, read off steps beyond.

    What is still missing is the host's own part, 1.5 ms on an ordinary one.
    """
    given = name.format("its host read off this run")
    if name == given:
        given = "the same, its host read off this run"
    without = COSTS[name.format("nothing given")]
    for num_tokens, measured_s in said()["prompts"][:2]:
        pairs = num_tokens * (num_tokens + 1) // 2
        shape = BatchShape(0, 0, 1, num_tokens, num_tokens, pairs)
        own_s = measured_s - 1.5e-3
        assert step_s(without, shape) < 0.65 * own_s
        assert 0.75 * own_s < step_s(COSTS[given], shape) < own_s


@pytest.mark.parametrize(
    ("cost", "most_pct"),
    [
        ("datasheet, nothing given", {"tpot": 11.0, "e2el": 23.0}),
        ("datasheet, its host read off this run", {"tpot": 6.0, "e2el": 17.0}),
        ("the same, products at the power limit", {"tpot": 2.5, "e2el": 7.5}),
        ("its kernels measured", {"tpot": 10.5, "e2el": 22.0}),
        ("the same, its host read off this run", {"tpot": 6.5, "e2el": 16.5}),
    ],
)
def test_a_minute_with_a_full_cache(
    cost: str, most_pct: dict[str, float], tmp_path: Path
) -> None:
    """Steps with prompts are a twentieth too short, which queues multiply."""
    truth, summary = measured_ms(), run(COSTS[cost], tmp_path).summary
    for name, most in most_pct.items():
        error = 100.0 * (summary[f"mean_{name}_ms"] / truth[name] - 1.0)
        assert -most <= error < 0.0, (name, error)
    assert 25 <= summary["num_preemptions"] <= 55
