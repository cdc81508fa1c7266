"""Preemptions of several runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.views.plots.curves import NUM_PIXEL_COLUMNS
from sim.views.plots.preemption import bar_edges_s, bar_width_s
from sim.views.plots.runs import compared_figure, draw_curve, latest_s, looks_of
from sim.views.plots.style import house_style, set_count_axis, set_time_axis, time_unit
from sim.views.plots.tables import column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.binning import Floats
    from sim.views.plots.runs import Run
    from sim.views.plots.tables import Tables


@house_style
def preemptions(runs: Sequence[Run]) -> Figure:
    """Draw preemptions so far and preemptions per minute."""
    panels = compared_figure(runs, "Preemptions", (1.2, 1.0), _facts)
    total, rate = panels.axes
    stop_s = latest_s(runs)
    for run, look in zip(runs, looks_of(len(runs)), strict=True):
        time_s = np.sort(column(run.tables.preemptions, "time_s"))
        _draw_total(total, time_s, stop_s, look)
        edges_s = bar_edges_s(stop_s)
        per_minute = np.histogram(time_s, edges_s)[0] * (60.0 / np.diff(edges_s))
        draw_curve(rate, edges_s, per_minute, stop_s, look)
    set_count_axis(total, "so far (number)")
    width_s = bar_width_s(stop_s)
    bins = f"{width_s:g} s" if width_s < 60.0 else f"{width_s / 60.0:g} min"
    set_count_axis(rate, f"per minute (bins of {bins})")
    set_time_axis(rate, stop_s)
    return panels.figure


def _facts(tables: Tables) -> str:
    formats = {
        "num_preemptions": "{:,.0f} in all",
        "recomputed_tokens": "{:,.0f} tokens computed again",
    }
    if tables.number("num_preemptions_swap"):
        formats["num_preemptions_swap"] = "{:,.0f} by swap"
        formats["swapped_out_blocks"] = "{:,.0f} blocks out"
    return tables.facts(**formats)


def _draw_total(
    axes: Axes, time_s: Floats, stop_s: float, look: dict[str, Any]
) -> None:
    at_s = np.linspace(0.0, stop_s, NUM_PIXEL_COLUMNS + 1)
    so_far = np.searchsorted(time_s, at_s, "right")
    x = at_s / time_unit(stop_s)[0]
    axes.step(x, so_far, where="post", linewidth=1.5, **look)
