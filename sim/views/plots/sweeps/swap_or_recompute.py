"""Swapping against computing again, against load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter

from sim.views.plots.style import house_style, short_number
from sim.views.plots.sweeps.series import (
    draw_series,
    legend_right_below,
    panels_over_load,
    series_of,
)
from sim.views.plots.sweeps.table import PREEMPTION_RATE, NotShownError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.views.plots.sweeps.table import SweepRuns

MODE = "engine.preemption_mode"
_PANELS = {
    "mean_ttft_ms": "mean TTFT (ms)",
    "p99_e2el_ms": "p99 end-to-end latency (ms)",
    PREEMPTION_RATE: "preemptions per 100 requests",
}


@house_style
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
        axes.yaxis.set_major_formatter(FuncFormatter(short_number))
    legend_right_below(figure)
    return figure
