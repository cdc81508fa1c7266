"""Advice: remedies fit what binds, are really run, and do what is said of them."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.results.summary.objectives import parse_objectives
from sim.studies.advice.advise import _verdict, advise, measure, resampled
from sim.studies.advice.remedies import remedies_for
from sim.studies.sweeps.local import SerialExecutor

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"}


def pressured(
    rate: float,
    prompt: int,
    output: int,
    objectives: dict[str, Any],
    num_requests: int = 400,
    **engine: Any,
) -> dict[str, Any]:
    """Return a configuration that does not keep its objectives."""
    config = {
        "workload": {
            "synthetic": {
                "num_requests": num_requests,
                "arrivals": {"kind": "poisson", "rate": rate},
                "prompt_tokens": {"kind": "uniform", "low": 1, "high": 2 * prompt},
                "output_tokens": {"kind": "uniform", "low": 2, "high": 2 * output},
            }
        },
        "engine": {**LLAMA, **engine},
        "objectives": objectives,
    }
    return parse_config(config).to_data()


CASES = {
    "few seats": pressured(12, 500, 150, {"p95_ttft_ms": 400}, max_num_seqs=12),
    "few seats, two objectives": pressured(
        20, 300, 100, {"p95_ttft_ms": 300, "p95_tpot_ms": 40}, max_num_seqs=16
    ),
    "few blocks": pressured(
        12, 900, 300, {"p95_e2el_ms": 4000}, num_gpu_blocks_override=1500
    ),
    "a small GPU": pressured(
        4, 1500, 300, {"p95_ttft_ms": 1500}, gpu="l4", max_model_len=8192
    ),
    "a full memory": pressured(
        9,
        3000,
        500,
        {"p95_ttft_ms": 2000},
        model="Qwen/Qwen3-14B",
        gpu="a100_sxm_40gb",
    ),
    "a small budget": pressured(
        16, 2000, 20, {"p95_ttft_ms": 500}, max_num_batched_tokens=1024
    ),
    "long prompts": pressured(9, 6000, 50, {"p95_ttft_ms": 1000}),
    "slow tokens": pressured(30, 400, 300, {"p95_tpot_ms": 12}),
    "before chunks": pressured(
        14,
        900,
        250,
        {"p95_ttft_ms": 800},
        150,  # step by step, in many times the time
        scheduler="v0",
        num_gpu_blocks_override=2000,
    ),
    "a large model": pressured(
        3,
        1500,
        300,
        {"p95_e2el_ms": 9000},
        model="Qwen/Qwen3-32B",
        gpu="h100_sxm",
    ),
}


def shorter(name: str, num_requests: int) -> dict[str, Any]:
    run = deepcopy(CASES[name])
    run["workload"]["synthetic"]["num_requests"] = num_requests
    return run


def advice_for(run: dict[str, Any], num_seeds: int = 5) -> Any:
    with SerialExecutor() as executor:
        return advise(run, executor, num_seeds=num_seeds)


def test_seats_are_what_a_run_without_seats_is_advised() -> None:
    run = shorter("few seats", 120)
    advice = advice_for(run, 3)
    assert advice.resource == "max_num_seqs"
    assert advice.objective == "p95_ttft_ms"
    seats = next(each for each in advice.best if each.key == "max_num_seqs")
    assert seats.verdict == "helps"
    assert seats.low < seats.change < seats.high < 0
    assert seats.flags in ("--max-num-seqs 24", "--max-num-seqs 48")
    assert len({each.key for each in advice.best}) == len(advice.best) <= 3


def test_what_the_traffic_has_not_cannot_be_made_better() -> None:
    run = pressured(20, 50, 1, {"p95_tpot_ms": 40}, num_requests=4)
    run["workload"]["synthetic"]["output_tokens"] = {"kind": "fixed", "tokens": 1}
    with pytest.raises(ConfigError, match=r"objectives\.p95_tpot_ms: no request"):
        advice_for(run, num_seeds=2)


def test_a_trace_that_comes_at_once_is_the_same_for_each_seed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    request = {"arrival_s": 0.0, "prompt": [[0, 20]], "num_output_tokens": 4}
    lines = [{"kvsim_requests": 1}, request, request | {"prompt": [[1, 9]]}]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    run = pressured(20, 50, 1, {"p95_ttft_ms": 40})
    run["workload"] = {"trace": {"kind": "kvsim", "path": str(path)}}
    assert resampled(run) == run


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (-0.3, 0.1, "helps"),
        (0.3, 0.1, "harms"),
        (-0.005, 0.001, "no effect"),
        (0.01, 0.03, "no effect"),
        (-0.2, 0.5, "unclear"),
        (0.0, 0.06, "unclear"),
    ],
)
def test_a_wide_interval_says_nothing(mean: float, half: float, verdict: str) -> None:
    assert _verdict(mean, half) == verdict


def test_remedies_fit_what_binds() -> None:
    engine = parse_config(CASES["few blocks"]).engine.model_copy(
        update={"async_scheduling": False}
    )
    facts = {
        "gpu_memory_utilization": 0.92,
        "max_num_seqs": 256.0,
        "max_num_batched_tokens": 8192.0,
        "num_running_mean": 40.0,
        "loses_prefixes": 0.0,
    }
    keys = {each.key for each in remedies_for(engine, facts, "kv_capacity")}
    assert {"watermark", "admission", "max_num_seqs"} <= keys
    assert "kv_cache_dtype" not in keys  # the number of blocks is given
    seats = [each.flags for each in remedies_for(engine, facts, "max_num_seqs")]
    assert seats[:2] == ["--max-num-seqs 512", "--max-num-seqs 1024"]
    assert "async_scheduling" in {e.key for e in remedies_for(engine, facts, "host")}
    assert "kv_offloading_size" not in keys  # nothing is ever found again
    facts["loses_prefixes"] = 1.0
    assert "kv_offloading_size" in {
        each.key for each in remedies_for(engine, facts, "compute")
    }
    older = engine.model_copy(update={"engine_version": "0.11.2"})
    assert "kv_offloading_size" not in {
        each.key for each in remedies_for(older, facts, "compute")
    }


@pytest.mark.slow
def test_host_memory_is_advised_where_chats_are_forgotten() -> None:
    chats = {
        "kind": "chat",
        "num_sessions": 60,
        "arrivals": {"kind": "poisson", "rate": 1.0},
        "turns": {"kind": "fixed", "number": 5},
        "first_prompt_tokens": {"kind": "fixed", "tokens": 3000},
        "prompt_tokens": {"kind": "fixed", "tokens": 100},
        "output_tokens": {"kind": "fixed", "tokens": 100},
        "think_s": {"kind": "fixed", "value_s": 20.0},
    }
    run = {
        "workload": {"sessions": chats},
        "engine": {**LLAMA, "num_gpu_blocks_override": 2000, "max_model_len": 8192},
        "objectives": {"p95_ttft_ms": 100},
    }
    advice = advice_for(parse_config(run).to_data(), 3)
    host = next(each for each in advice.tried if each.key == "kv_offloading_size")
    assert host.verdict == "helps"
    assert host.flags == "--kv-offloading-size 256"


def test_a_trace_differs_from_seed_to_seed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(
        f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0000000,10,5\n" for i in range(100)
    )
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    run = parse_config(
        {"workload": {"trace": {"kind": "azure", "path": str(path)}}, "engine": LLAMA}
    ).to_data()
    table = resampled(run)["workload"]["resample"]
    assert table == {"window_s": pytest.approx(9.9), "num_windows": None}


def test_the_command_keeps_its_advice_and_the_report_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    run = shorter("few seats", 90)
    config.write_text(json.dumps(run))
    out = tmp_path / "out"
    assert kvsim(["run", str(config), "--out", str(out), "--no-figures"]) == 0
    assert f"what would help: kvsim advise {out}" in capsys.readouterr().out
    assert kvsim(["advise", str(out), "--seeds", "2", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    advice = json.loads((out / "advice.json").read_text())
    assert said.startswith(f"What helps most: {advice['best'][0]['name']}")
    assert advice["num_seeds"] == 2
    page = tmp_path / "page.html"
    assert kvsim(["report", str(out), "--out", str(page), "--static"]) == 0
    assert f"What helps most: {advice['best'][0]['name']}" in page.read_text()
    kept = (out / "advice.json").read_bytes()
    other = ["--set", "engine.max_num_seqs=6", "--seeds", "2", "--workers", "1"]
    assert kvsim(["advise", str(out), *other]) == 0
    assert "not kept: --set makes another run of this" in capsys.readouterr().out
    assert (out / "advice.json").read_bytes() == kept
    assert kvsim(["advise", str(out), "--seeds", "1"]) == 2
    assert "--seeds takes a number from 2 to 11" in capsys.readouterr().err


@pytest.mark.slow
def test_advice_does_in_fresh_runs_what_it_says() -> None:
    """Of ten, nine improve and eight lie within what was said."""
    improved, within = [], []
    for name, run in CASES.items():
        advice = advice_for(run)
        assert advice.best, name
        first = advice.best[0]
        (objective,) = (
            each
            for each in parse_objectives(run["objectives"])
            if each.name == advice.objective
        )
        changed = {**run, "engine": {**run["engine"], **first.changes}}
        moves = []
        for seed in range(100, 120):
            before, after = (
                measure({"run": {**each, "seed": seed}, "facts": False})["values"]
                for each in (run, changed)
            )
            moves.append(after[objective.name] / before[objective.name])
        truth = float(np.exp(np.mean(np.log(moves)))) - 1.0
        improved.append(truth < 0.0)
        within.append(first.low <= truth <= first.high)
        print(
            f"{name}: {advice.resource}; {first.name}; {first.change:+.3f} "
            f"({first.low:+.3f} to {first.high:+.3f}), fresh {truth:+.3f}"
        )
    assert sum(improved) >= 9
    assert sum(within) >= 8
