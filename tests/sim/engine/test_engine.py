"""The step loop: what happens when, on engines small enough to follow by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.costs.base import StepCost
from sim.errors import CostError
from sim.scheduler.base import CacheUsage, SchedulerOutput
from sim.scheduler.v1 import V1Scheduler
from tests.shared import ROOT
from tests.sim.build import Run, spec

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import simpy

    from sim.engine.loop import Engine
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.request import Request


class PricePerToken:
    """A second a step and a tenth per token: batches show in the time."""

    def step(self, shape: BatchShape) -> StepCost:
        total_s = 1.0 + 0.1 * (shape.num_decodes + shape.num_prefill_tokens)
        return StepCost(total_s, gemm_s=total_s)

    def describe(self) -> dict[str, object]:
        return {}


def test_a_lone_request_by_hand() -> None:
    # Prefill of 20 tokens at 0.5 s, then two decodes.
    run = Run([spec(0, 0.5, 20, 3)], PricePerToken())
    recording = run.go()
    row = recording.requests.iloc[0]
    assert row["first_scheduled_s"] == 0.5
    assert row["first_token_s"] == pytest.approx(0.5 + 3.0)
    assert row["finish_s"] == pytest.approx(0.5 + 3.0 + 2 * 1.1)
    assert row["tpot_s"] == pytest.approx(1.1)
    assert row["status"] == "finished_stopped"
    assert list(recording.steps["num_batched_tokens"]) == [20, 1, 1]
    assert list(recording.steps["num_logical_tokens"]) == [20, 21, 22]
    assert list(recording.steps["num_physical_blocks"]) == [2, 2, 2]
    assert list(recording.steps["num_finished"]) == [0, 0, 1]


def test_arrivals_during_a_step_join_the_next_one_even_at_its_very_end() -> None:
    run = Run([spec(0, 0.0, 5, 3), spec(1, 0.3, 5, 1), spec(2, 1.0, 5, 1)])
    requests = run.go().requests
    assert list(requests["first_scheduled_s"]) == [0.0, 1.0, 1.0]


def test_a_long_prompt_comes_in_chunks_and_decodes_go_on() -> None:
    run = Run([spec(0, 0.0, 10, 5), spec(1, 0.5, 100, 2)], max_num_batched_tokens=64)
    recording = run.go()
    # Step 1: one decode and 63 of 100 tokens; step 2: one decode and the other 37.
    assert list(recording.steps["num_batched_tokens"]) == [10, 64, 38, 2, 1]
    assert recording.requests["first_token_s"].tolist() == [1.0, 3.0]


def test_preemption_takes_the_tail_and_admits_nobody_in_that_step() -> None:
    # Three prompts of two blocks each in six blocks; the first to need a third
    # block takes it from the last one.
    specs = [spec(i, 0.0, 31, 20) for i in range(3)] + [spec(3, 0.5, 5, 1)]
    run = Run(specs, num_gpu_blocks=7, max_model_len=90)
    recording = run.go()
    preemptions = recording.preemptions
    first = preemptions.iloc[0]
    assert (first["request_id"], first["for_request_id"]) == (2, 0)
    assert first["time_s"] == 2.0  # token 33 needs the third block
    assert first["num_tokens_lost"] == 32
    assert first["num_blocks_freed"] == 2
    assert first["kv_cache_usage_before"] == 1.0
    assert first["kv_cache_usage_after"] == pytest.approx(4 / 6)
    step = recording.steps[recording.steps["num_preempted"] > 0].iloc[0]
    assert step["num_waiting"] == 2  # the victim stands before the newcomer
    requests = recording.requests
    assert list(requests["status"]) == ["finished_stopped"] * 4
    assert requests["num_output_tokens"].tolist() == [20, 20, 20, 1]
    assert requests["num_recomputed_tokens"].sum() == (
        preemptions["num_tokens_lost"].sum()
    )
    assert recording.steps["num_recomputed_tokens"].sum() == (
        requests["num_recomputed_tokens"].sum()
    )


def test_requests_that_never_fit_are_rejected_with_a_reason() -> None:
    run = Run(
        [
            spec(0, 0.0, 200, 1),
            spec(1, 0.0, 90, 1),
            spec(2, 0.0, 50, 9, max_tokens=60),
            spec(3, 0.0, 50, 9, max_tokens=9),
        ],
        num_gpu_blocks=6,
        max_model_len=150,
    )
    requests = run.go().requests
    assert list(requests["status"]) == ["finished_rejected"] * 3 + ["finished_stopped"]
    assert "leaves no room for output within max_model_len 150" in requests["reason"][0]
    assert (
        "a prompt of 90 tokens needs 6 blocks; the cache has 5"
        in (requests["reason"][1])
    )
    assert (
        "a prompt and its longest output of 110 tokens needs 7" in requests["reason"][2]
    )


def test_without_the_admission_check_a_stall_ends_the_run() -> None:
    run = Run(
        [spec(0, 0.0, 100, 1), spec(1, 3.0, 5, 1)],
        admission_check=False,
        num_gpu_blocks=4,
    )
    requests = run.go().requests
    assert run.engine.stalled
    assert requests["status"].tolist() == ["waiting", "waiting"]
    assert math.isnan(requests["finish_s"][0])


def test_outputs_are_cut_at_max_model_len() -> None:
    run = Run([spec(0, 0.0, 20, 50)], max_model_len=30)
    row = run.go().requests.iloc[0]
    assert row["num_output_tokens"] == 10
    assert row["status"] == "finished_length_capped"


def test_a_stop_keeps_what_was_done() -> None:
    run = Run([spec(0, 0.0, 20, 2), spec(1, 0.0, 20, 50)])
    run.engine.observe(3, lambda engine: setattr(engine, "stop_requested", True))
    recording = run.go()
    assert len(recording.steps) == 3
    assert recording.requests["status"].tolist() == ["finished_stopped", "running"]


@pytest.mark.parametrize(("version", "takes_chunks"), [("0.11", True), ("0.33", False)])
def test_a_queue_that_takes_chunks_of_what_never_fits_ends_too(
    version: str, takes_chunks: bool
) -> None:
    # Without caching the head computes chunks, preempts itself, and begins again.
    # From 0.20 on it is not admitted at all.
    run = Run(
        [spec(0, 0.0, 100, 1), spec(1, 3.0, 5, 1)],
        admission_check=False,
        num_gpu_blocks=4,
        max_num_batched_tokens=16,
        engine_version=version,
    )
    recording = run.go()
    assert run.engine.stalled
    assert (3 < len(recording.steps) < 30) == takes_chunks
    assert (len(recording.preemptions) > 0) == takes_chunks


class Patient(V1Scheduler):
    """Waits for company before it starts, with empty steps meanwhile."""

    def schedule(self, now_s: float) -> SchedulerOutput:
        if not self.running and self.num_waiting < 3 and now_s < 50:
            return SchedulerOutput()
        return super().schedule(now_s)


def test_empty_steps_of_a_policy_that_waits_cost_time_and_lose_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.sim.build.V1Scheduler", Patient)
    run = Run([spec(0, 0.0, 20, 2), spec(1, 5.0, 20, 2)])
    recording = run.go()
    assert not run.engine.stalled
    assert recording.requests["first_scheduled_s"].tolist() == [50.0, 50.0]
    assert (recording.steps["latency_s"] == 1.0).all()
    assert len(recording.steps) == 52


class Watchful(V1Scheduler):
    """Asks for every step, as its rule may hang on each."""

    num_updates = 0

    def update(self, finished: Sequence[Request]) -> None:
        self.num_updates += 1
        super().update(finished)


class Reserving(V1Scheduler):
    """Reports a cache of its own."""

    def cache_usage(self) -> CacheUsage:
        return super().cache_usage()._replace(cpu_cache_usage=0.5)


def test_what_a_subclass_redefines_is_called_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.sim.build.V1Scheduler", Watchful)
    run = Run([spec(0, 0.0, 20, 40), spec(1, 5.0, 20, 9)], check=False)
    num_steps = len(run.go().steps)
    assert isinstance(run.scheduler, Watchful)
    assert run.scheduler.num_updates == num_steps == 40
    monkeypatch.setattr("tests.sim.build.V1Scheduler", Reserving)
    run = Run([spec(0, 0.0, 20, 40)], check=False)
    assert (run.go().steps["cpu_cache_usage"] == 0.5).all()


def test_a_policy_that_waits_for_ever_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sim.engine.steps.vain.MAX_NUM_EMPTY_STEPS", 20)
    monkeypatch.setattr("tests.sim.build.V1Scheduler", Patient)
    run = Run([spec(0, 0.0, 20, 2)])
    assert len(run.go().steps) == 20
    assert run.engine.stalled


class Client:
    """Does one thing at a simulated time."""

    def __init__(self, run: Run, at_s: float, act: Callable[[Run], None]) -> None:
        self.run, self.at_s, self.act = run, at_s, act
        run.env.process(self.process())

    def process(self) -> Generator[simpy.Event, Any, None]:
        yield self.run.env.timeout(self.at_s)
        self.act(self.run)


def abort_first(run: Run) -> None:
    run.engine.abort(run.recorder.active[0], "gone")


def stop(run: Run) -> None:
    run.engine.stop_requested = True


def test_an_abort_takes_effect_between_steps_and_frees_its_blocks() -> None:
    run = Run([spec(0, 0.0, 20, 50), spec(1, 0.0, 20, 5)])
    Client(run, 2.5, abort_first)
    recording = run.go()
    requests = recording.requests
    assert requests["status"].tolist() == ["finished_aborted", "finished_stopped"]
    assert requests["reason"][0] == "gone"
    assert requests["num_output_tokens"][0] == 3  # the step in progress still counts
    assert run.scheduler.cache_usage().kv_cache_usage == 0
    assert recording.itl.weights.sum() == 4  # of served requests
    # Little's law counts the aborted one for as long as it was there.
    assert recording.occupancy_s == pytest.approx(3 + 5)


def test_an_abort_during_the_last_step_comes_too_late() -> None:
    run = Run([spec(0, 0.0, 20, 2)])
    Client(run, 1.5, abort_first)
    assert run.go().requests["status"].tolist() == ["finished_stopped"]


def test_aborting_a_head_that_blocks_the_queue_frees_the_way() -> None:
    run = Run(
        [spec(0, 0.0, 100, 1), spec(1, 0.0, 5, 1), spec(2, 100.0, 5, 1)],
        admission_check=False,
        num_gpu_blocks=4,
    )
    Client(run, 10.0, abort_first)
    requests = run.go().requests
    assert requests["first_scheduled_s"].tolist()[1:] == [10.0, 100.0]


def test_a_stop_during_a_burst_of_rejections_ends_the_run() -> None:
    run = Run([spec(i, float(i), 9000, 1) for i in range(5)])
    Client(run, 2.5, stop)
    assert len(run.go().requests) < 5


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf, 1e-300])
def test_a_step_without_a_length_is_refused(step_s: float) -> None:
    class Broken(PricePerToken):
        def step(self, shape: BatchShape) -> StepCost:
            return StepCost(step_s)

    with pytest.raises(CostError, match="finite time of more than zero"):
        Run([spec(0, 1.0, 20, 2)], Broken()).go()


def test_a_budget_that_shrinks_starves_the_tail_and_itl_shows_it() -> None:
    run = Run([spec(i, 0.0, 2, 8) for i in range(3)])

    def shrink(engine: Engine) -> None:
        run.scheduler._budget = 2 if engine.num_steps < 5 else 2048

    run.engine.observe(1, shrink)
    recording = run.go()
    requests = recording.requests
    # Steps 1 to 4 have room for two of the three decodes.
    assert requests["finish_s"].tolist() == [8.0, 8.0, 12.0]
    itl = recording.itl
    spread = np.repeat(itl.values_s, itl.weights)
    assert sorted(spread.tolist()) == [1.0] * 20 + [5.0]


def test_no_policy_reads_how_long_an_output_will_be() -> None:
    room = ROOT / "sim" / "scheduler"
    modules = [path for path in room.rglob("*.py") if path != room / "request.py"]
    assert len(modules) > 45
    for module in modules:
        source = module.read_text(encoding="utf-8")
        for word in (".oracle", ".num_tokens_at_event", ".due_step"):
            assert word not in source, f"{module.name}: {word}"


small_requests = st.lists(
    st.tuples(
        st.floats(0, 30, allow_nan=False), st.integers(1, 70), st.integers(1, 40)
    ),
    min_size=1,
    max_size=12,
)


@given(
    small_requests,
    st.integers(8, 14),
    st.sampled_from([4, 7, 16, 64, 256]),
    st.booleans(),
    st.sampled_from(["0.11", "0.33"]),
)
@settings(max_examples=60, deadline=None)
def test_every_run_ends_and_keeps_the_invariants(
    raw: list[tuple[float, int, int]],
    blocks: int,
    budget: int,
    caching: bool,
    version: str,
) -> None:
    """Invariants 1 to 4 and 7 in a cache of a few blocks."""
    raw.sort()
    specs = [spec(i, *row) for i, row in enumerate(raw)]
    run = Run(
        specs,
        PricePerToken(),
        num_gpu_blocks=blocks,
        max_model_len=(blocks - 1) * 16,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        engine_version=version,
    )
    recording = run.go()
    requests, steps = recording.requests, recording.steps
    assert len(requests) == len(specs)
    assert not run.scheduler.num_running
    assert not run.scheduler.num_waiting
    assert run.scheduler.cache_usage().kv_cache_usage == 0
    served = requests[requests["status"].str.startswith("finished_")]
    served = served[served["status"] != "finished_rejected"]
    assert (served["arrival_s"] <= served["first_scheduled_s"]).all()
    assert (served["first_scheduled_s"] < served["first_token_s"]).all()
    assert (served["first_token_s"] <= served["finish_s"]).all()
    ends = steps["start_s"] + steps["latency_s"]
    assert (steps["latency_s"] > 0).all()
    assert (steps["start_s"].iloc[1:].to_numpy() >= ends.iloc[:-1].to_numpy()).all()
    assert steps["kv_cache_usage"].between(0, 1).all()
    itl = recording.itl
    assert itl.weights.sum() == (served["num_output_tokens"] - 1).sum()
    spans_s = served["finish_s"] - served["first_token_s"]
    assert (itl.values_s * itl.weights).sum() == pytest.approx(
        spans_s.sum(), rel=1e-9, abs=1e-9
    )
    # Every token is computed once, less prefix hits, and again after preemptions.
    once = (served["num_prompt_tokens"] + served["num_output_tokens"] - 1).sum()
    stats = run.scheduler.prefix_cache_stats
    assert steps["num_batched_tokens"].sum() == (
        once - stats.hits + steps["num_recomputed_tokens"].sum()
    )
    assert served["num_cached_tokens"].sum() == stats.hits
    # Little's law, from counts on one side and time stamps on the other.
    sojourn_s = (served["finish_s"] - served["arrival_s"]).sum()
    assert recording.occupancy_s == pytest.approx(sojourn_s, rel=1e-9, abs=1e-9)


@given(small_requests, st.integers(0, 11), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_longer_answer_changes_nothing_before_it_shows(
    raw: list[tuple[float, int, int]], which: int, longer: int
) -> None:
    """Invariant 4: until the shorter answer ends, all steps are the same."""
    raw.sort()
    which %= len(raw)
    changed = list(raw)
    changed[which] = (*raw[which][:2], raw[which][2] + longer)
    runs = [
        Run(
            [spec(i, *row) for i, row in enumerate(rows)],
            PricePerToken(),
            num_gpu_blocks=12,
            max_model_len=176,
        ).go()
        for rows in (raw, changed)
    ]
    until = runs[0].requests["finish_s"][which]
    if math.isnan(until):
        return
    columns = ["start_s", "latency_s", "num_batched_tokens", "num_physical_blocks"]
    before = [run.steps[run.steps["start_s"] < until][columns] for run in runs]
    assert before[0].equals(before[1])
