"""The page of a sweep: its runs, its failures, its curves."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from sim.cli.main import run as kvsim
from sim.views.report.sections.sweep import METRICS
from tests.sim.commands import refused
from tests.sim.studies.sweeps.files import tiny, write_sweep
from tests.sim.views.report.pages import Page, page_of

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS, SEQS = "engine.num_gpu_blocks_override", "engine.max_num_seqs"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pools, the smallest of which cannot hold the longest request."""
    directory = tmp_path_factory.mktemp("sweep")
    grid = {BLOCKS: [2, 25, 50], SEQS: [4, 16]}
    spec = write_sweep(directory, grid=grid, repeats=2)
    out = directory / "out"
    told = ["sweep", str(spec), "--out", str(out), "--workers", "1", "--quiet"]
    assert kvsim(told) == 0
    return out


@pytest.fixture(scope="module")
def runs(sweep: Path) -> pd.DataFrame:
    return pd.read_parquet(sweep / "runs")


@pytest.fixture(scope="module")
def page(sweep: Path) -> Page:
    return page_of(sweep)


def test_each_run_is_there_with_the_numbers_of_the_dataset(
    page: Page, runs: pd.DataFrame
) -> None:
    done = runs.query("status == 'done'").set_index("run")
    assert len(done) == 8
    found = 0
    for number in runs["run"]:
        for key, value in page.data(number):
            assert value == pytest.approx(done.loc[number, key], rel=0, abs=0)
            found += 1
    assert found == len(done) * len({*METRICS} & {*runs.columns})


def test_failures_say_why(page: Page, runs: pd.DataFrame) -> None:
    refusals = runs.query("status == 'refused'")
    assert len(refusals) == 4
    counted = {e["data-key"]: e["value"] for n, e in page.elements if n == "data"}
    assert (counted["refused"], counted["done"]) == ("4", "8")
    for error in refusals["error"]:
        assert " ".join(error.strip().splitlines()[-1].split())[:200] in page.visible


def test_curves_are_means_over_repeats(page: Page, runs: pd.DataFrame) -> None:
    done = runs.query("status == 'done'")
    told = [metric for metric in METRICS if metric in runs]  # no fleet's
    assert set(page.figures) == {metric.replace("_", "-") for metric in told}
    for metric in told:
        expected = done.groupby([SEQS, BLOCKS])[metric].mean()
        spec = page.figures[metric.replace("_", "-")]
        for trace in spec["data"]:
            seqs = int(trace["name"].rpartition(" = ")[2])
            for x, y in zip(trace["x"], trace["y"], strict=True):
                assert y == pytest.approx(expected.loc[seqs, x], rel=1e-5)
        assert sum(len(trace["x"]) for trace in spec["data"]) == len(expected)


def test_a_sweep_stands_alone_and_may_be_unfinished(
    sweep: Path,
    plain_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ["--out", str(tmp_path / "x.html")]
    line = refused(["report", str(sweep), str(plain_run), *out], capsys, tmp_path)
    assert "holds a sweep, which has a page of its own" in line
    part = tmp_path / "part"
    shutil.copytree(sweep, part)
    facts = json.loads((part / "sweep.json").read_text())
    (part / "sweep.json").write_text(json.dumps(facts | {"num_runs": 20}))
    assert "8 of 20 runs are missing" in page_of(part).visible
    (part / "runs" / "runs.parquet").write_bytes(b"cut")
    assert "cannot be read" in refused(["report", str(part), *out], capsys, tmp_path)
    (part / "runs" / "runs.parquet").unlink()
    line = refused(["report", str(part), *out], capsys, tmp_path)
    assert "no run of the sweep" in line


def test_a_sweep_over_words_has_no_curves(tmp_path: Path) -> None:
    schedulers = ["v1", {"kind": "cacheflow"}]
    spec = write_sweep(tmp_path, grid={"engine.scheduler": schedulers})
    out = tmp_path / "out"
    told = ["sweep", str(spec), "--out", str(out), "--workers", "1", "--quiet"]
    assert kvsim(told) == 0
    page = page_of(out, is_static=True)
    assert "No number was varied" in page.visible
    assert "with engine.scheduler = " in page.visible
    assert '"kind"' not in page.visible
    assert "The same in all runs: repeat 0 and seed 0." in page.visible
    assert "Synchronous" not in page.visible
    assert not page.unclosed


def test_the_page_says_which_runs_keep_the_objectives(tmp_path: Path) -> None:
    base = tiny() | {"objectives": {"p95_tpot_ms": 1e6, "p95_ttft_ms": 1e-3}}
    grid = {"objectives.p95_ttft_ms": [1e-3, 1e6], BLOCKS: [2, 50]}
    spec = write_sweep(tmp_path, base=base, grid=grid)
    out = tmp_path / "out"
    told = ["sweep", str(spec), "--out", str(out), "--workers", "1", "--quiet"]
    assert kvsim(told) == 0
    runs = pd.read_parquet(out / "runs").set_index("run")
    done = runs.query("status == 'done'")
    kept = [n for n, text in done["verdict"].items() if json.loads(text)["holds"]]
    assert (len(done), len(kept)) == (2, 1)
    page = page_of(out)
    assert f"The objectives hold in 1 of 2 runs: {kept[0]}." in page.visible
    assert page.visible.count("missed: p95_ttft_ms") == 1
    assert page.visible.count("kept") == 1


def test_a_run_of_a_fleet_tells_its_gpu_hours(tmp_path: Path) -> None:
    fleet = {"pools": [{"name": "only", "replicas": 2}], "router": "round_robin"}
    spec = write_sweep(tmp_path, grid={"fleet": [None, fleet]})
    out = tmp_path / "out"
    told = ["sweep", str(spec), "--out", str(out), "--workers", "1", "--quiet"]
    assert kvsim(told) == 0
    hours = pd.read_parquet(out / "runs").set_index("run").loc[1, "gpu_hours"]
    page = page_of(out)
    assert page.visible.count("GPU hours") == 1
    assert ("gpu_hours", hours) in page.data(1)
    assert "gpu_hours" not in dict(page.data(0))
