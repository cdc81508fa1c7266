"""Figures of the step loop: queues over time, latency of steps and their batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sim.views.plots import style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.run.tables import Tables

LOG_FROM_RATIO = 50.0
"""Step latencies that differ by more than this are drawn on a logarithmic scale."""

PARTS: dict[str, tuple[str, str, str]] = {
    "gemm_s": ("GEMM", style.BLUE, ""),
    "prefill_attention_s": ("prefill attn", style.ORANGE, ""),
    "decode_attention_s": ("decode attn", style.GREEN, "///"),
    "head_s": ("head", style.YELLOW, ""),
    "allreduce_s": ("all-reduce", style.PURPLE, "\\\\\\"),
    "swap_s": ("swap", style.VERMILLION, ""),
    "copy_s": ("copy", style.SKY, "..."),
    "host_s": ("other", "#E5E5E5", ""),
}
"""Parts of a step's latency: column, and name, colour and hatch in the figure."""


@style.house_style
def queues(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw the requests in each queue over time."""
    facts = tables.facts(
        completed="completed {:,.0f} requests",
        rejected="rejected {:,.0f}",
        duration="{:,.1f} s",
    )
    title = f"Queues: {facts}" if facts else "Queues"
    panels = style.new_panels(tables, title, (1.0, 1.0), on=on)
    upper, lower = panels.axes
    absent: list[Artist] = []
    if tables.has_steps:
        _draw_queue(upper, tables, "running", (style.SKY, style.BLUE, "-"))
        if tables.curves.totals["num_swapped"].high > 0.0:
            _draw_queue(
                upper, tables, "swapped", (style.ORANGE, style.VERMILLION, "--")
            )
        else:
            absent.append(Line2D([], [], linestyle="none", label="swapped: none"))
        _draw_queue(lower, tables, "waiting", (style.PURPLE, style.BLACK, "-"))
    else:
        style.say(upper, "No engine step in this run")
    style.set_count_axis(upper, "running (requests)")
    style.set_count_axis(lower, "waiting (requests)")
    panels.set_time_axes(tables.stop_s)
    handles = upper.get_legend_handles_labels()[0]
    style.legend_above(upper, [*handles, *absent])
    style.legend_above(lower)
    return panels.figure


def _draw_queue(
    axes: Axes, tables: Tables, name: str, look: tuple[str, str, str]
) -> None:
    """Draw a queue's envelope and mean; `look` is fill, line and line style."""
    length = tables.curves.state[f"num_{name}"]
    peak = tables.curves.totals[f"num_{name}"].high
    fill, colour, linestyle = look
    style.draw_band(axes, length, fill, f"{name}, min to max (peak {peak:,.0f})")
    style.draw_mean(axes, length, colour, f"{name}, mean", linestyle=linestyle)


@style.house_style
def step_costs(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw latency, its parts and the batch of the engine's steps over time.

    Parts are shares of time, which long steps dominate; the batch is per step, each
    step counted once.
    """
    facts = tables.facts(
        num_steps="{:,.0f} steps",
        duration="{:,.1f} s",
        total_output_tokens="{:,.0f} output tokens",
    )
    title = f"Engine: {facts}" if facts else "Engine steps"
    panels = style.new_panels(tables, title, (1.2, 1.0, 1.0), on=on)
    latency, parts, batch = panels.axes
    if tables.has_steps:
        _draw_latency(latency, tables)
        _draw_parts(parts, tables)
        _draw_batch(batch, tables)
    else:
        style.say(latency, "No engine step in this run")
        style.set_count_axis(batch, "tokens per step")
    latency.set_ylabel("step latency (ms)")
    style.set_percent_axis(parts, "share of time (%)", 100.0 / 1.04)
    panels.set_time_axes(tables.stop_s)
    for axes in panels.axes:
        style.legend_above(axes)
    return panels.figure


def _draw_latency(axes: Axes, tables: Tables) -> None:
    curves, name = tables.curves, "latency_ms"
    low, high = curves.totals[name].low, curves.totals[name].high
    label = f"min to max (longest {_duration(1e-3 * high)})"
    style.draw_band(axes, curves.pixels[name], style.SKY, label)
    median = f"median over {_duration(curves.coarse.width_s)}"
    style.draw_line(
        axes, curves.coarse, curves.medians[name].median, style.BLACK, median
    )
    if high > LOG_FROM_RATIO * low > 0.0:
        axes.set_yscale("log")
        style.set_log_axis(axes.yaxis, low, high)
        axes.set_ylim(low / 1.1, high * 1.1)
    else:
        axes.set_ylim(0.0, high * 1.04)
        axes.yaxis.set_major_formatter(FuncFormatter(style.plain_number))
        axes.yaxis.set_major_locator(MaxNLocator(5))


def _duration(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1.0 else f"{1e3 * seconds:.4g} ms"


def _draw_parts(axes: Axes, tables: Tables) -> None:
    curves = tables.curves
    layers, looks = [], []
    for name, (label, colour, hatch) in PARTS.items():
        percent = curves.totals[name].mean_over_time
        if percent > 0.0:
            layers.append((f"{label} {percent:.2g} %", curves.bins[name].mean))
            looks.append((colour, hatch))
    style.draw_stack(axes, curves.coarse, layers, looks)
    if not layers:
        style.say(axes, "The cost model gives no parts")


def _draw_batch(axes: Axes, tables: Tables) -> None:
    curves = tables.curves
    drawn = []
    for name, colour, linestyle in (
        ("prefill", style.ORANGE, "-"),
        ("decode", style.GREEN, "--"),
    ):
        mean = curves.step_means[f"{name}_tokens"].mean
        over = f"mean over steps of {_duration(curves.coarse.width_s)}"
        all_ = curves.totals[f"{name}_tokens"].mean
        label = f"{name}, {over} ({all_:,.4g} over all)"
        style.draw_line(axes, curves.coarse, mean, colour, label, linestyle=linestyle)
        drawn.append(mean)
    style.set_wide_count_axis(axes, "tokens per step", np.concatenate(drawn))
