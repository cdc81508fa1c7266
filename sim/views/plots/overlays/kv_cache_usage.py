"""Usage of the KV cache of several runs, and when each of them preempted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import NullLocator

from sim.views.plots.binning import extremes_per_column
from sim.views.plots.memory import NUM_MARKER_COLUMNS
from sim.views.plots.runs import (
    coarser,
    compared_figure,
    draw_curve,
    latest_s,
    looks_of,
)
from sim.views.plots.style import (
    house_style,
    set_percent_axis,
    set_time_axis,
    time_unit,
)
from sim.views.plots.tables import column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.runs import Run
    from sim.views.plots.tables import Tables

_COLUMNS_A_POINT = 4


@house_style
def kv_cache_usage(runs: Sequence[Run]) -> Figure:
    """Draw the mean usage of the KV cache over time, and a tick for each preemption."""
    heights = (4.5, 0.5 + 0.17 * len(runs))
    panels = compared_figure(runs, "KV cache usage, and preemptions", heights, _facts)
    usage, ticks = panels.axes
    stop_s = latest_s(runs)
    for i, (run, look) in enumerate(zip(runs, looks_of(len(runs)), strict=True)):
        if run.tables.has_steps:
            _draw_usage(usage, run.tables, stop_s, look)
        _draw_ticks(ticks, run.tables, stop_s, look, i)
    set_percent_axis(usage, "KV blocks in use (%)")
    ticks.set_ylim(len(runs) - 0.5, -0.5)
    ticks.yaxis.set_major_locator(NullLocator())
    ticks.set_ylabel("preempted", fontsize="small")
    ticks.grid(visible=False, axis="y")
    set_time_axis(ticks, stop_s)
    return panels.figure


def _facts(tables: Tables) -> str:
    return tables.facts(
        kv_cache_usage_mean="mean {:.1%}",
        kv_cache_usage_max="max {:.1%}",
        num_preemptions="{:,.0f} preemptions",
    ).replace("%", " %")


def _draw_usage(
    axes: Axes, tables: Tables, stop_s: float, look: dict[str, Any]
) -> None:
    envelope = tables.curves.state["kv_cache_usage_percent"]
    edges_s = envelope.columns.edges_s[::_COLUMNS_A_POINT]
    mean = coarser(envelope.mean, _COLUMNS_A_POINT)
    draw_curve(axes, edges_s, mean, stop_s, look)


def _draw_ticks(
    axes: Axes, tables: Tables, stop_s: float, look: dict[str, Any], row: int
) -> None:
    """Mark preemptions in the run's own row; few enough to see each mark."""
    time_s = column(tables.preemptions, "time_s")
    edges_s = np.linspace(0.0, stop_s, NUM_MARKER_COLUMNS + 1)
    kept = extremes_per_column(time_s, time_s, edges_s)
    axes.plot(
        time_s[kept] / time_unit(stop_s)[0],
        np.full(kept.size, row),
        linestyle="none",
        marker="|",
        markersize=7.0,
        markeredgewidth=0.9,
        color=look["color"],
    )
