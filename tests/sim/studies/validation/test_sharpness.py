"""More blocks than the engine had are found out where its cache was full."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.config.tables import parse_config
from sim.simulation.simulate import simulate
from sim.studies.validation.readers import read
from sim.studies.validation.readers.requests_csv import read_timeseries
from sim.studies.validation.run import Validation, validate
from tests.sim.studies.validation.runs import config, write_requests, write_series

if TYPE_CHECKING:
    from pathlib import Path

    from sim.config.tables import RunConfig
    from sim.studies.validation.observed import Observed


def pressed(num_blocks: int = 140) -> dict[str, Any]:
    """A hundred requests at once, long answers: the cache is full to the end."""
    data = config()
    synthetic = data["workload"]["synthetic"]
    synthetic |= {
        "num_requests": 100,
        "arrivals": {"kind": "poisson", "rate": 20.0},
        "prompt_tokens": {"kind": "lognormal", "median": 60, "sigma": 0.7, "max": 300},
        "output_tokens": {"kind": "lognormal", "median": 150, "sigma": 0.5, "max": 400},
    }
    data["engine"]["num_gpu_blocks_override"] = num_blocks
    return data


def with_blocks(num_blocks: int) -> RunConfig:
    return parse_config(pressed(num_blocks))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """A run in the preempting regime, as if an engine had been measured."""
    folder = tmp_path_factory.mktemp("measured")
    results = simulate(with_blocks(140))
    write_requests(results, folder / "requests.csv")
    time_s = np.arange(0.25, results.summary["duration"], 0.25)
    write_series(results, time_s, folder / "series.csv")
    return replace(
        read(folder / "requests.csv"), series=read_timeseries(folder / "series.csv")
    )


@pytest.fixture(scope="module")
def right(measured: Observed) -> Validation:
    return validate(with_blocks(140), measured)


def test_the_run_is_full_most_of_the_time(measured: Observed) -> None:
    assert measured.series is not None
    usage = measured.series.kv_cache_usage
    assert usage is not None
    busy = usage[usage > 0.0]
    assert float(np.mean(busy > 0.95)) > 0.5


def test_with_the_right_blocks_there_is_no_error_and_more_have_one(
    right: Validation,
) -> None:
    report = right.to_dict()
    sharpness = report["sharpness"]
    assert report["metrics"]["mean_e2el_ms"]["error_pct"] == pytest.approx(
        0.0, abs=1e-6
    )
    assert sharpness["is_sharp"]
    assert sharpness["verdict"].startswith("sharp: 5 % more blocks change ")
    few, many = sharpness["more_blocks"]
    assert (few["more_pct"], few["num_gpu_blocks"]) == (5, 147)
    assert (many["more_pct"], many["num_gpu_blocks"]) == (30, 182)
    for each in (few, many):
        assert each["num_requests_changed"] > 10
    errors = [e["metrics"]["mean_ttft_ms"]["error_pct"] for e in (few, many)]
    assert errors[1] < errors[0] < -1.0
    preempted = [e["metrics"]["num_preemptions"]["predicted"] for e in (few, many)]
    assert preempted[1] < report["metrics"]["num_preemptions"]["measured"]


def test_more_blocks_are_what_a_run_with_them_gives(
    right: Validation, measured: Observed
) -> None:
    found = right.to_dict()["sharpness"]["more_blocks"][1]["metrics"]
    assert found == validate(with_blocks(182), measured).to_dict()["metrics"]


def test_blocks_that_the_engine_had_not_are_found_out(measured: Observed) -> None:
    report = validate(with_blocks(2000), measured).to_dict()
    assert report["metrics"]["num_preemptions"]["error_pct"] == -100.0
    verdict = report["sharpness"]["verdict"]
    assert verdict.startswith("not sharp: usage <= ")
    assert "the number of blocks that was given is probably too large" in verdict
    assert report["sharpness"]["has_pressure"]


def report_of(
    folder: Path, capsys: pytest.CaptureFixture[str], num_blocks: int
) -> tuple[dict[str, Any], str]:
    data = pressed(num_blocks)
    (folder / "config.yaml").write_text(yaml.safe_dump(data))
    write_requests(simulate(parse_config(data)), folder / "requests.csv")
    out = folder / "out"
    command = ["validate", str(folder / "config.yaml"), "--out", str(out)]
    assert kvsim([*command, "--measured", str(folder / "requests.csv")]) == 0
    return json.loads((out / "validation.json").read_text()), capsys.readouterr().out


def test_a_cache_that_was_never_full_is_not_sharp_and_has_no_curve_of_pressure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, text = report_of(tmp_path, capsys, 4000)
    peak = 100.0 * report["sharpness"]["peak_kv_cache_usage"]
    assert 0.0 < peak < 20.0
    assert f"not sharp: usage <= {peak:.1f} % (simulated)" in text
    assert "predicted with" not in text
    assert "KV usage (" not in text
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert names == {"latencies.png", "per_request.png"}


def test_the_terminal_shows_what_more_blocks_predict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, text = report_of(tmp_path, capsys, 140)
    assert report["sharpness"]["is_sharp"]
    assert "140 blocks, as given" in text
    assert "+30 %: 182" in text
    assert "KV usage (simulation) 95% to 100%" in text
