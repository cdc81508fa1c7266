"""A trial's numbers are those of the run's tables; what is cut had lost already."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.results.summary.objectives import parse_objectives
from sim.simulation.simulate import simulate
from sim.studies.planning.search.observation import MAX_SHARE, warmup_share
from sim.studies.planning.search.trial import (
    Trial,
    is_overloaded,
    perform,
    requests_of,
    split_table,
    with_scale,
)
from workloads.draws.streams import Streams


def run_of(rate: float, num_requests: int = 600, **engine: Any) -> dict[str, Any]:
    return {
        "workload": {
            "synthetic": {
                "num_requests": num_requests,
                "arrivals": {"kind": "poisson", "rate": rate},
                "prompt_tokens": {"kind": "uniform", "low": 10, "high": 120},
                "output_tokens": {"kind": "uniform", "low": 1, "high": 60},
            }
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h200_sxm",
            "num_gpu_blocks_override": 60,
            "max_model_len": 400,
        }
        | engine,
        "cost": {"kind": "constant", "step_s": 0.01},
        "seed": 3,
    }


ASKED = {
    "p95_ttft_ms": 5000.0,
    "mean_tpot_ms": 50.0,
    "p99_itl_ms": 5000.0,
    "median_e2el_ms": 5000.0,
    "goodput": {"share": 0.5, "ttft_ms": 300.0, "tpot_ms": 20.0},
    "preemptions_per_request": 3.0,
    "kv_cache_usage_mean": 1.0,
    "kv_cache_usage_max": 1.0,
}


@pytest.mark.parametrize(
    "model", ["meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1"]
)
def test_values_of_ranks_are_those_of_their_tables(model: str) -> None:
    data = run_of(60.0, 200, model=model, data_parallel_size=2)
    trial = Trial(data, parse_objectives(ASKED))
    seen = perform(trial, details=True)
    results = simulate(parse_config(data))
    summary = results.summary
    assert len(summary["ranks"]) == 2
    for name in ("p95_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "median_e2el_ms"):
        assert seen.values[name] == pytest.approx(summary[name])
    assert seen.num_requests == 200
    assert not seen.was_cut
    assert 0.0 < seen.facts["busy_share"] <= 1.0
    crowded = perform(trial.at(100.0))
    assert crowded.is_overloaded


def test_values_are_those_of_the_tables() -> None:
    trial = Trial(run_of(30.0), parse_objectives(ASKED), warmup_share=0.1)
    seen = perform(trial)
    results = simulate(parse_config(trial.run))
    rows = results.requests.iloc[60:]
    values = seen.values
    assert seen.num_requests == 540
    assert values["p95_ttft_ms"] == pytest.approx(
        1e3 * np.percentile(rows["ttft_s"], 95)
    )
    assert values["mean_tpot_ms"] == pytest.approx(1e3 * rows["tpot_s"].mean())
    assert values["median_e2el_ms"] == pytest.approx(1e3 * rows["e2el_s"].median())
    good = (rows["ttft_s"] <= 0.3) & ~(rows["tpot_s"] > 0.02)
    assert values["goodput"] == pytest.approx(good.mean())
    assert values["preemptions_per_request"] == rows["num_preemptions"].mean() > 0
    assert values["kv_cache_usage_max"] == results.summary["kv_cache_usage_max"]
    assert 10.0 <= (values["p99_itl_ms"] or 0.0) < 1000.0
    assert seen.margin <= 0


def test_all_tokens_count_for_itl_without_a_warm_up() -> None:
    trial = Trial(run_of(30.0), parse_objectives({"p99_itl_ms": 1.0, "mean_itl_ms": 1}))
    summary = simulate(parse_config(trial.run)).summary
    values = perform(trial).values
    assert values["p99_itl_ms"] == pytest.approx(summary["p99_itl_ms"])
    assert values["mean_itl_ms"] == pytest.approx(summary["mean_itl_ms"])


@pytest.mark.parametrize("by", ["random", "round_robin"])
def test_a_fleet_is_its_replicas_run_one_by_one(by: str) -> None:
    objectives = parse_objectives({"p90_ttft_ms": 5000.0})
    trial = Trial(run_of(20.0), objectives, num_replicas=3, by=by)  # type: ignore[arg-type]
    ttft_s: list[float] = []
    for replica in range(3):
        workload = trial.run["workload"] | {"split": split_table(3, replica, by)}
        ttft_s += (
            simulate(parse_config({**trial.run, "workload": workload}))
            .requests["ttft_s"]
            .tolist()
        )
    assert len(ttft_s) == 600
    seen = perform(trial)
    assert seen.values["p90_ttft_ms"] == pytest.approx(1e3 * np.percentile(ttft_s, 90))


def test_steps_twice_as_long_are_as_if_the_cost_model_said_so() -> None:
    objectives = parse_objectives({"p95_ttft_ms": 400.0, "p95_tpot_ms": 40.0})
    scaled = perform(Trial(run_of(4.0), objectives, step_time=2.0), details=True)
    run = run_of(4.0) | {"cost": {"kind": "constant", "step_s": 0.02}}
    direct = perform(Trial(run, objectives), details=True)
    for name in ("p95_ttft_ms", "p95_tpot_ms", "kv_cache_usage_mean"):
        assert scaled.values[name] == pytest.approx(direct.values[name], rel=1e-6)
    assert scaled.margin == pytest.approx(direct.margin, abs=1e-6)


def test_what_is_cut_had_lost() -> None:
    objectives = parse_objectives({"p95_ttft_ms": 200.0})
    run = run_of(100.0, 3000)
    seen = perform(Trial(run, objectives))
    assert seen.was_cut
    assert seen.margin == inf
    assert seen.num_requests < 3000
    whole = simulate(parse_config(run)).requests["ttft_s"]
    assert 1e3 * np.percentile(whole, 95) > 200.0


def test_a_queue_that_grows_is_overload_whatever_is_promised() -> None:
    run = run_of(100.0, 3000)
    seen = perform(Trial(run, parse_objectives({"p95_tpot_ms": 1e6})))
    assert seen.was_cut
    assert seen.is_overloaded
    calm = perform(Trial(with_slower(run), parse_objectives({"p95_tpot_ms": 1e6})))
    assert not calm.is_overloaded
    assert calm.margin < 0
    assert is_overloaded(11, 100)
    assert not is_overloaded(10, 100)
    assert not is_overloaded(20, 1000)


def test_a_fleet_is_looked_at_whichever_of_its_engines_are_at_work() -> None:
    """Its first engine alone was, which is dead here."""
    fleet = {"pools": [{"name": "main", "replicas": 3}], "router": "least_requests"}
    fleet["events"] = [{"time_s": 0.001, "kind": "die", "engine": 0}]
    run = run_of(150.0, 3000)
    for asked in ({"p95_ttft_ms": 200.0}, {"p95_tpot_ms": 1e6}):
        seen = perform(Trial(run, parse_objectives(asked), fleet=fleet))
        assert seen.was_cut
        assert seen.margin == inf
        calm = Trial(with_slower(run), parse_objectives(asked), fleet=fleet)
        assert not perform(calm).was_cut


def test_engines_that_run_one_after_the_other_are_not_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of engines that had yet to run were said to wait all the while."""
    monkeypatch.setattr("sim.fleet.apart._REQUESTS_AT_ONCE", 300)
    monkeypatch.setattr("sim.studies.planning.search.trial._LOOK_EVERY_STEPS", 16)
    fleet = {"pools": [{"name": "main", "replicas": 8}], "router": "round_robin"}
    asked = parse_objectives({"p95_ttft_ms": 1500.0})
    seen = perform(Trial(run_of(260.0, 2000), asked, fleet=fleet))
    assert not seen.was_cut
    assert seen.values["p95_ttft_ms"] == pytest.approx(879.077, abs=0.01)


def with_slower(run: dict[str, Any]) -> dict[str, Any]:
    return with_scale(run, 0.1)


def test_an_empty_start_is_found() -> None:
    """Twenty bins of filling up, then noise around ten."""
    rng = Streams(1).generator("runs")
    ramp = np.minimum(np.arange(100) / 20, 1) * 10
    runs = [ramp + rng.normal(0, 0.5, 100) for _ in range(3)]
    assert 0.15 <= warmup_share(runs) <= MAX_SHARE
    level = [10 + rng.normal(0, 0.5, 100) for _ in range(3)]
    assert warmup_share(level) <= 0.1


def test_a_part_comes_as_densely_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(run_of(20.0), parse_objectives({"mean_ttft_ms": 1}))
    _, every = requests_of(trial)
    half = replace(trial, part=0.5)
    assert len(requests_of(half)[1]) == len(every)  # few are never divided
    monkeypatch.setattr("sim.studies.planning.search.trial._LEAST_PART", 10)
    num_some = len(every) // 2
    _, some = requests_of(half)
    assert [r.arrival_s for r in some] == [r.arrival_s for r in every[:num_some]]
    assert len(requests_of(replace(trial, part=0.0))[1]) == 10


@pytest.mark.parametrize(
    ("share", "part", "expected"),
    [(0.05, 0.5, 0.1), (0.2, 0.5, MAX_SHARE), (0.4, 0.5, 0.4), (0.0, 0.25, 0.0)],
)
def test_a_part_warms_up_as_long_as_the_whole(
    share: float, part: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But more than a quarter of it only counts as little as the plan says."""
    monkeypatch.setattr("sim.studies.planning.search.trial._LEAST_PART", 10)
    run = run_of(20.0)
    trial = Trial(run, parse_objectives({"mean_ttft_ms": 1}), share, part=part)
    num_some = len(requests_of(trial)[1])
    num_counted = perform(trial).num_requests
    assert num_counted == num_some - int(num_some * expected)


def test_an_engine_with_host_memory_loads_in_a_trial_as_in_a_run() -> None:
    session = {
        "kind": "chat",
        "num_sessions": 30,
        "arrivals": {"kind": "poisson", "rate": 3.0},
        "turns": {"kind": "fixed", "number": 4},
        "first_prompt_tokens": {"kind": "fixed", "tokens": 900},
        "prompt_tokens": {"kind": "fixed", "tokens": 60},
        "output_tokens": {"kind": "fixed", "tokens": 20},
        "think_s": {"kind": "fixed", "value_s": 4.0},
    }
    run = {
        "workload": {"sessions": session},
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "l40s",
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": 400,
            "max_model_len": 4096,
            "kv_offloading_size": 4,
        },
        "cost_intervals": False,
    }
    summary = simulate(parse_config(run)).summary
    assert summary["external_prefix_cache_hits"] > 0
    seen = perform(Trial(run, parse_objectives({"p95_ttft_ms": 2000})))
    assert seen.num_requests == summary["completed"] == 120
    assert not seen.is_overloaded
    assert seen.values["p95_ttft_ms"] == pytest.approx(summary["p95_ttft_ms"])
