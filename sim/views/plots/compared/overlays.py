"""Figures of several runs, each a function ``Sequence[Run] -> Figure``.

They have the names of the figures of one run. To add one: write its function, and name
it in `OVERLAYS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from sim.results.schema import OF_REQUESTS
from sim.views.plots import style
from sim.views.plots.binning import extremes_per_column
from sim.views.plots.compared.runs import (
    coarser,
    compared_figure,
    draw_curve,
    latest_s,
    looks_of,
    with_looks,
)
from sim.views.plots.run.curves import NUM_PIXEL_COLUMNS
from sim.views.plots.run.latency import served_values
from sim.views.plots.run.memory import NUM_MARKER_COLUMNS, empty_share, facts_of_usage
from sim.views.plots.run.preemption import bar_edges_s, bar_width_s
from sim.views.plots.run.tables import column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.results.schema import Latency
    from sim.views.plots.binning import Envelope, Floats
    from sim.views.plots.compared.runs import Run
    from sim.views.plots.run.tables import Tables


_COLUMNS_A_POINT, _COARSE_COLUMNS = 4, 7
"""Pixel columns that a line of several runs is averaged over."""


@style.house_style
def kv_cache_usage(runs: Sequence[Run]) -> Figure:
    """Draw the mean usage of the KV cache over time, and a tick for each preemption."""
    heights = (4.5, 0.5 + 0.17 * len(runs))
    panels = compared_figure(
        runs, "KV cache usage, and preemptions", heights, facts_of_usage
    )
    usage, ticks = panels.axes
    stop_s = latest_s(runs)
    for i, (run, look) in enumerate(with_looks(runs)):
        if run.tables.has_steps:
            envelope = run.tables.curves.state["kv_cache_usage_percent"]
            _draw_mean(usage, envelope, _COLUMNS_A_POINT, stop_s, look)
        _draw_ticks(ticks, run.tables, stop_s, look, i)
    style.set_percent_axis(usage, "KV blocks in use (%)")
    ticks.set_ylim(len(runs) - 0.5, -0.5)
    ticks.yaxis.set_major_locator(NullLocator())
    ticks.set_ylabel("preempted", fontsize="small")
    ticks.grid(visible=False, axis="y")
    style.set_time_axis(ticks, stop_s)
    return panels.figure


def _draw_mean(
    axes: Axes, envelope: Envelope, num: int, stop_s: float, look: dict[str, Any]
) -> Floats:
    """Draw the means of so many neighbouring columns; return them."""
    mean = coarser(envelope.mean, num)
    draw_curve(axes, envelope.columns.edges_s[::num], mean, stop_s, look)
    return mean


def _draw_ticks(
    axes: Axes, tables: Tables, stop_s: float, look: dict[str, Any], row: int
) -> None:
    """Mark preemptions in the run's own row; few enough to see each mark."""
    time_s = column(tables.preemptions, "time_s")
    edges_s = np.linspace(0.0, stop_s, NUM_MARKER_COLUMNS + 1)
    kept = extremes_per_column(time_s, time_s, edges_s)
    axes.plot(
        time_s[kept] / style.time_unit(stop_s)[0],
        np.full(kept.size, row),
        linestyle="none",
        marker="|",
        markersize=7.0,
        markeredgewidth=0.9,
        color=look["color"],
    )


@style.house_style
def queues(runs: Sequence[Run]) -> Figure:
    """Draw the mean numbers of running and of waiting requests over time."""
    panels = compared_figure(
        runs, "Requests in each queue", (1.0, 1.0), _facts_of_queues
    )
    stop_s = latest_s(runs)
    for run, look in with_looks(runs):
        if not run.tables.has_steps:
            continue
        for axes, name in zip(panels.axes, ("num_running", "num_waiting"), strict=True):
            envelope = run.tables.curves.state[name]
            _draw_mean(axes, envelope, _COLUMNS_A_POINT, stop_s, look)
    style.set_count_axis(panels.axes[0], "running (requests)")
    style.set_count_axis(panels.axes[1], "waiting (requests)")
    style.set_time_axis(panels.axes[1], stop_s)
    return panels.figure


def _facts_of_queues(tables: Tables) -> str:
    formats = {"completed": "completed {:,.0f} requests"}
    if tables.number("num_prompts") is not None:
        formats = {"num_prompts": "{:,.0f} prompts for others"}
    return tables.facts(
        **formats,
        num_running_mean="{:,.1f} running on average",
        num_waiting_mean="{:,.1f} waiting",
        duration="{:,.1f} s",
    )


@style.house_style
def preemptions(runs: Sequence[Run]) -> Figure:
    """Draw preemptions so far and preemptions per minute."""
    panels = compared_figure(runs, "Preemptions", (1.2, 1.0), _facts_of_preemptions)
    total, rate = panels.axes
    stop_s = latest_s(runs)
    for run, look in with_looks(runs):
        time_s = np.sort(column(run.tables.preemptions, "time_s"))
        _draw_total(total, time_s, stop_s, look)
        edges_s = bar_edges_s(stop_s)
        per_minute = np.histogram(time_s, edges_s)[0] * (60.0 / np.diff(edges_s))
        draw_curve(rate, edges_s, per_minute, stop_s, look)
    style.set_count_axis(total, "so far (number)")
    width_s = bar_width_s(stop_s)
    bins = f"{width_s:g} s" if width_s < 60.0 else f"{width_s / 60.0:g} min"
    style.set_count_axis(rate, f"per minute (bins of {bins})")
    style.set_time_axis(rate, stop_s)
    return panels.figure


def _facts_of_preemptions(tables: Tables) -> str:
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
    x = at_s / style.time_unit(stop_s)[0]
    axes.step(x, so_far, where="post", linewidth=1.5, **look)


_TOKENS = ("prefill_tokens", "decode_tokens")


@style.house_style
def steps(runs: Sequence[Run]) -> Figure:
    """Draw the median latency of steps, and the mean number of tokens in them."""
    title = "Engine steps: median latency and mean batch"
    panels = compared_figure(runs, title, (1.0, 1.0), _facts_of_steps)
    latency, batch = panels.axes
    stop_s = latest_s(runs)
    for run, look in with_looks(runs):
        if not run.tables.has_steps:
            continue
        curves = run.tables.curves
        edges_s = curves.coarse.edges_s
        median = curves.medians["latency_ms"].median
        draw_curve(latency, edges_s, median, stop_s, look)
        prefill, decode = (curves.step_means[name].mean for name in _TOKENS)
        draw_curve(batch, edges_s, prefill + decode, stop_s, look)
    latency.set_ylim(0.0, None)
    latency.set_ylabel("step latency (ms)")
    latency.yaxis.set_major_formatter(FuncFormatter(style.plain_number))
    style.set_count_axis(batch, "tokens per step")
    style.set_time_axis(batch, stop_s)
    return panels.figure


def _facts_of_steps(tables: Tables) -> str:
    return tables.facts(
        num_steps="{:,.0f} steps",
        mean_step_ms="{:,.1f} ms on average",
        total_output_tokens="{:,.0f} output tokens",
        output_throughput="{:,.0f} a second",
    )


@style.house_style
def latency_cdfs(runs: Sequence[Run]) -> Figure:
    """Draw the distributions of TTFT, TPOT and end-to-end latency."""
    panels = compared_figure(
        runs, "Latency of finished requests", (1.0,), _facts_of_latencies
    )
    figure = panels.figure
    (first,) = figure.axes
    box = first.get_position()
    first.remove()
    side_by_side = figure.subplots(
        ncols=len(OF_REQUESTS),
        gridspec_kw=style.margins(0.065, 0.98, 0.1, box.y1 - 0.01, wspace=0.2),
    )
    for metric, axes in zip(OF_REQUESTS, side_by_side, strict=True):
        _draw_cdfs(axes, runs, metric)
        style.set_percent_axis(axes, "", 100.0)
    side_by_side[0].set_ylabel("finished requests (%)")
    return figure


def _facts_of_latencies(tables: Tables) -> str:
    return tables.facts(
        median_ttft_ms="TTFT median {:,.0f} ms",
        p95_ttft_ms="p95 {:,.0f} ms",
        p99_ttft_ms="p99 {:,.0f} ms",
        median_tpot_ms="TPOT median {:,.1f} ms",
        p95_tpot_ms="p95 {:,.1f} ms",
        p99_tpot_ms="p99 {:,.1f} ms",
        request_throughput="{:,.4g} requests/s",
    )


def _draw_cdfs(axes: Axes, runs: Sequence[Run], metric: Latency) -> None:
    values = [served_values(run.tables, metric) for run in runs]
    every = np.concatenate(values)
    if not every.size:
        axes.set_xlabel(f"{metric.meaning} (s)")
        return
    scale, unit = style.latency_unit(every)
    for known, look in zip(values, looks_of(len(runs)), strict=True):
        if known.size:
            style.draw_cdf(axes, known * scale, linewidth=1.5, **look)
    axes.set_xlabel(f"{metric.meaning} ({unit})")
    style.scale_x(axes, float(every.min()) * scale, float(every.max()) * scale)


@style.house_style
def fragmentation(runs: Sequence[Run]) -> Figure:
    """Draw the share of the token slots of blocks in use that are empty."""
    title = "Fragmentation: empty slots of blocks in use"
    panels = compared_figure(runs, title, (1.0,), _facts_of_fragmentation)
    (axes,) = panels.axes
    stop_s, top = latest_s(runs), 0.0
    for run, look in with_looks(runs):
        if not run.tables.has_steps or not run.tables.block_size:
            continue
        percent = run.tables.curves.pixels["empty_percent"]
        mean = _draw_mean(axes, percent, _COARSE_COLUMNS, stop_s, look)
        top = max(top, float(mean[np.isfinite(mean)].max(initial=0.0)))
    style.set_percent_axis(axes, "empty slots (%)", top or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    style.set_time_axis(axes, stop_s)
    return panels.figure


def _facts_of_fragmentation(tables: Tables) -> str:
    if not tables.has_steps or not tables.block_size:
        return "not known"
    return f"{empty_share(tables):.2%} of the slots".replace("%", " %")


class OverlayFigure(Protocol):
    """Draws several runs; its docstring's first line is the legend."""

    def __call__(self, runs: Sequence[Run]) -> Figure:
        """Draw."""


OVERLAYS: dict[str, OverlayFigure] = {
    "kv_cache_usage": kv_cache_usage,
    "queues": queues,
    "preemptions": preemptions,
    "steps": steps,
    "latency_cdfs": latency_cdfs,
    "fragmentation": fragmentation,
}
"""File name without its ending, and the function that draws it."""
