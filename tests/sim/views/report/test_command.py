"""``kvsim report``: a page, or one line that says why not."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from sim.cli.console import LoggedProgress
from sim.cli.main import run as kvsim
from sim.views.report.source import labels
from tests.sim.commands import refused
from tests.sim.views.report.pages import Page

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def copied(plain_run: Path, tmp_path: Path) -> Path:
    """Results that a test may damage."""
    directory = tmp_path / "copied"
    shutil.copytree(plain_run, directory)
    return directory


def test_a_page_is_written_and_named(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert kvsim(["report", str(plain_run), "--out", str(out), "--static"]) == 0
    assert not Page(out.read_text(encoding="utf-8")).unclosed
    assert capsys.readouterr().out.startswith(str(out))
    assert [*tmp_path.iterdir()] == [out]
    assert out.stat().st_mode & 0o777 == 0o644


def test_a_page_that_takes_long_says_how_far_it_is(
    plain_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LoggedProgress, "EVERY_S", 0.001)
    out = tmp_path / "page.html"
    assert kvsim(["report", str(plain_run), "--out", str(out), "--static"]) == 0
    lines = capsys.readouterr().err.splitlines()
    pattern = re.compile(
        r"kvsim: [A-Z].*: \d+ of 10 sections, (about )?.* s (left|so far)"
    )
    assert any(pattern.fullmatch(line) for line in lines)


def test_an_older_page_stays_unless_it_is_to_be_replaced(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    out.write_text("older")
    command = ["report", str(plain_run), "--static", "--quiet", "--out", str(out)]
    line = refused(command, capsys, tmp_path)
    assert "exists already; choose another --out or add --overwrite" in line
    assert out.read_text() == "older"
    assert kvsim([*command, "--overwrite"]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out == ""


def test_a_failure_leaves_the_older_page(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    out.write_text("older")
    (copied / "steps.parquet").write_bytes(b"cut")
    told = ["report", str(copied), "--out", str(out), "--overwrite"]
    assert "steps.parquet' cannot be read" in refused(told, capsys, tmp_path)
    assert out.read_text() == "older"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("missing", "'{}' does not exist; give the --out of 'kvsim run'"),
        ("file", "'{}' is no directory; give the --out"),
        ("empty", "'{}' holds no results: there is no plan.json, sweep.json, summary"),
    ],
)
def test_what_is_no_results_is_refused(
    name: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    given = tmp_path / name
    out = str(tmp_path / "page.html")
    assert line.format(given) in refused(
        ["report", str(given), "--out", out], capsys, tmp_path
    )


def test_no_directory_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["report", "--out", str(tmp_path / "x.html")], capsys, tmp_path)
    assert "nothing to report on" in line


def test_where_no_page_can_be_written(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["report", str(plain_run), "--out"]
    line = refused([*told, str(tmp_path)], capsys, tmp_path)
    assert "is a directory; give --out a file" in line
    line = refused([*told, str(tmp_path / "no" / "x.html")], capsys, tmp_path)
    assert "there is no directory" in line


@pytest.mark.parametrize(
    "name",
    ["summary.json", "config.yaml", "requests.parquet", "preemptions.parquet",
     "steps.parquet"],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damaged_results_are_named(
    name: str,
    damage: str,
    copied: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = copied / name
    if damage == "cut":
        path.write_bytes(b"\xff{" + path.read_bytes()[:10])
    else:
        path.unlink()
    told = ["report", str(copied), "--out", str(tmp_path / "x.html")]
    line = refused(told, capsys, tmp_path)
    if (name, damage) == ("summary.json", "missing"):
        assert "holds no results" in line
    else:
        assert name in line
        assert "run it again" in line


def test_results_of_another_version_are_named(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["report", str(copied), "--out", str(tmp_path / "x.html")]
    steps = pd.read_parquet(copied / "steps.parquet")
    steps.drop(columns="head_s").to_parquet(copied / "steps.parquet")
    line = refused(told, capsys, tmp_path)
    assert "has no column 'head_s': it is of another version of kvsim" in line
    steps.to_parquet(copied / "steps.parquet")
    summary = json.loads((copied / "summary.json").read_text())
    for key in ("num_gpu_blocks", "capacity"):
        rest = {name: value for name, value in summary.items() if name != key}
        (copied / "summary.json").write_text(json.dumps(rest))
        line = refused(told, capsys, tmp_path)
        assert f"{key}" in line
        assert "another version of kvsim; run it again" in line


def test_too_many_runs_and_one_twice(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "x.html")]
    line = refused(["report", *[str(plain_run)] * 9, *out], capsys, tmp_path)
    assert "a page compares at most 8 runs, got 9" in line
    line = refused(["report", *[str(plain_run)] * 2, *out], capsys, tmp_path)
    assert "is given twice" in line


def test_damaged_records_are_named(
    crowded_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("schedule.jsonl.zst", "blocks.json"):
        directory = tmp_path / name.partition(".")[0]
        shutil.copytree(crowded_run, directory)
        (directory / name).write_bytes(b"cut")
        told = ["report", str(directory), "--out", str(tmp_path / "x.html")]
        assert name in refused(told, capsys, tmp_path)


def test_labels_are_short_and_unlike(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "run", tmp_path / "b" / "run"
    assert labels([one]) == ["run"]
    assert labels([one, tmp_path / "c"]) == ["run", "c"]
    assert labels([one, other]) == [str(one), str(other)]


def test_runs_without_requests_or_steps_have_a_page(
    copied: Path, tmp_path: Path
) -> None:
    for name in ("requests", "preemptions", "steps"):
        path = copied / f"{name}.parquet"
        pd.read_parquet(path)[:0].to_parquet(path)
    summary = json.loads((copied / "summary.json").read_text())
    for key in summary:
        if key.endswith(("_ttft_ms", "_tpot_ms", "_itl_ms", "_e2el_ms")):
            summary[key] = None
    (copied / "summary.json").write_text(json.dumps(summary | {"num_preemptions": 0}))
    out = tmp_path / "page.html"
    for flags in ([], ["--static", "--overwrite"]):
        assert kvsim(["report", str(copied), "--out", str(out), "--quiet", *flags]) == 0
        page = Page(out.read_text(encoding="utf-8"))
        assert "there is not a single step" in page.visible
        assert "No request was served to its end." in page.visible
