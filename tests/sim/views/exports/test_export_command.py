"""``kvsim export``: where things go, CSV, and what is refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from sim.cli.main import run as kvsim
from tests.sim.commands import files, refused

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def results(recorded: Path, tmp_path: Path) -> Path:
    """Return a copy of results that may be changed."""
    return shutil.copytree(recorded, tmp_path / "results")


def test_csv_is_the_tables(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvsim(["export", str(results), "--to", "csv"]) == 0
    out = results / "exports" / "csv"
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}\n  rows: 40 requests, ")
    names = ["itl", "preemptions", "requests", "steps"]
    assert sorted(path.stem for path in out.iterdir()) == names
    for name in names:
        expected = pd.read_parquet(results / f"{name}.parquet")
        # No value: an empty text, or an empty cell of numbers.
        texts = dict.fromkeys(expected.select_dtypes("str").columns, "")
        found = pd.read_csv(out / f"{name}.csv", dtype=dict(expected.dtypes))
        pd.testing.assert_frame_equal(found.fillna(texts), expected, rtol=1e-15)


def test_exports_go_into_the_results_and_leave_with_them(results: Path) -> None:
    for to in ("chrome", "bench", "prometheus", "csv"):
        assert kvsim(["export", str(results), "--to", to, "--quiet"]) == 0
    exports = sorted(path.name for path in (results / "exports").iterdir())
    assert exports == ["bench.json", "csv", "metrics.prom", "trace.json"]
    before = files(results / "exports")
    for to in ("chrome", "bench", "prometheus", "csv"):
        arguments = ["export", str(results), "--to", to, "--quiet", "--overwrite"]
        assert kvsim(arguments) == 0
    assert files(results / "exports") == before
    config = str(results / "config.yaml")
    arguments = ["run", config, "--out", str(results), "--overwrite"]
    assert kvsim([*arguments, "--no-figures", "--quiet"]) == 0
    assert not (results / "exports").exists()


@pytest.mark.parametrize("to", ["chrome", "bench", "prometheus", "csv"])
def test_what_is_there_stays(
    to: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "there"
    arguments = ["export", str(results), "--to", to, "--out", str(out)]
    assert kvsim([*arguments, "--quiet"]) == 0
    line = refused(arguments, capsys, tmp_path)
    assert "exists already; choose another --out or add --overwrite" in line
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    line = refused(["export", str(nothing), "--to", to], capsys, tmp_path)
    assert "holds no results: there is no plan.json, sweep.json, summary.json" in line


def test_only_its_own_folder_is_replaced(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "csv"
    arguments = ["export", str(results), "--to", "csv", "--out", str(out)]
    assert kvsim([*arguments, "--quiet"]) == 0
    (out / "notes.txt").write_text("mine")
    line = refused([*arguments, "--overwrite"], capsys, tmp_path)
    assert "also holds 'notes.txt'" in line
    arguments = ["export", str(results), "--to", "bench", "--out", str(out)]
    line = refused([*arguments, "--overwrite"], capsys, tmp_path)
    assert "is a directory" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "bench", "--begin", "5"], "--begin and --end are of --to chrome"),
        (["--to", "chrome", "--begin", "5", "--end", "5"], "got 5 and 5"),
        (["--to", "chrome", "--begin", "nan"], "got nan and inf"),
        (["--to", "pdf"], "chrome"),
        ([], "--to"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    options: list[str],
    message: str,
    results: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in refused(["export", str(results), *options], capsys, tmp_path)


def test_a_sweep_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    line = refused(["export", str(tmp_path), "--to", "csv"], capsys, tmp_path)
    assert "holds a sweep, not a run" in line


def test_broken_results_leave_nothing_behind(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = results / "schedule.jsonl.zst"
    schedule.write_bytes(schedule.read_bytes()[:-200])
    out = str(tmp_path / "trace.json")
    arguments = ["export", str(results), "--to", "chrome", "--out", out]
    assert "schedule.jsonl.zst" in refused(arguments, capsys, tmp_path)
    (results / "requests.parquet").write_bytes(b"PAR1")
    out = str(tmp_path / "bench.json")
    arguments = ["export", str(results), "--to", "bench", "--out", out]
    assert "requests.parquet" in refused(arguments, capsys, tmp_path)


@pytest.mark.parametrize("to", ["chrome", "bench", "prometheus", "csv"])
@pytest.mark.parametrize("table", ["steps", "itl", "preemptions"])
def test_tables_that_are_cut_off_are_refused(
    to: str,
    table: str,
    results: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = results / f"{table}.parquet"
    path.write_bytes(path.read_bytes()[:500])
    arguments = ["export", str(results), "--to", to, "--out", str(tmp_path / "out")]
    line = refused(arguments, capsys, tmp_path)
    assert f"{table}.parquet' cannot be read" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "key"), [("bench", "request_rate"), ("prometheus", "num_preemptions")]
)
def test_summaries_of_other_versions_are_refused(
    to: str,
    key: str,
    results: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = results / "summary.json"
    summary = json.loads(path.read_text())
    del summary[key]
    path.write_text(json.dumps(summary))
    arguments = ["export", str(results), "--to", to, "--out", str(tmp_path / "out")]
    line = refused(arguments, capsys, tmp_path)
    assert f"has no number '{key}'" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["prefix_cache_queries", "max_model_len"])
@pytest.mark.parametrize("odd", ["a.py:B", None, float("inf")])
def test_a_summary_without_its_numbers_is_refused(
    key: str,
    odd: object,
    results: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = results / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: odd}))
    out = ["--to", "prometheus", "--out", str(tmp_path / "out")]
    line = refused(["export", str(results), *out], capsys, tmp_path)
    assert "summary.json'" in line
    assert key in line
