"""Autoscalers: the rule of Kubernetes' HPA, and fleets that grow and shrink by it."""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.config import autoscaling
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.fleet.autoscaling.target_tracking import (
    Behaviour,
    Metric,
    Policy,
    PolicyKind,
    Select,
    TargetTracking,
    recommended,
)
from sim.fleet.replicas import Replicas
from sim.fleet.roster import ReplicaState
from sim.fleet.routers import ROUTERS
from sim.simulation.run import Simulation
from tests.sim.fleet.test_events import checked, event
from tests.sim.fleet.test_run import GENERATIONS, SESSIONS, data_of, fleet_of, tables

if TYPE_CHECKING:
    from sim.results.run import Results

IN_FLIGHT = Metric.REQUESTS_IN_FLIGHT
QUICK: dict[str, Any] = {
    "targets": {"requests_in_flight": 6},
    "max_replicas": 5,
    "start_s": 0.2,
    "interval_s": 0.1,
    "scrape_interval_s": 0.05,
    "scale_up": {"policies": [{"kind": "pods", "value": 2, "period_s": 0.1}]},
    "scale_down": {
        "stabilization_s": 0.3,
        "policies": [{"kind": "percent", "value": 50, "period_s": 0.1}],
    },
}


def simulation_of(
    generation: str = "v1",
    *,
    kind: str = "least_requests",
    replicas: int = 1,
    stepwise: bool = False,
    events: list[dict[str, Any]] | None = None,
    workload: dict[str, Any] | None = None,
    num_requests: int = 150,
    **more: Any,
) -> Simulation:
    fleet = fleet_of(replicas, kind) | {"autoscaler": QUICK | more}
    if events:
        fleet["events"] = events
    data = data_of(GENERATIONS[generation], fleet, num_requests, 60.0)
    if workload is not None:
        data["workload"] = workload
    return Simulation(parse_config(data), stepwise=stepwise)


def states_of(simulation: Simulation) -> list[tuple[float, int, ReplicaState]]:
    assert isinstance(simulation.engine, Replicas)
    return simulation.engine.roster.changes


# -- the rule --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "num_missing", "current", "expected"),
    [
        ([200.0] * 3, 0, 3, 6),
        ([50.0] * 4, 0, 4, 2),
        ([51.0] * 4, 0, 4, 3),
        ([109.0] * 7, 0, 7, 7),  # within the tolerance
        ([91.0] * 7, 0, 7, 7),
        ([111.0] * 7, 0, 7, 8),
        ([], 3, 3, None),
        ([300.0], 1, 2, 3),  # the one that starts counts as idle
        ([200.0], 1, 2, 2),
        ([120.0], 3, 4, 4),  # with those that start it would be too many
        ([20.0, 20.0], 2, 4, 3),  # and as at the target where fewer would do
        ([0.0] * 4, 0, 4, 0),
    ],
)
def test_the_recommendation(
    values: list[float], num_missing: int, current: int, expected: int | None
) -> None:
    assert recommended(values, num_missing, current, 100.0, 0.1) == expected


def decided(rule: TargetTracking, total: float, current: int, now_s: float) -> int:
    values = {IN_FLIGHT: [total / current] * current}
    return rule.decide(now_s, current, values, 0)


def test_the_defaults_are_those_of_kubernetes() -> None:
    """Twice as many or four more in 15 s; fewer after five minutes, all at once."""
    rule = TargetTracking({IN_FLIGHT: 1.0}, 1, 100)
    current, seen = 2, []
    for number in range(40):
        current = decided(rule, 60.0 if number < 10 else 3.0, current, 15.0 * number)
        seen.append(current)
    assert seen[:10] == [6, 12, 24, 48, 60, 60, 60, 60, 60, 60]
    assert seen[10:29] == [60] * 19
    assert seen[29:] == [3] * 11


def test_policies_limit_what_changes_in_their_period() -> None:
    slow = Behaviour((Policy(PolicyKind.PODS, 3, 60.0),))
    least = Behaviour(
        (Policy(PolicyKind.PODS, 5, 15.0), Policy(PolicyKind.PERCENT, 10, 15.0)),
        select=Select.MIN,
    )
    rule = TargetTracking({IN_FLIGHT: 1.0}, 1, 100, 0.1, slow, least)
    current, seen = 10, []
    for number in range(9):
        current = decided(rule, 90.0, current, 15.0 * number)
        seen.append(current)
    assert seen == [13, 13, 13, 13, 16, 16, 16, 16, 19]
    assert decided(rule, 1.0, 40, 1000.0) == 36
    never = Behaviour(least.policies, select=Select.DISABLED)
    rule = TargetTracking({IN_FLIGHT: 1.0}, 1, 100, 0.1, slow, never)
    assert decided(rule, 1.0, 40, 0.0) == 40


def test_a_window_before_more_waits_for_load_that_lasts() -> None:
    calm = Behaviour((Policy(PolicyKind.PODS, 50, 15.0),), stabilization_s=60.0)
    rule = TargetTracking({IN_FLIGHT: 1.0}, 1, 100, scale_up=calm)
    seen = [decided(rule, t, 5, 15.0 * i) for i, t in enumerate([5, 50, 5, 50, 20])]
    assert seen == [5] * 5
    seen = [decided(rule, 20, 5, 75.0 + 15.0 * i) for i in range(4)]
    assert seen == [5, 20, 20, 20]


def test_the_metric_that_needs_most_replicas_holds() -> None:
    rule = TargetTracking({IN_FLIGHT: 10.0, Metric.KV_CACHE_USAGE: 0.5}, 1, 100)
    values = {IN_FLIGHT: [5.0] * 4, Metric.KV_CACHE_USAGE: [0.75] * 4}
    assert rule.decide(0.0, 4, values, 0) == 6
    assert rule.decide(15.0, 200, values, 0) == 100  # out of bounds: nothing else asked


@given(
    total=st.floats(0.0, 1000.0),
    more=st.floats(0.0, 1000.0),
    current=st.integers(1, 60),
    target=st.floats(0.5, 50.0),
)
def test_more_load_never_means_fewer_replicas(
    total: float, more: float, current: int, target: float
) -> None:
    low, high = (
        decided(TargetTracking({IN_FLIGHT: target}, 2, 60), load, current, 0.0)
        for load in (total, total + more)
    )
    assert 2 <= low <= high <= 60
    rule, number = TargetTracking({IN_FLIGHT: target}, 2, 60), max(current, 2)
    for step in range(60):
        number = decided(rule, total, number, 15.0 * step)
    wanted = min(max(ceil(total / target), 2), 60)
    assert number >= wanted - 0.1 * number - 1
    assert number * target <= total / 0.9 + 2 * target or number == 2


# -- fleets ----------------------------------------------------------------------------


def test_names_are_those_of_the_rule() -> None:
    for names, kinds in (
        (autoscaling.METRICS, Metric),
        (autoscaling.POLICY_KINDS, PolicyKind),
        (autoscaling.SELECTS, Select),
    ):
        assert names == tuple(each.value for each in kinds)


def test_replicas_come_with_traffic_and_go() -> None:
    simulation = simulation_of()
    results = checked(simulation)
    summary = results.summary
    (told,) = summary["autoscalers"]
    assert summary["completed"] == 150
    assert told["pool"] == "main"
    assert told["most_wanted"] > 1 == told["least_wanted"]
    assert "at most 5 engines" in summary["title"]
    requests = results.requests
    assert requests["engine"].nunique() == told["most_wanted"]
    begun: dict[int, float] = {}
    for time_s, place, state in states_of(simulation):
        if state is ReplicaState.STARTING:
            begun[place] = time_s
            assert time_s % 0.1 == pytest.approx(0.0, abs=1e-9) or time_s > 0
        elif state is ReplicaState.READY:
            assert time_s == pytest.approx(begun[place] + 0.2)
            own = requests[requests["engine"] == place]["arrival_s"]
            assert (own >= begun[place] + 0.2).all()
    assert sum(summary["up_s"]) < 5 * summary["duration"]


@pytest.mark.parametrize("target", Metric)
def test_each_metric_scales(target: Metric) -> None:
    goals = {
        Metric.WAITING_REQUESTS: 2,
        Metric.KV_CACHE_USAGE: 0.5,
        Metric.REQUESTS_IN_FLIGHT: 6,
        Metric.TOKENS_IN_FLIGHT: 1200,
    }
    fast, slow = (
        simulation_of(targets={target.value: goals[target]}, stepwise=way).run()
        for way in (False, True)
    )
    assert fast.summary["autoscalers"] == slow.summary["autoscalers"]
    assert fast.summary["autoscalers"][0]["most_wanted"] > 1
    _assert_same(fast, slow)


@pytest.mark.parametrize(
    ("generation", "kind"),
    [
        ("v1, scheduling ahead", "llm_d"),
        ("v1, 0.11", "sglang_cache_aware"),
        ("v0", "session"),
        pytest.param("v1, a pipeline", "round_robin", marks=pytest.mark.slow),
        pytest.param("gpt-oss", "ray_prefix", marks=pytest.mark.slow),
    ],
)
def test_stepwise_it_is_the_same(generation: str, kind: str) -> None:
    events = [event(0.6, "die", 0), event(0.9, "slow", 1, factor=2.0)]
    fast, slow = (
        simulation_of(generation, kind=kind, events=events, stepwise=way).run()
        for way in (False, True)
    )
    assert fast.summary["completed"] == 150
    assert len(fast.summary["events"]) == 2
    _assert_same(fast, slow)


def test_one_that_never_scales_is_the_fixed_fleet() -> None:
    """A metamorphic law: as many at least as at most."""
    for kind in ("round_robin", "least_requests", "llm_d"):
        scaled = simulation_of(
            kind=kind, replicas=3, min_replicas=3, max_replicas=3
        ).run()
        data = data_of(GENERATIONS["v1"], fleet_of(3, kind), 150, 60.0)
        _assert_same(scaled, Simulation(parse_config(data)).run())
        assert scaled.summary["autoscalers"][0]["num_scale_ups"] == 0


def test_a_shorter_start_and_more_replicas_never_wait_longer() -> None:
    waits = [
        simulation_of(start_s=start_s, max_replicas=most).run().requests["queue_s"]
        for start_s, most in ((1.0, 1), (1.0, 5), (0.01, 5))
    ]
    one, late, early = (float(each.mean()) for each in waits)
    assert early < late < one


def test_a_fleet_may_scale_to_zero_and_back() -> None:
    """Sessions that begin one after the other, long after the one before has ended."""
    workload = {
        "synthetic": {
            "num_requests": 6,
            "arrivals": {"kind": "constant", "rate": 0.2},
            "prompt_tokens": {"kind": "fixed", "tokens": 60},
            "output_tokens": {"kind": "fixed", "tokens": 20},
        }
    }
    simulation = simulation_of(workload=workload, min_replicas=0, cooldown_s=1.0)
    results = checked(simulation)
    assert results.summary["completed"] == 6
    assert results.summary["autoscalers"][0]["least_wanted"] == 0
    starts = [s for s, _, state in states_of(simulation) if state.value == "starting"]
    assert len(starts) == 5  # the first one comes to the replica that is there
    waits = results.requests["queue_s"][1:]
    assert (waits > 0.2).all()  # for the decision, and for the start
    assert (waits < 0.2 + 0.1 + 0.1).all()
    assert results.summary["up_s"][0] < 0.6 * results.summary["duration"]


def test_a_fleet_without_requests_yet_scales_to_zero() -> None:
    workload = {
        "synthetic": {
            "num_requests": 3,
            "arrivals": {"kind": "poisson", "rate": 0.1},
            "prompt_tokens": {"kind": "fixed", "tokens": 60},
            "output_tokens": {"kind": "fixed", "tokens": 20},
        }
    }
    results = checked(simulation_of(workload=workload, min_replicas=0, cooldown_s=1.0))
    assert results.requests["arrival_s"][0] > 2
    assert results.requests["queue_s"][0] > 0.2  # for the decision, and for the start
    assert results.summary["autoscalers"][0]["least_wanted"] == 0


def test_without_a_cooldown_the_last_one_goes_when_it_is_idle() -> None:
    """Not while a request is in flight, or waits for an engine to be there."""
    results = checked(simulation_of(min_replicas=0, cooldown_s=0.0, num_requests=60))
    assert results.summary["completed"] == 60
    assert not results.summary["stalled"]


def test_a_replica_that_dies_is_replaced() -> None:
    simulation = simulation_of(
        replicas=2, min_replicas=2, max_replicas=2, events=[event(0.5, "die", 0)]
    )
    results = checked(simulation)
    assert results.summary["completed"] == 150
    assert results.summary["num_retried"] > 0
    own = [(s, state) for s, place, state in states_of(simulation) if place == 0]
    assert [state.value for _, state in own] == ["dying", "off", "starting", "ready"]
    assert own[3][0] - own[2][0] == pytest.approx(0.2)
    assert own[2][0] == own[1][0]


def test_what_a_drain_does_not_end_in_time_begins_again() -> None:
    down = {"scale_down": {"stabilization_s": 0.0}}
    patient, hasty = (
        simulation_of(
            replicas=5, targets={"requests_in_flight": 60}, drain_s=drain_s, **down
        ).run()
        for drain_s in (None, 0.02)
    )
    assert patient.summary["num_retried"] == 0 < hasty.summary["num_retried"]
    for each in (patient, hasty):
        assert each.summary["completed"] == 150


def test_prefillers_and_decoders_scale_by_themselves() -> None:
    fleet = {
        "pools": [
            {"name": "prefill", "replicas": 1, "role": "prefill"},
            {"name": "decode", "replicas": 1, "role": "decode"},
        ],
        "router": {"kind": "least_requests"},
        "decode_router": {"kind": "least_requests"},
        "links": {"bytes_per_s": 1e9},
        "autoscaler": [
            QUICK | {"pool": "prefill", "targets": {"waiting_requests": 1}},
            QUICK | {"pool": "decode"},
        ],
    }
    data = data_of(GENERATIONS["v1"], fleet, 90, 60.0)
    fast, slow = (
        Simulation(parse_config(data), stepwise=way).run() for way in (False, True)
    )
    assert fast.summary["completed"] == 90
    told = fast.summary["autoscalers"]
    assert [each["pool"] for each in told] == ["prefill", "decode"]
    assert all(each["most_wanted"] > 1 for each in told)
    _assert_same(fast, slow)


def test_clients_in_a_closed_loop_find_replicas() -> None:
    for target in (1, 3):
        simulation = simulation_of(
            kind="session", workload=SESSIONS, targets={"requests_in_flight": target}
        )
        assert checked(simulation).summary["completed"] == 36


def test_a_stuck_queue_ends_the_run() -> None:
    tight = {"num_gpu_blocks_override": 20, "admission_check": False}
    data = data_of(GENERATIONS["v1"] | tight, None, 3, 60.0)
    data["workload"]["synthetic"]["prompt_tokens"] = {"kind": "fixed", "tokens": 900}
    data["fleet"] = fleet_of(1, "llm_d") | {"autoscaler": QUICK}
    summary = Simulation(parse_config(data)).run().summary
    assert summary["stalled"]


def test_a_queue_that_is_stuck_as_its_replica_drains_ends_the_run() -> None:
    """The autoscaler waited for the drain for ever: requests beyond the length run."""
    limits = {"max_model_len": 300, "max_num_batched_tokens": 24}
    limits |= {"admission_check": False, "async_scheduling": False}
    data = data_of(GENERATIONS["v1"] | limits, None, 6, 60.0)
    data["workload"]["synthetic"]["prompt_tokens"] = {"kind": "fixed", "tokens": 400}
    fleet = fleet_of(2, "round_robin")
    data["fleet"] = fleet | {"autoscaler": QUICK | {"cooldown_s": 10.0}}
    simulation = Simulation(parse_config(data))
    simulation.env.run(until=500.0)
    assert ReplicaState.DRAINING in simulation.engine.roster.states
    assert simulation.engine.autoscalers[0].next_s == inf
    assert simulation.run().summary["stalled"]


def test_one_that_flaps_is_warned_of() -> None:
    nervous = {
        "targets": {"requests_in_flight": 3},
        "tolerance": 0.0,
        "scale_down": {"stabilization_s": 0.0},
    }
    warned = simulation_of(num_requests=400, **nervous).run().summary
    (line,) = [each for each in warned["warnings"] if "flaps" in each]
    assert "raise scale_down.stabilization_s" in line
    assert warned["autoscalers"][0]["most_reversals_an_hour"] >= 6
    calm = simulation_of().run().summary
    assert not [each for each in calm["warnings"] if "flaps" in each]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    generation=st.sampled_from(sorted(GENERATIONS)),
    kind=st.sampled_from(sorted(set(ROUTERS) - {"vllm_dp"})),
    target=st.sampled_from(sorted(autoscaling.METRICS)),
    goal=st.floats(0.02, 0.9),
    least=st.integers(0, 2),
    most=st.integers(2, 5),
    start_s=st.sampled_from([0.0, 0.05, 0.4]),
    drain_s=st.sampled_from([None, 0.01, 0.3]),
    deaths=st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 1)), max_size=3),
)
def test_no_request_and_no_block_is_lost(  # noqa: PLR0917 - what is drawn
    generation: str,
    kind: str,
    target: str,
    goal: float,
    least: int,
    most: int,
    start_s: float,
    drain_s: float | None,
    deaths: list[tuple[int, int]],
) -> None:
    is_v1 = "scheduler" not in GENERATIONS[generation]
    assume(is_v1 or kind != "dynamo_kv")  # others do not tell what they cache
    scale = {"kv_cache_usage": 1.0, "tokens_in_flight": 4000.0}.get(target, 20.0)
    simulation = simulation_of(
        generation,
        kind=kind,
        replicas=max(least, 1),
        targets={target: goal * scale},
        min_replicas=least,
        max_replicas=most,
        start_s=start_s,
        drain_s=drain_s,
        cooldown_s=0.3,
        scale_down={"stabilization_s": 0.1},
        events=[event(time / 1000, "die", place) for time, place in deaths],
        num_requests=100,
    )
    results = checked(simulation)
    assert results.requests["request_id"].tolist() == list(range(100))
    assert results.summary["completed"] == 100
    assert not results.summary["stalled"]
    longest_s = results.summary["duration"] * (1.0 + 1e-12)  # of pieces that add up
    assert np.all(np.array(results.summary["up_s"]) <= longest_s)


@pytest.mark.parametrize(
    ("more", "kind", "line"),
    [
        ({"targets": {"queue": 1}}, "random", "targets: must be of waiting_requests"),
        ({"targets": {"kv_cache_usage": 70}}, "random", "at most 1, got 70.*0.7 for"),
        ({"targets": {}}, "random", "targets: "),
        ({"min_replicas": 9}, "random", "min_replicas: must not be above max_replicas"),
        ({"pool": "other"}, "random", "autoscaler.pool: must be one of main, got"),
        ({"max_replica": 9}, "random", "max_replica: unknown key; did you mean 'max_r"),
        ({"scale_up": {"select": "all"}}, "random", "select: must be one of max, min"),
        ({"min_replicas": 2}, "random", "pools: main begins within the bounds .* 2 to"),
        (
            {"scale_up": {"policies": [{"kind": "pod", "value": 1, "period_s": 1}]}},
            "random",
            "kind: must be one of pods, percent, got 'pod'",
        ),
        ({}, "vllm_dp", "fleet.autoscaler: .* set_ready.*, which vllm_dp has not"),
    ],
)
def test_refused(more: dict[str, Any], kind: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        simulation_of(kind=kind, **more)
    assert "\n" not in str(refused.value)


def test_null_is_no_autoscaler() -> None:
    """As where a run file has the key and nothing behind it: it was a traceback."""
    data = data_of(GENERATIONS["v1"], fleet_of(1, "random"))
    empty = data | {"fleet": data["fleet"] | {"autoscaler": None}}
    assert parse_config(empty) == parse_config(data)


def test_events_that_an_autoscaler_does_itself_are_refused() -> None:
    with pytest.raises(ConfigError, match="which starts and drains it, got drain"):
        simulation_of(events=[event(1.0, "drain", 0)])


def _assert_same(one: Results, other: Results) -> None:
    for name, table in tables(one).items():
        order = ["engine", "step"] if name == "steps" else []
        mine, theirs = table, tables(other)[name]
        if order:
            mine, theirs = (
                each.sort_values(order, ignore_index=True) for each in (mine, theirs)
            )
        assert mine.equals(theirs), name
