"""Goodput against the offered rate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from sim.results.schema import OF_REQUESTS
from sim.views.plots.style import GREY, house_style
from sim.views.plots.sweeps.series import (
    draw_series,
    legend_right_below,
    load_of,
    panels_over_load,
    series_of,
)
from sim.views.plots.sweeps.table import NotShownError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.views.plots.sweeps.table import SweepRuns


@house_style
def goodput(runs: SweepRuns) -> Figure:
    """Draw the requests a second that keep all limits, over those that come."""
    frame = runs.frame
    if "request_goodput" not in frame or frame["request_goodput"].isna().all():
        raise NotShownError(
            "goodput needs limits; add goodput: {ttft_ms: ..., tpot_ms: ...} to the "
            "sweep's base (of a plan, an objective goodput)"
        )
    best = runs.run_with_most("request_goodput")
    figure = panels_over_load(
        runs,
        f"Goodput: up to {best['request_goodput']:,.4g} requests/s within "
        f"{_limits(frame['goodput'].iloc[0])}",
    )
    (axes,) = figure.axes
    for each in series_of(runs):
        draw_series(axes, each, "request_goodput")
    x, label = load_of(runs)
    top = float(best["request_goodput"])
    if "requests/s" in label:
        ends = np.array([0.0, float(x.max())])
        axes.plot(ends, ends, color=GREY, linestyle=":", label="all that come")
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
