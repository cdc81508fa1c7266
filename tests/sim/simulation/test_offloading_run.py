"""A CPU tier on the clock: links, runs, and what must not depend on what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.engine.links import Copy, Link, LinkRules
from sim.errors import ConfigError
from sim.hardware.gpus import GPUS
from sim.scheduler.v1.connectors.base import JobKind
from sim.simulation.run import Simulation
from sim.views.plots.run.tables import Tables
from sim.views.plots.run.tiers import by_source, has_tier, moved_bytes, tier, tier_ttft

if TYPE_CHECKING:
    from pathlib import Path

STORE, LOAD, SYNC = JobKind.STORE, JobKind.LOAD, JobKind.SYNC_LOAD


def copy(number: int, kind: JobKind, seconds: float) -> Copy:
    job: Any = SimpleNamespace(job_id=number, kind=kind)
    return Copy(job, seconds, by_kernel=False)


def ends(link: Link) -> dict[int, float]:
    return {each.job.job_id: round(each.end_s, 9) for each in link.poll()}


def test_a_direction_is_a_queue_and_both_share_the_link() -> None:
    link = Link(LinkRules(both_ways_share=0.8))
    for number, kind, seconds in ((0, STORE, 2.0), (1, STORE, 1.0), (2, LOAD, 1.6)):
        link.submit(copy(number, kind, seconds))
    link.follow(10.0)
    # both at 0.8 until 2.0, where the load ends; 0.4 s of the first store are left
    assert ends(link) == {2: 2.0, 0: 2.4, 1: 3.4}
    link.check()


def test_loads_of_both_kinds_halve_their_direction() -> None:
    link = Link(LinkRules())
    link.submit(copy(0, LOAD, 1.0))
    link.submit(copy(1, SYNC, 1.0))
    link.wait_for([1])
    assert link.now_s == 2.0
    assert ends(link) == {0: 2.0, 1: 2.0}


def test_a_step_and_copies_slow_each_other_while_both_last() -> None:
    link = Link(LinkRules(step_factor=2.0, transfer_factor=1.25))
    link.submit(copy(0, LOAD, 0.8))
    # the copy takes 1 s, in which half a second of the step is done
    assert link.step(2.0) == pytest.approx(2.5)
    assert ends(link) == {0: 1.0}
    link.submit(copy(1, LOAD, 8.0))
    assert link.step(1.0) == pytest.approx(4.5)
    assert not link.poll()
    link.follow(100.0)
    assert ends(link) == {1: pytest.approx(4.5 + 8.0 - 2.0 / 1.25)}


def test_copies_that_take_no_time_end_at_once() -> None:
    link = Link(LinkRules())
    link.follow(3.0)
    link.submit(copy(0, LOAD, 0.0))
    assert ends(link) == {0: 3.0}
    assert not link.is_busy


CHATS: dict[str, Any] = {
    "sessions": {
        "kind": "chat",
        "num_sessions": 24,
        "arrivals": {"kind": "burst", "burst_size": 24, "interval_s": 1.0},
        "turns": {"kind": "fixed", "number": 4},
        "first_prompt_tokens": {"kind": "fixed", "tokens": 600},
        "prompt_tokens": {"kind": "fixed", "tokens": 80},
        "output_tokens": {"kind": "fixed", "tokens": 64},
        "think_s": {"kind": "fixed", "value_s": 2.0},
        "max_context_tokens": 4096,
    },
    "max_concurrent_users": 12,
}
ENGINE = {
    "model": "meta-llama/Llama-3.1-8B",
    "gpu": "h200_sxm",
    "num_gpu_blocks_override": 300,
    "max_model_len": 4096,
}


def run(
    *,
    link: dict[str, Any] | None = None,
    stepwise: bool = False,
    workload: dict[str, Any] = CHATS,
    check_every: int = 50,
    **engine: Any,
) -> Any:
    if link is not None:
        engine["kv_offloading_link"] = link
    config = parse_config(
        {"workload": workload, "engine": ENGINE | engine, "cost_intervals": False}
    )
    return Simulation(config, stepwise=stepwise).run(check_every=check_every)


def test_a_tier_turns_recomputation_into_loads() -> None:
    without, with_tier = run(), run(kv_offloading_size=4.0)
    told = with_tier.summary
    assert told["completed"] == 96
    assert told["external_prefix_cache_hits"] > 10_000
    assert told["loaded_bytes"] > 0
    assert told["mean_ttft_ms"] < without.summary["mean_ttft_ms"]
    assert 0 < told["stored_link_utilisation"] < told["loaded_link_utilisation"] < 1
    copies = with_tier.recording.transfer_table
    assert np.all(copies["begin_s"] <= copies["end_s"])
    assert np.all(copies["end_s"] <= copies["reported_s"] + 1e-9)
    assert with_tier.steps["cpu_cache_usage"].max() == told["cpu_cache_usage_max"]


@pytest.mark.parametrize("ahead", [False, True])
def test_no_copy_is_quicker_than_its_link(ahead: bool) -> None:
    """A call of 10,000 pieces is still described when its first ones are copied."""
    sessions = CHATS["sessions"] | {
        "num_sessions": 6,
        "first_prompt_tokens": {"kind": "fixed", "tokens": 12_000},
        "max_context_tokens": 16_384,
    }
    found = run(
        workload={"sessions": sessions},
        num_gpu_blocks_override=2_000,
        max_model_len=16_384,
        max_num_batched_tokens=16_384,
        kv_offloading_size=64.0,
        async_scheduling=ahead,
    )
    copies = found.recording.transfer_table
    # 32 pieces of 64 KiB a block: most are loads and stores of 24,000 pieces
    assert np.sum(copies["num_blocks"][copies["kind"] == "load"] > 700) > 10
    assert np.sum(copies["num_blocks"][copies["kind"] == "store"] > 700) >= 5
    lasted_s = copies["end_s"] - copies["begin_s"]
    link = GPUS["h200_sxm"].host_bytes_per_s * 0.8
    assert np.all(copies["num_bytes"] <= lasted_s * link)
    for way in ("loaded", "stored"):
        assert found.summary[f"{way}_bytes_per_s"] <= link


def test_figures_show_what_a_tier_moved() -> None:
    tables = Tables.of(run(kv_offloading_size=4.0))
    assert has_tier(tables)
    for draw in (tier, tier_ttft):
        assert all(axes.has_data() for axes in draw(tables).axes)
    begin_s, end_s, sizes = np.array([0.0]), np.array([2.0]), np.array([8.0])
    moved = moved_bytes(begin_s, end_s, sizes, np.array([0.0, 0.5, 3.0]))
    assert moved.tolist() == [2.0, 6.0]
    local, loaded, computed = by_source(tables.requests).values()
    assert loaded.sum() > 0
    assert np.all(local + loaded + computed == tables.requests["num_prompt_tokens"])


OLD = {"engine_version": "0.29", "async_scheduling": True}


BY_USE = {"evictor": "lfu", "async_scheduling": True}


@pytest.mark.parametrize("engine", [{}, OLD, BY_USE])
def test_fast_and_stepwise_runs_agree(engine: dict[str, Any]) -> None:
    fast, stepwise = (
        run(kv_offloading_size=1.0, stepwise=each, **engine) for each in (0, 1)
    )
    assert fast.requests.equals(stepwise.requests)
    assert fast.summary["num_preemptions"] > 0
    assert np.allclose(fast.steps["latency_s"], stepwise.steps["latency_s"], rtol=1e-9)


@pytest.mark.parametrize("ahead", [False, True])
def test_ends_of_stores_and_of_requests_ask_for_no_call(ahead: bool) -> None:
    """Only prompts do, and the stores and loads that they bring."""
    sizes = {"num_gpu_blocks_override": 2000, "async_scheduling": ahead}
    engine = ENGINE | sizes | {"kv_offloading_size": 4.0}
    synthetic = {
        "arrivals": {"kind": "poisson", "rate": 20.0},
        "num_requests": 40,
        "prompt_tokens": {"kind": "fixed", "tokens": 480},
        "output_tokens": {"kind": "uniform", "low": 20, "high": 200},
    }
    workload = {"synthetic": synthetic}
    config = {"workload": workload, "engine": engine, "cost_intervals": False}
    simulation = Simulation(parse_config(config))
    scheduler: Any = simulation.scheduler
    form, num_calls = scheduler.form, 0

    def counting(now_s: float) -> Any:
        nonlocal num_calls
        num_calls += 1
        return form(now_s)

    scheduler.form = counting
    told = simulation.run().summary
    assert told["num_stored_jobs"] == 40
    # prompts, the step in which a store begins, and the others that it lasts
    assert num_calls < 80 < told["num_steps"] / 5


@pytest.mark.parametrize("ahead", [False, True])
def test_a_link_that_carries_nothing_changes_nothing(ahead: bool) -> None:
    # Ahead, blocks come free a step later with a tier: all requests find room here.
    engine = {
        "async_scheduling": ahead,
        "num_gpu_blocks_override": 2000 if ahead else 300,
    }
    without = run(**engine).requests
    link = {"load_bytes_per_s": 0.0}
    dead = run(kv_offloading_size=4.0, link=link, **engine).requests
    assert np.allclose(without["finish_s"], dead["finish_s"], rtol=1e-12)
    assert not dead["num_loaded_tokens"].any()


def chats_apart(num_sessions: int, think_s: float) -> dict[str, Any]:
    """Return conversations of which hardly two are served at a time."""
    more = {
        "num_sessions": num_sessions,
        "arrivals": {"kind": "poisson", "rate": 5 / think_s},
        "think_s": {"kind": "lognormal", "median_s": think_s, "sigma": 0.4},
    }
    return {"sessions": CHATS["sessions"] | more}


@pytest.mark.parametrize("rate", [1e8, 1e9, 1e12])
def test_no_load_waits_for_another_arrival(rate: float) -> None:
    link = {"load_bytes_per_s": rate, "store_bytes_per_s": rate}
    result = run(kv_offloading_size=4.0, link=link, workload=chats_apart(10, 200.0))
    assert result.requests["num_loaded_tokens"].any()
    # Some meet on the link; arrivals are 40 s apart.
    assert result.requests["ttft_s"].max() < 3 * 1000 * 2**17 / rate + 1.0


def test_more_memory_never_lowers_hits() -> None:
    hits = []
    for size in (0.25, 1.0, 4.0):
        told = run(kv_offloading_size=size).summary
        hits.append(told["external_prefix_cache_hits"] + told["prefix_cache_hits"])
    assert hits[0] * 0.97 <= hits[1] <= hits[2] * 1.03


def test_a_step_in_flight_hides_the_host_and_wastes_a_slot_a_request() -> None:
    tier: dict[str, Any] = {"kv_offloading_size": 4.0}
    in_turn, ahead = (run(**tier, async_scheduling=each) for each in (False, True))
    told = ahead.summary
    assert told["completed"] == 96
    assert told["num_wasted_tokens"] == 96  # their outputs end at a stop token
    assert told["overlapped_s"] > 0
    last_s = [each.requests["finish_s"].max() for each in (in_turn, ahead)]
    assert last_s[1] < last_s[0]
    assert told["mean_tpot_ms"] < in_turn.summary["mean_tpot_ms"]
    hits = [each.summary["external_prefix_cache_hits"] for each in (in_turn, ahead)]
    assert hits[1] == pytest.approx(hits[0], rel=0.1)
    copies = ahead.recording.transfer_table
    assert copies.num_rows > 100
    assert np.all(copies["begin_s"] <= copies["end_s"])
    assert np.all(copies["end_s"] <= copies["reported_s"] + 1e-9)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_failed_loads_lose_no_request(policy: str, ahead: bool) -> None:
    link = {"load_failure_rate": 0.5}
    transfer = {"kv_load_failure_policy": policy}
    result = run(
        kv_offloading_size=4.0,
        link=link,
        kv_transfer_config=transfer,
        async_scheduling=ahead,
    )
    statuses = set(result.requests["status"])
    assert ("finished_error" in statuses) == (policy == "fail")
    assert len(result.requests) == 96 or policy == "fail"


def test_blocks_of_a_failed_load_are_held_until_they_are_computed() -> None:
    few = {"num_sessions": 6, "turns": {"kind": "fixed", "number": 3}}
    result = run(
        check_every=2,
        workload={"sessions": CHATS["sessions"] | few},
        num_gpu_blocks_override=260,
        kv_offloading_size=4.0,
        link={"load_failure_rate": 0.5},
        kv_transfer_config={"kv_load_failure_policy": "recompute"},
        max_num_batched_tokens=64,
    )
    assert result.summary["completed"] == 18


def written(policy: str, **engine: Any) -> dict[str, Any]:
    """Return the engine's keys, with batches that are small beside the pool."""
    extra = {"write_policy": policy, "offload_prompt_only": False}
    return {
        "max_num_batched_tokens": 128,
        "kv_offloading_size": 0.5,
        "kv_transfer_config": {"kv_connector_extra_config": extra},
    } | engine


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_written_back_is_what_the_pool_gives_up(
    ahead: bool, *, is_quick: bool
) -> None:
    workload = chats_apart(16, 4.0)
    through, back = (
        run(
            **written(policy, async_scheduling=ahead),
            workload=workload,
            check_every=15 if is_quick else 1,
        ).summary
        for policy in ("write_through", "write_back")
    )
    assert through["completed"] == back["completed"] == 64
    # A host that is smaller than the pool has what the pool has, or what it lacks.
    hits = [each["external_prefix_cache_hits"] for each in (through, back)]
    assert hits[1] > 1.5 * hits[0]
    assert back["stored_bytes"] < through["stored_bytes"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            written("write_back", enable_prefix_caching=False),
            "write_back needs the release's prefix cache",
        ),
        (
            written(
                "write_back",
                kv_transfer_config={
                    "kv_connector_extra_config": {
                        "write_policy": "write_back",
                        "eviction_policy": "next_use",
                    }
                },
            ),
            "blocks of no request, which eviction_policy next_use asks for",
        ),
        (
            written(
                "write_back",
                kv_transfer_config={
                    "kv_connector_extra_config": {
                        "write_policy": "write_back",
                        "blocks_per_chunk": 2,
                    }
                },
            ),
            "write_back stores blocks one by one, got chunks of 2",
        ),
        ({"kv_offloading_size": 1e-6}, "the tier must hold a chunk"),
        ({"kv_offloading_size": -1.0}, "kv_offloading_size: should be greater than 0"),
        ({"kv_offloading_link": {}}, "no tier behind the pool"),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            "native is built",
        ),
        (
            {
                "kv_offloading_size": 1.0,
                "kv_offloading_link": {"load_bytes_per_s": -1.0},
            },
            "load_bytes_per_s: should be greater than or equal to 0",
        ),
        (
            {"kv_offloading_size": 1.0, "scheduler": "v0"},
            "v0 swaps preempted requests to the host by itself",
        ),
        (
            {"kv_offloading_size": 1.0, "pipeline_parallel_size": 2},
            "KV offloading with pipeline_parallel_size above 1 is not built",
        ),
        (
            {"kv_offloading_size": 1.0, "engine_version": "0.11"},
            "a CPU tier is known from 0.28 on",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
            "must be OffloadingConnector, got 'NixlConnector'; .*roles of fleet.pools",
        ),
        (
            {
                "kv_offloading_size": 1.0,
                "kv_transfer_config": {"kv_role": "kv_producer"},
            },
            "kv_role: OffloadingConnector stores and loads, got 'kv_producer'",
        ),
        (
            {
                "kv_offloading_size": 1.0,
                "kv_transfer_config": {"kv_connector_extra_config": {"block_size": 20}},
            },
            "a chunk is whole blocks of 16 tokens, got 20",
        ),
    ],
)
def test_bad_input_is_a_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**keys)


def with_tiers(*tiers: dict[str, Any], **extra: Any) -> dict[str, Any]:
    extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [*tiers]}
    transfer = {"kv_connector_extra_config": extra}
    return {"kv_offloading_size": 0.25, "kv_transfer_config": transfer}


POOL = {
    "type": "pool",
    "capacity_bytes": 4e9,
    "read_bytes_per_s": 2e10,
    "write_bytes_per_s": 2e10,
}
OWN = """
from cache.tiers import SecondaryTier

class Newest(SecondaryTier):
    def __init__(self, chunk_bytes, **more):
        super().__init__(chunk_bytes, **more)

    def victim(self):
        held = self._readers
        return next((key for key in reversed(self._used_s) if key not in held), None)
"""


def test_copies_behind_the_host_are_told(tmp_path: Path) -> None:
    path = tmp_path / "newest.py"
    path.write_text(OWN)
    own = POOL | {"type": f"{path}:Newest", "capacity_bytes": 1e9}
    result = run(**with_tiers(own, POOL, blocks_per_chunk=2))
    copies, tier = result.recording.transfer_table, result.recording.tier_table
    kinds = set(copies["kind"])
    assert kinds == {"store", "load", "Newest_store", "Newest_load"} | {
        "pool_store",
        "pool_load",
    }
    is_own = copies["kind"] == "pool_load"
    summary = result.summary["secondary_tiers"]["pool"]
    assert copies["num_bytes"][is_own].sum() == summary["read_bytes"] > 0
    assert tier["num_pool_chunks"].max() <= summary["num_chunks"]
    assert result.summary["completed"] == 96


BROKEN = """
from cache.tiers import SecondaryTier

class Mine(SecondaryTier):
    def __init__(self, chunk_bytes, **more):
        super().__init__(chunk_bytes, **more)

    def {method}
"""
AGAIN = """
        from cache.tiers import LookupResult
        return LookupResult.RETRY
"""


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("lookup(self, key, access, now_s): return True", "lookup must return HIT, "),
        (
            "lookup(self, *_):\n        from cache.tiers import LookupResult\n"
            "        return LookupResult.HIT",
            "lookup said HIT of a chunk that is not there",
        ),
        ("lookup(self, *_):" + AGAIN, "lookup said RETRY, and has_news is False"),
        ("prepare_store(self, keys, now_s): return [12345]", "prepare_store must"),
        ("victim(self): return 42", "victim must return a chunk .* got 42"),
    ],
)
def test_a_tier_of_ones_own_is_held_to_its_contract(
    tmp_path: Path, method: str, message: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(method=method))
    own = POOL | {"type": f"{path}:Mine", "capacity_bytes": 1e8}
    with pytest.raises(ConfigError, match=rf"kv_transfer_config: Mine: {message}"):
        run(**with_tiers(own))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"type": "tape"}, r"secondary_tiers\[0\].type: 'tape' is not built"),
        ({"capacity_bytes": 10.0}, r"secondary_tiers\[0\]: capacity_bytes .* hold a"),
        ({"read_bytes_per_s": -1.0}, "read_bytes_per_s of a tier must be 1 or more"),
        ({"speed": 1.0}, r"secondary_tiers\[0\].speed: 'pool' has no such key"),
    ],
)
def test_impossible_tiers_behind_the_host_are_refused(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**with_tiers(POOL | keys))
    missing = {k: v for k, v in POOL.items() if k != "capacity_bytes"}
    with pytest.raises(ConfigError, match="capacity_bytes: 'pool' needs this key"):
        run(**with_tiers(missing))
    with pytest.raises(ConfigError, match="of TieringOffloadingSpec, got CPUOff"):
        run(
            **with_tiers(POOL)
            | {
                "kv_transfer_config": {
                    "kv_connector_extra_config": {"secondary_tiers": [POOL]}
                }
            }
        )
