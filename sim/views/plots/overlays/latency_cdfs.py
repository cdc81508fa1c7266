"""Latencies of several runs, as distribution functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.results.schema import OF_REQUESTS
from sim.views.plots.binning import cdf_points
from sim.views.plots.latency import NUM_CDF_POINTS, scale_x, served_values
from sim.views.plots.runs import compared_figure, looks_of
from sim.views.plots.style import house_style, set_percent_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.results.schema import Latency
    from sim.views.plots.runs import Run
    from sim.views.plots.tables import Tables


@house_style
def latency_cdfs(runs: Sequence[Run]) -> Figure:
    """Draw the distributions of TTFT, TPOT and end-to-end latency."""
    panels = compared_figure(runs, "Latency of finished requests", (1.0,), _facts)
    figure = panels.figure
    (first,) = figure.axes
    box = first.get_position()
    first.remove()
    side_by_side = figure.subplots(
        ncols=len(OF_REQUESTS),
        gridspec_kw={
            "left": 0.065,
            "right": 0.98,
            "top": box.y1 - 0.01,
            "bottom": 0.1,
            "wspace": 0.2,
        },
    )
    for metric, axes in zip(OF_REQUESTS, side_by_side, strict=True):
        _draw_cdfs(axes, runs, metric)
        set_percent_axis(axes, "", 100.0)
    side_by_side[0].set_ylabel("finished requests (%)")
    return figure


def _facts(tables: Tables) -> str:
    return tables.facts(
        median_ttft_ms="TTFT median {:,.0f} ms",
        p99_ttft_ms="p99 {:,.0f} ms",
        median_tpot_ms="TPOT median {:,.1f} ms",
        p99_tpot_ms="p99 {:,.1f} ms",
        request_throughput="{:,.4g} requests/s",
    )


def _draw_cdfs(axes: Axes, runs: Sequence[Run], metric: Latency) -> None:
    values = [served_values(run.tables, metric) for run in runs]
    every = np.concatenate(values)
    if not every.size:
        axes.set_xlabel(f"{metric.meaning} (s)")
        return
    scale, unit = (1e3, "ms") if float(np.quantile(every, 0.9)) < 2.0 else (1.0, "s")
    for known, look in zip(values, looks_of(len(runs)), strict=True):
        if known.size:
            x, share = cdf_points(known * scale, NUM_CDF_POINTS)
            x, share = np.append(x[0], x), np.append(0.0, share)
            axes.step(x, 100.0 * share, where="post", linewidth=1.5, **look)
    axes.set_xlabel(f"{metric.meaning} ({unit})")
    scale_x(axes, float(every.min()) * scale, float(every.max()) * scale)
