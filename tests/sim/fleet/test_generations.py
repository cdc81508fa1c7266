"""Pools of several generations behind one router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from sim.config.tables import parse_config
from sim.errors import ConfigError, EngineDiedError
from sim.results.summary.rows import summary_rows
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from tests.sim.config.test_config import minimal
from tests.sim.fleet.test_run import GENERATIONS, TIGHT, data_of, fleet_of, tables

if TYPE_CHECKING:
    from sim.results.run import Results

NAMES = ("v1", "sglang", "v0", "cacheflow")
TOLD = ("first_token_s", "finish_s", "num_preemptions", "num_cached_tokens")


def mixed(*names: str, kind: str = "round_robin") -> dict[str, Any]:
    """Return a fleet with an engine of each of some generations."""
    pools = [
        {"name": name, "replicas": 1, "engine": {**GENERATIONS[name]}} for name in names
    ]
    return {"pools": pools, "router": {"kind": kind}}


def rows_of(results: Results, place: int) -> pd.DataFrame:
    requests = results.requests
    rows = requests[requests["engine"] == place].sort_values("request_id")
    return rows[["request_id", *TOLD]].reset_index(drop=True)


def test_each_engine_serves_as_among_its_own_kind() -> None:
    together = simulate(parse_config(data_of({}, mixed(*NAMES), rate=60.0)))
    assert together.summary["num_preemptions"] > 0
    for place, name in enumerate(NAMES):
        data = data_of(GENERATIONS[name], fleet_of(4, "round_robin"), rate=60.0)
        alike = simulate(parse_config(data))
        pd.testing.assert_frame_equal(rows_of(together, place), rows_of(alike, place))


def test_the_fast_path_changes_nothing() -> None:
    config = parse_config(data_of({}, mixed(*NAMES, kind="least_requests"), rate=60.0))
    fast, stepwise = (Simulation(config, stepwise=each) for each in (False, True))
    assert fast.path == "fast"
    found = [each.run() for each in (fast, stepwise)]
    for place in range(len(NAMES)):
        pd.testing.assert_frame_equal(*(rows_of(each, place) for each in found))


@pytest.mark.parametrize("first", ["v1", "sglang"])
def test_each_pool_takes_the_share_of_memory_of_its_release(first: str) -> None:
    engines = [
        {"scheduler": "sglang", "gpu": "h200_sxm"},
        {"scheduler": "sglang", "gpu": "h100_sxm"},
        {"scheduler": "v1"},
        {"scheduler": "v1", "engine_version": "0.19"},
        {"scheduler": "v0"},
        {"scheduler": "v0", "gpu_memory_utilization": 0.8},
    ]
    pools = [
        {"name": f"p{place}", "replicas": 1, "engine": engine}
        for place, engine in enumerate(engines)
    ]
    fleet = {"pools": pools, "router": {"kind": "round_robin"}}
    config = minimal(gpu="h100_sxm", scheduler=first) | {"fleet": fleet}
    found = Simulation(parse_config(config)).pools
    shares = [each.capacity.gpu_memory_utilization for each in found]
    assert shares == [0.907, 0.835, 0.92, 0.9, 0.9, 0.8]


def test_all_is_told_of_each_pool() -> None:
    results = simulate(parse_config(data_of({}, mixed("v1", "sglang", "v0"))))
    told = [
        (each["scheduler"], each["engine_version"], each["block_size"])
        for each in results.summary["pools"]
    ]
    assert told == [("v1", "0.33", 16), ("sglang", "0.5.9", 1), ("v0", "0.7.3", 16)]
    rows = dict(summary_rows(results.summary))
    assert rows["KV cache"].startswith("70 blocks of 16 tokens and 1,120 tokens; ")
    assert "v1 0.33 and sglang 0.5.9 and v0 0.7.3" in results.summary["title"]
    assert results.summary["scheduling"].startswith(
        "asynchronous scheduling and overlap scheduling ("
    )
    assert results.summary["scheduling"].endswith("; synchronous scheduling")


def test_another_generation_shares_what_stands_at_no_default() -> None:
    pools = [
        {"name": "new", "replicas": 1},
        {"name": "old", "replicas": 1, "engine": {"scheduler": "v0"}},
    ]
    engine = {"engine_version": "0.11", "max_num_seqs": 32, "tensor_parallel_size": 2}
    config = parse_config(data_of(engine, {"pools": pools}))
    new, old = config.engines()
    assert (new.scheduler_kind, new.version, new.prefix_caching) == ("v1", "0.11", True)
    assert (old.scheduler_kind, old.version, old.prefix_caching) == (
        "v0",
        "0.7.3",
        False,
    )
    assert old.max_num_seqs == new.max_num_seqs == 32
    assert old.tensor_parallel_size == 2
    again = parse_config(config.to_data())
    assert again.engines() == [new, old]


@pytest.mark.parametrize("key", ["best_of", "beam_width"])
def test_samples_come_in_one_way(key: str) -> None:
    data = data_of({}, mixed("v1", "v0"))
    data["workload"][key] = 3
    with pytest.raises(ConfigError, match=rf"workload: some pools .* got {key} 3; ask"):
        simulate(parse_config(data))
    data["fleet"]["pools"].pop()
    assert simulate(parse_config(data)).summary["completed"]


def test_prompts_are_handed_on_within_a_generation() -> None:
    fleet = mixed("v1", "sglang")
    for pool, role in zip(fleet["pools"], ("prefill", "decode"), strict=True):
        pool["role"] = role
    fleet["links"] = {"interconnect": "infiniband_ndr"}
    with pytest.raises(ConfigError, match=r"pools\.1\.role: .* of one generation, got"):
        parse_config(data_of({}, fleet))


@pytest.mark.parametrize("router", [None, "round_robin", "least_requests", "llm_d"])
def test_a_death_as_the_real_engine_dies_names_its_time(router: str | None) -> None:
    engine = {
        "scheduler": "sglang",
        "max_model_len": 28,
        "max_running_requests": 1,
        "admission_check": False,
    }
    data = data_of(engine, None)
    data["workload"]["synthetic"]["prompt_tokens"] = {"kind": "fixed", "tokens": 26}
    if router:
        pools = [{"name": "main", "replicas": 1}]
        data["fleet"] = {"pools": pools, "router": {"kind": router}}
    with pytest.raises(EngineDiedError, match=r"an engine dies at 0\.284 s, as the"):
        simulate(parse_config(data))


@pytest.mark.parametrize("role", [False, True])
def test_one_pool_whose_requests_are_looked_at_makes_all_so(role: bool) -> None:
    """Decodes of the first stood on a clock that no step of such a run reads."""
    spaced = {"prefill_schedule_interval": 3}
    fleet: dict[str, Any] = {
        "pools": [
            {"name": "one", "replicas": 1},
            {"name": "other", "replicas": 1, "engine": spaced},
        ]
    }
    if role:
        fleet["links"] = {"bytes_per_s": 50e9}
        for pool, own in zip(fleet["pools"], ("prefill", "decode"), strict=True):
            pool["role"] = own
    config = parse_config(data_of(TIGHT | {"async_scheduling": True}, fleet, 30))
    run, slow = (Simulation(config, stepwise=way) for way in (False, True))
    assert "prefill_schedule_interval" in run.path_reason
    ours, others = run.run(), slow.run()
    assert ours.summary["completed"] == 30
    for name, table in tables(ours).items():
        assert table.equals(tables(others)[name]), name
