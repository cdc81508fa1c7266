"""Runs of data-parallel ranks: results by rank, keys, files, figures, refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.errors import ConfigError, ResultsError
from sim.results.fleet.ranks import tables_of_rank
from sim.results.folder import RunFolder
from sim.results.run import Results
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from sim.views.plots.accessor import figures_of
from tests.sim.cli.test_run_command import kvsim
from tests.sim.config.test_config import minimal, write

if TYPE_CHECKING:
    from pathlib import Path

MIXTRAL = {
    "model": "mistralai/Mixtral-8x7B-v0.1",
    "num_gpu_blocks_override": 70,
    "max_model_len": 1024,
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "async_scheduling": False,
}
MIXTRAL_AHEAD = MIXTRAL | {"async_scheduling": None}
DENSE = {
    "num_gpu_blocks_override": 70,
    "max_model_len": 1024,
    "data_parallel_size": 3,
    "async_scheduling": False,
}
AHEAD = DENSE | {"async_scheduling": True}
PIPES = DENSE | {"pipeline_parallel_size": 2}


EAGLE = {"method": "eagle3", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def data_of(engine: dict[str, Any], num_requests: int = 60) -> dict[str, Any]:
    data = minimal(**engine)
    data["workload"]["synthetic"] |= {
        "num_requests": num_requests,
        "arrivals": {"kind": "poisson", "rate": 60.0},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 400},
        "output_tokens": {"kind": "uniform", "low": 2, "high": 60},
    }
    data["cost"] = {"kind": "roofline"}
    return data


def test_ranks_of_a_mixture_step_together() -> None:
    simulation = Simulation(parse_config(data_of(MIXTRAL)))
    results = simulation.run(check_every=1)
    steps, summary = results.steps, results.summary
    by_step = steps.groupby("step")[["start_s", "latency_s"]].nunique()
    assert (by_step == 1).all(axis=None)
    assert set(results.requests["rank"]) == {0, 1}
    assert results.requests["request_id"].tolist() == list(range(60))
    ranks = summary["ranks"]
    assert sum(each["completed"] for each in ranks) == summary["completed"] == 60
    assert (
        sum(each["num_steps"] for each in ranks) == summary["num_steps"] == len(steps)
    )
    assert summary["num_preemptions"] == len(results.preemptions) > 0
    dummies = steps[steps["num_batched_tokens"] == 0]
    assert summary["num_dummy_steps"] == len(dummies) > 0
    assert (steps["wait_s"] <= steps["allreduce_s"]).all()
    waited = steps["wait_s"].sum() / steps["latency_s"].sum()
    assert summary["wait_share"] == pytest.approx(waited)
    usage = np.mean([each["kv_cache_usage_mean"] for each in ranks])
    assert summary["kv_cache_usage_mean"] == pytest.approx(usage)
    assert summary["num_waves"] >= 1


def test_ranks_of_a_mixture_schedule_ahead() -> None:
    """The host is hidden, at most as it is on one engine, and nothing is lost."""
    cost = {"kind": "roofline", "step_overhead_s": 0.003}
    told = {}
    for engine in (MIXTRAL, MIXTRAL_AHEAD):
        data = data_of(engine) | {"cost": cost}
        results = Simulation(parse_config(data)).run(check_every=1)
        steps, summary = results.steps, results.summary
        assert (steps.groupby("step")["latency_s"].nunique() == 1).all()
        assert summary["completed"] == 60
        assert summary["num_dummy_steps"] > 0
        told[engine["async_scheduling"]] = summary
    ahead, one_by_one = told[None], told[False]
    assert ahead["scheduling"].startswith("asynchronous")
    hidden_s = 2 * 1e-3 * (one_by_one["mean_tpot_ms"] - ahead["mean_tpot_ms"])
    assert hidden_s == pytest.approx(0.006, rel=0.2)
    assert 0 < ahead["overlapped_s"] < 0.004 * ahead["num_steps"]
    assert ahead["num_wasted_tokens"] > 0


@pytest.mark.parametrize("engine", [DENSE, AHEAD, PIPES])
def test_a_dense_rank_is_an_engine_of_its_own(engine: dict[str, Any]) -> None:
    data = data_of(engine)
    simulation = Simulation(parse_config(data))
    together = simulation.run(check_every=1)
    assert together.summary["num_preemptions"] > 0
    assert "num_dummy_steps" not in together.summary
    data["engine"]["data_parallel_size"] = 1
    overlapped_s = 0.0
    for rank in range(3):
        own = together.requests[together.requests["rank"] == rank]
        specs = [
            spec._replace(request_id=place)
            for place, spec in enumerate(simulation.specs[i] for i in own["request_id"])
        ]
        alone = Simulation(parse_config(data), specs=specs).run()
        for name in ("arrival_s", "first_token_s", "finish_s", "num_preemptions"):
            assert alone.requests[name].tolist() == own[name].tolist(), name
        steps = together.steps[together.steps["rank"] == rank]
        for name in ("start_s", "latency_s", "num_physical_blocks", "num_waiting"):
            assert alone.steps[name].tolist() == steps[name].tolist(), name
        overlapped_s += alone.summary.get("overlapped_s", 0.0)
    told_s = together.summary.get("overlapped_s", 0.0)
    assert told_s == pytest.approx(overlapped_s)
    assert ("overlapped_s" in together.summary) == (engine is not DENSE)


@pytest.mark.parametrize("engine", [MIXTRAL, MIXTRAL_AHEAD, DENSE, AHEAD, PIPES])
def test_stepwise_it_is_the_same(engine: dict[str, Any]) -> None:
    config = parse_config(data_of(engine))
    fast, slow = (Simulation(config, stepwise=way).run() for way in (False, True))
    assert fast.requests.equals(slow.requests)
    assert fast.steps.equals(slow.steps)
    assert fast.preemptions.equals(slow.preemptions)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "version", [pytest.param("0.28", marks=pytest.mark.slow), "0.33"]
)
def test_ranks_space_prefills_by_a_count_that_they_share(
    ahead: bool, version: str
) -> None:
    """Prompts meet in one step of four, and share its wait for the slowest."""
    told = {}
    for interval in (None, 4):
        own = MIXTRAL | {"async_scheduling": ahead, "engine_version": version}
        own |= {"num_gpu_blocks_override": 400, "prefill_schedule_interval": interval}
        data = data_of(own)
        data["workload"]["synthetic"]["arrivals"]["rate"] = 18.0
        results = Simulation(parse_config(data)).run(check_every=20)
        steps = results.steps
        steps["turn"] = steps.groupby("rank").cumcount()
        prompts = steps[steps["num_prefill_tokens"] > 0]
        told[interval] = prompts["step"].nunique()
        assert results.summary["completed"] == 60
        assert results.summary["num_waves"] == 1
        if interval is None:
            continue
        beside = prompts[prompts["num_decodes"] > 0]
        assert len(beside) > 10
        # a scan that leaves requests behind lifts the hold; here none does
        assert (beside["turn"] % 4 == 0).all()
    assert told[4] < 0.8 * told[None]


def test_sessions_go_through_the_balancer() -> None:
    data = data_of(MIXTRAL)
    data["workload"] = {
        "sessions": {
            "kind": "chat",
            "arrivals": {"kind": "poisson", "rate": 4.0},
            "num_sessions": 12,
            "turns": {"kind": "fixed", "number": 3},
            "prompt_tokens": {"kind": "fixed", "tokens": 60},
            "output_tokens": {"kind": "fixed", "tokens": 20},
            "think_s": {"kind": "fixed", "value_s": 0.5},
        },
        "max_concurrent_users": 5,
    }
    results = Simulation(parse_config(data)).run(check_every=1)
    assert results.summary["completed"] == 36


def test_the_exchange_and_its_links_cost_time() -> None:
    def mean_ms(**engine: Any) -> float:
        summary = simulate(parse_config(data_of(MIXTRAL | engine, 20))).summary
        return float(summary["mean_e2el_ms"])

    usual = mean_ms()
    assert mean_ms(interconnect="pcie3") > usual
    one_a_node = {"bytes_per_s": 4.5e11, "is_switched": True, "hop_s": 0, "max_gpus": 2}
    spread = mean_ms(data_parallel_size=4, interconnect=one_a_node)
    slow = mean_ms(
        data_parallel_size=4, interconnect=one_a_node, network="infiniband_hdr"
    )
    assert spread < slow
    assert mean_ms(all2all_backend="deepep_low_latency") != usual
    assert mean_ms(enable_expert_parallel=False) != usual
    few, many = (
        simulate(parse_config(data_of(DENSE | {"api_server_count": n}))).requests
        for n in (1, 3)
    )
    assert few["rank"].tolist() != many["rank"].tolist()


def test_files_figures_and_their_reader(tmp_path: Path) -> None:
    path = write(tmp_path, data_of(MIXTRAL))
    out = tmp_path / "out"
    assert kvsim(["run", str(path), "--out", str(out), "--itl", "exact"]) == 0
    loaded, simulated = Results.load(out), simulate(parse_config(data_of(MIXTRAL)))
    assert loaded.requests.equals(simulated.requests)
    assert loaded.preemptions.equals(simulated.preemptions)
    columns = ["step", "rank", "start_s", "wait_s", "num_running"]
    for rank in range(2):
        mine = [
            tables_of_rank(each.recording, rank).step_table.batches(columns)
            for each in (loaded, simulated)
        ]
        read, kept = (next(iter(batches)) for batches in mine)
        for name in columns:
            assert read[name].tolist() == kept[name].tolist()
    summary = json.loads((out / "summary.json").read_text())
    assert [each["rank"] for each in summary["ranks"]] == [0, 1]
    figures, runs = figures_of(loaded)
    assert [run.label for run in runs] == ["rank 0", "rank 1"]
    assert sorted(f"{name}.png" for name in figures) == sorted(
        each.name for each in (out / "figures").iterdir()
    )
    assert kvsim(["plot", str(out), "--out", str(tmp_path / "again")]) == 0
    with pytest.raises(ResultsError, match="of 2 data-parallel ranks"):
        RunFolder(out).of_one_engine()


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    config = parse_config(data_of(MIXTRAL))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        Simulation(config).run().write(tmp_path / name)
    for table in ("steps", "requests", "preemptions"):
        one, other = (tmp_path / n / f"{table}.parquet" for n in ("one", "other"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"scheduler": "v0"},
            r"engine\.data_parallel_size: ranks are built for the v1",
        ),
        (
            {"enable_expert_parallel": False, "all2all_backend": "deepep_low_latency"},
            r"engine\.all2all_backend: deepep_low_latency needs whole experts",
        ),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size: ranks .* step together, without stages; got 2",
        ),
    ],
)
def test_what_ranks_cannot_do_is_said(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(parse_config(data_of(MIXTRAL | engine)))


def test_recordings_are_of_one_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, data_of(MIXTRAL))
    out = str(tmp_path / "out")
    assert kvsim(["run", str(path), "--out", out, "--record", "blocks"]) == 2
    assert "--record is built for one engine" in capsys.readouterr().err


def test_a_model_that_prices_ranks_one_by_one_is_warned_of() -> None:
    data = data_of(MIXTRAL, 10)
    data["cost"] = {"kind": "constant", "step_s": 0.01}
    summary = simulate(parse_config(data)).summary
    assert any("prices ranks one by one" in line for line in summary["warnings"])


def test_the_cost_table_may_still_say_it() -> None:
    data = data_of(MIXTRAL | {"data_parallel_size": 1, "tensor_parallel_size": 2}, 10)
    said = simulate(parse_config(data))
    del data["engine"]["enable_expert_parallel"]
    data["cost"]["enable_expert_parallel"] = True
    before = simulate(parse_config(data))
    assert said.steps.equals(before.steps)
    line = "cost.enable_expert_parallel is engine.enable_expert_parallel by now"
    assert any(each.startswith(line) for each in before.summary["warnings"])


def test_an_overload_is_that_of_all_ranks() -> None:
    data = data_of(MIXTRAL | {"max_num_seqs": 2}, 60)
    data["workload"]["synthetic"]["arrivals"]["rate"] = 1000.0
    results = simulate(parse_config(data))
    (said,) = (line for line in results.summary["warnings"] if "overloaded" in line)
    steps, last_s = results.steps, results.requests["arrival_s"].max()
    late = steps[steps["start_s"] >= last_s].groupby("rank").first()
    assert f"overloaded: {late['num_waiting'].sum()} requests were waiting" in said


def test_a_run_can_be_stopped() -> None:
    simulation = Simulation(parse_config(data_of(MIXTRAL)))
    simulation.engine.observe(40, lambda _: simulation.stop())
    results = simulation.run()
    assert results.summary["interrupted"]
    assert not results.summary["stalled"]
    assert 0 < results.summary["completed"] < 60


@pytest.mark.parametrize(
    "engine",
    [
        DENSE | {"speculative_config": EAGLE},
        AHEAD | {"speculative_config": EAGLE},
        MIXTRAL | {"speculative_config": NGRAM},
        MIXTRAL_AHEAD | {"speculative_config": NGRAM},
    ],
)
def test_ranks_verify_drafts(engine: dict[str, Any]) -> None:
    data = data_of(engine)
    data["workload"]["acceptance"] = {"kind": "constant", "rate": 0.6}
    simulation = Simulation(parse_config(data))
    results = simulation.run(check_every=1)
    requests, steps, summary = results.requests, results.steps, results.summary
    assert (requests["status"] == "finished_stopped").all()
    num_ranks = engine["data_parallel_size"]
    assert set(requests["rank"]) == {*range(num_ranks)}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        by_rank = steps.groupby("rank")[name].sum()
        assert (by_rank > 0).all()
    told = summary["spec_decode_draft_tokens"]
    assert told == requests["num_draft_tokens"].sum()
    assert summary["spec_decode_acceptance_length"] == pytest.approx(2.176, rel=0.1)
    if engine.get("enable_expert_parallel"):
        by_step = steps.groupby("step")["latency_s"].nunique()
        assert (by_step == 1).all()
