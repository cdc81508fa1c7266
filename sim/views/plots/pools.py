"""The pools of a fleet against each other, and the transfers between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.results.fleet.pulls import PARTS, in_flight, pulls_of
from sim.views.plots import style
from sim.views.plots.fleets import mean_usage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.results.run import Results
    from sim.views.plots.binning import Floats

_NUM_COLUMNS = 300
_NUM_SPANS = 60


def has_pools(results: Results) -> bool:
    """Whether prompts are computed by other engines than their outputs."""
    return "ttft_split" in results.summary


def pools_figure(results: Results) -> Figure:
    """Draw the KV cache of each pool, transfers and what TTFTs were spent on, in time.

    Parameters
    ----------
    results
        Of a fleet that prefills and decodes apart.
    """
    return _pools(results)


@style.house_style
def _pools(results: Results) -> Figure:
    summary = results.summary
    figure = style.titled_figure(
        "Prefill and decode pools, and what is read between them",
        str(summary["title"]),
    )
    figure.subplots(
        nrows=3,
        sharex=True,
        gridspec_kw=style.margins(0.08, 0.8, 0.08, 0.87, hspace=0.22),
    )
    usage, transfers, split = figure.axes
    stop_s = max(summary["duration"], 1e-9)
    _draw_usage(usage, results, stop_s)
    _draw_transfers(transfers, results, stop_s)
    _draw_split(split, results, stop_s)
    style.set_time_axis(split, stop_s)
    for axes in figure.axes:
        axes.set_ylim(bottom=0.0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def _draw_usage(axes: Axes, results: Results, stop_s: float) -> None:
    summary = results.summary
    unit_s, _ = style.time_unit(stop_s)
    edges_s = np.linspace(0.0, stop_s, _NUM_COLUMNS + 1)
    engines = summary["engines"]
    usage = mean_usage(results.recording.step_table, len(engines), edges_s)
    for pool in summary["pools"]:
        own = [each["pool"] == pool["pool"] for each in engines]
        mean = 100.0 * usage[own].mean(axis=0)
        label = f"{pool['pool']}, {sum(own)} engine{'s' * (sum(own) > 1)}"
        axes.stairs(mean, edges_s / unit_s, label=label)
    axes.set_ylabel("KV blocks in use (%)")


def _draw_transfers(axes: Axes, results: Results, stop_s: float) -> None:
    transfers = results.recording.transfer_table
    assert transfers is not None
    pulls = pulls_of(transfers)
    unit_s, _ = style.time_unit(stop_s)
    times_s, numbers = in_flight(pulls["begin_s"], pulls["end_s"])
    edges_s = np.linspace(0.0, stop_s, _NUM_COLUMNS + 1)
    area = np.concatenate([[0.0], np.cumsum(np.diff(times_s) * numbers[:-1])])
    under_way: Floats = np.zeros(_NUM_COLUMNS)
    if len(times_s):
        under_way = np.diff(np.interp(edges_s, times_s, area)) / np.diff(edges_s)
    axes.stairs(
        under_way, edges_s / unit_s, color=style.GREEN, label="transfers under way"
    )
    axes.set_ylabel("mean number")


def _draw_split(axes: Axes, results: Results, stop_s: float) -> None:
    """Stack the mean parts of the TTFTs of requests that came in each span."""
    requests = results.recording.request_table
    unit_s, _ = style.time_unit(stop_s)
    has_token = ~np.isnan(requests["first_token_s"])
    arrival_s = requests["arrival_s"][has_token]
    edges_s = np.linspace(0.0, stop_s, _NUM_SPANS + 1)
    counts = np.histogram(arrival_s, edges_s)[0]
    below: Floats = np.zeros(_NUM_SPANS)
    colours = (style.GREY, style.BLUE, style.GREEN, style.ORANGE)
    for part, colour in zip(PARTS, colours, strict=True):
        values_s = requests[f"ttft_{part}_s"][has_token]
        sums_s = np.histogram(arrival_s, edges_s, weights=values_s)[0]
        top = below + sums_s / np.maximum(counts, 1)
        axes.stairs(
            top, edges_s / unit_s, baseline=below, fill=True, color=colour, label=part
        )
        below = top
    axes.set_ylabel("mean TTFT by arrival (s)")
