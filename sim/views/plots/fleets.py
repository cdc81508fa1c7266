"""The engines of a fleet beside each other: cache over time, load and hits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from sim.results.tables.steps import engines_in, span_columns, spans_s
from sim.views.plots import style

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.results.run import Results
    from sim.results.tables.steps import StepTable
    from sim.views.plots.binning import Floats

_NUM_COLUMNS = 300
_COLOURS = "cividis"
_MOST_NAMES = 4
"""Pools that an axis names."""


def mean_usage(steps: StepTable, num_engines: int, edges_s: Floats) -> Floats:
    """Return the mean KV cache usage of each engine between edges; idle time is empty.

    Parameters
    ----------
    steps
        Of a fleet.
    num_engines
        Rows of the result.
    edges_s
        Of its columns, in seconds.
    """
    held_s = np.zeros((num_engines, len(edges_s) - 1))
    for batch in steps.batches(("kv_cache_usage", *span_columns(steps))):
        for engine in engines_in(batch["engine"]):
            is_own = batch["engine"] == engine
            own = {name: column[is_own] for name, column in batch.items()}
            start_s, spans = own["start_s"], spans_s(own)
            area_s = spans * own["kv_cache_usage"]
            until_s = np.cumsum(area_s)
            times_s = np.column_stack((start_s, start_s + spans)).ravel()
            times_s = np.maximum.accumulate(times_s)
            areas_s = np.column_stack((until_s - area_s, until_s)).ravel()
            held_s[engine] += np.diff(np.interp(edges_s, times_s, areas_s))
    found: Floats = held_s / np.diff(edges_s)
    return found


def engines_figure(results: Results) -> Figure:
    """Draw the KV cache of every engine over time, and what came to each.

    Preemptions are ticks on the map, and engines that are not there are hatched. Beside
    it stand the requests of each engine over the mean and, with prefix caching, its hit
    rate.
    """
    return _engines(results)


@style.house_style
def _engines(results: Results) -> Figure:
    summary = results.summary
    engines = summary["engines"]
    figure = style.titled_figure(
        "KV cache usage by engine, and preemptions", str(summary["title"])
    )
    rates = [each.get("prefix_cache_hit_rate") for each in engines]
    has_hits = bool(summary.get("prefix_cache_queries"))
    widths = [6.0, 1.2, 1.2] if has_hits else [6.0, 1.2]
    figure.subplots(
        ncols=len(widths),
        sharey=True,
        gridspec_kw=style.margins(
            0.07, 0.98, 0.1, 0.8, wspace=0.14, width_ratios=widths
        ),
    )
    over_time, load, *more = figure.axes
    _draw_map(over_time, results)
    _draw_bars(load, _loads(engines), "requests / mean")
    load.axvline(1.0, color=style.GREY, linewidth=0.8)
    for axes in more:
        _draw_bars(axes, np.array([100.0 * (r or 0.0) for r in rates]), "hit rate (%)")
        axes.set_xlim(0.0, 100.0)
    return figure


def pool_places(engines: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of an axis of engines: of several pools with their numbers."""
    pools: dict[str, list[int]] = {}
    for each in engines:
        pools.setdefault(each["pool"], []).append(each["engine"])
    if not 1 < len(pools) <= _MOST_NAMES:
        return "engine"
    told = (
        f"{pool} {min(at)}" + (f" to {max(at)}" if len(at) > 1 else "")
        for pool, at in pools.items()
    )
    return f"engine ({', '.join(told)})"


def _loads(engines: Sequence[Mapping[str, Any]]) -> Floats:
    """Return the requests of each engine over the mean of all that do the same."""
    numbers = np.array(
        [each.get("num_prompts", each["num_requests"]) for each in engines], float
    )
    is_prefiller = np.array(["num_prompts" in each for each in engines])
    for role in (is_prefiller, ~is_prefiller):
        if role.any():
            numbers[role] /= max(numbers[role].mean(), 1e-300)
    return numbers


def _draw_map(axes: Axes, results: Results) -> None:
    summary, recording = results.summary, results.recording
    num_engines, stop_s = len(summary["engines"]), max(summary["duration"], 1e-9)
    unit_s, _ = style.time_unit(stop_s)
    edges_s = np.linspace(0.0, stop_s, _NUM_COLUMNS + 1)
    usage = mean_usage(recording.step_table, num_engines, edges_s)
    image = axes.imshow(
        100.0 * usage,
        aspect="auto",
        origin="lower",
        interpolation="none",
        cmap=_COLOURS,
        vmin=0.0,
        vmax=100.0,
        extent=(0.0, stop_s / unit_s, -0.5, num_engines - 0.5),
    )
    _hatch(axes, summary["engines"], unit_s)
    preempted = recording.preemption_table
    axes.plot(
        preempted["time_s"] / unit_s,
        preempted["engine"] + 0.3,
        linestyle="none",
        marker="|",
        markersize=4.0,
        color=style.VERMILLION,
    )
    axes.set_ylabel(pool_places(summary["engines"]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    style.set_time_axis(axes, stop_s)
    bar = axes.figure.colorbar(
        image, cax=axes.inset_axes((0.6, 1.06, 0.4, 0.025)), orientation="horizontal"
    )
    bar.ax.xaxis.set_ticks_position("top")
    bar.ax.tick_params(labelsize="small")
    is_whole = not any(each.get("absent_s") for each in summary["engines"])
    hatched = "" if is_whole else "hatched: not there; "
    axes.text(
        *(0.58, 1.06, f"{hatched}KV blocks in use (%)"),
        transform=axes.transAxes,
        ha="right",
        fontsize="small",
    )


def _hatch(axes: Axes, engines: Sequence[Mapping[str, Any]], unit_s: float) -> None:
    """Mark when an engine was not there: dead, taken out, or not yet started."""
    for engine in engines:
        spans_s = engine.get("absent_s", ())
        axes.broken_barh(
            [
                (begin_s / unit_s, (end_s - begin_s) / unit_s)
                for begin_s, end_s in spans_s
            ],
            (engine["engine"] - 0.5, 1.0),
            facecolor="white",
            edgecolor=style.GREY,
            hatch="////",
            linewidth=0.0,
        )


def _draw_bars(axes: Axes, values: Floats, label: str) -> None:
    axes.barh(np.arange(len(values)), values, height=0.8)
    axes.set_xlabel(label)
    axes.grid(visible=False, axis="y")
