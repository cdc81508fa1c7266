"""Figures of the KV cache: how full it is, and how much of it is wasted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.markers import CARETDOWN
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sim.results.recording.usage import mean_between
from sim.results.summary.rows import layers_in_words
from sim.views.plots import style
from sim.views.plots.binning import extremes_per_column
from sim.views.plots.run.tables import column

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.run.tables import Tables

_GROUP_LOOKS = tuple(
    (colour, hatch)
    for hatch in ("", "//")
    for colour in (style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW)
)

LOW_USAGE_PERCENT = 50.0
"""Below it, usage by kind of group is drawn on an axis of its own length."""
NUM_MARKER_COLUMNS = 400
"""Preemption markers are wider than a pixel: thinner columns would only smear."""


@style.house_style
def kv_cache_usage(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw the usage of the KV cache over time, with the preemptions on it."""
    facts = facts_of_usage(tables)
    title = f"KV cache usage: {facts}" if facts else "KV cache usage"
    panels = style.new_panels(tables, title, right=0.91, on=on)
    (axes,) = panels.axes
    if tables.has_steps:
        usage = tables.curves.state["kv_cache_usage_percent"]
        style.draw_band(axes, usage, style.SKY, "GPU blocks, min to max")
        if tables.groups is not None:
            _draw_groups(axes, tables, tables.groups)
        style.draw_mean(axes, usage, style.BLUE, "mean")
        _draw_tree(axes, tables)
        _draw_cpu_usage(axes, tables)
    else:
        style.say(axes, "No engine step in this run")
    _mark_preemptions(axes, tables)
    style.set_percent_axis(axes, "KV blocks in use (%)", _top_percent(tables))
    _add_block_scale(axes, tables)
    style.set_time_axis(axes, tables.stop_s)
    style.legend_above(axes)
    return panels.figure


def facts_of_usage(tables: Tables) -> str:
    """Return mean and largest usage, and preemptions, in words."""
    return tables.facts(
        kv_cache_usage_mean="mean {:.1%}",
        kv_cache_usage_max="max {:.1%}",
        num_preemptions="{:,.0f} preemptions",
    ).replace("%", " %")


def _top_percent(tables: Tables) -> float:
    """Return the end of the axis: all blocks, but where kinds would be lost in it."""
    kinds = tables.summary.get("kv_cache_groups", ())
    has_own = any("num_blocks" in kind for kind in kinds)
    if tables.groups is None or not tables.has_steps or has_own:
        return 100.0
    high = float(tables.curves.totals["kv_cache_usage_percent"].high)
    return high if 0.0 < high < LOW_USAGE_PERCENT else 100.0


def _draw_groups(axes: Axes, tables: Tables, rows: Mapping[str, Any]) -> None:
    """Stack the blocks of each kind of KV cache group, below the whole.

    Kinds with a pool of their own have a line each instead, a share of that.
    """
    num_blocks = tables.number("num_gpu_blocks")
    kinds = tables.summary.get("kv_cache_groups")
    if not num_blocks or not kinds:
        return
    columns = tables.curves.fine
    layers = [
        (
            layers_in_words(kind),
            100.0
            * mean_between(rows, "num_blocks", columns.edges_s, kind=place)
            / kind.get("num_blocks", num_blocks),
        )
        for place, kind in enumerate(kinds)
    ]
    if any("num_blocks" in kind for kind in kinds):
        for words, percent in layers[1:]:  # the first pool is the whole of usage
            style.draw_line(axes, columns, percent, style.ORANGE, words)
        return
    style.draw_stack(axes, columns, layers, _GROUP_LOOKS)


def _draw_tree(axes: Axes, tables: Tables) -> None:
    """Draw how full the pool is with the prefixes that are kept and not in use."""
    num_blocks, block_size = tables.number("num_gpu_blocks"), tables.block_size
    if tables.tree is None or not num_blocks or not block_size:
        return
    columns = tables.curves.fine
    kept = mean_between(tables.tree, "num_evictable_tokens", columns.edges_s)
    used = tables.curves.state["kv_cache_usage_percent"].mean
    percent = used + 100.0 * kept / (num_blocks * block_size)
    style.draw_line(axes, columns, percent, style.GREEN, "with prefixes kept")


def _draw_cpu_usage(axes: Axes, tables: Tables) -> None:
    curves, usage = tables.curves, "cpu_cache_usage_percent"
    if any(
        curves.totals[name].high > 0.0 for name in (usage, "num_swapped_out_blocks")
    ):
        mean = curves.state[usage]
        style.draw_mean(axes, mean, style.GREEN, "CPU blocks, mean", linestyle="--")


def _mark_preemptions(axes: Axes, tables: Tables) -> None:
    """Mark preemptions where they happened, few enough to see each mark."""
    time_s = column(tables.preemptions, "time_s")
    usage = 100.0 * column(tables.preemptions, "kv_cache_usage_before")
    if not time_s.size:
        return
    edges_s = np.linspace(0.0, tables.stop_s, NUM_MARKER_COLUMNS + 1)
    kept = extremes_per_column(time_s, usage, edges_s)
    axes.plot(
        time_s[kept] / style.time_unit(tables.stop_s)[0],
        usage[kept],
        linestyle="none",
        marker=CARETDOWN,  # its tip is at the usage, the curve stays free
        markersize=4.0,
        markerfacecolor=style.VERMILLION,
        markeredgecolor=style.BLACK,
        markeredgewidth=0.3,
        clip_on=False,
        zorder=3,
        label=f"{time_s.size:,} preemptions, usage before each",
    )


def _add_block_scale(axes: Axes, tables: Tables) -> None:
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


@style.house_style
def fragmentation(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw blocks in use against tokens in use, and the share that is wasted."""
    block_size = tables.block_size
    if not tables.has_steps or not block_size:
        return _no_fragmentation(tables, on)
    title = (
        f"Fragmentation: {empty_share(tables):.2%} of the token slots of blocks in use "
        f"are empty"
    )
    is_shared = tables.curves.totals["is_shared"].high > 0.0
    heights = (3.0, 1.5, 1.5) if is_shared else (3.0, 2.0)
    panels = style.new_panels(tables, title.replace("%", " %"), heights, on=on)
    _draw_tokens(panels.axes[0], tables, block_size, is_shared=is_shared)
    _draw_share(panels.axes[1], tables, "empty_percent", ("empty slots", style.ORANGE))
    if is_shared:
        look = ("tokens saved by sharing", style.PURPLE)
        _draw_share(panels.axes[2], tables, "saved_percent", look)
    panels.set_time_axes(tables.stop_s)
    return panels.figure


def empty_share(tables: Tables) -> float:
    """Return the share of the token slots of blocks in use that are empty."""
    totals = tables.curves.totals
    room = totals["capacity_tokens"].mean_over_time
    stored = totals["num_physical_tokens"].mean_over_time
    return (room - stored) / (room or 1.0)


def _draw_share(axes: Axes, tables: Tables, name: str, look: tuple[str, str]) -> None:
    """Draw a percentage's envelope and mean; `look` is its label and its fill."""
    says, fill = look
    percent = tables.curves.pixels[name]
    style.draw_band(axes, percent, fill, f"{says}, min to max")
    style.draw_mean(axes, percent, style.BLACK, "mean")
    top = tables.curves.totals[name].high or 1.0
    style.set_percent_axis(axes, "share of slots (%)", top)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    style.legend_above(axes)


def _no_fragmentation(tables: Tables, on: Sequence[Axes] | None) -> Figure:
    panels = style.new_panels(tables, "Fragmentation", on=on and on[:1])
    (axes,) = panels.axes
    has_steps = tables.has_steps
    missing = "No engine step"
    if has_steps:
        missing = (
            "blocks of unlike groups differ in size"
            if tables.summary.get("kv_cache_groups")
            else "block_size is not in the summary"
        )
    style.say(axes, f"{missing}: fragmentation is not known")
    style.set_percent_axis(axes, "share (%)")
    style.set_time_axis(axes, tables.stop_s)
    return panels.figure


def _draw_tokens(
    axes: Axes, tables: Tables, block_size: float, *, is_shared: bool
) -> None:
    state = tables.curves.state
    room = state["capacity_tokens"]
    style.draw_band(axes, room, style.SKY, "room in blocks in use, min to max")
    style.draw_mean(axes, room, style.BLUE, f"mean (blocks x {block_size:g} tokens)")
    stored = state["num_physical_tokens"]
    style.draw_mean(
        axes, stored, style.VERMILLION, "tokens stored, mean", linestyle="--"
    )
    if is_shared:
        asked = state["num_logical_tokens"]
        style.draw_mean(
            axes, asked, style.PURPLE, "tokens of requests, mean", linestyle=":"
        )
    style.set_count_axis(axes, "KV cache (tokens)")
    style.legend_above(axes)
