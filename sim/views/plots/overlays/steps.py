"""Steps of several runs: how long they take and how much they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter

from sim.views.plots.runs import compared_figure, draw_curve, latest_s, looks_of
from sim.views.plots.style import (
    house_style,
    plain_number,
    set_count_axis,
    set_time_axis,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from sim.views.plots.runs import Run
    from sim.views.plots.tables import Tables


_TOKENS = ("prefill_tokens", "decode_tokens")


@house_style
def steps(runs: Sequence[Run]) -> Figure:
    """Draw the median latency of steps, and the mean number of tokens in them."""
    title = "Engine steps: median latency and mean batch"
    panels = compared_figure(runs, title, (1.0, 1.0), _facts)
    latency, batch = panels.axes
    stop_s = latest_s(runs)
    for run, look in zip(runs, looks_of(len(runs)), strict=True):
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
    latency.yaxis.set_major_formatter(FuncFormatter(plain_number))
    set_count_axis(batch, "tokens per step")
    set_time_axis(batch, stop_s)
    return panels.figure


def _facts(tables: Tables) -> str:
    return tables.facts(
        num_steps="{:,.0f} steps",
        mean_step_ms="{:,.1f} ms on average",
        total_output_tokens="{:,.0f} output tokens",
        output_throughput="{:,.0f} a second",
    )
