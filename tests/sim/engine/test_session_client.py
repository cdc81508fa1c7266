"""Closed loops: follow-up turns and a bound on users, on the simulated clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.costs.constant import ConstantCost
from sim.errors import ConfigError
from sim.scheduler.generations import OURS
from sim.simulation.run import Simulation
from tests.identity.compare import assert_equal_paths
from tests.sim.build import Run
from tests.sim.closed_loops import chat_config, check_sending_times, listed, turn
from workloads.requests.chains import in_order


@pytest.mark.parametrize(
    "best_of",
    [{1: 0.5, 2: 0.5}, pytest.param(1, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("generation", OURS)
def test_a_turn_is_sent_a_think_time_after_the_answer(
    generation: str, best_of: Any
) -> None:
    config = parse_config(chat_config(generation, workload={"best_of": best_of}))
    simulation = Simulation(config)
    results = simulation.run(check_every=1)
    # SGLang holds room for the whole output of whatever it admits.
    least = 1 if generation == "sglang" else 6
    assert results.summary["num_preemptions"] >= least
    assert results.summary["completed"] == simulation.num_requests
    assert check_sending_times(simulation, results.requests) > 20
    # Ids of the engine are numbers in the order of sending.
    assert results.requests["arrival_s"].is_monotonic_increasing
    assert results.requests["request_id"].tolist() == list(range(len(results.requests)))


def test_what_is_joined_to_the_requests() -> None:
    priority = {0: 0.5, 2: 0.5}
    workload = {"priority": priority, "slo_class": {"chat": 0.5, "batch": 0.5}}
    simulation = Simulation(parse_config(chat_config(workload=workload)))
    results = simulation.run()
    for row in results.requests.itertuples():
        request = simulation.specs[row.parent_id]
        facts = (row.session_id, row.priority, row.slo_class)
        assert facts == (request.session_id, request.priority, request.slo_class)
        turns = 0
        while request.previous_id is not None:
            request = simulation.specs[request.previous_id]
            turns += 1
        assert row.turn == turns
    summary = results.summary
    assert summary["sessions"]["num_sessions"] == 25
    assert summary["sessions"]["num_completed"] == 25
    assert summary["sessions"]["num_turns"] == len(simulation.specs)
    spans = results.requests.groupby("session_id").agg(
        {"arrival_s": "min", "finish_s": "max"}
    )
    durations_s = spans["finish_s"] - spans["arrival_s"]
    assert summary["sessions"]["mean_duration_s"] == pytest.approx(durations_s.mean())
    assert summary["sessions"]["max_duration_s"] == durations_s.max()
    classes = summary["by_slo_class"]
    assert list(classes) == ["batch", "chat"]
    of_chat = results.requests[results.requests["slo_class"] == "chat"]
    assert classes["chat"]["completed"] == len(of_chat)
    assert classes["chat"]["mean_ttft_ms"] == pytest.approx(
        1e3 * of_chat["ttft_s"].mean()
    )


def test_columns_are_joined_without_sessions() -> None:
    data = chat_config(workload={"slo_class": {"a": 0.5, "b": 0.5}, "priority": 7})
    del data["workload"]["sessions"]
    data["workload"]["preset"] = {"name": "azure_conv_2023", "num_requests": 30}
    data["engine"] |= {"num_gpu_blocks_override": 2000, "max_model_len": 9000}
    simulation = Simulation(parse_config(data))
    results = simulation.run()
    requests = results.requests
    assert set(requests["session_id"]) == {-1}
    assert (set(requests["turn"]), set(requests["priority"])) == ({0}, {7})
    assert requests["slo_class"].tolist() == [s.slo_class for s in simulation.specs]
    assert set(requests["slo_class"]) == {"a", "b"}
    assert "sessions" not in results.summary
    assert results.summary["path"] == "fast"


def test_later_turns_find_the_blocks_of_earlier_ones() -> None:
    first, answer = ((0, 40),), (1, 30)
    second = (*first, answer, (2, 20))
    specs = [
        turn(0, None, 0.0, 40, 30),
        turn(1, 0, 5.0, 0, 10, prompt=second),
        turn(2, 1, 5.0, 0, 10, prompt=(*second, (3, 10), (4, 6))),
    ]
    run = Run(specs, enable_prefix_caching=True)
    requests = run.go().requests
    # The last token of an answer is never computed: 69 of 70 tokens, 4 full blocks;
    # then 99 of 100, 6 blocks.
    assert requests["num_prompt_tokens"].tolist() == [40, 90, 106]
    assert requests["num_cached_tokens"].tolist() == [0, 64, 96]


def test_an_answer_that_was_cut_is_quoted_as_the_workload_says() -> None:
    """Quoting more than was generated costs a hit there, and nothing else."""
    prompt = ((0, 64), (1, 60), (2, 10))
    specs = [
        turn(0, None, 0.0, 64, 60, max_tokens=20),
        turn(1, 0, 1.0, 0, 5, prompt=prompt),
    ]
    requests = Run(specs, enable_prefix_caching=True).go().requests
    assert requests["status"].tolist() == ["finished_length_capped", "finished_stopped"]
    assert requests["num_prompt_tokens"].tolist() == [64, 134]
    # 83 tokens were computed, 5 full blocks.
    assert requests["num_cached_tokens"].tolist() == [0, 80]


def test_users_wait_for_each_other_and_think() -> None:
    # Two users, steps of a second, answers of four tokens: four seconds each.
    specs = [turn(i, None, 3.0, 10, 4, at=0.5 * i) for i in range(3)]
    specs.append(turn(3, None, 3.0, 10, 4, at=30.0))
    run = Run(specs, max_concurrent_users=2)
    requests = run.go().requests
    # Users who have had no session send at once; the first to become free thinks for
    # three seconds. The last one arrives when everybody has thought enough.
    first_end_s = requests["finish_s"][0]
    assert first_end_s == 4.0
    assert requests["arrival_s"].tolist() == [0.0, 0.5, 7.0, 30.0]


def test_who_has_not_thought_enough_sends_later_than_the_arrival() -> None:
    specs = [turn(0, None, 0.0, 10, 4), turn(1, None, 3.0, 10, 4, at=5.0)]
    requests = Run(specs, max_concurrent_users=1).go().requests
    assert requests["arrival_s"].tolist() == [0.0, 7.0]  # 4 + 3, not 5


def test_a_user_is_busy_between_turns() -> None:
    specs = [
        turn(0, None, 0.0, 10, 2),
        turn(1, None, 0.0, 10, 2),
        turn(2, 0, 10.0, 10, 2, at=10.0),
    ]
    requests = Run(specs, max_concurrent_users=1).go().requests
    assert requests["parent_id"].tolist() == [0, 2, 1]
    assert requests["arrival_s"].tolist() == [0.0, 12.0, 14.0]


@pytest.mark.parametrize("lengths", [(30, 2), (2, 30)])
def test_side_by_side_requests_all_belong_to_the_session(
    lengths: tuple[int, int],
) -> None:
    specs = [
        turn(0, None, 0.0, 10, 2),
        turn(1, 0, 1.0, 10, lengths[0]),
        turn(2, 0, 1.5, 10, lengths[1]),
        turn(3, 2, 1.0, 10, 2),
        turn(4, None, 0.0, 10, 2, at=3.0),
    ]
    specs = in_order(specs)
    requests = Run(specs, max_concurrent_users=1).go().requests
    by_parent = requests.set_index("parent_id")
    assert by_parent["arrival_s"][[0, 1, 2]].tolist() == [0.0, 3.0, 3.5]
    # The session ends with the longest of its branches; only then comes the next.
    other = next(r for r in specs[1:] if r.previous_id is None)
    last = by_parent.loc[other.request_id]
    assert last["arrival_s"] == by_parent["finish_s"].drop(last.name).max() > 30


def test_the_user_who_is_free_for_longest_takes_the_next_session() -> None:
    specs = [turn(0, None, 0.0, 10, 2), turn(1, None, 0.0, 10, 6)]
    specs.append(turn(2, None, 5.0, 10, 2, at=7.0))
    requests = Run(specs, max_concurrent_users=2).go().requests
    assert requests["finish_s"].tolist()[:2] == [2.0, 6.0]
    assert requests["arrival_s"].tolist() == [0.0, 0.0, 7.0]  # 2 + 5, not 6 + 5


@pytest.mark.parametrize("samples", [{"beam_width": 2}, {"best_of": 3}])
def test_beams_and_samples_are_waited_for(samples: dict[str, int]) -> None:
    specs = [turn(0, None, 0.0, 20, 6, **samples), turn(1, 0, 2.5, 20, 3)]
    requests = Run(specs, enable_prefix_caching=True).go().requests
    ends_s = requests.groupby("parent_id")["finish_s"].max()
    assert requests["arrival_s"].iloc[-1] == ends_s[0] + 2.5
    assert requests["parent_id"].value_counts()[0] > 2


def test_after_a_rejection_the_session_ends() -> None:
    requests = [
        {"at": 0.0, "prompt": [[0, 30]], "out": 5, "seg": 1, "session_id": 0},
        {"at": 0.0, "prompt": [[2, 30]], "out": 5, "seg": 3, "session_id": 1},
        {"at": 1.0, "prompt": [[4, 900]], "out": 5, "seg": 5, "previous_id": 0},
        {"at": 1.0, "prompt": [[6, 30]], "out": 5, "seg": 7, "previous_id": 1},
        {"at": 2.0, "prompt": [[8, 30]], "out": 5, "seg": 9, "previous_id": 2},
        {"at": 2.0, "prompt": [[10, 30]], "out": 5, "seg": 11, "previous_id": 2},
        {"at": 3.0, "prompt": [[12, 30]], "out": 5, "seg": 13, "previous_id": 5},
    ]
    for request in requests[2:]:
        request |= {"delay_s": 1.0, "session_id": 0}
    requests[3]["session_id"] = 1
    results = Simulation(parse_config(listed(requests, best_of=2))).run(check_every=1)
    summary = results.summary
    assert (summary["num_requests"], summary["completed"]) == (14, 6)
    assert (summary["rejected"], summary["unsent"], summary["unfinished"]) == (2, 6, 0)
    assert any("6 of 14 requests were not sent" in w for w in summary["warnings"])
    assert summary["sessions"]["num_sessions"] == 2
    assert summary["sessions"]["num_completed"] == 1
    assert summary["sessions"]["num_turns"] == 4


def test_after_an_abort_the_session_ends() -> None:
    specs = [turn(0, None, 0.0, 10, 50), turn(1, 0, 1.0, 10, 5), turn(2, 1, 1.0, 9, 5)]
    run = Run(specs)

    def give_up(engine: Any) -> None:
        if engine.num_steps == 10:
            engine.abort(run.recorder.active[0], "the user went away")

    run.engine.observe(1, give_up)
    requests = run.go().requests
    assert requests["status"].tolist() == ["finished_aborted"]


def test_a_stopped_run_counts_what_was_not_sent() -> None:
    simulation = Simulation(parse_config(chat_config()))

    def stop(engine: Any) -> None:
        if engine.num_steps == 150:
            simulation.stop()

    simulation.engine.observe(1, stop)
    summary = simulation.run().summary
    assert summary["interrupted"]
    assert summary["unsent"] > 0
    assert summary["unfinished"] > 0
    parts = ("completed", "rejected", "aborted", "unsent", "unfinished")
    assert sum(summary[part] for part in parts) == summary["num_requests"]
    assert not any("not sent" in line for line in summary["warnings"])


def test_a_stall_is_told_of_sessions_too() -> None:
    requests = [
        {"at": 0.0, "prompt": [[0, 30]], "out": 5, "seg": 1},
        {"at": 1.0, "prompt": [[2, 5000]], "out": 5, "seg": 3, "previous_id": 0},
        {"at": 2.0, "prompt": [[4, 30]], "out": 5, "seg": 5, "previous_id": 1},
    ]
    data = listed(requests, max_concurrent_users=1)
    data["engine"] |= {"admission_check": False, "max_model_len": 6000}
    summary = Simulation(parse_config(data)).run().summary
    assert summary["stalled"]
    facts = (summary["completed"], summary["unfinished"], summary["unsent"])
    assert facts == (1, 1, 1)


@pytest.mark.parametrize("num_users", [1, 3, 8])
def test_no_more_users_than_allowed(num_users: int) -> None:
    config = parse_config(chat_config(workload={"max_concurrent_users": num_users}))
    simulation = Simulation(config)
    results = simulation.run(check_every=1)
    assert results.summary["completed"] == len(simulation.specs)
    spans = results.requests.groupby("session_id").agg(
        begin_s=("arrival_s", "min"), end_s=("finish_s", "max")
    )
    begins, ends = (np.sort(spans[name]) for name in ("begin_s", "end_s"))
    # A session that ends makes room for one that begins at that very time.
    in_progress = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, "right")
    assert in_progress.max() == num_users
    assert check_sending_times(simulation, results.requests) > 20
    assert not any("overloaded" in line for line in results.summary["warnings"])


def test_more_users_than_anybody_needs_are_as_good_as_no_bound() -> None:
    free = Simulation(parse_config(chat_config())).run()
    workload = {"max_concurrent_users": 10**15}
    bounded = Simulation(parse_config(chat_config(workload=workload))).run()
    assert bounded.requests.equals(free.requests)


def test_single_requests_count_as_sessions_of_their_own() -> None:
    data = chat_config(workload={"max_concurrent_users": 2})
    del data["workload"]["sessions"]
    data["workload"]["synthetic"] = {
        "num_requests": 40,
        "arrivals": {"kind": "burst", "burst_size": 40, "interval_s": 1.0},
        "prompt_tokens": {"kind": "uniform", "low": 5, "high": 60},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
    }
    simulation = Simulation(parse_config(data))
    results = simulation.run(check_every=1)
    assert results.summary["num_running_max"] == 2
    assert results.summary["completed"] == 40


def test_beams_of_sessions_are_equal_on_both_paths() -> None:
    data = chat_config()
    data["workload"]["beam_width"] = 2
    compared = assert_equal_paths(parse_config(data))
    assert compared.chosen.path == "fast"


def test_a_longer_answer_changes_nothing_before_it_shows() -> None:
    """Invariant 4, for turns that follow from an answer: no policy knows its length."""
    data = chat_config()
    del data["workload"]["max_tokens"]
    plain = Simulation(parse_config(data))
    previous = {request.previous_id for request in plain.specs}
    # In the middle of a conversation: it waited for an answer, and is waited for.
    changed = next(r for r in plain.specs if r.previous_id and r.request_id in previous)
    specs = list(plain.specs)
    specs[changed.request_id] = changed._replace(
        num_output_tokens=changed.num_output_tokens + 40
    )
    longer = Simulation(parse_config(data), specs=specs)
    before, after = plain.run(), longer.run()
    rows = before.requests
    end_s = rows["finish_s"][rows["parent_id"] == changed.request_id].iloc[0]
    steps = [each.steps[each.steps["start_s"] < end_s] for each in (before, after)]
    assert len(steps[0]) > 50
    columns = [name for name in steps[0] if name != "num_finished"]
    assert steps[0][columns].equals(steps[1][columns])
    assert not before.steps["start_s"].equals(after.steps["start_s"])


@st.composite
def random_chains(draw: st.DrawFn) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 14))):
        request: dict[str, Any] = {
            "at": draw(st.sampled_from([0.0, 0.01, 0.25])),
            "prompt": [[2 * number, draw(st.integers(1, 120))]],
            "out": draw(st.integers(1, 40)),
            "seg": 2 * number + 1,
            "best_of": draw(st.sampled_from([1, 1, 1, 2, 3])),
        }
        if number and draw(st.booleans()):
            before = draw(st.integers(0, number - 1))
            request["previous_id"] = before
            request["delay_s"] = draw(st.sampled_from([0.0, 0.005, 0.01, 0.5]))
            history = requests[before]
            quoted = [history["seg"], draw(st.integers(1, 40))]
            request["prompt"] = [*history["prompt"], quoted, *request["prompt"]]
            request["at"] = history["at"] + request["delay_s"]
        else:
            request["delay_s"] = draw(st.sampled_from([0.0, 0.02]))
        requests.append(request)
    return requests


@settings(max_examples=40, deadline=None)
@given(
    random_chains(),
    st.sampled_from(list(OURS)),
    st.none() | st.integers(1, 3),
    st.booleans(),
)
def test_whatever_the_chains_no_request_is_lost(
    requests: list[dict[str, Any]], generation: str, num_users: int | None, tiny: bool
) -> None:
    order = sorted(range(len(requests)), key=lambda i: (requests[i]["at"], i))
    numbers = {old: new for new, old in enumerate(order)}
    ordered = [dict(requests[old]) for old in order]
    for request in ordered:
        if "previous_id" in request:
            request["previous_id"] = numbers[request["previous_id"]]
    data = listed(ordered, max_tokens=40, max_concurrent_users=num_users)
    data["engine"] |= {
        "scheduler": generation,
        "num_gpu_blocks_override": 24 if tiny else 60,
        "max_model_len": 200 if tiny else 400,
    }
    simulation = Simulation(parse_config(data))
    try:
        results = simulation.run(check_every=1)
    except ConfigError:  # every single one was rejected
        assert simulation.recorder.num_left == simulation.recorder.num_arrived > 0
        return
    summary = results.summary
    assert not summary["stalled"]
    assert summary["unfinished"] == 0
    total = summary["completed"] + summary["rejected"] + summary["unsent"]
    assert total == summary["num_requests"] == simulation.num_requests
    check_sending_times(simulation, results.requests)


def test_ties_are_seen_by_the_next_scheduler_call() -> None:
    """A think time that ends with a step comes before the next scheduler call."""
    specs = [
        turn(0, None, 0.0, 10, 2),
        turn(1, 0, 3.0, 10, 1),
        turn(2, None, 0.0, 10, 9),
    ]
    run = Run(
        sorted(specs, key=lambda s: s.previous_id is not None), ConstantCost(step_s=1.0)
    )
    requests = run.go().requests.set_index("parent_id")
    assert requests["arrival_s"][1] == 5.0
    assert requests["first_scheduled_s"][1] == 5.0


@pytest.mark.parametrize("generation", ["v1", "v0"])
def test_a_generated_chat_finds_its_history(generation: str) -> None:
    data = chat_config(generation, engine={"enable_prefix_caching": True})
    data["workload"]["sessions"] |= {
        "num_sessions": 1,
        "turns": {"kind": "fixed", "number": 3},
        "first_prompt_tokens": {"kind": "fixed", "tokens": 40},
        "prompt_tokens": {"kind": "fixed", "tokens": 20},
        "output_tokens": {"kind": "fixed", "tokens": 30},
    }
    requests = Simulation(parse_config(data)).run(check_every=1).requests
    assert requests["num_prompt_tokens"].tolist() == [40, 90, 140]
    # Blocks of 16: of 69 computed tokens 4 are full, of 119 there are 7.
    assert requests["num_cached_tokens"].tolist() == [0, 64, 112]
