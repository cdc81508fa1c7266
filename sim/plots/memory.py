"""Figures of the KV cache: how full it is, and how much of it is wasted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.markers import CARETDOWN
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sim.plots.binning import extremes_per_column
from sim.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    draw_band,
    draw_line,
    house_style,
    legend_above,
    new_figure,
    say,
    set_count_axis,
    set_percent_axis,
    set_time_axis,
    time_unit,
)
from sim.plots.tables import column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.plots.binning import Floats
    from sim.plots.tables import Tables

NUM_MARKER_COLUMNS = 400
"""Preemption markers are wider than a pixel: thinner columns would only smear."""


@house_style
def kv_cache_usage(tables: Tables) -> Figure:
    """Draw the usage of the KV cache over time, with the preemptions on it."""
    facts = tables.facts(
        kv_cache_usage_mean="mean {:.1%}",
        kv_cache_usage_max="max {:.1%}",
        num_preemptions="{:,.0f} preemptions",
    ).replace("%", " %")
    title = f"KV cache usage: {facts}" if facts else "KV cache usage"
    figure = new_figure(tables, title, right=0.91)
    (axes,) = figure.axes
    usage = 100.0 * tables.step("kv_cache_usage")
    if usage.size:
        draw_band(axes, tables.state, usage, SKY, "GPU blocks, min to max")
        draw_line(axes, tables.state, tables.state.mean(usage), BLUE, "mean")
        _draw_cpu_usage(axes, tables)
    else:
        say(axes, "No engine step in this run")
    _mark_preemptions(axes, tables)
    set_percent_axis(axes, "KV blocks in use (%)")
    _add_block_scale(axes, tables)
    set_time_axis(axes, tables.stop_s)
    legend_above(axes)
    return figure


def _draw_cpu_usage(axes: Axes, tables: Tables) -> None:
    usage = 100.0 * tables.step("cpu_cache_usage")
    moved = tables.step("num_swapped_out_blocks")
    if usage.max(initial=0.0) > 0.0 or moved.max(initial=0.0) > 0.0:
        mean = tables.state.mean(usage)
        draw_line(axes, tables.state, mean, GREEN, "CPU blocks, mean", linestyle="--")


def _mark_preemptions(axes: Axes, tables: Tables) -> None:
    """Mark preemptions where they happened, few enough to see each mark."""
    time_s = column(tables.preemptions, "time_s")
    usage = 100.0 * column(tables.preemptions, "kv_cache_usage_before")
    if not time_s.size:
        return
    edges_s = np.linspace(0.0, tables.stop_s, NUM_MARKER_COLUMNS + 1)
    kept = extremes_per_column(time_s, usage, edges_s)
    axes.plot(
        time_s[kept] / time_unit(tables.stop_s)[0],
        usage[kept],
        linestyle="none",
        marker=CARETDOWN,  # its tip is at the usage, the curve stays free
        markersize=4.0,
        markerfacecolor=VERMILLION,
        markeredgecolor=BLACK,
        markeredgewidth=0.3,
        clip_on=False,
        zorder=3,
        label=f"{time_s.size:,} preemptions, usage before each",
    )


def _add_block_scale(axes: Axes, tables: Tables) -> None:
    """Add the same scale in blocks on the right."""
    num_blocks = tables.number("num_gpu_blocks")
    if not num_blocks:
        return
    right = axes.twinx()
    right.set_ylim(axes.get_ylim())
    right.set_ylabel("GPU blocks in use (number)")
    right.yaxis.set_major_formatter(
        FuncFormatter(lambda percent, _: f"{percent / 100.0 * num_blocks:,.0f}")
    )
    right.grid(visible=False)
    right.spines["right"].set_visible(True)


@house_style
def fragmentation(tables: Tables) -> Figure:
    """Draw blocks in use against tokens in use, and the share that is wasted."""
    physical = tables.step("num_physical_tokens")
    logical = tables.step("num_logical_tokens")
    block_size = tables.number("block_size")
    if not physical.size or not block_size:
        return _no_fragmentation(tables, has_steps=bool(physical.size))
    capacity = tables.step("num_physical_blocks") * block_size
    latency_s = tables.step("latency_s")
    wasted = 100.0 * _share_missing(physical, capacity)
    mean = _mean(capacity - physical, latency_s) / (_mean(capacity, latency_s) or 1.0)
    title = f"Fragmentation: {mean:.2%} of the token slots of blocks in use are empty"
    is_shared = bool((logical != physical).any())
    heights = (3.0, 1.5, 1.5) if is_shared else (3.0, 2.0)
    figure = new_figure(tables, title.replace("%", " %"), heights)
    _draw_tokens(figure.axes[0], tables, capacity, block_size)
    _draw_share(figure.axes[1], tables, wasted, ("empty slots", ORANGE, BLACK))
    if is_shared:
        saved = 100.0 * _share_missing(physical, logical)
        look = ("tokens saved by sharing", PURPLE, BLACK)
        _draw_share(figure.axes[2], tables, saved, look)
    set_time_axis(figure.axes[-1], tables.stop_s)
    return figure


def _draw_share(
    axes: Axes, tables: Tables, percent: Floats, look: tuple[str, str, str]
) -> None:
    """Draw a percentage's envelope and mean; `look` is name, fill and line."""
    name, fill, line = look
    draw_band(axes, tables.pixels, percent, fill, f"{name}, min to max")
    draw_line(axes, tables.pixels, tables.pixels.mean(percent), line, "mean")
    set_percent_axis(axes, "share of slots (%)", float(percent.max()) or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    legend_above(axes)


def _no_fragmentation(tables: Tables, *, has_steps: bool) -> Figure:
    figure = new_figure(tables, "Fragmentation")
    (axes,) = figure.axes
    missing = "block_size is not in the summary" if has_steps else "No engine step"
    say(axes, f"{missing}: fragmentation is not known")
    set_percent_axis(axes, "share (%)")
    set_time_axis(axes, tables.stop_s)
    return figure


def _draw_tokens(
    axes: Axes, tables: Tables, capacity: Floats, block_size: float
) -> None:
    physical = tables.step("num_physical_tokens")
    logical = tables.step("num_logical_tokens")
    state = tables.state
    draw_band(axes, state, capacity, SKY, "room in blocks in use, min to max")
    room = f"mean (blocks x {block_size:g} tokens)"
    draw_line(axes, state, state.mean(capacity), BLUE, room)
    stored = state.mean(physical)
    draw_line(axes, state, stored, VERMILLION, "tokens stored, mean", linestyle="--")
    if bool((logical != physical).any()):
        logical_mean = state.mean(logical)
        draw_line(
            axes,
            state,
            logical_mean,
            PURPLE,
            "tokens of requests, mean",
            linestyle=":",
        )
    set_count_axis(axes, "KV cache (tokens)")
    legend_above(axes)


def _share_missing(part: Floats, whole: Floats) -> Floats:
    """Return ``1 - part / whole``, no less than 0, and 0 where there is no whole."""
    filled = np.ones_like(whole)
    np.divide(part, whole, out=filled, where=whole > 0.0)
    return np.maximum(1.0 - filled, 0.0)


def _mean(values: Floats, latency_s: Floats) -> float:
    """Return the mean over busy time."""
    busy_s = float(latency_s.sum())
    return float(values @ latency_s) / busy_s if busy_s else 0.0
