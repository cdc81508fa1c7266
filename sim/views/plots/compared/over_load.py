"""Figures over load: preemptions, usage of the cache, swapping, goodput.

Lines are one for each value of a key, with the range of its seeds as a band.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import FuncFormatter

from sim.errors import ConfigError
from sim.results.metrics import USAGE_PERCENTILES
from sim.results.schema import OF_REQUESTS
from sim.results.summary.compared import short_names
from sim.views.plots import style
from sim.views.plots.compared.runs import LINES, looks_of
from sim.views.plots.compared.sweep_runs import PREEMPTION_RATE
from sim.views.plots.output import NotShownError
from sim.views.plots.style import margins, titled_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.binning import Floats
    from sim.views.plots.compared.sweep_runs import SweepRuns


MAX_SERIES = 16
_MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Series:
    """One line."""

    label: str  # tells it apart
    look: Mapping[str, Any]  # colour, line and marker
    rows: pd.DataFrame  # its runs: of each load all seeds
    x: pd.Series[float]  # of each row, where it is drawn

    def values(self, name: str) -> tuple[Floats, Floats, Floats, Floats]:
        """Return loads, and of each the mean, the least and the most of a column."""
        found = self.rows[name].groupby(self.x).agg(["mean", "min", "max"]).dropna()
        x = found.index.to_numpy(dtype=np.float64)
        mean, low, high = (found[each].to_numpy(np.float64) for each in found)
        return x, mean, low, high


def load_of(runs: SweepRuns) -> tuple[pd.Series[float], str]:
    """Return the load of each run, and the label of its axis.

    Requests a second where the runs have that: the mean of the seeds of each load, so
    that they stand above each other.
    """
    key, frame = runs.load, runs.frame
    rate = frame.get("request_rate")
    if not key.endswith(("rate_scale", "arrivals.rate")) or rate is None:
        return frame[key].astype(np.float64), key.rpartition(".")[2].replace("_", " ")
    if "candidate" in frame:
        return rate.astype(np.float64), "offered load (requests/s)"
    means = rate.groupby(frame[key]).transform("mean")
    return means, "offered load (requests/s)"


def series_of(runs: SweepRuns, colour_by: str | None = None) -> list[Series]:
    """Return a line for each combination of the keys that are no load."""
    x, _ = load_of(runs)
    others = [key for key in runs.keys if key != runs.load]
    first = colour_by or runs.size or (others[0] if others else None)
    keys = [first, *(key for key in others if key != first)] if first else []
    if not keys:
        return [Series("", {**looks_of(1)[0], "marker": "o"}, runs.frame, x)]
    groups = list(runs.frame.groupby(keys, dropna=False, sort=True))
    if len(groups) > MAX_SERIES:
        raise ConfigError(
            f"a figure holds {MAX_SERIES} lines at most, got {len(groups)} from "
            f"{', '.join(keys)}; sweep over fewer values, or draw a heat map"
        )
    names = short_names(keys)
    return [
        Series(
            ", ".join(
                _part(names, key, value, rows)
                for key, value in zip(keys, values, strict=True)
            ),
            look,
            rows,
            x[rows.index],
        )
        for (values, rows), look in zip(
            groups, _looks([v for v, _ in groups]), strict=True
        )
    ]


def _part(names: Mapping[str, str], key: str, value: Any, rows: pd.DataFrame) -> str:
    """Return a value as a legend says it; of sizes, the blocks that came of them."""
    if key == "engine.num_gpu_blocks_override":
        return f"{int(rows['num_gpu_blocks'].iloc[0]):,} blocks"
    if key in ("candidate", "engine.preemption_mode") and isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return f"{names[key]} null"
    return (
        f"{names[key]} {value:g}"
        if isinstance(value, float)
        else f"{names[key]} {value}"
    )


def _looks(groups: Sequence[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield a colour and a marker for each first value, a line for each of the rest."""
    # Told apart by their texts, as NaN is not equal to itself.
    firsts = list(dict.fromkeys(repr(each[0]) for each in groups))
    rests = list(dict.fromkeys(repr(each[1:]) for each in groups))
    colours = [look["color"] for look in looks_of(len(firsts))]
    for first, *rest in groups:
        place = firsts.index(repr(first))
        yield {
            "color": colours[place],
            "marker": _MARKERS[place % len(_MARKERS)],
            "linestyle": LINES[rests.index(repr(tuple(rest))) % len(LINES)],
        }


def panels_over_load(
    runs: SweepRuns,
    title: str,
    num_panels: int = 1,
    seeds: str = "lines: means of {}, bands: all of them",
) -> Figure:
    """Return a figure with panels side by side, all over load."""
    figure = titled_figure(title, runs.about(seeds))
    figure.subplots(
        ncols=num_panels,
        gridspec_kw=margins(0.07, 0.98, 0.09, 0.865, wspace=0.26),
    )
    _, label = load_of(runs)
    for axes in figure.axes:
        axes.set_xlabel(label)
    return figure


def draw_series(axes: Axes, each: Series, name: str) -> None:
    """Draw the means of a column over load, and a band from the least to the most."""
    x, mean, low, high = each.values(name)
    if (high > low).any():
        colour = each.look["color"]
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0.0)
    axes.plot(
        x,
        mean,
        label=each.label or None,
        markersize=4.5,
        linewidth=1.2 * mpl.rcParams["lines.linewidth"],
        **each.look,
    )


def legend_right_below(figure: Figure) -> None:
    """Put one legend for all panels under the title, in rows; make room for it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if not handles:
        return
    columns = min(len(handles), 6)
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0165, 0.912),
        ncols=columns,
        borderaxespad=0.0,
        handlelength=2.6,
        columnspacing=1.4,
    )
    rows = -(-len(handles) // columns)
    make_room(figure, 0.885 - 0.031 * rows)


def make_room(figure: Figure, top: float) -> None:
    """Let all panels end at a share of the figure's height."""
    for axes in figure.axes:
        left, bottom, width, _ = axes.get_position().bounds
        axes.set_position((left, bottom, width, top - bottom))


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
            "goodput needs limits; add goodput: {ttft_ms: ..., tpot_ms: ...} or "
            "objectives of latencies to the sweep's base (of a plan, an objective "
            "goodput)"
        )
    best = runs.run_with_most("request_goodput")
    figure = panels_over_load(
        runs,
        f"Goodput: up to {best['request_goodput']:,.4g} requests/s within "
        f"{_limits(best['goodput'])}",
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
