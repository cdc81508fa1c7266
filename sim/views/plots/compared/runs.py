"""Several runs in one figure: their labels, and how each is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.lines import Line2D

from sim.errors import ConfigError
from sim.results.summary.compared import differing, short_names
from sim.views.plots.style import (
    Panels,
    add_steps,
    fit_legend,
    margins,
    time_unit,
    titled_figure,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from matplotlib.axes import Axes

    from sim.views.plots.binning import Floats
    from sim.views.plots.run.tables import Tables

MAX_RUNS = 8
"""More lines than that are not told apart."""
_MAX_LABEL = 48
LINES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_ROW = 0.0285
"""Height of a row of the legend, as a share of the figure's."""


@dataclass(frozen=True)
class Run:
    """One of the runs that are compared."""

    label: str  # tells it apart from the others
    tables: Tables  # its tables and its summary
    # the keys that set all of the runs apart, where the labels do not say so
    differs: str = ""


def labels_of(
    names: Sequence[str],
    configs: Sequence[Mapping[str, Any]],
    summaries: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return the label of each run: the keys in which they differ, if few.

    Values of keys that were left to their defaults stand in the summaries.
    """
    found = differing(configs)
    short = short_names(list(found))

    def told(key: str, i: int) -> str:
        value = found[key][i]
        if value is None:
            value = summaries[i].get(key.rpartition(".")[2])
        return f"{short[key]}={_shown(value)}"

    labels = [", ".join(told(key, i) for key in found) for i in range(len(names))]
    is_told = len(set(labels)) == len(labels)
    if is_told and max(map(len, labels)) <= _MAX_LABEL:
        return labels
    return list(names)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def keys_that_differ(configs: Sequence[Mapping[str, Any]]) -> str:
    """Return the keys in which runs differ, for a line under the title."""
    found = differing(configs)
    if not found:
        return "all of the same configuration"
    # The engine first: a long list is cut.
    keys = sorted(found, key=lambda key: not key.startswith("engine."))
    return f"they differ in {', '.join(short_names(keys).values())}"


def in_common(titles: Sequence[str]) -> str:
    """Return the parts of titles that all of them have."""
    first, *others = [title.split(", ") for title in titles]
    return ", ".join(part for part in first if all(part in each for each in others))


def looks_of(number: int) -> list[dict[str, Any]]:
    """Return a colour and a line for each of some runs, told apart in grey as well."""
    colours = cycle(mpl.rcParams["axes.prop_cycle"].by_key().get("color", ["black"]))
    lines = cycle(LINES)
    return [
        {"color": colour, "linestyle": line}
        for _, colour, line in zip(range(number), colours, lines, strict=False)
    ]


def with_looks(runs: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yield each run with its colour and line."""
    return zip(runs, looks_of(len(runs)), strict=True)


def compared_figure(
    runs: Sequence[Run],
    title: str,
    heights: Sequence[float],
    facts: Callable[[Tables], str],
) -> Panels:
    """Return panels one above the other, below a legend with a row for each run."""
    if len(runs) > MAX_RUNS:
        raise ConfigError(
            f"a figure holds {MAX_RUNS} runs at most, got {len(runs)}; leave some out"
        )
    titles = [str(run.tables.summary.get("title") or "") for run in runs]
    below = "; ".join(filter(None, (in_common(titles), runs[0].differs)))
    figure = titled_figure(title, below)
    figure.subplots(
        nrows=len(heights),
        sharex=True,
        squeeze=False,
        gridspec_kw=margins(
            0.075,
            0.98,
            0.085,
            0.885 - _ROW * len(runs),
            hspace=0.16,
            height_ratios=list(heights),
        ),
    )
    figure.align_ylabels()
    add_legend(Panels(figure, figure.axes), runs, facts)
    return Panels(figure, figure.axes)


def add_legend(
    panels: Panels, runs: Sequence[Run], facts: Callable[[Tables], str]
) -> None:
    """Put a row for each run between the title and the panels."""
    handles = []
    for run, look in with_looks(runs):
        told = facts(run.tables)
        label = f"{run.label}: {told}" if told else run.label
        handles.append(Line2D([], [], linewidth=2.0, label=label, **look))
    legend = panels.figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0165, 0.912),
        borderaxespad=0.0,
        handlelength=2.6,
        labelspacing=0.35,
    )
    fit_legend(legend)


def latest_s(runs: Sequence[Run]) -> float:
    return max(run.tables.stop_s for run in runs)


def draw_curve(
    axes: Axes, edges_s: Floats, heights: Floats, stop_s: float, look: Mapping[str, Any]
) -> None:
    """Draw one value per column of a run as a step line, in the unit of all."""
    add_steps(
        axes,
        heights,
        edges_s / time_unit(stop_s)[0],
        baseline=None,
        fill=False,
        edgecolor=look["color"],
        linestyle=look["linestyle"],
        linewidth=mpl.rcParams["lines.linewidth"],
    )


def coarser(values: Floats, num: int) -> Floats:
    """Return means of so many neighbours: lines of several runs need room."""
    whole = values[: len(values) // num * num].reshape(-1, num)
    some = np.isfinite(whole).any(axis=1)
    found = np.full(len(whole), np.nan)
    found[some] = np.nanmean(whole[some], axis=1)
    return found
