"""Fragmentation of several runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from sim.views.plots.runs import (
    coarser,
    compared_figure,
    draw_curve,
    latest_s,
    looks_of,
)
from sim.views.plots.style import house_style, set_percent_axis, set_time_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from sim.views.plots.runs import Run
    from sim.views.plots.tables import Tables

_COLUMNS_A_POINT = 7


@house_style
def fragmentation(runs: Sequence[Run]) -> Figure:
    """Draw the share of the token slots of blocks in use that are empty."""
    title = "Fragmentation: empty slots of blocks in use"
    panels = compared_figure(runs, title, (1.0,), _facts)
    (axes,) = panels.axes
    stop_s, top = latest_s(runs), 0.0
    for run, look in zip(runs, looks_of(len(runs)), strict=True):
        if not run.tables.has_steps or not run.tables.number("block_size"):
            continue
        percent = run.tables.curves.pixels["empty_percent"]
        edges_s = percent.columns.edges_s[::_COLUMNS_A_POINT]
        mean = coarser(percent.mean, _COLUMNS_A_POINT)
        draw_curve(axes, edges_s, mean, stop_s, look)
        top = max(top, float(mean[np.isfinite(mean)].max(initial=0.0)))
    set_percent_axis(axes, "empty slots (%)", top or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    set_time_axis(axes, stop_s)
    return panels.figure


def _facts(tables: Tables) -> str:
    totals = tables.curves.totals if tables.has_steps else {}
    if not totals or not tables.number("block_size"):
        return "not known"
    room = totals["capacity_tokens"].mean_over_time
    stored = totals["num_physical_tokens"].mean_over_time
    return f"{(room - stored) / (room or 1.0):.2%} of the slots".replace("%", " %")
