"""The figure of preemptions: how many, when, of which mode."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from sim.views.plots import style
from sim.views.plots.run.curves import NUM_PIXEL_COLUMNS
from sim.views.plots.run.tables import column, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.binning import Floats
    from sim.views.plots.run.tables import Tables

MAX_BARS = 90
_BAR_WIDTHS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
_BAR_WIDTHS_MIN = (1, 2, 5, 10, 15, 30, 60, 120, 360, 720, 1440, 10080)
_LOOKS = {
    "recompute": (style.ORANGE, "", "--"),
    "swap": (style.SKY, "///", ":"),
}


@style.house_style
def preemption_history(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw preemptions so far and preemptions per minute, by mode."""
    formats = {
        "num_preemptions": "{:,.0f} in all",
        "num_preemptions_recompute": "{:,.0f} by recompute",
        "num_preemptions_swap": "{:,.0f} by swap",
        "recomputed_tokens": "{:,.0f} tokens computed again",
    }
    if tables.number("swapped_out_blocks"):
        formats["swapped_out_blocks"] = "{:,.0f} blocks out"
    facts = tables.facts(**formats)
    title = f"Preemptions: {facts}" if facts else "Preemptions"
    panels = style.new_panels(tables, title, right=0.91, on=on)
    (rate,) = panels.axes
    total = rate.twinx()
    by_mode = _times_by_mode(tables)
    if by_mode:
        _draw_rate(rate, tables, by_mode)
        _draw_total(total, tables, by_mode)
    else:
        style.say(rate, _nothing_to_draw(tables))
    width_s = bar_width_s(tables.stop_s)
    style.set_count_axis(rate, f"preemptions per minute (in bins of {_width(width_s)})")
    style.set_count_axis(total, "preemptions so far (number)")
    _swap_sides(rate, total)
    style.set_time_axis(rate, tables.stop_s)
    lines, bars = (axes.get_legend_handles_labels()[0] for axes in (total, rate))
    pairs = itertools.zip_longest(lines, bars)
    named = [artist for pair in pairs for artist in pair if artist is not None]
    style.legend_above(total, named, num_columns=3)
    return panels.figure


def bar_width_s(stop_s: float) -> float:
    """Return the width of a bar in seconds: a round one, at most `MAX_BARS` bars."""
    widths_s = (*_BAR_WIDTHS_S, *(60.0 * width for width in _BAR_WIDTHS_MIN))
    return next((w for w in widths_s if stop_s / w <= MAX_BARS), stop_s / MAX_BARS)


def bar_edges_s(stop_s: float) -> Floats:
    """Return the borders of the bars in seconds, the last one the end of the run.

    The last bar is as wide as the rest. Less than half a bar is not a bar of its own,
    for a single preemption would tower in it, but widens the one before.
    """
    width_s = bar_width_s(stop_s)
    num_bars = max(int(stop_s / width_s + 0.5), 1)
    edges_s: Floats = np.arange(num_bars + 1.0) * width_s
    edges_s[-1] = stop_s
    return edges_s


def _width(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 60.0 else f"{seconds / 60.0:g} min"


def _nothing_to_draw(tables: Tables) -> str:
    counted = tables.number("num_preemptions")
    if counted:
        return f"{counted:,.0f} preemptions, none of them in the table"
    return "No preemptions in this run"


def _times_by_mode(tables: Tables) -> dict[str, Floats]:
    time_s = column(tables.preemptions, "time_s")
    if not time_s.size:
        return {}
    mode = words(tables.preemptions, "mode")
    return {name: np.sort(time_s[mode == name]) for name in sorted(set(mode.tolist()))}


def _draw_rate(axes: Axes, tables: Tables, by_mode: dict[str, Floats]) -> None:
    edges_s = bar_edges_s(tables.stop_s)
    floor = np.zeros(edges_s.size - 1)
    for name, time_s in by_mode.items():
        colour, hatch, _ = _LOOKS.get(name, (style.PURPLE, "...", "-."))
        height = np.histogram(time_s, edges_s)[0] * (60.0 / np.diff(edges_s))
        style.add_steps(
            axes,
            floor + height,
            edges_s / style.time_unit(tables.stop_s)[0],
            baseline=floor,
            fill=True,
            facecolor=colour,
            edgecolor=style.GREY,
            hatch=hatch or None,
            linewidth=0.0,
            label=f"{name}, per minute",
        )
        floor = floor + height


def _draw_total(axes: Axes, tables: Tables, by_mode: dict[str, Floats]) -> None:
    every = np.sort(np.concatenate(list(by_mode.values())))
    _draw_count(axes, tables, every, (f"all so far ({every.size:,})", "-"))
    if len(by_mode) > 1:
        for name, time_s in by_mode.items():
            linestyle = _LOOKS.get(name, (style.PURPLE, "...", "-."))[2]
            label = f"{name} so far ({time_s.size:,})"
            _draw_count(axes, tables, time_s, (label, linestyle))


def _draw_count(
    axes: Axes, tables: Tables, time_s: Floats, look: tuple[str, str]
) -> None:
    """Count times up to each pixel column; `look` is label and line style."""
    at_s = np.linspace(0.0, tables.stop_s, NUM_PIXEL_COLUMNS + 1)
    label, linestyle = look
    axes.step(
        at_s / style.time_unit(tables.stop_s)[0],
        np.searchsorted(time_s, at_s, "right"),
        where="post",
        color=style.BLACK,
        linestyle=linestyle,
        linewidth=1.5,
        label=label,
    )


def _swap_sides(rate: Axes, total: Axes) -> None:
    """Put the totals, which are drawn on top, on the left."""
    total.yaxis.set_ticks_position("left")
    total.yaxis.set_label_position("left")
    rate.yaxis.set_ticks_position("right")
    rate.yaxis.set_label_position("right")
    rate.spines["right"].set_visible(True)
    # One grid, behind the bars and of their own axis: bars are read against lines.
    rate.set_axisbelow(True)
    total.grid(visible=False)
