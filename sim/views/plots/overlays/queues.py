"""Queues of several runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.views.plots.runs import (
    coarser,
    compared_figure,
    draw_curve,
    latest_s,
    looks_of,
)
from sim.views.plots.style import house_style, set_count_axis, set_time_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from sim.views.plots.runs import Run
    from sim.views.plots.tables import Tables

_COLUMNS_A_POINT = 4


@house_style
def queues(runs: Sequence[Run]) -> Figure:
    """Draw the mean numbers of running and of waiting requests over time."""
    panels = compared_figure(runs, "Requests in each queue", (1.0, 1.0), _facts)
    stop_s = latest_s(runs)
    for run, look in zip(runs, looks_of(len(runs)), strict=True):
        if not run.tables.has_steps:
            continue
        for axes, name in zip(panels.axes, ("num_running", "num_waiting"), strict=True):
            envelope = run.tables.curves.state[name]
            edges_s = envelope.columns.edges_s[::_COLUMNS_A_POINT]
            mean = coarser(envelope.mean, _COLUMNS_A_POINT)
            draw_curve(axes, edges_s, mean, stop_s, look)
    set_count_axis(panels.axes[0], "running (requests)")
    set_count_axis(panels.axes[1], "waiting (requests)")
    set_time_axis(panels.axes[1], stop_s)
    return panels.figure


def _facts(tables: Tables) -> str:
    return tables.facts(
        completed="completed {:,.0f} requests",
        num_running_mean="{:,.1f} running on average",
        num_waiting_mean="{:,.1f} waiting",
        duration="{:,.1f} s",
    )
