"""Figures over load: preemptions, usage of the cache, swapping, goodput."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import FuncFormatter

from sim.results.metrics import USAGE_PERCENTILES
from sim.results.schema import OF_REQUESTS
from sim.views.plots import style
from sim.views.plots.sweeps.series import (
    draw_series,
    legend_right_below,
    load_of,
    make_room,
    panels_over_load,
    series_of,
)
from sim.views.plots.sweeps.table import PREEMPTION_RATE, NotShownError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.sweeps.series import Series
    from sim.views.plots.sweeps.table import SweepRuns


_WIDE_FROM = 50.0
"""Rates that differ by more are drawn on a logarithmic scale."""


@style.house_style
def preemption_rate(runs: SweepRuns) -> Figure:
    """Draw preemptions per 100 requests over load, a line for each size of cache."""
    name = runs.column(PREEMPTION_RATE)
    rates = runs.frame[name].dropna().to_numpy(np.float64)
    most = runs.run_with_most(name)
    title = f"Preemptions: up to {most[name]:,.3g} per 100 requests"
    if not most[name]:
        title = "Preemptions: none in any run"
    elif "num_preemptions" in runs.frame:
        title += f" ({most['num_preemptions']:,.0f} in one run)"
    figure = panels_over_load(runs, title)
    (axes,) = figure.axes
    for each in series_of(runs):
        draw_series(axes, each, name)
    label = "preemptions per 100 requests"
    if rates.max() > _WIDE_FROM * rates[rates > 0].min(initial=np.inf):
        style.set_wide_count_axis(axes, label, rates)
    else:
        style.set_count_axis(axes, label)
    legend_right_below(figure)
    return figure


MAX_PANELS = 4
_LOWEST, _LOW, _MIDDLE, _HIGH, _HIGHEST = (
    f"p{percent}_kv_cache_usage" for percent in USAGE_PERCENTILES
)


@style.house_style
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
        _draw_shares_of_time(axes, each)
        axes.set_title(each.label, loc="left", fontsize="medium")
        style.set_percent_axis(axes, "")
    figure.axes[0].set_ylabel("KV blocks in use (%)")
    legend_right_below(figure)
    # Titles of panels stand between them and the legend.
    make_room(figure, 0.81)
    return figure


def _draw_shares_of_time(axes: Axes, each: Series) -> None:
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
    _draw_line(axes, each, _MIDDLE, {"linestyle": "-", "label": "median over time"})
    dashes = {"linestyle": (0, (4, 2)), "label": "mean"}
    _draw_line(axes, each, "kv_cache_usage_mean", dashes)
    _draw_line(axes, each, "kv_cache_usage_max", {"linestyle": ":", "label": "max"})


def _draw_line(axes: Axes, each: Series, name: str, look: dict[str, Any]) -> None:
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


MODE = "engine.preemption_mode"
_PANELS = {
    "mean_ttft_ms": "mean TTFT (ms)",
    "p99_e2el_ms": "p99 end-to-end latency (ms)",
    PREEMPTION_RATE: "preemptions per 100 requests",
}


@style.house_style
def swap_or_recompute(runs: SweepRuns) -> Figure:
    """Draw latencies and preemptions of both preemption modes over load."""
    if MODE not in runs.keys or not {"swap", "recompute"} <= set(runs.frame[MODE]):
        raise NotShownError(
            f"swap against recompute needs runs of both; vary {MODE}: [swap, "
            f"recompute], with a generation that swaps, such as v0"
        )
    totals = runs.frame.groupby(MODE)["num_preemptions"].sum()
    title = (
        f"Swap or recompute: {totals['swap']:,.0f} preemptions by swap, "
        f"{totals['recompute']:,.0f} by recompute in all runs"
    )
    figure = panels_over_load(runs, title, len(_PANELS))
    lines = series_of(runs, MODE)
    for axes, (name, label) in zip(figure.axes, _PANELS.items(), strict=True):
        for each in lines:
            draw_series(axes, each, name)
        axes.set_ylim(0.0, None)
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(FuncFormatter(style.short_number))
    legend_right_below(figure)
    return figure


@style.house_style
def goodput(runs: SweepRuns) -> Figure:
    """Draw the requests a second that keep all limits, over those that come."""
    frame = runs.frame
    if "request_goodput" not in frame or frame["request_goodput"].isna().all():
        raise NotShownError(
            "goodput needs limits; add goodput: {ttft_ms: ..., tpot_ms: ...} to the "
            "sweep's base (of a plan, an objective goodput)"
        )
    best = runs.run_with_most("request_goodput")
    figure = panels_over_load(
        runs,
        f"Goodput: up to {best['request_goodput']:,.4g} requests/s within "
        f"{_limits(frame['goodput'].iloc[0])}",
    )
    (axes,) = figure.axes
    for each in series_of(runs):
        draw_series(axes, each, "request_goodput")
    x, label = load_of(runs)
    top = float(best["request_goodput"])
    if "requests/s" in label:
        ends = np.array([0.0, float(x.max())])
        axes.plot(ends, ends, color=style.GREY, linestyle=":", label="all that come")
        axes.set_xlim(0.95 * float(x.min()), 1.02 * float(x.max()))
        top = max(top, float(x.max()))
    axes.set_ylim(0.0, 1.05 * top or 1.0)
    axes.set_ylabel("goodput (requests/s)")
    legend_right_below(figure)
    return figure


def _limits(text: str) -> str:
    limits = json.loads(text)
    names = {f"{each.key}_ms": each.label for each in OF_REQUESTS}
    return ", ".join(f"{names[key]} {value:,g} ms" for key, value in limits.items())
