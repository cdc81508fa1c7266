"""Plans from end to end: right by arithmetic, repeatable, refused in a line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import load_config
from sim.errors import ConfigError
from sim.simulation.simulate import simulate
from sim.studies.planning.answer.verdict import verdicts_of
from sim.studies.planning.solve import PLAN_FILES
from tests.sim.studies.planning.plans import (
    STEP_S,
    BackToFront,
    Stopping,
    small,
    solved,
    written,
)

if TYPE_CHECKING:
    from pathlib import Path


SEQS_RATE = 8 / (20 * STEP_S)
"""Eight places, each taken for the twenty steps that give twenty tokens."""


TOKENS = {"kind": "fixed", "tokens": 20}
RATELESS = {
    "synthetic": {
        "arrivals": {"kind": "poisson", "rate": None},
        "prompt_tokens": TOKENS,
        "output_tokens": TOKENS,
    }
}


def only(data: Any) -> Any:
    (candidate,) = data["candidates"]
    return candidate


@pytest.mark.slow
def test_capacity_of_places_is_found(tmp_path: Path) -> None:
    found = only(solved(small(), tmp_path).data)
    assert found["status"] == "ok"
    assert found["rate"]["value"] == pytest.approx(SEQS_RATE, rel=0.02)
    assert found["binding"]["resource"] == "max_num_seqs"
    assert "8 max_num_seqs" in found["binding"]["sentence"]


def test_capacity_of_the_token_budget_is_found(tmp_path: Path) -> None:
    """A request of 100 + 1 computed tokens takes its share of 64 a step."""
    plan = small(
        engine={
            "model": "meta-llama/Llama-3.1-8B",
            "max_num_batched_tokens": 64,
            "max_num_seqs": 64,
        }
    )
    plan["workload"]["synthetic"] |= {
        "prompt_tokens": {"kind": "fixed", "tokens": 100},
        "output_tokens": {"kind": "fixed", "tokens": 2},
    }
    found = only(solved(plan, tmp_path).data)
    assert found["rate"]["value"] == pytest.approx(64 / 101 / STEP_S, rel=0.02)


def test_replicas_are_the_fewest_that_hold(tmp_path: Path) -> None:
    """80 requests/s in turn to engines that hold 40 each: two do, one does not."""
    plan = small(replicas={"by": "round_robin", "spare": 1})
    plan["workload"]["synthetic"]["rate_scale"] = 7.8
    found = only(solved(plan, tmp_path).data)
    assert found["replicas"] == 2
    below, own, spare = found["fleets"]
    assert [f["replicas"] for f in found["fleets"]] == [1, 2, 3]
    assert below["seeds_that_hold"] == 0
    assert own["seeds_that_hold"] == spare["seeds_that_hold"] == own["num_seeds"]
    assert found["cost_per_hour"] == 8.0
    per_hour = 78.0 * 20 * 3600
    assert found["cost_per_million_output_tokens"] == pytest.approx(
        8.0 / per_hour * 1e6, rel=0.02
    )


@pytest.mark.slow
def test_what_takes_far_too_many_replicas_is_not_searched(tmp_path: Path) -> None:
    """40 requests/s an engine, or 5: of 78, three replicas serve what two do not."""
    plan = small(
        candidates={"gpu": ["h200_sxm"], "max_num_seqs": [8, 1]},
        replicas={"by": "round_robin", "spare": 0, "most": 3},
    )
    del plan["engine"]["max_num_seqs"]
    plan["workload"]["synthetic"]["rate_scale"] = 7.8
    many, one = solved(plan, tmp_path).data["candidates"]
    assert many["status"] == "ok"
    assert many["replicas"] == 2
    assert one["status"] == "too_many"
    assert one["reason"].endswith("so that 3 replicas do not serve 78")
    assert "rate" not in one
    plan["candidates"]["max_num_seqs"] = [1]
    alone = only(solved(plan, tmp_path).data)
    assert alone["status"] == "too_many"
    assert alone["rate"]["value"] == pytest.approx(1 / (20 * STEP_S), rel=0.02)


@pytest.mark.slow
def test_same_plan_same_bytes_in_any_order(tmp_path: Path) -> None:
    plan = small(cost_band=0.1, sensitivity={"num_seeds": 1})
    plan["workload"]["synthetic"] |= {
        "num_requests": 80,
        "arrivals": {"kind": "poisson", "rate": 10.0},
    }
    first = solved(plan, tmp_path)
    again = solved(plan, tmp_path, BackToFront())
    assert json.dumps(first.data) == json.dumps(again.data)
    assert first.configs == again.configs
    assert first.data["sensitivity"]


@pytest.mark.slow
def test_sensitivity_names_the_lever_that_binds(tmp_path: Path) -> None:
    found = solved(small(sensitivity={"num_seeds": 1}), tmp_path).data
    (sensitivity,) = found["sensitivity"].values()
    gains = {(e["lever"], e["change"]): e["rate_gain"] for e in sensitivity["effects"]}
    assert gains["max_num_seqs", "x 2 (16)"] == pytest.approx(1.0, abs=0.06)
    assert gains["max_num_seqs", "x 0.5 (4)"] == pytest.approx(-0.5, abs=0.03)
    assert gains["KV blocks", "+10 %"] == pytest.approx(0.0, abs=0.03)
    assert sensitivity["verdict"].startswith("a tenth more of max_num_seqs")
    assert "more than of anything else" in sensitivity["verdict"]


@pytest.mark.slow
def test_slower_steps_hold_as_much_less(tmp_path: Path) -> None:
    """Time has no scale of its own but for the bound, which is far away here."""
    found = only(solved(small(cost_band=0.25), tmp_path).data)
    rate = found["rate"]
    assert rate["cost_low"] == pytest.approx(SEQS_RATE / 1.25, rel=0.02)
    assert rate["cost_high"] == pytest.approx(SEQS_RATE * 1.25, rel=0.02)


def test_command_writes_the_plan_and_runnable_configurations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = small(replicas={"by": "round_robin"})
    plan["workload"]["synthetic"]["num_requests"] = 300
    path, out = written(plan, tmp_path), tmp_path / "out"
    command = ["plan", str(path), "--out", str(out), "--workers", "1"]
    assert kvsim(command) == 0
    printed = capsys.readouterr().out
    assert "vllm serve meta-llama/Llama-3.1-8B" in printed
    assert {each.name for each in out.iterdir()} == PLAN_FILES.names
    data = json.loads((out / "plan.json").read_text())
    # no tornado, as no sensitivities were asked for
    assert len(list((out / "figures").iterdir())) == 3
    config = load_config(out / only(data)["config"])
    summary = simulate(config).summary
    rate = only(data)["rate"]["value"]
    assert summary["request_rate"] == pytest.approx(rate, rel=0.01)
    replica = load_config(next(iter((out / "configs").glob("*fleet_of*"))))
    summary = simulate(replica).summary
    assert summary["num_requests"] == 300
    assert [each["num_requests"] for each in summary["engines"]] == [150, 150]
    assert kvsim(command) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_slower_steps_may_hold_nothing(tmp_path: Path) -> None:
    """Tokens of 10 ms keep a limit of 10.5 ms; of 12.5 ms they do at no rate."""
    plan = small(cost_band=0.25, objectives={"p95_tpot_ms": 10.5, "p95_ttft_ms": 300})
    plan["workload"]["synthetic"] |= {"num_requests": 200, "rate_scale": 2.0}
    data = solved(plan, tmp_path).data
    rate = only(data)["rate"]
    assert rate["cost_low"] < 0.001 * rate["value"]
    (verdict,) = verdicts_of(data).values()
    assert any("not even an idle engine does" in each for each in verdict.changes)


def test_traffic_that_comes_at_once_has_no_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    row = "2023-11-16 18:00:00.0000000,100,50\n"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row * 5}")
    plan = small(workload={"trace": {"kind": "azure", "path": str(trace)}})
    with pytest.raises(ConfigError, match=r"requests come at once.*spread over time"):
        solved(plan, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objectives": {"p95_tfft_ms": 1}}, "did you mean 'p95_ttft_ms'"),
        ({"objectives": {}}, "at least one"),
        ({"objectives": {"p50_ttft_ms": 300, "p99_ttft_ms": 200}}, "implies it"),
        ({"objectives": {"p99_ttft_ms": -1}}, "above 0, got -1"),
        ({"objectives": {"kv_cache_usage_mean": 90}}, "at most 1"),
        ({"objectives": {"goodput": {"share": 0.9}}}, "says no latency"),
        ({"prices": {"per_gpu_hour": {"l40s": 2.0}}}, "h200_sxm: there is no price"),
        ({"prices": {"per_gpu_hour": {"h200_sxm": 0}}}, "above 0"),
        ({"prices": {"per_gpu_hour": {"h200_sxm": 1}, "per_host_gib_hour": -1}},
          "prices.per_host_gib_hour: give a number of at least 0, got -1"),
        ({"prices": "nowhere.yaml"}, "there is no file 'nowhere.yaml'"),
        ({"workload": RATELESS}, "arrivals.rate: Input should be a valid number"),
        ({"candidates": {"gpu": []}}, "give a list"),
        ({"candidates": {"gpus": ["h200_sxm"]}}, "did you mean 'gpu'"),
        ({"candidates": {"gpu": ["h200_sxm", "h200_sxm"]}}, "stands twice"),
        ({"engine": {"model": "meta-llama/Llama-3.1-70B"}}, "none of 1 can run"),
        ({"search": {"rates": [5.0, 2.0]}}, "lowest < highest"),
        ({"search": {"num_sedes": 5}}, "did you mean 'num_seeds'"),
        ({"search": {"num_seeds": 1}}, "greater than or equal to 3"),
        ({"objectives": {"p50_tpot_ms": 8.0}}, "an idle engine has p50_tpot_ms 10 ms, "
          "25% above 8"),
        ({"sensitivity": {"of": "nobody"}}, "there is no candidate 'nobody'"),
    ],
)  # fmt: skip
def test_bad_plans_are_refused_in_a_line(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = small(**changes)
    plan["workload"]["synthetic"]["num_requests"] = 60
    out = tmp_path / "out"
    status = kvsim(["plan", str(written(plan, tmp_path)), "--out", str(out), "--quiet"])
    error = capsys.readouterr().err
    assert status == 2
    assert words in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_the_closest_of_those_that_miss_when_idle_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt of 100 tokens takes 50, 20 and 40 ms by 20, 50 and 25 a step."""
    plan = small(
        engine={"model": "meta-llama/Llama-3.1-8B", "max_num_seqs": 8},
        candidates={"gpu": ["h100_sxm"], "max_num_batched_tokens": [20, 50, 25]},
        objectives={"p50_ttft_ms": 15.0},
    )
    plan["workload"]["synthetic"] |= {
        "num_requests": 60,
        "prompt_tokens": {"kind": "fixed", "tokens": 100},
    }
    assert kvsim(["plan", str(written(plan, tmp_path)), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "closest is " in error
    assert "an idle engine has p50_ttft_ms 20 ms, 33% above 15" in error


def test_users_in_a_closed_loop_are_no_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = small()
    plan["workload"]["max_concurrent_users"] = 5
    assert kvsim(["plan", str(written(plan, tmp_path)), "--quiet"]) == 2
    assert "set their own" in capsys.readouterr().err


def test_candidates_that_do_not_fit_are_rows(tmp_path: Path) -> None:
    plan = small(
        engine={"max_num_seqs": 8},
        candidates={
            "model": ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"],
            "gpu": ["h100_sxm"],
        },
    )
    plan["workload"]["synthetic"]["num_requests"] = 200
    eight, seventy = solved(plan, tmp_path).data["candidates"]
    assert eight["status"] == "ok"
    assert seventy["status"] == "does_not_fit"
    assert "weights" in seventy["reason"]


def test_what_was_found_before_a_stop_is_kept(tmp_path: Path) -> None:
    plan = small(sensitivity={"num_seeds": 1})
    plan["workload"]["synthetic"]["num_requests"] = 100
    with pytest.raises(KeyboardInterrupt):
        solved(plan, tmp_path, Stopping(3))
    found = solved(plan, tmp_path, Stopping(2 + 3 + 4))
    assert found.stopped_in == "replicas"
    assert only(found.data)["rate"]["value"] > 0
    assert only(found.data)["replicas"] is None
    assert found.data["sensitivity"] == {}
    target = tmp_path / "folder"
    target.mkdir()
    found.write(target, wall_s=1.0)
    assert json.loads((target / "plan.json").read_text())["stopped_in"] == "replicas"


OWN_BOUNDS = """
from sim.costs.base import StepCost

class Bounded:
    def __init__(self, step_s: float):
        self.step_s = step_s

    def step(self, shape):
        t = self.step_s
        return StepCost(t, host_s=t, lo_s=0.8 * t, hi_s=1.25 * t)

    def describe(self):
        return {"kind": "bounded"}
"""


@pytest.mark.slow
def test_bounds_of_the_cost_model_go_before_the_band(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_BOUNDS)
    plan = small(
        cost={"kind": f"{tmp_path / 'own.py'}:Bounded", "step_s": STEP_S},
        cost_band=0.5,
    )
    plan["workload"]["synthetic"]["num_requests"] = 400
    rate = only(solved(plan, tmp_path).data)["rate"]
    assert rate["cost_bounds"] == "of the cost model"
    assert rate["cost_low"] == pytest.approx(SEQS_RATE * 0.8, rel=0.03)
    assert rate["cost_high"] == pytest.approx(SEQS_RATE / 0.8, rel=0.03)


def test_traffic_that_any_rate_serves_ends_the_search(tmp_path: Path) -> None:
    """All of it fits at once, however soon it comes."""
    plan = small(objectives={"p99_ttft_ms": 100_000})
    plan["workload"]["synthetic"]["num_requests"] = 8
    plan["search"] = plan["search"] | {"num_seeds": 5}
    found = only(solved(plan, tmp_path).data)
    assert found["rate"]["at_bound"] == "high"
    # All searches end where the pilot run did, and do not set out from there again.
    assert found["rate"]["value"] < 1e4 * 2 * SEQS_RATE
