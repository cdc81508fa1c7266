"""Replicas of several data-parallel ranks: the router sees each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.results.summary.rows import summary_rows
from sim.simulation.run import Simulation
from tests.sim.fleet.test_events import proven
from tests.sim.fleet.test_pairs import checked
from tests.sim.fleet.test_run import TIGHT, data_of

if TYPE_CHECKING:
    from sim.results.run import Results

EXPERTS = TIGHT | {
    "model": "Qwen/Qwen3-30B-A3B",
    "data_parallel_size": 3,
    "enable_expert_parallel": True,
}
ENGINES: dict[str, dict[str, Any]] = {
    "experts": EXPERTS,
    "experts, one step at a time": EXPERTS | {"async_scheduling": False},
    "dense": TIGHT | {"data_parallel_size": 3},
}
OF_RANKS = {"num_waves", "num_dummy_steps", "wait_share"}


def fleet_of(kind: str, *pools: tuple[int, int], **arguments: Any) -> dict[str, Any]:
    """Return pools of so many replicas of so many ranks each."""
    return {
        "pools": [
            {
                "name": f"{ranks} ranks",
                "replicas": replicas,
                "engine": {"data_parallel_size": ranks},
            }
            for replicas, ranks in pools
        ],
        "router": {"kind": kind} | arguments,
    }


def same(one: pd.DataFrame, other: pd.DataFrame) -> None:
    one = one.rename(columns={"rank": "engine"})
    shared = [name for name in one if name in other]
    assert len(shared) >= len([*one]) - ("wait_s" in one)
    pd.testing.assert_frame_equal(one[shared], other[shared])


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("name", ENGINES)
def test_behind_their_own_balancer_ranks_are_those_of_one_engine(
    name: str, stepwise: bool
) -> None:
    fleet = fleet_of("vllm_dp", (1, 3), num_servers=3)
    datas = [data_of(ENGINES[name], each, rate=80.0) for each in (None, fleet)]
    alone, one = (
        Simulation(parse_config(data), stepwise=stepwise).run(check_every=5)
        for data in datas
    )
    same(alone.requests, one.requests)
    same(alone.steps, one.steps)
    same(alone.preemptions, one.preemptions)
    assert alone.summary["num_preemptions"] > 0
    (pool,) = one.summary["pools"]
    told = {key: alone.summary[key] for key in OF_RANKS & alone.summary.keys()}
    assert told == {key: pool[key] for key in OF_RANKS & pool.keys()}
    assert bool(told) is name.startswith("experts")
    for rank, engine in zip(
        alone.summary["ranks"], one.summary["engines"], strict=True
    ):
        assert rank["num_requests"] == engine["num_requests"]
        if told:
            assert rank["wait_s"] == engine["wait_s"] > 0


@pytest.mark.parametrize(
    "kind",
    [
        "least_requests",
        "llm_d",
        pytest.param("round_robin", marks=pytest.mark.slow),
        pytest.param("dynamo_kv", marks=pytest.mark.slow),
    ],
)
def test_the_fast_path_changes_nothing(kind: str) -> None:
    config = parse_config(data_of(EXPERTS, fleet_of(kind, (2, 3), (1, 1)), rate=150.0))
    fast, slow = (
        Simulation(config, stepwise=stepwise).run(check_every=7)
        for stepwise in (False, True)
    )
    same(fast.requests, slow.requests)
    pd.testing.assert_frame_equal(
        fast.steps.sort_values(["engine", "step"], ignore_index=True),
        slow.steps.sort_values(["engine", "step"], ignore_index=True),
    )


def test_replicas_step_apart_and_ranks_of_one_together() -> None:
    engine = EXPERTS | {"async_scheduling": False}
    config = parse_config(data_of(engine, fleet_of("round_robin", (2, 3), (1, 1))))
    results = Simulation(config).run()
    steps = results.steps
    ends_s = (steps["start_s"] + steps["latency_s"]).round(9).to_numpy()
    of = [set(ends_s[steps["engine"] == engine]) for engine in range(7)]
    assert of[0] == of[1] == of[2]
    assert of[3] == of[4] == of[5]
    assert len(of[0] & of[3]) < len(of[0]) / 2
    assert not np.any(steps["wait_s"][steps["engine"] == 6])
    assert results.summary["pools"][1]["replicas"] == 1
    assert "wait_share" not in results.summary["pools"][1]
    gpu = config.engine.gpu
    assert f"3 replicas of 3 x {gpu} and {gpu} behind" in results.summary["title"]
    rows = dict(summary_rows(results.summary))
    assert rows["pool 3 ranks"].startswith("2 x 3 ranks of 70 blocks of 16 tokens, ")
    assert rows["pool 1 ranks"].startswith("1 engine of 70 blocks of 16 tokens, ")


def test_one_server_a_rank_is_what_a_fleet_has_anyway() -> None:
    fleet = fleet_of("round_robin", (2, 3))
    told, left_out = (
        Simulation(parse_config(data_of(EXPERTS | more, fleet))).run().summary
        for more in ({"api_server_count": 1}, {})
    )
    assert told == left_out


def test_gpus_of_all_ranks_are_paid_for() -> None:
    fleet = fleet_of("round_robin", (2, 3)) | {"prices": {"per_gpu_hour": {}}}
    fleet["prices"]["per_gpu_hour"][data_of({}, None)["engine"]["gpu"]] = 3.0
    summary = Simulation(parse_config(data_of(EXPERTS, fleet))).run().summary
    hours = 6 * summary["duration"] / 3600
    assert summary["gpu_hours"] == pytest.approx(hours)
    assert summary["cost_of_gpus"] == pytest.approx(3.0 * hours)


@pytest.mark.parametrize(
    ("fleet", "engine", "says"),
    [
        ({}, {"api_server_count": 2}, "the router chooses the rank, .* got .* 2; rem"),
        (
            {"events": [{"time_s": 1.0, "kind": "die", "engine": 6}]},
            {},
            r"fleet\.events: engines are numbered from 0 to 5, pool by pool, got 6",
        ),
        (
            {
                "events": [
                    {"time_s": 1.0, "kind": "die", "engine": 3},
                    {"time_s": 2.0, "kind": "drain", "engine": 5},
                ]
            },
            {},
            "engine 5 is off by then, got drain at 2",
        ),
    ],
)
def test_a_mistake_is_a_line(
    fleet: dict[str, Any], engine: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config(data_of(EXPERTS | engine, fleet_of("random", (2, 3)) | fleet))


PD = {"links": {"bytes_per_s": 20e9}, "decode_router": {"kind": "least_requests"}}


def pulls_of(results: Results) -> pd.DataFrame:
    table = results.recording.transfer_table
    assert table is not None
    return table.arrow.to_pandas()


def pools_apart(prefill: tuple[int, int], decode: tuple[int, int]) -> dict[str, Any]:
    """Return pools of so many replicas of so many ranks that prefill, and decode."""
    pools = fleet_of("least_requests", prefill, decode)["pools"]
    for pool, role in zip(pools, ("prefill", "decode"), strict=True):
        pool |= {"name": role, "role": role}
    return {"pools": pools, "router": {"kind": "least_requests"}} | PD


@pytest.mark.parametrize("stepwise", [False, True])
def test_ranks_without_experts_hand_prompts_on_as_replicas_do(stepwise: bool) -> None:
    def run(fleet: dict[str, Any]) -> Any:
        config = parse_config(data_of(TIGHT, fleet, 60, 40.0))
        return Simulation(config, stepwise=stepwise).run()

    ranks, replicas = (
        run(pools_apart((1, 2), (2, 2))),
        run(pools_apart((2, 1), (4, 1))),
    )
    for name in ("requests", "steps", "preemptions"):
        pd.testing.assert_frame_equal(getattr(ranks, name), getattr(replicas, name))
    assert ranks.summary["transfers"] == replicas.summary["transfers"]
    assert ranks.requests["engine"].nunique() == 4
    assert ranks.requests["prefill_engine"].nunique() == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_that_divide_experts_hand_prompts_on(ahead: bool) -> None:
    """Byte-equal stepwise, all blocks let go, and ranks of a replica in step."""
    engine = EXPERTS | {"async_scheduling": ahead}
    config = parse_config(data_of(engine, pools_apart((1, 2), (1, 2)), 24, 40.0))
    runs = [Simulation(config, stepwise=stepwise) for stepwise in (False, True)]
    fast, slow = map(checked, runs)
    for name in ("requests", "preemptions"):
        pd.testing.assert_frame_equal(getattr(fast, name), getattr(slow, name))
    pd.testing.assert_frame_equal(
        fast.steps.sort_values(["engine", "step"], ignore_index=True),
        slow.steps.sort_values(["engine", "step"], ignore_index=True),
    )
    assert pulls_of(fast).equals(pulls_of(slow))
    summary, requests = fast.summary, fast.requests
    assert summary["completed"] == summary["transfers"]["num_transfers"] == 24
    assert set(requests["engine"]) == {2, 3}
    assert set(requests["prefill_engine"]) == {0, 1}
    parts = ["queue", "prefill", "transfer", "decode"]
    split = requests[[f"ttft_{part}_s" for part in parts]]
    assert split.sum(axis=1).to_numpy() == pytest.approx(requests["ttft_s"])
    assert all(pool["wait_share"] > 0 for pool in summary["pools"])
    row = dict(summary_rows(summary))["pool decode"]
    dummies = summary["pools"][1]["num_dummy_steps"]
    assert f"; {dummies:,} dummy steps, " in row
    if not ahead:
        steps = fast.steps
        ends_s = (steps["start_s"] + steps["latency_s"]).round(9)
        of = [set(ends_s[steps["engine"] == engine]) for engine in range(4)]
        assert of[0] == of[1] != of[2] == of[3]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_wave_goes_on_while_blocks_are_read_and_not_while_they_are_held(
    ahead: bool,
) -> None:
    """As a request that waits is unfinished, and one whose blocks are kept is not."""
    engine = EXPERTS | {"async_scheduling": ahead}
    fleet = pools_apart((1, 2), (1, 3)) | {"links": {"bytes_per_s": 20e9}}
    fleet["links"]["latency_s"] = 2.0
    results = Simulation(parse_config(data_of(engine, fleet, 1))).run()
    request, steps = results.requests.iloc[0], results.steps
    assert request["ttft_transfer_s"] > 2.0
    read = pulls_of(results).iloc[0]
    prefill, decode = (pool["num_waves"] for pool in results.summary["pools"])
    assert (prefill, decode) == (1, 1)
    step_s = steps["latency_s"].max()
    of = {engine: steps[steps["engine"] == engine] for engine in range(5)}
    for place in range(2):  # two all-reduces after its last turn at most
        assert 0 < len(of[place]) <= 3 * 16
        assert of[place]["start_s"].max() < read["begin_s"] + 33 * step_s
    for place in range(2, 5):
        own = of[place]
        idle = own[own["start_s"] < read["end_s"]]
        assert not idle["num_batched_tokens"].any()
        assert len(idle) > 2.0 / step_s
        gaps_s = own["start_s"].to_numpy()[1:] - own["start_s"].to_numpy()[:-1]
        assert gaps_s.max() <= 2 * step_s


# -- replicas that come and go ---------------------------------------------------------


def event(time_s: float, kind: str, engine: int, **more: Any) -> dict[str, Any]:
    return {"time_s": time_s, "kind": kind, "engine": engine} | more


def both_ways(
    fleet: dict[str, Any], engine: dict[str, Any] = EXPERTS, rate: float = 40.0
) -> Results:
    """Run a fleet, and again one step at a time, which gives the same; return it."""
    config = parse_config(data_of(engine, fleet, 40, rate))
    fast, slow = (proven(Simulation(config, stepwise=each)) for each in (False, True))
    pd.testing.assert_frame_equal(fast.requests, slow.requests)
    pd.testing.assert_frame_equal(
        fast.steps.sort_values(["engine", "step"], ignore_index=True),
        slow.steps.sort_values(["engine", "step"], ignore_index=True),
    )
    return fast


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_of_a_replica_come_and_go_together(ahead: bool) -> None:
    events = [
        event(0.3, "die", 1),
        event(0.6, "start", 0),
        event(0.7, "slow", 4, factor=2.0),
        event(0.8, "drain", 3),
    ]
    fleet = fleet_of("least_requests", (2, 3)) | {"events": events}
    results = both_ways(fleet, EXPERTS | {"async_scheduling": ahead})
    summary, steps = results.summary, results.steps
    assert summary["completed"] == 40
    assert summary["num_retried"] > 0 == summary["num_lost"]
    assert len({*summary["up_s"][:3]}) == len({*summary["up_s"][3:]}) == 1
    gone = steps[(steps["start_s"] > 0.3) & (steps["start_s"] < 0.6)]
    assert gone[gone["engine"] < 3].groupby("engine").size().max() <= 3
    back = steps[(steps["start_s"] > 0.6) & (steps["num_batched_tokens"] > 0)]
    assert set(back["engine"]) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_that_prefill_or_decode_come_and_go(ahead: bool) -> None:
    events = [
        event(0.3, "die", 1),
        event(0.4, "die", 6),
        event(0.6, "start", 0),
        event(0.7, "start", 7),
        event(0.8, "drain", 2),
    ]
    fleet = pools_apart((2, 2), (2, 2)) | {"events": events}
    fleet["connector"] = {"kv_load_failure_policy": "recompute"}
    results = both_ways(fleet, EXPERTS | {"async_scheduling": ahead})
    summary = results.summary
    assert summary["completed"] == 40
    assert summary["num_retried"] > 0
    up_s = summary["up_s"]
    assert all(up_s[i] == up_s[i + 1] for i in range(0, 8, 2))
    assert {6, 7} <= set(results.requests["engine"])


def test_ranks_without_experts_die_as_replicas_that_die_at_once() -> None:
    fleets = [
        fleet_of("least_requests", (2, 2)) | {"events": [event(0.3, "die", 0)]},
        fleet_of("least_requests", (4, 1))
        | {"events": [event(0.3, "die", 0), event(0.3, "die", 1)]},
    ]
    ranks, replicas = (
        Simulation(parse_config(data_of(TIGHT, each, 40, 40.0))).run()
        for each in fleets
    )
    for name in ("requests", "steps", "preemptions"):
        pd.testing.assert_frame_equal(getattr(ranks, name), getattr(replicas, name))
    assert ranks.summary["num_retried"] == replicas.summary["num_retried"] > 0
    last_s = max(replicas.summary["up_s"][:2])  # until both have ended their step
    assert ranks.summary["up_s"][:2] == [last_s, last_s]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_slow_rank_slows_its_replica(ahead: bool) -> None:
    """All take twice as long: a host that is half as quick hides as much."""
    slowed = {"events": [event(0.0, "slow", 1, factor=2.0)]}
    well, slow = (
        Simulation(
            parse_config(
                data_of(
                    EXPERTS | {"async_scheduling": ahead},
                    fleet_of("least_requests", (1, 3)) | each,
                    1,
                )
            )
        ).run()
        for each in ({}, slowed)
    )
    took_s = [
        (each.requests["finish_s"] - each.requests["arrival_s"])[0]
        for each in (well, slow)
    ]
    assert took_s[1] == pytest.approx(2 * took_s[0], rel=1e-9)
    assert slow.steps["latency_s"].sum() == pytest.approx(
        2 * well.steps["latency_s"].sum(), rel=0.05 if ahead else 1e-9
    )


def test_an_autoscaler_counts_replicas_and_not_ranks() -> None:
    scaler = {
        "targets": {"requests_in_flight": 10},
        "max_replicas": 3,
        "start_s": 0.1,
        "interval_s": 0.1,
        "scrape_interval_s": 0.1,
        "scale_down": {"stabilization_s": 0.2},
    }
    fleet = fleet_of("least_requests", (1, 2)) | {"autoscaler": scaler}
    results = both_ways(fleet, rate=60.0)
    summary = results.summary
    (told,) = summary["autoscalers"]
    assert summary["completed"] == 40
    assert told["least_wanted"] == 1 < told["most_wanted"] <= 3
    up_s = summary["up_s"]
    assert up_s[0] == up_s[1] > up_s[2] == up_s[3] > 0
    table = results.recording.fleet_table
    assert table is not None
    assert 1 < table["num_ready"].max() <= told["most_wanted"]
    assert summary["gpu_hours"] == pytest.approx(sum(up_s) / 3600)


def test_an_autoscaler_may_take_out_what_has_ended_before_its_mates() -> None:
    """When all is served the waves of other replicas go on for a while."""
    scaler = {
        "max_replicas": 3,
        "start_s": 0.1,
        "interval_s": 0.02,
        "scrape_interval_s": 0.05,
        "scale_down": {"stabilization_s": 0},
    }
    fleet = pools_apart((1, 2), (2, 2)) | {"links": {"bytes_per_s": 1e10}}
    fleet["links"]["latency_s"] = 0.01
    fleet["autoscaler"] = [
        {"pool": pool, "targets": {"tokens_in_flight": target}} | scaler
        for pool, target in (("prefill", 1), ("decode", 10))
    ]
    summary = both_ways(fleet, EXPERTS | {"async_scheduling": False}, 60.0).summary
    assert summary["completed"] == 40
    assert all(each["num_scale_ups"] > 0 for each in summary["autoscalers"])
