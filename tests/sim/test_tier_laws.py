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


def told(workload: dict[str, Any], seed: int = 0, **engine: Any) -> dict[str, Any]:
    """Return the summary of a run."""
    config = {"workload": workload, "engine": ENGINE | engine, "seed": seed}
    return Simulation(parse_config(config | {"cost_intervals": False})).run().summary


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
def test_what_is_loaded_crowds_the_pool_and_preempts_more() -> None:
    def runs(**engine: Any) -> tuple[int, float]:
        """Return preemptions and the mean TTFT in seconds, of three seeds."""
        found = [
            told(CROWDED, seed, num_gpu_blocks_override=2000, **engine)
            for seed in range(3)
        ]
        ttft_s = sum(each["mean_ttft_ms"] for each in found) / 3000
        return sum(each["num_preemptions"] for each in found), ttft_s

    (without, without_s), (tier, tier_s) = runs(), runs(kv_offloading_size=64.0)
    assert tier_s < 0.8 * without_s
    assert tier > 1.1 * without  # 192 and 164
    # A link that loads slowly lets them in one after the other instead.
    slowly = {"load_bytes_per_s": 2e9, "store_bytes_per_s": 2e9}
    assert runs(kv_offloading_size=64.0, kv_offloading_link=slowly)[0] < without
    # It is the room that a prompt is to find as a whole that holds them back.
    unreserved = runs(kv_offloading_size=64.0, scheduler_reserve_full_isl=False)
    assert unreserved[0] > 1.2 * tier
