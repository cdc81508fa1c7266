"""Fleets whose engines have tiers: each its host, and a pool that all share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.simulation.run import Simulation
from sim.views.plots.accessor import figures_of

CHATS: dict[str, Any] = {
    "sessions": {
        "kind": "chat",
        "num_sessions": 36,
        "arrivals": {"kind": "burst", "burst_size": 18, "interval_s": 1.0},
        "turns": {"kind": "fixed", "number": 3},
        "first_prompt_tokens": {"kind": "fixed", "tokens": 600},
        "prompt_tokens": {"kind": "fixed", "tokens": 80},
        "output_tokens": {"kind": "fixed", "tokens": 48},
        "think_s": {"kind": "fixed", "value_s": 1.0},
        "max_context_tokens": 4096,
    },
    "max_concurrent_users": 24,
}
ENGINE: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "gpu": "h200_sxm",
    "num_gpu_blocks_override": 300,
    "max_model_len": 4096,
    "enable_prefix_caching": True,
    "async_scheduling": False,
    "kv_offloading_size": 0.25,
}
POOL: dict[str, Any] = {
    "type": "pool",
    "capacity_bytes": 4e9,
    "read_bytes_per_s": 2e10,
    "write_bytes_per_s": 2e10,
}
DISK = POOL | {"type": "fs"}


def fleet(replicas: int, **more: Any) -> dict[str, Any]:
    pools = [{"name": "main", "replicas": replicas}]
    return {"pools": pools, "router": {"kind": "round_robin"}} | more


def run(
    *tiers: dict[str, Any],
    fleet: dict[str, Any] | None = None,
    stepwise: bool = False,
    check_every: int = 10,
    **engine: Any,
) -> Any:
    extra: dict[str, Any] = {"block_size": 256}
    if tiers:
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [*tiers]}
    told = {"kv_transfer_config": {"kv_connector_extra_config": extra}}
    config = parse_config(
        {
            "workload": CHATS,
            "engine": ENGINE | told | engine,
            "fleet": fleet,
            "cost_intervals": False,
        }
    )
    return Simulation(config, stepwise=stepwise).run(check_every=check_every)


def test_a_fleet_of_one_is_the_engine_with_its_tiers() -> None:
    alone, one = run(POOL), run(POOL, fleet=fleet(1))
    for column in ("finish_s", "first_token_s", "num_loaded_tokens"):
        assert np.array_equal(alone.requests[column], one.requests[column])
    told = one.summary["secondary_tiers"]
    assert told == alone.summary["secondary_tiers"]


def test_a_fleet_of_one_has_the_copies_of_the_engine_in_their_order() -> None:
    more: dict[str, Any] = {
        "num_gpu_blocks_override": 200,
        "max_num_batched_tokens": 2048,
    }
    alone, one = (run(DISK, fleet=each, **more) for each in (None, fleet(1)))
    copies = alone.recording.transfer_table
    jobs = copies["job_id"][copies["job_id"] >= 0]
    # A load waits for another while a store of a later number begins.
    assert np.any(np.diff(jobs) < 0)
    assert np.all(np.diff(copies["begin_s"]) >= 0)
    for name in ("transfer_table", "tier_table"):
        own, table = (getattr(r.recording, name).arrow for r in (alone, one))
        assert table.select(own.column_names).equals(own), name


def test_hit_rates_of_a_fleet_are_shares_not_sums_of_shares() -> None:
    told = run(POOL, fleet=fleet(3)).summary
    for name in ("prefix_cache", "external_prefix_cache"):
        queries, hits = (told[f"{name}_{key}"] for key in ("queries", "hits"))
        assert told[f"{name}_hit_rate"] == hits / queries
        for key in ("queries", "hits"):
            parts = [each[f"{name}_{key}"] for each in told["engines"]]
            assert 0 < sum(parts) == told[f"{name}_{key}"]


@pytest.mark.parametrize("ahead", [False, True])
def test_engines_find_in_a_shared_pool_what_others_put_there(ahead: bool) -> None:
    more = {"fleet": fleet(3), "async_scheduling": ahead}
    shared, own = run(POOL, **more), run(DISK, **more)
    told = shared.summary["secondary_tiers"]["pool"]
    assert told["is_shared"]
    # Turns go round robin: a disk of its own has what an engine computed itself.
    hits = [each.summary["external_prefix_cache_hits"] for each in (shared, own)]
    assert hits[0] > 1.4 * hits[1] > 0
    assert told["num_loaded_tokens"] > 0
    # A chunk is written once, whoever computes it.
    assert told["written_bytes"] < own.summary["secondary_tiers"]["fs"]["written_bytes"]
    copies = shared.recording.transfer_table
    assert set(copies["engine"]) == {0, 1, 2}
    for kind, key in (("pool_store", "written_bytes"), ("pool_load", "read_bytes")):
        assert copies["num_bytes"][copies["kind"] == kind].sum() == told[key]
    held = shared.recording.tier_table
    assert np.all(np.diff(held["time_s"]) >= 0)
    assert held["num_pool_chunks"].max() <= told["num_chunks"]
    assert held["num_used_chunks"].min() >= 0
    assert held["num_used_chunks"].max() <= shared.summary["num_tier_chunks"]


def test_fast_and_stepwise_fleets_with_a_pool_agree() -> None:
    fast, stepwise = (
        run(
            POOL,
            fleet=fleet(3, router={"kind": "llm_d"}),
            stepwise=each,
            check_every=0,
        )
        for each in (False, True)
    )
    assert np.allclose(
        fast.requests["finish_s"], stepwise.requests["finish_s"], rtol=1e-9
    )
    assert (
        fast.summary["secondary_tiers"]["pool"]["read_bytes"]
        == stepwise.summary["secondary_tiers"]["pool"]["read_bytes"]
    )


@pytest.mark.parametrize("rate", [1e8, 2e10])
def test_a_dead_engine_lets_go_of_the_pool_and_finds_it_again(
    rate: float, *, is_quick: bool
) -> None:
    events = [
        {"time_s": 1.2, "kind": "die", "engine": 1},
        {"time_s": 2.0, "kind": "start", "engine": 1},
        {"time_s": 2.5, "kind": "die", "engine": 0, "requests": "retry"},
    ]
    tier = POOL | {"read_bytes_per_s": rate, "write_bytes_per_s": rate}
    check_every = 7 if is_quick else 1
    result = run(tier, fleet=fleet(2, events=events), check_every=check_every)
    assert result.summary["completed"] == 108
    assert result.summary["num_retried"] > 0
    requests = result.requests
    again = requests["num_loaded_tokens"][
        (requests["engine"] == 1) & (requests["arrival_s"] > 2.0)
    ]
    assert again.any()  # its host was empty, the pool was not


def test_engines_that_have_served_their_share_still_store_it() -> None:
    """They do not know that it was the last of it, whoever deals."""
    workload = {
        "num_requests": 12,
        "arrivals": {"kind": "poisson", "rate": 2.0},
        "prompt_tokens": {"kind": "uniform", "low": 300, "high": 900},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 4},
    }
    data = {"workload": {"synthetic": workload}, "engine": ENGINE, "fleet": fleet(5)}
    told = [
        Simulation(parse_config(data), stepwise=stepwise).run().summary
        for stepwise in (False, True)
    ]
    stored = [each["stored_blocks"] for each in told]
    assert stored[0] == stored[1] > 0


def test_tiers_of_all_engines_are_drawn_together() -> None:
    results = run(fleet=fleet(2))
    figures, drawn = figures_of(results)
    assert len(drawn) == 2
    rows = results.recording.tier_table
    most = max(np.asarray(rows["num_used_chunks"]))
    axes, *_ = figures["tier"](drawn).axes
    used = next(line for line in axes.lines if line.get_label() == "used")
    share = 100.0 * most / results.summary["num_tier_chunks"]
    assert max(used.get_ydata()) == pytest.approx(share)
    assert "tier_ttft" in figures


def test_what_a_dead_engine_held_is_gone(*, is_quick: bool) -> None:
    events = [
        {"time_s": 1.2, "kind": "die", "engine": 1},
        {"time_s": 3.0, "kind": "start", "engine": 1},
    ]
    check_every = 7 if is_quick else 1
    result = run(DISK, fleet=fleet(2, events=events), check_every=check_every)
    summary, held = result.summary, result.recording.tier_table
    whole = run(DISK, fleet=fleet(2)).summary
    assert summary["num_tier_chunks"] == whole["num_tier_chunks"]
    disks = [each["secondary_tiers"]["fs"]["num_chunks"] for each in (summary, whole)]
    assert disks[0] == disks[1]
    used = held["num_used_chunks"]
    assert summary["cpu_cache_usage_max"] == used.max() / summary["num_tier_chunks"]
    for name in ("num_used_chunks", "num_fs_chunks"):
        before, after = (
            held[name][held["time_s"] < time_s][-1] for time_s in (1.2, 2.0)
        )
        assert after < 0.8 * before, name


def test_the_host_of_a_drained_engine_is_gone_with_it() -> None:
    events = [
        {"time_s": 1.2, "kind": "drain", "engine": 1},
        {"time_s": 3.5, "kind": "start", "engine": 1},
    ]
    result = run(DISK, fleet=fleet(2, events=events), check_every=1)
    assert result.summary["completed"] == 108
    states = result.recording.fleet_table
    off_s = states["time_s"][np.asarray(states["num_draining"]) > 0].max()
    assert 1.2 <= off_s < 3.5
    for part, gone in zip(result.recording.parts, (False, True), strict=True):
        held = part.tier_table
        assert np.all(np.diff(held["time_s"]) >= 0)
        for name in ("num_used_chunks", "num_fs_chunks"):
            told = held[name][held["time_s"] < 3.5]
            assert told.max() > 0
            assert (told[-1] == 0) == gone, name


def test_the_link_of_each_engine_bounds_what_it_has_of_the_pool() -> None:
    wide, narrow = (
        run(POOL | more, fleet=fleet(3)).recording.transfer_table
        for more in ({}, {"client_bytes_per_s": 1e9})
    )
    for copies, most in ((wide, 2.1e10), (narrow, 1.01e9)):
        own = copies["kind"] == "pool_load"
        seconds = copies["end_s"][own] - copies["begin_s"][own]
        assert (copies["num_bytes"][own] / seconds).max() < most


@pytest.mark.parametrize(
    ("table", "engine", "message"),
    [
        (
            {
                "pools": [
                    {"name": "a", "replicas": 1},
                    {"name": "b", "replicas": 1, "engine": {"kv_offloading_size": 1.0}},
                ],
            },
            {"kv_offloading_size": None, "kv_transfer_config": None},
            "all engines have a tier behind their pool or none has",
        ),
    ],
)
def test_what_is_not_built_is_a_line(
    table: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(fleet=table, **engine)
