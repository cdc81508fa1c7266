"""`kvsim plot` as a user meets it: files, formats, styles, refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sim.cli.main import run as kvsim
from sim.views.plots import FIGURES
from sim.views.plots.catalogue import FIGURES_OF, SWEEP_FIGURES, HeatMapKeys, drawings
from sim.views.plots.compared.overlays import OVERLAYS
from sim.views.plots.compared.sweep_runs import read_sweep
from tests.shared import ROOT
from tests.sim.commands import files, refused
from tests.sim.views.plots.directories import RATE, pressed, said, write_sweep_results
from tests.sim.views.plots.tables import pixels_of

if TYPE_CHECKING:
    from pathlib import Path


def plot(*arguments: object) -> int:
    return kvsim(["plot", *map(str, arguments)])


def test_a_run_gives_the_figures_that_the_run_itself_draws(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "figures"
    assert kvsim(["run", str(config), "--out", str(run), "--quiet"]) == 0
    assert plot(run, "--out", out) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(out / f"{name}.png") for name in FIGURES]
    assert files(out) == files(run / "figures")


@pytest.mark.slow
def test_several_runs_lie_over_each_other(
    two_runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot(*two_runs, "--out", tmp_path / "o", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == [str(tmp_path / "o" / f"{n}.png") for n in OVERLAYS]
    for content in files(tmp_path / "o").values():
        assert pixels_of(content).std() > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["latency_cdfs", "heat_map"])
@pytest.mark.parametrize("format_", ["svg", "png", "pdf"])
def test_the_same_figure_has_the_same_bytes_in_any_process(
    figure: str, format_: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    given = (
        [request.getfixturevalue("pressed_sweep")]
        if figure == "heat_map"
        else request.getfixturevalue("two_runs")
    )
    here, there = tmp_path / "here", tmp_path / "there"
    asked = ["--figure", figure, "--format", format_, "--quiet", "--out"]
    assert plot(*given, *asked, here) == 0
    command = [sys.executable, "-m", "kvsim", "plot", *map(str, given), *asked]
    subprocess.run([*command, str(there)], check=True, cwd=ROOT)
    assert files(here) == files(there)
    (content,) = files(here).values()
    if format_ != "png":
        assert b"date" not in content.lower()


@pytest.mark.slow
def test_a_sweep_gives_its_figures_and_a_style_changes_them(
    pressed_sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot(pressed_sweep, "--out", tmp_path / "a") == 0
    assert not capsys.readouterr().err
    assert set(files(tmp_path / "a")) == {f"{name}.png" for name in SWEEP_FIGURES}
    style = tmp_path / "mine.mplstyle"
    style.write_text(
        "font.size: 14\nfigure.figsize: 5, 3 # inches\nbackend: agg\n"
        "axes.prop_cycle: cycler('color', ['ff0000', '123456'])\n"
    )
    asked = ["--figure", "goodput", "--format", "svg", "--out"]
    assert plot(pressed_sweep, *asked, tmp_path / "b", "--style", style) == 0
    svg = (tmp_path / "b" / "goodput.svg").read_text()
    assert "#123456" in svg
    assert 'width="360pt"' in svg
    assert plot(pressed_sweep, *asked, tmp_path / "c") == 0
    assert "#123456" not in (tmp_path / "c" / "goodput.svg").read_text()


def test_the_list_names_every_figure(
    two_runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot("--list") == 0
    printed = capsys.readouterr().out
    for figures in FIGURES_OF.values():
        for name in figures:
            assert re.search(rf"^  {name} +\w.{{10}}", printed, re.MULTILINE)
    assert plot(two_runs[0], "--list", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["run"]) == set(FIGURES)


def test_what_a_sweep_cannot_fill_is_left_out_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = pressed()
    del base["goodput"]
    grid = {"engine.max_num_seqs": [2, 8], "engine.block_size": [16, 32]}
    sweep = write_sweep_results(tmp_path / "s", base=base, grid=grid)
    assert plot(sweep, "--out", tmp_path / "o") == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [str(tmp_path / "o" / "heat_map.png")]
    assert len(told.err.splitlines()) == len(SWEEP_FIGURES) - 1
    for name, message in (
        ("goodput", "add goodput: {ttft_ms"),
        ("swap_or_recompute", "vary engine.preemption_mode"),
        ("preemption_rate", "vary a key such as workload.preset.rate_scale"),
    ):
        arguments = ["plot", str(sweep), "--figure", name, "--out", str(tmp_path / "p")]
        assert message in refused(arguments, capsys, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NOWHERE"], "does not exist"),
        (["EMPTY"], "holds no results"),
        ([], "nothing to draw"),
        (["RUN", "RUN"], "given twice"),
        (["RUN", "SWEEP"], "is a sweep, and only runs are drawn together"),
        (["RUN", "--figure", "queue"], "no 'queue' of a run; did you mean 'queues'"),
        (["RUN", "--figure", "heat_map"], "there is no 'heat_map' of a run"),
        (["RUN", "--x", "seed"], "are for --figure heat_map of a sweep"),
        (["RUN", "--style", "NOWHERE"], "cannot be read"),
        (["RUN", "--style", "BADKEY"], "no setting of matplotlib in 'fontsize: 3'"),
        (["RUN", "--style", "BADVALUE"], "BADVALUE"),
        (["RUN", "--format", "gif"], "gif"),
        (["RUN", "--out", "FULL"], "exists already"),
        (["SWEEP", "--x", "rate"], "--x 'rate' is no key that was varied"),
        (["SWEEP", "--x", "rate_scale", "--y", "rate_scale"], "are both"),
        (["SWEEP", "--metric", "p99_tft_ms"], "did you mean 'p99_"),
        (["SWEEP", "--metric", "title"], "is no number"),
        (["BROKEN"], "summary.json' cannot be read"),
        (["BROKENPLAN"], "plan.json' cannot be read"),
        (["BROKENSWEEP"], "holds no sweep that can be read"),
    ],
)
def test_mistakes_are_told_in_a_line(  # noqa: PLR0917 - fixtures
    arguments: list[str],
    message: str,
    two_runs: list[Path],
    pressed_sweep: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = {
        "RUN": two_runs[0],
        "SWEEP": pressed_sweep,
        "NOWHERE": tmp_path / "nowhere",
        **{
            name: tmp_path / name
            for name in (
                "EMPTY",
                "FULL",
                "BADKEY",
                "BADVALUE",
                "BROKEN",
                "BROKENPLAN",
                "BROKENSWEEP",
            )
        },
    }
    for name in ("EMPTY", "FULL", "BROKEN", "BROKENPLAN", "BROKENSWEEP"):
        named[name].mkdir()
    (named["FULL"] / "queues.png").write_text("mine")
    (named["BROKEN"] / "summary.json").write_text("{")
    (named["BROKENPLAN"] / "plan.json").write_text("{")
    (named["BROKENSWEEP"] / "sweep.json").write_text("{}")
    named["BADKEY"].write_text("fontsize: 3\n")
    named["BADVALUE"].write_text("font.size: large-ish\n")
    given = [str(named.get(word, word)) for word in arguments]
    if "--out" not in given:
        given += ["--out", str(tmp_path / "o")]
    assert message in refused(["plot", *given], capsys, tmp_path)


def test_figures_that_are_there_are_replaced_only_if_asked(
    two_runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [two_runs[0], "--figure", "queues", "--out", tmp_path, "--quiet"]
    assert plot(*asked) == 0
    before = files(tmp_path)
    (tmp_path / "queues.png").write_text("mine")
    assert "add --overwrite" in refused(["plot", *map(str, asked)], capsys, tmp_path)
    assert plot(*asked, "--overwrite") == 0
    assert files(tmp_path) == before
    assert plot(*asked[:1], "--figure", "steps", *asked[3:]) == 0
    assert set(files(tmp_path)) == {"queues.png", "steps.png"}


@pytest.mark.slow
def test_runs_that_differ_in_much_have_their_names_and_say_in_what(
    two_runs: list[Path], config: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    assert kvsim(["run", str(config), "--out", str(other), "--quiet"]) == 0
    there = drawings("runs", [two_runs[0], other], HeatMapKeys())
    text = said(there["queues"]())
    assert "they differ in" in text
    assert "scheduler" in text
    assert "\nsmall: completed" in text
    assert "\nother: completed" in text


def test_objectives_of_a_sweep_give_its_goodput(tmp_path: Path) -> None:
    base = pressed()
    limits = base.pop("goodput")
    base["objectives"] = {"goodput": limits | {"share": 0.9}}
    grid = {RATE: [1.0, 2.0], "engine.max_num_seqs": [2, 8]}
    sweep = write_sweep_results(tmp_path / "s", base=base, grid=grid)
    asked = ["--figure", "goodput", "--format", "svg", "--out", tmp_path / "o"]
    assert plot(sweep, *asked) == 0
    runs = read_sweep(sweep)
    assert (runs.frame["request_goodput"] > 0).any()
    assert json.loads(runs.frame["goodput"].iloc[0]) == limits
