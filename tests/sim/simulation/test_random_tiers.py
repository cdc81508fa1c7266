"""Random engines with tiers, proved after every step: nothing is lost, runs end."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.simulation.run import Simulation

FEW = range(4)
MANY = [range(first, first + 25) for first in range(4, 104, 25)]
RELEASES = "0.33", "0.29"  # which preempts what a step in flight writes


def drawn(draw: Random) -> dict[str, Any]:
    """Return a configuration in which all kinds of things go wrong."""
    turns = draw.randint(2, 5)
    workload: dict[str, Any] = {
        "sessions": {
            "kind": "chat",
            "num_sessions": draw.randint(6, 18),
            "arrivals": {"kind": "poisson", "rate": draw.choice([2.0, 20.0, 200.0])},
            "turns": {"kind": "fixed", "number": turns},
            "first_prompt_tokens": {
                "kind": "lognormal",
                "median": draw.choice([100, 500, 1500]),
                "sigma": 0.7,
            },
            "prompt_tokens": {"kind": "fixed", "tokens": draw.choice([5, 60, 200])},
            "output_tokens": {"kind": "lognormal", "median": 60, "sigma": 0.8},
            "think_s": {"kind": "lognormal", "median_s": 0.5, "sigma": 1.0},
            "max_context_tokens": 3000,
        },
        "client": {
            "timeout_s": draw.choice([0.5, 3.0, 30.0]),
            "max_retries": draw.randint(0, 1),
        },
    }
    rate = draw.choice([1e8, 1e9, 1e10, 1e12])
    extra: dict[str, Any] = {
        "offload_prompt_only": draw.random() < 0.5,
        "eviction_policy": draw.choice(["lru", "arc", "keep_ttl"]),
        "eviction_ttl_s": draw.choice([0.5, 20.0]),
    }
    if draw.random() < 0.3:
        extra["write_policy"] = "write_back"
    else:
        extra["blocks_per_chunk"] = draw.choice([1, 2, 5])
        extra["store_threshold"] = draw.choice([0, 0, 2])
    if draw.random() < 0.5:
        behind = {
            "capacity_bytes": draw.choice([5e7, 1e9]),
            "read_bytes_per_s": draw.choice([1e8, 1e10]),
            "write_bytes_per_s": draw.choice([1e8, 1e10]),
        }
        kinds = draw.choice([["fs"], ["pool"], ["fs", "pool"]])
        extra["spec_name"] = "TieringOffloadingSpec"
        extra["secondary_tiers"] = [
            {"type": kind, "ttl_s": draw.choice([0.5, 60.0])} | behind for kind in kinds
        ]
    return {
        "workload": workload,
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h200_sxm",
            "max_model_len": 3000,
            "num_gpu_blocks_override": draw.randint(200, 500),
            "max_num_batched_tokens": draw.choice([128, 512, 2048]),
            "enable_prefix_caching": True,
            "async_scheduling": draw.random() < 0.5,
            "scheduler_reserve_full_isl": draw.random() < 0.5,
            "scheduling_policy": draw.choice(["fcfs", "priority"]),
            "kv_offloading_size": draw.choice([0.02, 0.1, 1.0]),
            "kv_offloading_link": {
                "load_bytes_per_s": rate,
                "store_bytes_per_s": rate,
                "load_failure_rate": draw.choice([0.0, 0.2]),
            },
            "kv_transfer_config": {
                "kv_load_failure_policy": draw.choice(["fail", "recompute"]),
                "kv_connector_extra_config": extra,
            },
        },
        "cost_intervals": False,
        "seed": draw.randint(0, 1000),
    }


def prove(seed: int, check_every: int = 1) -> dict[str, Any]:
    config = drawn(Random(seed))
    config["engine"]["engine_version"] = Random(f"release {seed}").choice(RELEASES)
    simulation = Simulation(parse_config(config))
    result = simulation.run(check_every=check_every)
    rows = result.requests
    assert not rows["status"].isin(["waiting", "running", "preempted"]).any()
    scheduler: Any = simulation.scheduler
    # What is on its way still is of requests that have left, and nobody waits for it.
    connector, tables = scheduler.connector, scheduler.tables
    assert all(
        connector._offloads[job.request].has_ended for job in [*connector.jobs.values()]
    )
    if not scheduler.delayed:
        assert tables.num_free_blocks == tables.num_usable_blocks
    told: dict[str, Any] = result.summary
    return told


@pytest.mark.parametrize("seed", FEW)
def test_nothing_is_lost_whatever_happens(seed: int, *, is_quick: bool) -> None:
    prove(seed, check_every=7 if is_quick else 1)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", MANY, ids=str)
def test_nothing_is_lost_in_many_runs(seeds: range) -> None:
    told = [prove(seed) for seed in seeds]
    # They were what they are meant to be.
    for key in ("num_preemptions", "loaded_bytes", "num_tier_evictions"):
        assert sum(each[key] > 0 for each in told) > len(told) / 8, key
    assert sum(each.get("aborted", 0) > 0 for each in told) > len(told) / 8
