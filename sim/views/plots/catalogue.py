"""The figures of the results in a directory, and how they are drawn.

====== ======================================== =========================
kind   known by                                 figures
====== ======================================== =========================
a run  ``summary.json``                         `sim.views.plots.FIGURES`
runs   several such directories                 `sim.views.plots.compared.overlays`
sweep  ``sweep.json``                           `sim.views.plots.compared`
plan   ``plan.json``                            `sim.views.plots.studies.plans`,
                                                `sim.views.plots.compared`
====== ======================================== =========================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from sim.config.plug import did_you_mean
from sim.errors import ResultsError, UserError
from sim.results.fleet.ranks import parts_of
from sim.results.folder import kind_of
from sim.results.run import Results
from sim.studies.planning.answer.file import read_plan
from sim.views.plots import FIGURES, Tables
from sim.views.plots.accessor import figures_of
from sim.views.plots.compared.heat_map import HeatMap
from sim.views.plots.compared.over_load import (
    goodput,
    kv_usage,
    preemption_rate,
    swap_or_recompute,
)
from sim.views.plots.compared.overlays import OVERLAYS
from sim.views.plots.compared.runs import Run, keys_that_differ, labels_of
from sim.views.plots.compared.sweep_runs import SweepRuns, read_sweep, runs_of_plan
from sim.views.plots.run.drafts import drafts
from sim.views.plots.run.fleets import engines_figure, pools_figure, replicas_figure
from sim.views.plots.run.tiers import tier, tier_ttft
from sim.views.plots.studies.plans import PLAN_FIGURES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    Drawing: TypeAlias = Callable[[], Figure]

Content: TypeAlias = Literal["run", "runs", "sweep", "plan"]


class SweepFigure(Protocol):
    """Draws many runs; its docstring's first line is the legend.

    Where these runs cannot fill it, it raises `NotShownError`: the figure is left out
    unless it was asked for by name.
    """

    def __call__(self, runs: SweepRuns) -> Figure: ...


SWEEP_FIGURES: dict[str, SweepFigure] = {
    "preemption_rate": preemption_rate,
    "kv_usage": kv_usage,
    "swap_or_recompute": swap_or_recompute,
    "goodput": goodput,
    "heat_map": HeatMap(),
}
"""File name without its ending, and the function that draws it."""

FIGURES_OF: Mapping[Content, Mapping[str, Any]] = {
    "run": {
        **FIGURES,
        "drafts": drafts,
        "engines": engines_figure,
        "pools": pools_figure,
        "replicas": replicas_figure,
        "tier": tier,
        "tier_ttft": tier_ttft,
    },
    "runs": OVERLAYS,
    "sweep": SWEEP_FIGURES,
    "plan": PLAN_FIGURES | SWEEP_FIGURES,
}
"""Functions by name, for each content of a directory; some are of some runs only."""


@dataclass(frozen=True, slots=True)
class HeatMapKeys:
    """The keys of a heat map; see `sim.views.plots.compared.heat_map.HeatMap`."""

    x: str | None = None
    y: str | None = None
    metric: str | None = None

    def __bool__(self) -> bool:
        return any((self.x, self.y, self.metric))

    def figure(self) -> HeatMap:
        given = {"x": self.x, "y": self.y, "metric": self.metric}
        return HeatMap(**{key: value for key, value in given.items() if value})


def content_of(directories: Sequence[Path]) -> Content:
    found = [kind_of(directory) for directory in directories]
    if set(found) == {"run"}:
        return "run" if len(found) == 1 else "runs"
    if len(found) > 1:
        place = next(i for i, each in enumerate(found) if each != "run")
        raise ResultsError(
            f"'{directories[place]}' is a {found[place]}, and only runs are drawn "
            f"together; give it alone"
        )
    return found[0]


def named(
    content: Content, there: Mapping[str, Drawing], names: Sequence[str]
) -> dict[str, Drawing]:
    """Return the figures that are asked for; all of them if none is named."""
    for name in names:
        if name not in there:
            others = ", ".join(there)
            raise UserError(
                f"--figure: there is no '{name}' of a {content.removesuffix('s')}"
                f"{did_you_mean(name, there)} (there are: {others})"
            )
    return {name: there[name] for name in names or there}


def drawings(
    content: Content, directories: Sequence[Path], keys: HeatMapKeys
) -> dict[str, Drawing]:
    """Return the drawing of each figure of the results there, read once."""
    if content in ("run", "runs"):
        return _of_runs(directories)
    if content == "sweep":
        return _of_sweep(read_sweep(directories[0]), keys)
    plan = read_plan(directories[0])
    own: dict[str, Drawing] = {
        name: partial(draw, plan) for name, draw in PLAN_FIGURES.items()
    }
    return own | _of_sweep(runs_of_plan(plan), keys)


def _of_runs(directories: Sequence[Path]) -> dict[str, Drawing]:
    found = [Results.load(directory) for directory in directories]
    if len(found) == 1:
        figures, drawn = figures_of(found[0])
        return {name: partial(draw, drawn) for name, draw in figures.items()}
    tables = [
        Tables.of(_one_engine(each, d))
        for each, d in zip(found, directories, strict=True)
    ]
    names, configs = _names(directories), [each.config.to_data() for each in found]
    labels = labels_of(names, configs, [results.summary for results in found])
    differs = keys_that_differ(configs) if labels == names else ""
    runs = [
        Run(label, each, differs) for label, each in zip(labels, tables, strict=True)
    ]
    return {name: partial(draw, runs) for name, draw in OVERLAYS.items()}


def _one_engine(results: Results, directory: Path) -> Results:
    """Refuse several engines where runs are drawn over each other."""
    part, parts = parts_of(results.summary)
    if parts:
        noun = "data-parallel ranks" if part == "rank" else "engines of a fleet"
        raise ResultsError(
            f"'{directory}' has {noun}, a curve each, and is drawn alone; leave it out"
        )
    return results


def _names(directories: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that tell them apart."""
    parts = [directory.resolve().parts for directory in directories]
    for num in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-num:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise ResultsError(
        f"'{directories[0]}' is given twice, or another directory; give each once"
    )


def _of_sweep(runs: SweepRuns, keys: HeatMapKeys) -> dict[str, Drawing]:
    figures = SWEEP_FIGURES | {"heat_map": keys.figure()}
    return {name: partial(draw, runs) for name, draw in figures.items()}
