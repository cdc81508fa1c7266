"""The figure of latencies: how requests fared, as distribution functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.results.metrics import is_served
from sim.results.schema import OF_REQUESTS
from sim.views.plots import style
from sim.views.plots.run.tables import column, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.results.schema import Latency
    from sim.views.plots.binning import Floats
    from sim.views.plots.run.tables import Tables

_MARKS = {50: ("o", style.YELLOW), 95: ("s", style.ORANGE), 99: ("^", style.VERMILLION)}


@style.house_style
def latency_cdfs(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw the distributions of TTFT, TPOT and end-to-end latency."""
    facts = tables.facts(
        completed="{:,.0f} completed requests",
        request_throughput="{:,.4g} requests/s",
        output_throughput="{:,.0f} output tokens/s",
    )
    title = f"Latency: {facts}" if facts else "Latency"
    panels = _new_panels(tables, title) if on is None else style.given_panels(on, 3)
    for metric, axes in zip(OF_REQUESTS, panels.axes, strict=True):
        _draw_cdf(axes, tables, metric, served_values(tables, metric))
        style.set_percent_axis(axes, "", 100.0)
    panels.axes[0].set_ylabel("finished requests (%)")
    return panels.figure


def _new_panels(tables: Tables, title: str) -> style.Panels:
    figure = style.blank_figure(tables, title)
    figure.subplots(
        ncols=3,
        gridspec_kw=style.margins(0.065, 0.98, 0.1, 0.8, wspace=0.2),
    )
    return style.Panels(figure, figure.axes)


def served_values(tables: Tables, latency: Latency) -> Floats:
    """Return a latency of the requests that were served, where they have it."""
    served = is_served(words(tables.requests, "status"))
    values = column(tables.requests, latency.column)[served]
    return values[np.isfinite(values)]


def _draw_cdf(axes: Axes, tables: Tables, metric: Latency, values: Floats) -> None:
    axes.set_title(f"{metric.label}, n = {values.size:,}", loc="left", pad=26, size=10)
    if not values.size:
        style.say(axes, "No finished request\nwith this latency")
        axes.set_xlabel(f"{metric.meaning} (s)")
        return
    scale, unit = style.latency_unit(values)
    looks = {"color": style.BLUE, "linewidth": 1.6}
    x = style.draw_cdf(axes, values * scale, **looks)
    _mark_percentiles(axes, tables, metric, values, scale)
    axes.set_xlabel(f"{metric.meaning} ({unit})")
    style.scale_x(axes, float(x[0]), float(x[-1]))


def _mark_percentiles(
    axes: Axes, tables: Tables, metric: Latency, values: Floats, scale: float
) -> None:
    """Mark p50, p95 and p99, the summary's where it has them, and list them above."""
    for percent, (marker, colour) in _MARKS.items():
        milliseconds = tables.number(f"p{percent}_{metric.key}_ms")
        if milliseconds is None:
            milliseconds = 1e3 * float(np.quantile(values, percent / 100.0))
        x = milliseconds * 1e-3 * scale
        axes.plot(
            [x, x], [0.0, percent], color=style.GREY, linewidth=0.7, linestyle=":"
        )
        axes.plot(
            x,
            percent,
            linestyle="none",
            marker=marker,
            markersize=6.5,
            markerfacecolor=colour,
            markeredgecolor="black",
            markeredgewidth=0.8,
            label=f"p{percent} {_quantity(milliseconds)}",
        )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.03, 1.0),
        ncols=3,
        borderaxespad=0.1,
        borderpad=0.2,
        columnspacing=1.0,
        handletextpad=0.1,
    )


def _quantity(milliseconds: float) -> str:
    if milliseconds < 999.5:
        return f"{milliseconds:.3g} ms"
    seconds = milliseconds / 1e3
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
