"""`docs/figures.md` names the figures and options that there are."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import pytest

from sim.cli.plot import plot
from sim.studies.sweeps.expand import Sweep, check_runs
from sim.studies.sweeps.spec import load_sweep
from sim.views.plots import FIGURES
from sim.views.plots.catalogue import SWEEP_FIGURES
from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = (ROOT / "docs/figures.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("section", "figures"),
    [("One run", FIGURES), ("A sweep, or a plan", SWEEP_FIGURES)],
)
def test_every_figure_stands_in_its_table(
    section: str, figures: Mapping[str, object]
) -> None:
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(figures)


def test_every_option_stands_on_the_page() -> None:
    names = set(inspect.signature(plot).parameters) - {"directories", "quiet", "json"}
    said = set(re.findall(r"--(\w+)", PAGE.partition("\n## ")[0]))
    assert {name.rstrip("_") for name in names} == said


def test_pictures_are_there_and_small_and_lines_short() -> None:
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)\)", prose)
    assert len(links) >= 6
    for link in links:
        path = ROOT / "docs" / link
        assert path.exists(), link
        assert path.suffix != ".png" or path.stat().st_size < 100_000
    long = [
        line
        for line in PAGE.splitlines()
        if len(line) > 100 and not line.startswith("|")
    ]
    assert not long


def test_the_example_is_a_sweep_that_fills_every_figure() -> None:
    sweep = Sweep(load_sweep(ROOT / "examples/sweep_pressure.yaml"))
    check_runs(list(sweep.runs()))
    assert sweep.num_runs == 32
    assert "32 runs" in (ROOT / "examples/sweep_pressure.yaml").read_text()
    assert "goodput" in sweep.file.base
    assert "engine.preemption_mode" in sweep.spec.keys
