"""Runs in which a step is formed while the one before runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.config.engine import EngineConfig
from sim.config.tables import parse_config
from sim.costs.roofline import RooflineCost
from sim.costs.steps.ahead import HostAhead
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.results.recording.tokens import token_times
from sim.scheduler.batch import BatchShape
from sim.scheduler.generation import SCHEDULE_REQUEST_S, HostRule
from sim.scheduler.v1.dialect import dialect_of
from sim.simulation.run import Simulation
from sim.simulation.simulate import with_intervals
from sim.studies.validation.observed import series_of
from tests.identity.compare import ONLY_THE_END, compare

if TYPE_CHECKING:
    from sim.results.run import Results

STEP_S = 0.02
CONSTANT = {"kind": "constant", "step_s": STEP_S}


def simulation(
    *,
    cost: dict[str, Any],
    num_requests: int = 1,
    rate: float = 5.0,
    max_tokens: int | None = None,
    output_end: str | dict[str, float] | None = None,
    **engine: Any,
) -> Simulation:
    traffic = {
        "num_requests": num_requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt_tokens": {"kind": "fixed", "tokens": 300},
        "output_tokens": {"kind": "fixed", "tokens": 30},
    }
    pool = {"gpu": "h100_sxm", "num_gpu_blocks_override": 2000}
    config = {
        "workload": {
            "synthetic": traffic,
            "max_tokens": max_tokens,
            "output_end": output_end,
        },
        "engine": {"model": "meta-llama/Llama-3.1-8B"} | pool | engine,
        "cost": cost,
    }
    return Simulation(parse_config(config))


def run(*, ahead: bool, **more: Any) -> Results:
    return simulation(**more, async_scheduling=ahead).run(check_every=5)


def column(results: Results, name: str) -> list[float]:
    table = results.recording.request_table
    return [float(value) for value in table[name]]


def test_without_a_host_a_lone_request_takes_as_long() -> None:
    ahead, one_by_one = (run(ahead=each, cost=CONSTANT) for each in (True, False))
    for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"):
        assert ahead.summary[key] == pytest.approx(one_by_one.summary[key])
    assert ahead.summary["overlapped_s"] == pytest.approx(0.0, abs=1e-9)


def test_an_arrival_waits_for_the_step_after_next() -> None:
    more: dict[str, Any] = {"cost": CONSTANT, "num_requests": 40, "rate": 20.0}
    ahead, one_by_one = (run(ahead=each, **more) for each in (True, False))
    later = [
        (after - before) / STEP_S
        for after, before in zip(
            column(ahead, "first_token_s"),
            column(one_by_one, "first_token_s"),
            strict=True,
        )
    ]
    # One step later where others run; both clocks begin anew where all have ended.
    assert all(-1.01 < shift < 2.01 for shift in later)
    assert sum(abs(shift - 1) < 0.01 for shift in later) > 20
    assert ahead.summary["mean_tpot_ms"] == pytest.approx(1e3 * STEP_S)


@pytest.mark.parametrize(("overhead_s", "bound"), [(0.002, "gpu"), (0.05, "host")])
def test_the_host_is_hidden_as_far_as_it_fits(overhead_s: float, bound: str) -> None:
    host = {"step_overhead_s": overhead_s, "request_overhead_s": 0.0}
    cost = {"kind": "roofline"} | host
    ahead, one_by_one = (run(ahead=each, cost=cost) for each in (True, False))
    both_s = one_by_one.summary["mean_tpot_ms"] / 1e3
    expected_s = overhead_s if bound == "host" else both_s - overhead_s
    assert ahead.summary["mean_tpot_ms"] / 1e3 == pytest.approx(expected_s, rel=0.01)
    # The first step of a busy engine hides nothing.
    ttft = ahead.summary["mean_ttft_ms"] - one_by_one.summary["mean_ttft_ms"]
    assert 0.0 <= ttft <= 1e3 * overhead_s + 1e-6
    assert ahead.summary["overlapped_s"] > 25 * (both_s - expected_s)


def test_a_length_limit_wastes_nothing_and_a_stop_token_one_slot() -> None:
    more: dict[str, Any] = {"cost": CONSTANT, "num_requests": 12, "rate": 50.0}
    stopped = run(ahead=True, **more)
    limited = run(ahead=True, max_tokens=30, **more)
    asked = run(ahead=True, output_end="length", **more)
    assert asked.summary == limited.summary
    some = run(ahead=True, output_end={"stop": 0.5, "length": 0.5}, **more)
    assert 0 < some.summary["num_wasted_tokens"] < 12
    assert stopped.summary["num_wasted_tokens"] == 12
    assert limited.summary["num_wasted_tokens"] == 0
    for results in (stopped, limited):
        assert results.summary["total_output_tokens"] == 12 * 30
    words = r"asynchronous scheduling (0.0 s of the host hidden, 12 tokens wasted)"
    assert stopped.summary["scheduling"] == words


def test_pressure_with_steps_ahead() -> None:
    tight = {"num_gpu_blocks_override": 98, "scheduler_reserve_full_isl": False}
    more: dict[str, Any] = {"cost": CONSTANT, "num_requests": 20, "rate": 1e3}
    results = run(ahead=True, **more, **tight)
    assert results.summary["completed"] == 20
    assert results.summary["num_preemptions"] > 0
    assert results.summary["total_output_tokens"] == 20 * 30


@pytest.mark.parametrize("output_end", ["stop", "length"])
def test_stretches_of_steps_ahead_are_those_steps(output_end: str) -> None:
    tight = {"num_gpu_blocks_override": 98, "scheduler_reserve_full_isl": False}
    simulated = simulation(
        cost={"kind": "roofline"},
        num_requests=20,
        rate=1e3,
        output_end=output_end,
        async_scheduling=True,
        **tight,
    )
    compared = compare(
        simulated.config,
        ONLY_THE_END,
        lambda config: Simulation(config, stepwise=True),
    )
    assert (compared.chosen.path, compared.reference.path) == ("fast", "stepwise")
    assert not compared.differences
    assert compared.chosen.summary["num_preemptions"] > 0


def test_a_bound_moves_host_and_step() -> None:
    simulated = simulation(cost={"kind": "roofline"}, async_scheduling=True)
    results = with_intervals(simulated, simulated.run())
    assert results.summary["completed"] == 1


def test_what_is_not_built_says_so() -> None:
    for engine, words in (
        ({"engine_version": "0.13"}, "built from 0.14 on"),
        (
            {"scheduler": "v0"},
            "async_scheduling: .*no such key|built for v1, sglang only",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            simulation(cost=CONSTANT, async_scheduling=True, **engine)


def test_releases_that_schedule_ahead_by_default() -> None:
    for minor in range(8, 34):
        dialect = dialect_of(f"0.{minor}")
        assert dialect.schedules_ahead() is (minor >= 14)
        assert dialect.schedules_ahead(pipeline_parallel_size=2) is (minor >= 24)
        for method, since in (("mtp", 14), ("draft_model", 28), ("ngram", 33)):
            assert dialect.schedules_ahead(draft_method=method) is (minor >= since)


def test_what_is_assumed_of_a_release_is_said() -> None:
    for release, assumed in (("0.15", True), ("0.27", True), ("0.28", False)):
        found = run(ahead=True, cost=CONSTANT, engine_version=release)
        words = found.summary["scheduling"]
        assert ("preempted requests as from 0.28 on" in words) is assumed


def test_the_engine_is_not_empty_while_a_step_waits_for_the_one_before() -> None:
    results = run(ahead=True, cost={"kind": "roofline"}, num_requests=20, rate=1e3)
    ends_s = column(results, "finish_s")
    times_s = np.linspace(0.2 * max(ends_s), 0.99 * min(ends_s), 500)
    series = series_of(results, times_s)
    assert series.num_running is not None
    assert series.num_running.min() > 0
    # all have ended when the last one has
    assert series_of(results, np.array([max(ends_s) + 1.0])).num_running == [0.0]


def test_the_longer_of_host_and_gpu_is_a_step() -> None:
    model = load_model("meta-llama/Llama-3.1-8B")
    rule = HostRule(SCHEDULE_REQUEST_S, is_hidden=True)
    cost = RooflineCost(model=model, gpu=load_gpu("h100_sxm"), host_rule=rule)
    ahead = HostAhead(cost)
    shape = BatchShape(100, 100_000, 0, 0, 0, 0)
    (_, host_s), (_, gpu_s) = ahead.stage_times(shape)
    assert host_s == cost.step_overhead_s + 100 * SCHEDULE_REQUEST_S
    assert gpu_s == cost.step(shape).total_s - cost.step_overhead_s
    hidden = ahead.describe()["hidden"]
    assert hidden["prepare_s"] == cost.step_overhead_s
    low, high = hidden["schedule_request_s"]["interval"]
    assert low < hidden["schedule_request_s"]["value"] < high


@pytest.mark.parametrize(
    ("release", "is_ahead"), [("0.13", False), ("0.14", True), ("0.33", True)]
)
def test_null_is_what_the_release_does(release: str, *, is_ahead: bool) -> None:
    null, given = (
        simulation(cost=CONSTANT, async_scheduling=each, engine_version=release).run()
        for each in (None, is_ahead)
    )
    assert null.requests.equals(given.requests)
    assert null.summary["path"] == "fast"
    assert ("num_wasted_tokens" in null.summary) == is_ahead
    begins = "asynchronous" if is_ahead else "synchronous"
    assert null.summary["scheduling"].startswith(f"{begins} scheduling")


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"model": "openai/gpt-oss-20b"}, None),
        ({"model": "meta-llama/Llama-4-Scout-17B-16E"}, None),
        ({"model": "ibm-granite/granite-4.0-h-small"}, None),
        (
            {"model": "ibm-granite/granite-4.0-h-small", "prefix_match_unit": 16},
            "with hits inside blocks",
        ),
    ],
)
def test_windows_chunks_and_states_are_on_the_clock(
    engine: dict[str, Any], reason: str | None
) -> None:
    pool = {"tensor_parallel_size": 4, "max_model_len": 4096}
    told = simulation(cost=CONSTANT, **pool | engine).run().summary
    assert told["path"] == ("fast" if reason is None else "stepwise")
    assert told["path_reason"] == (reason and f"several steps are in flight {reason}")


@pytest.mark.parametrize("output_end", ["stop", "length"])
@pytest.mark.parametrize(
    "model", ["ibm-granite/granite-4.0-h-tiny", "Qwen/Qwen3-Next-80B-A3B-Instruct"]
)
def test_states_ahead_are_kept_and_hit_as_step_by_step(
    model: str, output_end: str
) -> None:
    sessions = {
        "kind": "chat",
        "arrivals": {"kind": "poisson", "rate": 5.0},
        "num_sessions": 10,
        "turns": {"kind": "fixed", "number": 3},
        "prompt_tokens": {"kind": "uniform", "low": 50, "high": 1000},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 300},
        "think_s": {"kind": "fixed", "value_s": 0.0},
        "prefixes": {
            "kind": "system_prompts",
            "num_groups": 2,
            "tokens": {"kind": "fixed", "tokens": 1200},
            "zipf": 1.0,
        },
    }
    engine = {
        "model": model,
        "gpu": "h200_sxm",
        "tensor_parallel_size": 4,
        "num_gpu_blocks_override": 60,
        "max_model_len": 8192,
        "enable_prefix_caching": True,
        "async_scheduling": True,
    }
    config = parse_config(
        {
            "workload": {"sessions": sessions, "output_end": output_end},
            "engine": engine,
            "cost": {"kind": "roofline"},
        }
    )
    compared = compare(
        config, ONLY_THE_END, lambda config: Simulation(config, stepwise=True)
    )
    assert (compared.chosen.path, compared.reference.path) == ("fast", "stepwise")
    assert not compared.differences
    assert compared.chosen.summary["num_preemptions"] > 0
    assert compared.chosen.summary["prefix_cache_hit_rate"] > 0


def test_null_is_the_default_of_the_release() -> None:
    def engine(**more: Any) -> EngineConfig:
        table = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h200_sxm"} | more
        return EngineConfig.model_validate(table)

    ranks = {"data_parallel_size": 2}
    assert engine(**ranks).schedules_ahead
    assert engine(model="mistralai/Mixtral-8x7B-v0.1", **ranks).schedules_ahead
    looked_up = {"method": "ngram", "num_speculative_tokens": 3}
    for ahead in (
        {"pipeline_parallel_size": 2},
        {"engine_version": "0.24"},
        {"speculative_config": looked_up},
        {"kv_offloading_size": 4.0},
    ):
        assert engine(**ahead).schedules_ahead
    for older in ({"engine_version": "0.13"}, {"scheduler": "v0"}):
        assert not engine(**older).schedules_ahead


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 3, 8192])
@pytest.mark.parametrize(
    "engine",
    [
        {"async_scheduling": True},
        {"async_scheduling": True, "num_gpu_blocks_override": 150},
        {"pipeline_parallel_size": 2, "async_scheduling": False},
    ],
)
def test_tokens_appear_when_outputs_are_processed(
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    chunk_rows: int,
    *,
    stepwise: bool,
) -> None:
    for module in ("step_log", "step_columns"):
        name = f"sim.results.recording.{module}.CHUNK_ROWS"
        monkeypatch.setattr(name, chunk_rows)
    monkeypatch.setattr("sim.results.recording.step_log.BATCH_ROWS", 2 * chunk_rows)
    cost = {"kind": "roofline"}
    simulated = simulation(cost=cost, num_requests=30, rate=100.0, **engine)
    recording = Simulation(simulated.config, stepwise=stepwise).run().recording
    table, steps = recording.requests, recording.steps
    for request in token_times(
        recording.step_table, recording.streaks, Path(tempfile.gettempdir()), 30
    ):
        row = table.loc[int(request["request_id"][0])]
        assert request["time_s"][0] == row["first_token_s"]
        assert request["time_s"][-1] == row["finish_s"]
        assert (np.diff(request["time_s"]) > 0).all()
    assert (steps["output_s"] > steps["start_s"]).all()
    assert steps["output_s"].is_monotonic_increasing
    mean_s = (table["e2el_s"] - table["ttft_s"]).sum() / (29 * 30)
    assert recording.itl.moments[1] == pytest.approx(mean_s)


def test_outputs_that_nothing_waited_for_have_no_time() -> None:
    simulated = simulation(cost=CONSTANT, num_requests=5, async_scheduling=True)
    simulated.engine.observe(9, lambda engine: simulated.stop())
    steps = simulated.run().recording.steps
    assert steps["output_s"].isna().tolist() == [False] * (len(steps) - 1) + [True]
