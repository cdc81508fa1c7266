"""A real vLLM 0.19 that saturates at 128 running requests, simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.studies.validation.fit import parse_term
from sim.studies.validation.readers import read
from sim.studies.validation.readers.requests_csv import read_timeseries
from sim.studies.validation.run import validate
from tests.shared import shared
from tests.truth.runs import RTX, rtx_config

if TYPE_CHECKING:
    from pathlib import Path

    from sim.studies.validation.observed import Observed

HIDDEN = {"schedule_request_s": 0.0}
"""The release schedules ahead: steps in turn wait for a host, not for the scheduler."""
IDEAL_HIT_TOKENS = 19_520
"""Reuse of full blocks of real token ids, which no eviction took away."""


@pytest.fixture
def measured() -> Observed:
    observed = read(shared(f"{RTX}/requests.csv"))
    series = read_timeseries(shared(f"{RTX}/timeseries.csv"))
    assert series.kv_cache_usage is None  # a known fault of what wrote the log
    return replace(observed, series=series)


def assert_within(report: dict[str, Any], part: str) -> None:
    """Hold the gates: TPOT and E2E mean 4 %, TTFT mean and median 8 %."""
    errors = {name: found["abs_error_pct"] for name, found in report[part].items()}
    assert errors["mean_tpot_ms"] <= 4.0
    assert errors["mean_e2el_ms"] <= 4.0
    assert errors["mean_ttft_ms"] <= 8.0
    assert errors["p50_ttft_ms"] <= 8.0


def assert_curves(report: dict[str, Any]) -> None:
    for name in ("num_running", "num_waiting"):
        assert report["curves"][name]["mean_abs"] <= 3.0


def test_the_datasheet_with_the_host_fitted_on_the_first_third(
    measured: Observed,
) -> None:
    """Of steps one by one: with the host hidden there is nothing to be fitted."""
    config = rtx_config({"kind": "roofline"} | HIDDEN, async_scheduling=False)
    report = validate(config, measured, [parse_term("host")]).to_dict()
    assert_within(report, "metrics")
    assert_within(report, "judged_metrics")
    assert_curves(report)
    assert report["metrics"]["completed"]["error_pct"] == 0.0


def test_scheduling_ahead_with_nothing_fitted(measured: Observed) -> None:
    ahead, one_by_one = (
        validate(rtx_config(async_scheduling=each), measured).to_dict()
        for each in (True, False)
    )
    assert_within(ahead, "metrics")
    assert_curves(ahead)
    for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"):
        both = [each["metrics"][name]["abs_error_pct"] for each in (ahead, one_by_one)]
        assert both[0] < both[1]
    for name, error in ahead["curves"].items():
        if name in {"num_running", "num_waiting"}:
            assert error["mean_abs"] < one_by_one["curves"][name]["mean_abs"]


def test_prefix_hits_are_those_of_the_real_token_ids(measured: Observed) -> None:
    validation = validate(rtx_config(), measured)
    ours = validation.predicted.requests
    assert ours is not None
    assert ours.num_cached_tokens is not None
    assert int(ours.num_cached_tokens.sum()) == IDEAL_HIT_TOKENS
    hits = validation.to_dict()["metrics"]["prefix_cache_hits"]
    assert (hits["predicted"], hits["measured"]) == (IDEAL_HIT_TOKENS, None)


def test_the_run_says_nothing_about_a_full_cache(measured: Observed) -> None:
    sharpness = validate(rtx_config(), measured).to_dict()["sharpness"]
    assert sharpness["verdict"].startswith("not sharp: usage <= 28.9 % (simulated)")
    assert not sharpness["has_pressure"]
    assert [each["num_requests_changed"] for each in sharpness["more_blocks"]] == [0, 0]


@pytest.mark.slow
def test_the_measured_layers_with_the_host_fitted_on_the_first_third(
    measured: Observed, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    folder = shared("profiles/llmservingsim/RTXPRO6000")
    command = ["profile", "import", "llmservingsim", "--path", str(folder)]
    model = ["--model", "meta-llama/Llama-3.1-8B"]
    assert kvsim([*command, *model, "--out", str(path), "--quiet"]) == 0
    cost = {"kind": "measured", "profile": str(path)} | HIDDEN
    for terms in ([], [parse_term("host")]):
        report = validate(
            rtx_config(cost, async_scheduling=False), measured, terms
        ).to_dict()
        assert_within(report, "metrics")
        if terms:
            assert_within(report, "judged_metrics")
        assert_curves(report)
        assert report["profile"].startswith("sha256:")
