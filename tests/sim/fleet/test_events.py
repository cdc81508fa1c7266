"""Engines of a fleet that die, are slow, drained, and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.engine.steps.in_flight import AheadQuietSteps
from sim.errors import ConfigError
from sim.fleet.engines import Engines
from sim.fleet.replicas import DIED, NONE_READY, Replicas
from sim.fleet.roster import ReplicaState
from sim.fleet.routers import ROUTERS
from sim.results.fleet.summary import fleet_rows
from sim.scheduler.sglang.scheduler import SglangScheduler
from sim.simulation.run import Simulation
from tests.sim.fleet.test_run import GENERATIONS, SESSIONS, data_of, fleet_of, tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.results.run import Results

Event = dict[str, Any]


def event(time_s: float, kind: str, engine: int, **more: Any) -> Event:
    return {"time_s": time_s, "kind": kind, "engine": engine} | more


EVENTS = [
    event(0.3, "slow", 2, factor=3.0),
    event(0.5, "die", 1),
    event(0.8, "drain", 0),
    event(0.9, "slow", 2, factor=1.0),
    event(1.2, "start", 1),
    event(1.5, "start", 0),
]


def simulation_of(
    events: Sequence[Event],
    generation: str = "v1",
    *,
    kind: str = "round_robin",
    replicas: int = 3,
    stepwise: bool = False,
) -> Simulation:
    told: dict[str, Any] = {}
    if kind == "dynamo_kv" and not generation.startswith("v1"):
        told["use_kv_events"] = False  # these engines do not tell what they cache
    fleet = fleet_of(replicas, kind, **told) | {"events": list(events)}
    data = data_of(GENERATIONS[generation], fleet, 120, 60.0)
    return Simulation(parse_config(data), stepwise=stepwise)


def run(events: Sequence[Event], **more: Any) -> Results:
    return simulation_of(events, **more).run()


def proven(simulation: Simulation) -> Results:
    """Run with proofs after every few steps of the engines that are there at first."""
    engines = simulation.engine
    assert isinstance(engines, Engines)

    def check(_: object) -> None:
        simulation.check()
        assert engines.num_in_flight == len(simulation.recorder.active)

    for engine in engines.engines:
        engine.observe(5, check)
    return simulation.run(check_every=5)


def test_an_event_at_the_very_end_is_told() -> None:
    ended = simulation_of([])
    ended.run()
    end_s = ended.engine.env.now
    told = run([event(end_s, "slow", 0, factor=2.0)]).summary["events"]
    assert [each["time_s"] for each in told] == [end_s]


def test_an_engine_that_has_ended_may_die_while_another_ends() -> None:
    """All is served, and a step that was formed ahead is under way elsewhere."""
    slow = event(0.1, "slow", 1, factor=30.0)
    ended = simulation_of([slow], replicas=2)
    ended.run()
    late_s = ended.engine.env.now - 1e-6
    summary = run([slow, event(late_s, "die", 0)], replicas=2).summary
    assert summary["completed"] == 120
    assert summary["up_s"][0] == late_s


def checked(simulation: Simulation) -> Results:
    """Run with proofs, the last one of all engines that there were."""
    engines = simulation.engine
    assert isinstance(engines, Replicas)
    results = proven(simulation)
    for place in range(len(engines.engines)):
        for engine in engines.all_at(place):
            engine.scheduler.check()
            # SGLang's requests end with their next token, which a dead engine never has
            is_on = engine is engines.engines[place] and (
                engines.roster.states[place] is not ReplicaState.OFF
            )
            if is_on or not isinstance(engine.scheduler, SglangScheduler):
                assert engine.scheduler.cache_usage().num_physical_blocks == 0
    return results


@pytest.mark.parametrize(
    ("generation", "kind"),
    [
        ("v1", "llm_d"),
        ("v1, 0.11", "sglang_cache_aware"),
        ("v0", "aibrix_prefix"),
        ("sglang", "sglang_cache_aware"),
        pytest.param("v1, a pipeline", "power_of_two", marks=pytest.mark.slow),
        pytest.param("gpt-oss", "ray_prefix", marks=pytest.mark.slow),
    ],
)
def test_stepwise_it_is_the_same(generation: str, kind: str) -> None:
    fast, slow = (
        run(EVENTS, generation=generation, kind=kind, stepwise=way)
        for way in (False, True)
    )
    assert fast.summary["completed"] == 120
    assert fast.summary["num_retried"] > 0
    for name, table in tables(fast).items():
        order = ["engine", "step"] if name == "steps" else []
        one, other = table, tables(slow)[name]
        if order:
            one, other = (
                each.sort_values(order, ignore_index=True) for each in (one, other)
            )
        assert one.equals(other), name


def test_without_an_event_it_is_the_same_fleet() -> None:
    later = [event(1e6, "die", 1)]
    for kind in ("round_robin", "llm_d"):
        one = run(later, kind=kind)
        plain = fleet_of(3, kind)
        alone = Simulation(
            parse_config(data_of(GENERATIONS["v1"], plain, 120, 60.0))
        ).run()
        for name, table in tables(one).items():
            order = ["engine", "step"] if name == "steps" else []
            mine, theirs = table, tables(alone)[name]
            if order:
                mine, theirs = (
                    each.sort_values(order, ignore_index=True)
                    for each in (mine, theirs)
                )
            assert mine.equals(theirs), (kind, name)
        assert one.summary["events"] == []


def test_requests_of_a_dead_engine_begin_again_elsewhere() -> None:
    results = run([event(0.5, "die", 1)])
    summary, requests = results.summary, results.requests
    assert requests["request_id"].tolist() == list(range(120))
    assert summary["completed"] == 120
    (death,) = summary["events"]
    assert death["num_retried"] == summary["num_retried"] > 0 == summary["num_lost"]
    of_dead = requests[requests["engine"] == 1]
    assert (of_dead["finish_s"] <= summary["up_s"][1]).all()
    assert 0.5 <= summary["up_s"][1] < 0.6
    moved = requests[
        (requests["request_id"] % 3 == 1)
        & (requests["arrival_s"] < 0.5)
        & (requests["engine"] != 1)
    ]
    assert len(moved) == summary["num_retried"]
    assert (moved["first_token_s"] > 0.5).all()
    assert (
        "events",
        f"1 died, {len(moved)} requests began again, 0 lost",
    ) in fleet_rows(summary)


def test_requests_of_a_dead_engine_are_lost() -> None:
    results = run([event(0.5, "die", 1, requests="lose")])
    summary, requests = results.summary, results.requests
    lost = requests[requests["reason"] == DIED]
    assert len(lost) == summary["num_lost"] > 0 == summary["num_retried"]
    assert (lost["engine"] == 1).all()
    assert summary["completed"] == 120 - len(lost)


@pytest.mark.parametrize("generation", ["v1", "v1, a pipeline", "v0"])
def test_a_dead_engine_is_there_until_its_last_step_ends(generation: str) -> None:
    """Where steps are formed ahead, as by v1, a second one is under way."""
    events = [event(0.5, "die", 1, requests="lose"), event(1.0, "die", 0)]
    results = simulation_of(events, generation).run()
    summary, steps = results.summary, results.steps
    ends_s = steps.get("output_s", steps["start_s"] + steps["latency_s"])
    ends_s = ends_s.groupby(steps["engine"]).max()
    busy_s = [each["busy_s"] for each in summary["engines"]]
    for place, up_s in enumerate(summary["up_s"]):
        assert up_s >= busy_s[place] - 1e-9
        assert up_s >= ends_s[place] - 1e-9
        assert busy_s[place] <= summary["duration"]
    assert max(ends_s) <= summary["duration"] + 1e-9
    assert max(ends_s[:2]) < summary["duration"]


def test_a_drained_engine_serves_what_it_has_and_comes_back_empty() -> None:
    results = run([event(0.5, "drain", 0), event(1.6, "start", 0)])
    requests = results.requests
    own = requests[requests["engine"] == 0]
    assert not own["arrival_s"].between(0.5, 1.6).any()
    before = own[own["arrival_s"] < 0.5]
    assert len(before) == len(requests[requests["arrival_s"] < 0.5]) // 3 + (
        len(requests[requests["arrival_s"] < 0.5]) % 3 > 0
    )
    assert (own["arrival_s"] > 1.6).any()
    assert results.summary["completed"] == 120
    steps = results.steps[results.steps["engine"] == 0]
    assert steps["step"].tolist() == list(range(len(steps)))


def test_a_slow_engine_takes_so_many_times_as_long() -> None:
    slow = [event(0.0, "slow", 0, factor=2.0)]
    for generation in ("v1, 0.11", "v0"):
        one = run(slow, generation=generation, replicas=1)
        fleet = fleet_of(1, "round_robin")
        plain = Simulation(
            parse_config(data_of(GENERATIONS[generation], fleet, 120, 60.0))
        )
        first, usual = one.steps.iloc[0], plain.run().steps.iloc[0]
        for name in ("latency_s", "host_s", "gemm_s", "latency_hi_s"):
            assert first[name] == 2 * usual[name]
        assert one.summary["path"] == "fast"


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_dead_fleet_lets_requests_wait_or_rejects_them(*, comes_back: bool) -> None:
    events = [event(0.5, "die", each) for each in range(3)]
    if comes_back:
        events.append(event(3.0, "start", 2))
    results = run(events)
    requests, summary = results.requests, results.summary
    late = requests[requests["finish_s"].isna() | (requests["finish_s"] > 0.6)]
    assert len(late) > 60
    if comes_back:
        assert summary["completed"] == 120
        assert (late["engine"] == 2).all()
        assert (late["first_scheduled_s"] >= 3.0).all()
    else:
        assert (late["reason"] == NONE_READY).all()
        assert len(late) == summary["num_refused"]
        assert any("none will be" in line for line in summary["warnings"])


def test_a_run_without_an_engine_is_refused_with_what_helps() -> None:
    events = [event(0.0, "die", place) for place in range(3)]
    with pytest.raises(ConfigError, match=r"; let an engine start again \(fleet\.ev"):
        run(events)


def test_an_engine_that_came_back_is_not_waited_for_once_more() -> None:
    events = [event(0.5, "die", 0), event(0.7, "start", 0), event(1.2, "die", 0)]
    results = run(events, replicas=1)
    requests, summary = results.requests, results.summary
    late = requests[requests["arrival_s"] > 1.2]
    assert len(late) > 30
    assert (late["reason"] == NONE_READY).all()
    assert not summary["stalled"]


def test_clients_that_wait_see_the_answer_of_the_second_try() -> None:
    fleet = fleet_of(3, "session") | {"events": [event(1.0, "die", 0)]}
    data = data_of(GENERATIONS["v1"], fleet) | {"workload": SESSIONS}
    assert checked(Simulation(parse_config(data))).summary["completed"] == 36


@pytest.mark.parametrize("generation", ["cacheflow", "v1"])
def test_dynamo_outlives_engines_that_tell_nothing(generation: str) -> None:
    results = checked(simulation_of(EVENTS, generation, kind="dynamo_kv"))
    assert results.summary["completed"] == 120


def fates() -> st.SearchStrategy[list[Event]]:
    """Draw events of three engines, each in turn off and on."""

    @st.composite
    def drawn(draw: st.DrawFn) -> list[Event]:
        events = []
        for engine in range(3):
            number = draw(st.integers(0, 5))
            times = draw(
                st.lists(st.integers(0, 3000), min_size=number, max_size=number)
            )
            is_on = True
            for time in sorted(times):
                if is_on and draw(st.integers(0, 3)) == 0:
                    factor = draw(st.sampled_from([0.5, 1.0, 7.0]))
                    events.append(event(time / 1000, "slow", engine, factor=factor))
                    continue
                kind = draw(st.sampled_from(["die", "drain"])) if is_on else "start"
                more: dict[str, Any] = {}
                if kind == "die":
                    more["requests"] = draw(st.sampled_from(["retry", "lose"]))
                events.append(event(time / 1000, kind, engine, **more))
                is_on = kind == "start"
        return events

    return drawn()


def test_a_proof_changes_nothing_in_an_engine_amid_its_step() -> None:
    """A step's end calls proofs of all engines, as another has formed a step."""
    events = [
        event(0.028, "slow", 1, factor=0.5),
        event(0.064, "slow", 2, factor=0.5),
        event(0.119, "slow", 1, factor=0.5),
        event(0.27, "drain", 1),
        event(1.121, "slow", 2, factor=1.0),
    ]
    results = checked(simulation_of(events, "sglang", kind="ray_prefix"))
    assert results.summary["completed"] == 120


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    events=fates().filter(bool),
    generation=st.sampled_from(sorted(GENERATIONS)),
    kind=st.sampled_from(sorted(set(ROUTERS) - {"vllm_dp"})),
)
def test_no_request_and_no_block_is_lost(
    events: list[Event], generation: str, kind: str
) -> None:
    simulation = simulation_of(events, generation, kind=kind)
    try:
        results = checked(simulation)
    except ConfigError as error:  # all three were off all the time
        assert NONE_READY in str(error)  # noqa: PT017
        return
    summary = results.summary
    assert results.requests["request_id"].tolist() == list(range(120))
    gone = summary["num_lost"] + summary["num_refused"]
    assert summary["completed"] + gone == 120
    assert not summary["stalled"]


@pytest.mark.parametrize(
    ("events", "kind", "line"),
    [
        ([event(1, "dye", 0)], "random", "kind: must be one of die, drain, start, slo"),
        ([event(1, "die", 3)], "random", "numbered from 0 to 2, .*, got 3"),
        ([event(1, "start", 0)], "random", "engine 0 is on already, got start at 1"),
        (
            [event(2, "drain", 0), event(1, "die", 0)],
            "random",
            "engine 0 is off by then, got drain at 2",
        ),
        ([event(1, "slow", 0)], "random", "factor: a slow engine needs it"),
        ([event(1, "slow", 0, factor=0)], "random", "factor: .* 0"),
        ([event(1, "drain", 0, factor=2.0)], "random", "factor: is a key of"),
        ([event(1, "die", 0, requests="keep")], "random", "one of retry, lose"),
        ([event(1, "die", 0)], "vllm_dp", "set_ready.*, which vllm_dp has not"),
    ],
)
def test_refused(events: list[Event], kind: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        simulation_of(events, kind=kind)
    assert "\n" not in str(refused.value)


def test_steps_ahead_go_on_when_requests_come_to_other_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stretch ends for what comes to its engine, or ends there, and for no other."""
    taken: dict[Any, int] = {}
    take = AheadQuietSteps.take

    def counting(self: Any, *arguments: Any) -> list[float]:
        taken[self] = taken.get(self, 0) + 1
        return take(self, *arguments)

    monkeypatch.setattr(AheadQuietSteps, "take", counting)
    engine = {"async_scheduling": True, "max_model_len": 1024}
    events = [event(0.5, "slow", 0, factor=1.0)]
    fleet = fleet_of(8, "round_robin") | {"events": events}
    config = parse_config(data_of(engine, fleet, 160, 40.0))
    fast = Simulation(config).run()
    assert sum(taken.values()) < 4 * 160  # of 160 x 8, were it for any of them
    slow = Simulation(config, stepwise=True).run()
    assert fast.requests.equals(slow.requests)
