"""Replicas that come and go, against the traffic that they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from sim.views.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.results.run import Results
    from sim.results.tables.memory import ResultTable
    from sim.views.plots.binning import Floats

_NUM_SPANS = 100


def has_changes(results: Results) -> bool:
    """Whether replicas came, or went."""
    summary = results.summary
    could = bool(summary.get("autoscalers") or summary.get("events"))
    return could and results.recording.fleet_table is not None


def replicas_figure(results: Results) -> Figure:
    """Draw requests that come, replicas that are there, and what these have, in time.

    Parameters
    ----------
    results
        Of a fleet with an autoscaler, or with events.
    """
    return _replicas(results)


@style.house_style
def _replicas(results: Results) -> Figure:
    summary = results.summary
    figure = style.titled_figure("Replicas against traffic", str(summary["title"]))
    figure.subplots(
        nrows=3,
        sharex=True,
        gridspec_kw=style.margins(0.08, 0.8, 0.08, 0.87, hspace=0.22),
    )
    traffic, replicas, requests = figure.axes
    stop_s = max(summary["duration"], 1e-9)
    _draw_traffic(traffic, results, stop_s)
    table = results.recording.fleet_table
    assert table is not None
    _draw_replicas(replicas, table, stop_s)
    _draw_requests(requests, table, stop_s)
    style.set_time_axis(requests, stop_s)
    for axes in figure.axes:
        axes.set_ylim(bottom=0.0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def _draw_traffic(axes: Axes, results: Results, stop_s: float) -> None:
    requests = results.recording.request_table
    unit_s, _ = style.time_unit(stop_s)
    edges_s = np.linspace(0.0, stop_s, _NUM_SPANS + 1)
    for column, label, colour in (
        ("arrival_s", "arrive", style.GREY),
        ("finish_s", "end", style.BLUE),
    ):
        times_s = requests[column]
        counts = np.histogram(times_s[~np.isnan(times_s)], edges_s)[0]
        axes.stairs(
            counts / np.diff(edges_s), edges_s / unit_s, color=colour, label=label
        )
    axes.set_ylabel("requests / s")


def _draw_replicas(axes: Axes, table: ResultTable, stop_s: float) -> None:
    """Stack the replicas of all pools, those that serve below."""
    below: Floats = np.zeros(0)
    for column, label, colour in (
        ("num_ready", "ready", style.GREEN),
        ("num_draining", "draining", style.ORANGE),
        ("num_starting", "starting", style.YELLOW),
    ):
        edges, numbers = _over_time(table, column, stop_s)
        below = below if len(below) else np.zeros(len(numbers))
        axes.stairs(
            below + numbers, edges, baseline=below, fill=True, color=colour, label=label
        )
        below = below + numbers
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("replicas")


def _draw_requests(axes: Axes, table: ResultTable, stop_s: float) -> None:
    for column, label, colour in (
        ("num_running", "running", style.BLUE),
        ("num_waiting", "waiting", style.VERMILLION),
        ("num_held", "before the router", style.BLACK),
        ("num_transfers", "prompts being read", style.GREEN),
    ):
        edges, numbers = _over_time(table, column, stop_s)
        if column in {"num_running", "num_waiting"} or numbers.any():
            axes.stairs(numbers, edges, color=colour, label=label)
    axes.set_ylabel("requests")


def _over_time(table: ResultTable, column: str, stop_s: float) -> tuple[Floats, Floats]:
    """Return edges on the axis of time, and the sum over pools between them."""
    unit_s, _ = style.time_unit(stop_s)
    times_s, row = np.unique(table["time_s"], return_inverse=True)
    values = table[column]
    if column == "num_held":  # one queue before all pools
        sums: Floats = np.zeros(len(times_s))
        sums[row] = values
    else:
        sums = np.bincount(row, weights=values).astype(np.float64)
    return np.append(times_s, stop_s) / unit_s, sums
