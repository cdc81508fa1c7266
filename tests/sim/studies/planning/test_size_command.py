"""``kvsim size``: a question in a line, and the plan that answers it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.errors import ConfigError
from sim.studies.planning.answer.verdict import Verdict, verdict_of
from sim.studies.planning.search import trial
from sim.studies.planning.sizing import SizeQuestion, default_prices, plan_of
from sim.studies.planning.solve import solve
from sim.studies.sweeps.local import SerialExecutor
from tests.shared import ROOT
from tests.sim.commands import refused
from tests.sim.studies.planning.plans import small, solved

if TYPE_CHECKING:
    from pathlib import Path

STEPS = (
    "cost.kind=constant",
    "cost.step_s=0.01",
    "engine.max_num_seqs=8",
    "engine.async_scheduling=false",
    "workload.synthetic.num_requests=300",
)
"""Constant steps, 8 places: an engine holds 40 requests/s of 20 tokens."""
MODEL = ["--model", "meta-llama/Llama-3.1-8B", "--gpu", "h200_sxm"]
TRAFFIC = ["--input-tokens", "16", "--output-tokens", "20", "--rate", "50"]
RANKS = ["--tensor-parallel-size", "1,2"]
QUESTION = ["size", *MODEL, *TRAFFIC, *RANKS, "--p95-ttft", "100ms"]
SETTINGS = [word for each in STEPS for word in ("--set", each)]


def question(**changes: Any) -> SizeQuestion:
    asked: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpus": ("h200_sxm",),
        "objectives": {"p95_ttft_ms": 100.0},
        "rate": 50.0,
        "input_tokens": 16,
        "output_tokens": 20,
    }
    return SizeQuestion(**asked | changes)


@pytest.mark.slow
def test_the_answer_is_that_of_the_plan_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 requests/s on engines that hold 40: two on one GPU each cost least."""
    path = tmp_path / "asked.yaml"
    arguments = [*QUESTION, *SETTINGS, "--write", str(path), "--json"]
    assert kvsim([*arguments, "--workers", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"]["answer"] == (
        "Buy 2 h200_sxm, 7.60 USD an hour: 2 engines on 1 h200_sxm each serve 50 "
        "requests/s of meta-llama/Llama-3.1-8B within the objectives."
    )
    assert told["verdict"]["one_engine"].startswith("One such engine does not hold it")
    assert told["verdict"]["confidence"].endswith(
        "All prompts have 16 tokens, all answers 20, and arrivals are Poisson: where "
        "traffic varies more, an engine holds less (--trace FILE)."
    )
    assert "2 engines on 2 h200_sxm each: 15.20" in told["verdict"]["alternatives"][0]
    out = tmp_path / "planned"
    run = ["plan", str(path), "--out", str(out), "--no-figures", "--quiet"]
    assert kvsim([*run, "--workers", "1"]) == 0
    assert json.loads((out / "plan.json").read_text()) == told["plan"]
    assert "exists" in refused(arguments, capsys, tmp_path)


def test_what_is_printed_begins_with_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kvsim([*QUESTION, *SETTINGS, "--explain", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Buy 2 h200_sxm, 7.60 USD an hour: 2 engines")
    order = ["Margin:", "What binds:", "Alternatives:", "What would change the answer:"]
    assert [line for line in printed.splitlines() if line in order] == order
    assert "…" not in printed
    explained = printed.split("The plan that was run:\n")[1]
    asked = plan_of(question(tensor_parallel_sizes=(1, 2), settings=STEPS))
    assert yaml.safe_load(explained) == asked.data


def test_few_runs_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that is searched takes some thirty runs, as its plan takes 150."""
    counted: list[int] = []
    performed = trial._run

    def counting(config: Any, specs: Any, *more: Any) -> Any:
        counted.append(len(specs))
        return performed(config, specs, *more)

    monkeypatch.setattr(trial, "_run", counting)
    asked = plan_of(question(tensor_parallel_sizes=(1,), settings=STEPS))
    with SerialExecutor() as executor:
        solve(asked.plan, executor)
    assert sum(counted) <= 40 * 300


@pytest.mark.slow
def test_the_question_of_a_newcomer_takes_few_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of some 7,000 simulated a second, two processors take as many in 20 s."""
    counted: list[int] = []
    performed = trial._run

    def counting(config: Any, specs: Any, *more: Any) -> Any:
        counted.append(len(specs))
        return performed(config, specs, *more)

    monkeypatch.setattr(trial, "_run", counting)
    asked = plan_of(
        question(
            model="RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic",
            gpus=("h100_sxm", "h200_sxm"),
            objectives={"p95_ttft_ms": 1000.0, "p95_tpot_ms": 60.0},
            rate=6.0,
            input_tokens=1500,
            output_tokens=300,
        )
    )
    with SerialExecutor() as executor:
        found = verdict_of(solve(asked.plan, executor).data)
    assert found.holds
    assert len(found.alternatives) == 2
    assert sum(counted) < 150_000


def test_a_shortlist_leaves_out_what_costs_more(tmp_path: Path) -> None:
    gpus = {"gpu": ["h200_sxm", "h100_sxm"], "tensor_parallel_size": [1, 2]}
    search = {"num_seeds": 3, "curve": [], "curve_seeds": 1, "warmup_share": 0.1}
    plan = small(candidates=gpus, search=search | {"shortlist": 1})
    plan["workload"]["synthetic"]["rate_scale"] = 7.5
    found = solved(plan, tmp_path).data
    by_status = {each["name"]: each["status"] for each in found["candidates"]}
    assert [name for name, s in by_status.items() if s == "ok"] == [
        "Llama-3.1-8B_h100_sxm_tp1"
    ]
    assert set(by_status.values()) == {"ok", "not_searched"}
    reasons = {each["name"][-12:]: each["reason"] for each in found["candidates"]}
    said = "no less than what was searched"
    cost = "8.00 USD an hour"
    assert reasons["h200_sxm_tp1"] == f"{cost} (2 engines) by its pilot run, {said}"
    # One such engine costs what two of the cheapest do not: no run is needed.
    assert reasons["h200_sxm_tp2"] == f"{cost} (1 engine), {said}"


@pytest.mark.slow
def test_each_model_has_a_shortlist_of_its_own(tmp_path: Path) -> None:
    models = ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"]
    two = {"model": models, "gpu": ["h200_sxm"], "tensor_parallel_size": [1, 2]}
    search = {"num_seeds": 3, "curve": [], "curve_seeds": 1, "warmup_share": 0.1}
    plan = small(
        candidates=two, engine={"max_num_seqs": 8}, search=search | {"shortlist": 1}
    )
    plan["workload"]["synthetic"] |= {"rate_scale": 7.5, "num_requests": 200}
    found = solved(plan, tmp_path).data["candidates"]
    searched = [each["name"] for each in found if each["status"] == "ok"]
    assert searched == ["Llama-3.1-8B_h200_sxm_tp1", "Qwen3-32B_h200_sxm_tp1"]


def test_what_was_not_searched_is_not_said_to_fail() -> None:
    left = {"name": "a", "model": "m", "gpu": "l4", "tensor_parallel_size": 1}
    left |= {"reason": "dear"}
    plan = {"traffic": {"rate": 50.0}, "candidates": [left | {"status": ""}]}
    assert verdict_of(plan).answer.startswith("No candidate serves 50 requests/s")
    plan = {**plan, "candidates": [left | {"status": "not_searched"}]}
    assert verdict_of(plan).answer == (
        "No candidate that was searched serves 50 requests/s within the objectives; "
        "1 was not (search.shortlist)."
    )


def test_of_equal_cost_the_surer_is_bought() -> None:
    rate = {"value": 6.5, "low": 6.0, "high": 7.0, "at_bound": None, "confidence": 0.75}
    rate |= {"cost_bounds": "cost_band"}
    fleet = {"replicas": 1, "seeds_that_hold": 3, "num_seeds": 3}
    fleet |= {"values": {"p95_ttft_ms": {"value": 400.0}}}
    common = {"model": "m", "reason": None, "binding": {"sentence": "compute binds"}}
    common |= {"serve_command": "", "not_in_the_command": [], "extrapolated": []}
    common["cost_per_hour"] = 12.0
    close = {
        "name": "a",
        "gpu": "l4",
        "tensor_parallel_size": 2,
        "rate": rate | {"cost_low": 5.0},
    }
    sure = {
        "name": "b",
        "gpu": "l4",
        "tensor_parallel_size": 4,
        "rate": rate | {"cost_low": 6.2},
    }
    more = {"replicas": 1, "num_gpus": 4, "fleets": [fleet]}
    found = verdict_of(
        {
            "traffic": {"rate": 6.0},
            "objectives": [{"name": "p95_ttft_ms", "limit": 1000.0}],
            "prices": {"currency": "USD", "per_gpu_hour": {"l4": 3.0}},
            "replicas": {"routers": []},
            "cost_band": 0.15,
            "candidates": [common | close | more, common | sure | more],
        }
    )
    assert found.answer.startswith("Buy 4 l4, 12.00 USD an hour: 1 engine on 4 l4")
    assert found.margin == ("p95_ttft_ms is 400, 60% below 1,000.",)
    assert found.changes == (
        "Traffic: about 8% more fits, by 1 engine at the most that one holds.",
        "Speed: nothing changes if all steps are 15% slower than predicted.",
    )


def test_an_engine_that_holds_the_traffic_in_some_seeds_only_is_said_so() -> None:
    """Its highest rate, a median, lies above the traffic all the same."""
    rate = {"value": 6.5, "low": 5.0, "high": 7.0, "at_bound": None, "confidence": 0.75}
    rate |= {"cost_bounds": "cost_band", "cost_low": 5.0}
    values = {"values": {"p95_ttft_ms": {"value": 400.0}}, "num_seeds": 3}
    candidate = {"model": "m", "gpu": "l4", "tensor_parallel_size": 1, "reason": None}
    candidate |= {"serve_command": "", "not_in_the_command": [], "extrapolated": []}
    candidate |= {"binding": None, "cost_per_hour": 2.0, "replicas": 2, "num_gpus": 2}
    candidate |= {"rate": rate, "name": "a", "engine": {"kv_cache_dtype": "auto"}}
    candidate["fleets"] = [values | {"replicas": 2, "seeds_that_hold": 3}]
    plan = {
        "traffic": {"rate": 6.0},
        "objectives": [{"name": "p95_ttft_ms", "limit": 1000.0}],
        "prices": {"currency": "USD", "per_gpu_hour": {"l4": 1.0}},
        "cost_band": 0.0,
        "candidates": [candidate],
    }
    assert "1 l4 each serve" in verdict_of(plan).answer
    assert verdict_of(plan).one_engine == (
        "One such engine does not hold it in every simulation: the most that it holds "
        "is 6.5 requests/s (5 to 7 from seed to seed; 6 asked)."
    )
    assert "KV blocks" not in verdict_of(plan).confidence
    candidate |= {
        "num_gpu_blocks": 2291,
        "extrapolated": ["KV blocks: 586 to 3,402: x"],
    }
    assert verdict_of(plan).confidence.endswith(
        " Its pool is taken to have 2,291 KV blocks, and may have 586 to 3,402 (kvsim "
        "capacity says why): with what an engine's log says, set "
        "engine.num_gpu_blocks_override."
    )


def test_candidates_of_one_gpu_are_told_apart_by_their_settings() -> None:
    fleet: dict[str, Any] = {
        "replicas": 1,
        "seeds_that_hold": 3,
        "num_seeds": 3,
        "values": {},
    }
    rate: dict[str, Any] = {
        "value": 6.5,
        "low": 5.0,
        "high": 7.0,
        "at_bound": None,
        "confidence": 0.75,
    }
    common: dict[str, Any] = {
        "model": "m",
        "gpu": "l4",
        "tensor_parallel_size": 1,
        "reason": None,
    }
    common |= {"serve_command": "", "not_in_the_command": [], "extrapolated": []}
    common |= {"binding": None, "replicas": 1, "num_gpus": 1, "fleets": [fleet]}
    common |= {"rate": rate | {"cost_low": 5.0}, "cost_per_hour": 1.0}
    host: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_offloading_size": 64.0}
    plan = {
        "traffic": {"rate": 4.0},
        "objectives": [],
        "prices": {"currency": "USD", "per_gpu_hour": {"l4": 1.0}},
        "replicas": {"routers": []},
        "cost_band": 0.0,
        "candidates": [
            common | {"name": name, "engine": engine}
            for name, engine in {
                "a": {"kv_cache_dtype": "auto", "kv_offloading_size": None},
                "b": {"kv_cache_dtype": "fp8", "kv_offloading_size": None},
                "c": host,
            }.items()
        ],
    }
    found = verdict_of(plan)
    assert "1 engine on 1 l4 (kv_cache_dtype auto) serves" in found.answer
    assert found.alternatives[0].startswith("1 engine on 1 l4 (kv_cache_dtype fp8): ")
    (memory,) = found.host_memory
    assert memory.startswith("64 GiB of host memory behind each engine (kv_cache_dtype")


def test_nothing_that_serves_is_said_so() -> None:
    plan = {
        "traffic": {"rate": 5.0},
        "candidates": [
            {
                "name": "a",
                "model": "m",
                "gpu": "l4",
                "tensor_parallel_size": 2,
                "reason": "64 do not serve it",
            }
        ],
    }
    answer = "No candidate serves 5 requests/s within the objectives."
    left = ("2 x l4: 64 do not serve it",)
    assert verdict_of(plan) == Verdict(False, answer, left_out=left)


ASK = ["--rate", "3", "--input-tokens", "9", "--output-tokens", "9", "--p95-ttft", "1s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--model", "openai/gpt-oss-120b", "--gpu", "rtx_4090", *ASK, *RANKS],
            "openai/gpt-oss-120b does not fit 2 x rtx_4090: a GPU lacks 14.4 GiB "
            "(weights and a step take 36.0, the engine may use 21.6); it fits from "
            "tensor_parallel_size 4",
        ),
        (
            ["--model", "Qwen/Qwen3-8B", "--gpu", "rtx_4090,l4", *ASK],
            "--price rtx_4090=NUMBER: there is no price",
        ),
        (
            ["--model", "Qwen/Qwen3-8B", "--gpu", "l40s", "--p95-ttft", "60"],
            "must be a time with its unit, such as 60ms or 1.5s, got 60",
        ),
        (
            ["--model", "Qwen/Qwen3-8B", "--gpu", "l40s", "--rate", "3"],
            "say what is promised",
        ),
        (
            ["--model", "Qwen/Qwen3-8B", "--gpu", "l40s", "--p95-ttft", "1s"],
            "describe the traffic",
        ),
        (
            [*MODEL, *ASK[2:], "--rate=-5"],
            "--rate takes requests a second above 0, got -5",
        ),
        (
            [*MODEL, *ASK, "--write", "no/folder.yaml"],
            "--write no/folder.yaml: No such",
        ),
        (
            ["--model", "Qwen/Qwen3-8B", "--gpu", "l40s", *ASK, *RANKS[:1], "3"],
            "tensor_parallel_size must divide the 32 attention heads",
        ),
        (
            ["--model", "Qwen/Qwen3-8B", "--gpu", "l40s", *ASK, "--price", "h200=3"],
            "--price h200_sxm: this GPU is not among --gpu",
        ),
        (["--model", "Qwen/Qwen3-8B", "--gpu", ",", *ASK], "must name at least one"),
        (
            [*MODEL, *ASK, "--tensor-parallel-size", ","],
            "must name at least one",
        ),
    ],
)
def test_questions_without_an_answer_are_refused_with_the_reason(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in refused(["size", *arguments], capsys, tmp_path)


def test_a_gpu_alone_needs_no_price() -> None:
    asked = plan_of(question(gpus=("rtx_4090",), model="Qwen/Qwen3-8B"))
    assert asked.data["prices"]["per_gpu_hour"] == {"rtx_4090": 1.0}
    asked = plan_of(question(prices={"h200": 3.3}))
    assert asked.data["prices"] == {"per_gpu_hour": {"h200_sxm": 3.3}}


def test_a_trace_without_a_rate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    request = {"arrival_s": 0.0, "prompt": [[0, 20]], "num_output_tokens": 4}
    path.write_text(f'{{"kvsim_requests": 1}}\n{json.dumps(request)}\n')
    lengths = {"input_tokens": None, "output_tokens": None}
    with pytest.raises(ConfigError, match="all of its requests come at once"):
        plan_of(question(trace=str(path), **lengths))


def test_round_figures_are_those_of_the_example() -> None:
    text = (ROOT / "examples/prices.yaml").read_text(encoding="utf-8")
    assert default_prices() == yaml.safe_load(text)


def test_a_trace_is_resampled_at_the_rate_that_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [
        f"2023-11-16 18:{m:02}:{s:02}.0,100,20" for m in range(5) for s in range(60)
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    lengths = {"input_tokens": None, "output_tokens": None}
    asked = plan_of(question(trace=str(path), rate=2.0, **lengths)).data["workload"]
    assert asked["trace"]["kind"] == "azure"
    assert asked["trace"]["rate_scale"] == pytest.approx(2.0, rel=0.01)
    assert asked["resample"]["window_s"] == pytest.approx(30, rel=0.01)
    assert asked["resample"]["num_windows"] == 30


def test_a_long_trace_is_seen_in_ten_windows_at_least(tmp_path: Path) -> None:
    """Three minutes of some busy ones are another traffic with each seed."""
    path = tmp_path / "trace.csv"
    rows = [
        f"2023-11-16 18:{m:02}:{s:02}.{t},100,20"
        for m in range(30)
        for s in range(60)
        for t in range(0, 10, 2)
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    lengths = {"input_tokens": None, "output_tokens": None, "rate": None}
    asked = plan_of(question(trace=str(path), **lengths)).data["workload"]
    assert asked["resample"] == {"window_s": 60.0, "num_windows": 10}


def test_a_log_of_no_known_format_is_to_be_converted(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("when,in,out\n1,2,3\n")
    lengths = {"input_tokens": None, "output_tokens": None, "rate": None}
    rule = "got 'when,in,out', .*; or table, .*; write it .* kvsim workload convert"
    with pytest.raises(ConfigError, match=rule):
        plan_of(question(trace=str(path), **lengths))


@pytest.mark.parametrize(
    ("model", "gpu", "ranks"),
    [
        ("Qwen2-7B", "a100", [1, 2, 4]),  # 28 heads
        ("phi-4", "h100", [1, 2]),  # ten KV heads
    ],
)
def test_ranks_that_do_not_divide_the_model_are_left_out(
    model: str, gpu: str, ranks: list[int]
) -> None:
    plan = plan_of(question(model=model, gpus=(gpu,))).data
    (table,) = plan["candidates"]
    assert table["tensor_parallel_size"] == ranks
