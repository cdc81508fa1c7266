"""Laws of tiers behind the pool: hits follow the larger cache, loads preempt more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.api import hit_curve, read_requests
from sim.config.tables import parse_config
from sim.simulation.run import Simulation

if TYPE_CHECKING:
    from pathlib import Path

SESSIONS: dict[str, Any] = {
    "kind": "chat",
    "first_prompt_tokens": {"kind": "lognormal", "median": 500, "sigma": 0.8},
    "prompt_tokens": {"kind": "fixed", "tokens": 80},
    "output_tokens": {"kind": "lognormal", "median": 64, "sigma": 0.5, "max": 300},
    "think_s": {"kind": "lognormal", "median_s": 15.0, "sigma": 0.8},
    "max_context_tokens": 8192,
}
CALM = {
    "sessions": SESSIONS
    | {
        "num_sessions": 30,
        "arrivals": {"kind": "poisson", "rate": 0.5},
        "turns": {"kind": "geometric", "mean": 5.0, "max": 12},
    }
}
CROWDED = {
    "sessions": SESSIONS
    | {
        "num_sessions": 120,
        "arrivals": {"kind": "burst", "burst_size": 120, "interval_s": 1.0},
        "turns": {"kind": "fixed", "number": 6},
        "first_prompt_tokens": {"kind": "lognormal", "median": 1500, "sigma": 0.8},
        "prompt_tokens": {"kind": "fixed", "tokens": 100},
        "output_tokens": {"kind": "lognormal", "median": 200, "sigma": 0.6},
        "think_s": {"kind": "lognormal", "median_s": 3.0, "sigma": 0.5},
    },
    "max_concurrent_users": 60,
}
ENGINE = {
    "model": "meta-llama/Llama-3.1-8B",
    "gpu": "h200_sxm",
    "max_model_len": 8192,
    "enable_prefix_caching": True,
    "async_scheduling": False,
}
NO_TIME = {"load_bytes_per_s": 1e18, "store_bytes_per_s": 1e18}
EVERYTHING = {"kv_connector_extra_config": {"offload_prompt_only": False}}
NUM_BLOCKS = 350


def told(
    workload: dict[str, Any],
    seed: int = 0,
    cost: dict[str, Any] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """Return the summary of a run."""
    config = {"workload": workload, "engine": ENGINE | engine, "seed": seed}
    config |= {"cost": {"kind": "roofline"} | (cost or {}), "cost_intervals": False}
    return Simulation(parse_config(config)).run().summary


def hit_rate(summary: dict[str, Any]) -> float:
    hits = summary["prefix_cache_hits"] + summary.get("external_prefix_cache_hits", 0)
    rate: float = hits / summary["prefix_cache_queries"]
    return rate


@pytest.mark.parametrize("size", [None, 0.25, 1.0, 1.5, 2.0])
def test_a_link_without_time_finds_what_the_larger_of_both_holds(
    size: float | None, tmp_path: Path
) -> None:
    # What is computed is stored at once, so that a tier holds what the pool holds: the
    # two together are a cache of the larger size, not of the sum.
    tier: dict[str, Any] = {}
    if size is not None:
        tier = {
            "kv_offloading_size": size,
            "kv_offloading_link": NO_TIME,
            "kv_transfer_config": EVERYTHING,
        }
    summary = told(CALM, num_gpu_blocks_override=NUM_BLOCKS, **tier)
    path = tmp_path / "calm.yaml"
    path.write_text(f"workload: {CALM}\nengine: {ENGINE}".replace("True", "true"))
    curve = hit_curve(read_requests(path)).curve
    num_blocks = max(NUM_BLOCKS, summary.get("num_tier_chunks", 0))
    # Conversations end and are answered side by side: orders of use differ a little.
    assert hit_rate(summary) == pytest.approx(curve.hit_rate_at(num_blocks), abs=0.03)


def behind(*tiers: dict[str, Any]) -> dict[str, Any]:
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [*tiers]}
    extra |= {"offload_prompt_only": False}
    return {"kv_transfer_config": {"kv_connector_extra_config": extra}}


FAST = {"read_bytes_per_s": 1e15, "write_bytes_per_s": 1e15, "latency_s": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), [("fs", {"evicts": True}), ("pool", {})])
def test_a_tier_without_time_behind_the_host_finds_what_a_large_host_does(
    kind: str, more: dict[str, Any]
) -> None:
    def run(size: float, **more: Any) -> dict[str, Any]:
        return told(
            CALM,
            num_gpu_blocks_override=NUM_BLOCKS,
            kv_offloading_size=size,
            kv_offloading_link=NO_TIME,
            **more,
        )

    large, small = (run(size, kv_transfer_config=EVERYTHING) for size in (2.0, 0.5))
    tier = {"type": kind, "capacity_bytes": 2.0 * 2**30, **FAST, **more}
    summary = run(0.5, **behind(tier))
    assert hit_rate(small) < hit_rate(large) - 0.1
    assert hit_rate(summary) == pytest.approx(hit_rate(large), abs=0.03)
    own = summary["secondary_tiers"][kind]
    assert 0 < own["num_loaded_tokens"] <= summary["external_prefix_cache_hits"]
    # What is slower to come back is not lost, it is only later.
    slow = run(0.5, **behind(tier | {"read_bytes_per_s": 1e9}))
    assert hit_rate(slow) == pytest.approx(hit_rate(summary), abs=0.03)
    assert slow["mean_ttft_ms"] > 1.2 * summary["mean_ttft_ms"]
    assert slow["completed"] == summary["completed"]


@pytest.mark.slow
def test_policies_that_know_more_find_more() -> None:
    think = {"think_s": {"kind": "lognormal", "median_s": 30.0, "sigma": 1.2}}
    chats = {"num_sessions": 100, "arrivals": {"kind": "poisson", "rate": 1.0}}
    found = {}
    for policy in ("lru", "session_end", "next_use"):
        extra = EVERYTHING["kv_connector_extra_config"] | {"eviction_policy": policy}
        found[policy] = hit_rate(
            told(
                {"sessions": CALM["sessions"] | think | chats},
                num_gpu_blocks_override=NUM_BLOCKS,
                kv_offloading_size=2.0,
                kv_transfer_config={"kv_connector_extra_config": extra},
            )
        )
    assert found["lru"] + 0.01 < found["session_end"] < found["next_use"] - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_release_that_frees_late_preempts_all_behind_the_one_in_need(
    seed: int,
) -> None:
    # Ahead, what a victim held comes free a step later beside a tier. From 0.24 to 0.29
    # the next victim then goes at once, and the next; 0.30 waits for the first.
    def run(release: str, **engine: Any) -> dict[str, Any]:
        engine |= {"engine_version": release, "async_scheduling": True}
        return told(CROWDED, seed, num_gpu_blocks_override=2000, **engine)

    (old, new), (old_tier, new_tier) = (
        [run(release, **tier) for release in ("0.29", "0.30")]
        for tier in ({}, {"kv_offloading_size": 64.0})
    )
    assert old["num_preemptions"] == new["num_preemptions"] > 40
    assert old_tier["num_preemptions"] > 5 * old["num_preemptions"]
    assert new_tier["num_preemptions"] < 1.5 * new["num_preemptions"]
    assert any("vLLM issue 49674" in line for line in old_tier["warnings"])
    assert not any("vLLM issue 49674" in line for line in new_tier["warnings"])
    for tier, without in ((old_tier, old), (new_tier, new)):
        assert tier["mean_ttft_ms"] < 0.8 * without["mean_ttft_ms"]


@pytest.mark.slow
def test_in_turn_loads_crowd_the_pool_unless_the_link_is_slow() -> None:
    def preemptions(**engine: Any) -> int:
        return sum(
            told(CROWDED, seed, cost, num_gpu_blocks_override=2000, **engine)[
                "num_preemptions"
            ]
            for seed in range(9)
        )

    # 624 and 571; of three seeds it was 1.29 times while long loads outran the link.
    cost = {"schedule_request_s": 0.0}
    slowly = {"load_bytes_per_s": 2e9, "store_bytes_per_s": 2e9}
    tier = {"kv_offloading_size": 64.0}
    quick, without = preemptions(**tier), preemptions()
    assert quick > 1.05 * without  # what is loaded takes no budget
    assert preemptions(**tier, kv_offloading_link=slowly) < without
    # It is the room that a prompt is to find as a whole that holds them back.
    assert preemptions(**tier, scheduler_reserve_full_isl=False) > 1.2 * quick
