"""How the usage of the KV cache is distributed over time, against load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np

from sim.results.metrics import USAGE_PERCENTILES
from sim.views.plots.style import house_style, set_percent_axis
from sim.views.plots.sweeps.series import (
    legend_right_below,
    make_room,
    panels_over_load,
    series_of,
)
from sim.views.plots.sweeps.table import NotShownError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.sweeps.series import Series
    from sim.views.plots.sweeps.table import SweepRuns

MAX_PANELS = 4
_LOWEST, _LOW, _MIDDLE, _HIGH, _HIGHEST = (
    f"p{percent}_kv_cache_usage" for percent in USAGE_PERCENTILES
)


@house_style
def kv_usage(runs: SweepRuns) -> Figure:
    """Draw percentiles over time of the KV usage over load, a panel for each cache."""
    if _MIDDLE not in runs.frame:
        raise NotShownError(
            f"these runs do not say how their KV usage was distributed ({_MIDDLE}); "
            f"sweeps of this release do"
        )
    lines = series_of(runs)
    left_out = len(lines) - MAX_PANELS
    lines = lines[:MAX_PANELS]
    full = runs.frame["kv_cache_usage_max"].max()
    mean = runs.frame["kv_cache_usage_mean"].max()
    title = f"KV usage: mean up to {mean:.1%}, max {full:.1%}".replace("%", " %")
    if left_out > 0:
        title += f" (the first {MAX_PANELS} of {MAX_PANELS + left_out})"
    told = "shares of time: means of {}; bars: all of them"
    figure = panels_over_load(runs, title, len(lines), told)
    for axes, each in zip(figure.axes, lines, strict=True):
        _draw(axes, each)
        axes.set_title(each.label, loc="left", fontsize="medium")
        set_percent_axis(axes, "")
    figure.axes[0].set_ylabel("KV blocks in use (%)")
    legend_right_below(figure)
    # Titles of panels stand between them and the legend.
    make_room(figure, 0.81)
    return figure


def _draw(axes: Axes, each: Series) -> None:
    colour = each.look["color"]
    for low, high, alpha, label in (
        (_LOWEST, _HIGHEST, 0.18, "5 to 95 % of the time"),
        (_LOW, _HIGH, 0.38, "25 to 75 %"),
    ):
        x, lower, *_ = each.values(low)
        _, upper, *_ = each.values(high)
        axes.fill_between(
            x,
            100.0 * lower,
            100.0 * upper,
            color=colour,
            alpha=alpha,
            linewidth=0.0,
            label=label,
        )
    _line(axes, each, _MIDDLE, {"linestyle": "-", "label": "median over time"})
    dashes = {"linestyle": (0, (4, 2)), "label": "mean"}
    _line(axes, each, "kv_cache_usage_mean", dashes)
    _line(axes, each, "kv_cache_usage_max", {"linestyle": ":", "label": "max"})


def _line(axes: Axes, each: Series, name: str, look: dict[str, Any]) -> None:
    x, mean, low, high = each.values(name)
    spread = np.stack([mean - low, high - mean]) * 100.0
    axes.errorbar(
        x,
        100.0 * mean,
        yerr=spread if spread.any() else None,
        color=mpl.rcParams["text.color"] if name == _MIDDLE else each.look["color"],
        elinewidth=0.8,
        capsize=2.0,
        **look,
    )
