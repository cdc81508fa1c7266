"""Preemptions against load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.views.plots.style import house_style, set_count_axis, set_wide_count_axis
from sim.views.plots.sweeps.series import (
    draw_series,
    legend_right_below,
    panels_over_load,
    series_of,
)
from sim.views.plots.sweeps.table import PREEMPTION_RATE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.views.plots.sweeps.table import SweepRuns

_WIDE_FROM = 50.0
"""Rates that differ by more are drawn on a logarithmic scale."""


@house_style
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
        set_wide_count_axis(axes, label, rates)
    else:
        set_count_axis(axes, label)
    legend_right_below(figure)
    return figure
