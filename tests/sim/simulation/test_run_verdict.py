"""Whether a run keeps its objectives: the numbers of the summary, in sentences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.results.summary.verdict import verdict_lines
from sim.simulation.run import Simulation
from sim.views.notebook import summary_html
from tests.sim.config.test_config import minimal


def run_of(objectives: dict[str, Any] | None, **engine: Any) -> Any:
    config = {
        "workload": {
            "synthetic": {
                "num_requests": 60,
                "arrivals": {"kind": "poisson", "rate": 40.0},
                "prompt_tokens": {"kind": "fixed", "tokens": 64},
                "output_tokens": {"kind": "uniform", "low": 2, "high": 40},
            }
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h100_sxm",
            "max_num_seqs": 4,
            **engine,
        },
        "cost": {"kind": "constant", "step_s": 0.01},
        "objectives": objectives,
    }
    return Simulation(parse_config(config)).run()


def test_without_objectives_nothing_is_said_and_nothing_is_written() -> None:
    results = run_of(None)
    assert "verdict" not in results.summary
    assert verdict_lines(results.summary) == []
    assert "objectives" not in results.config.to_data()


def test_the_one_that_is_missed_by_most_comes_first() -> None:
    summary = run_of(
        {"p95_ttft_ms": 500, "p95_tpot_ms": 20, "p97_e2el_ms": 900}
    ).summary
    verdict = summary["verdict"]
    by_name = {each["name"]: each for each in verdict["objectives"]}
    assert not verdict["holds"]
    assert verdict["fails_first"] == "p95_ttft_ms" == verdict["objectives"][0]["name"]
    assert by_name["p95_ttft_ms"]["value"] == summary["p95_ttft_ms"]
    assert by_name["p95_tpot_ms"] == {
        "name": "p95_tpot_ms",
        "limit": 20.0,
        "value": pytest.approx(10.0),
        "holds": True,
        "margin": pytest.approx(0.5),
    }
    assert verdict["answer"].startswith("Fails 2 of 3 objectives: p95_ttft_ms is ")
    assert verdict["answer"].endswith("the first to fail.")


def test_numbers_that_a_summary_has_not_are_taken_from_the_requests() -> None:
    results = run_of({"p97_e2el_ms": 10, "p97_itl_ms": 10, "p50_kv_cache_usage": 0.9})
    by_name = {e["name"]: e["value"] for e in results.summary["verdict"]["objectives"]}
    e2el_ms = 1e3 * results.requests["e2el_s"].to_numpy()
    assert by_name["p97_e2el_ms"] == pytest.approx(np.percentile(e2el_ms, 97))
    assert by_name["p97_itl_ms"] == pytest.approx(10.0)
    assert by_name["p50_kv_cache_usage"] == results.summary["p50_kv_cache_usage"]


def test_goodput_counts_the_tightest_limits() -> None:
    results = run_of({"p50_ttft_ms": 500, "p95_ttft_ms": 900, "p95_tpot_ms": 60})
    verdict = results.summary["verdict"]
    good = float((results.requests["ttft_s"] <= 0.5).mean())
    assert verdict["goodput_share"] == pytest.approx(good)
    assert f"{good:.1%} of the requests kept ttft_ms 500 and" in verdict["lines"][-1]


def test_what_holds_says_how_near_it_is() -> None:
    summary = run_of({"p95_ttft_ms": 60000}).summary
    answer = summary["verdict"]["answer"]
    assert summary["verdict"]["holds"]
    assert answer.startswith("Holds: p95_ttft_ms is ")
    assert answer.endswith("% below 60,000.")
    assert answer in summary_html(summary)
    both = run_of({"p95_ttft_ms": 60000, "p95_e2el_ms": 1e6}).summary["verdict"]
    name = both["fails_first"]
    assert both["answer"].startswith(f"Holds: {name}, the nearest to its limit, is ")


def test_a_run_that_rejects_does_not_hold() -> None:
    summary = run_of({"p95_ttft_ms": 60000}, max_model_len=90).summary
    assert summary["rejected"] or summary["length_capped"]
    assert summary["verdict"]["holds"] == (summary["completed"] == 60)


def test_preemptions_are_a_number_and_no_share() -> None:
    said = run_of({"preemptions_per_request": 0.5}).summary["verdict"]["answer"]
    assert said == "Holds: preemptions_per_request is 0, 100% below 0.5."


def test_what_was_not_measured_is_not_taken_for_unserved() -> None:
    config = run_of({"p95_tpot_ms": 60}).config.to_data()
    config["workload"]["synthetic"]["output_tokens"] = {"kind": "fixed", "tokens": 1}
    summary = Simulation(parse_config(config)).run().summary
    assert summary["completed"] == 60
    assert summary["verdict"]["answer"] == (
        "Fails the limit: p95_tpot_ms was not measured: no request that was served "
        "has it."
    )


def test_unknown_objectives_are_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="did you mean 'p95_ttft_ms'"):
        run_of({"p95_tft_ms": 500})
    with pytest.raises(ConfigError, match=r"objective; percentiles are below 100 \("):
        run_of({"p100_ttft_ms": 500})


def test_a_run_that_served_nothing_has_one_remedy() -> None:
    data = minimal(scheduler="cacheflow", max_num_seqs=1)
    data["workload"]["best_of"] = 3
    with pytest.raises(ConfigError, match="max_num_seqs 1; raise it") as refused:
        Simulation(parse_config(data)).run()
    assert "larger cache" not in str(refused.value)
