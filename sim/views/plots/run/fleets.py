"""Figures of a fleet: its engines beside each other, its pools, its replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from sim.results.fleet.pulls import PARTS, in_flight, pulls_of
from sim.results.fleet.summary import places_there
from sim.results.tables.steps import engines_in, span_columns, spans_s
from sim.views.plots import style

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.results.run import Results
    from sim.results.tables.memory import ResultTable
    from sim.results.tables.steps import StepTable
    from sim.views.plots.binning import Floats

_NUM_COLUMNS = 300
_NUM_SPANS, _NUM_TRAFFIC_SPANS = 60, 100
_COLOURS = "cividis"
_MOST_NAMES = 4
"""Pools that an axis names."""


def mean_usage(steps: StepTable, num_engines: int, edges_s: Floats) -> Floats:
    """Return the mean KV cache usage of each engine between edges; idle time is empty.

    Parameters
    ----------
    steps
        Of a fleet.
    num_engines
        Rows of the result.
    edges_s
        Of its columns, in seconds.
    """
    held_s = np.zeros((num_engines, len(edges_s) - 1))
    for batch in steps.batches(("kv_cache_usage", *span_columns(steps))):
        for engine in engines_in(batch["engine"]):
            is_own = batch["engine"] == engine
            own = {name: column[is_own] for name, column in batch.items()}
            start_s, spans = own["start_s"], spans_s(own)
            area_s = spans * own["kv_cache_usage"]
            until_s = np.cumsum(area_s)
            times_s = np.column_stack((start_s, start_s + spans)).ravel()
            times_s = np.maximum.accumulate(times_s)
            areas_s = np.column_stack((until_s - area_s, until_s)).ravel()
            held_s[engine] += np.diff(np.interp(edges_s, times_s, areas_s))
    found: Floats = held_s / np.diff(edges_s)
    return found


@style.house_style
def engines_figure(results: Results) -> Figure:
    """Draw the KV cache of every engine over time, and the requests of each.

    Preemptions are ticks on the map, and engines that are not there are hatched. Beside
    it stand the requests of each engine over the mean and, with prefix caching, its hit
    rate.
    """
    summary = results.summary
    engines = summary["engines"]
    figure = style.titled_figure(
        "KV cache usage by engine, and preemptions", str(summary["title"])
    )
    rates = [each.get("prefix_cache_hit_rate") for each in engines]
    has_hits = bool(summary.get("prefix_cache_queries"))
    widths = [6.0, 1.2, 1.2] if has_hits else [6.0, 1.2]
    figure.subplots(
        ncols=len(widths),
        sharey=True,
        gridspec_kw=style.margins(
            0.07, 0.98, 0.1, 0.8, wspace=0.14, width_ratios=widths
        ),
    )
    over_time, load, *more = figure.axes
    _draw_map(over_time, results)
    _draw_bars(load, _loads(engines, places_there(summary)), "requests / mean")
    load.axvline(1.0, color=style.GREY, linewidth=0.8)
    for axes in more:
        _draw_bars(axes, np.array([100.0 * (r or 0.0) for r in rates]), "hit rate (%)")
        axes.set_xlim(0.0, 100.0)
    return figure


def pool_places(engines: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of an axis of engines: of several pools with their numbers."""
    pools: dict[str, list[int]] = {}
    for each in engines:
        pools.setdefault(each["pool"], []).append(each["engine"])
    if not 1 < len(pools) <= _MOST_NAMES:
        return "engine"
    told = (
        f"{pool} {min(at)}" + (f" to {max(at)}" if len(at) > 1 else "")
        for pool, at in pools.items()
    )
    return f"engine ({', '.join(told)})"


def _loads(engines: Sequence[Mapping[str, Any]], there: Sequence[int]) -> Floats:
    """Return the requests of each engine over the mean of all that do the same.

    Engines that were never there do not count.
    """
    numbers = np.array(
        [each.get("num_prompts", each["num_requests"]) for each in engines], float
    )
    is_prefiller = np.array(["num_prompts" in each for each in engines])
    is_there = np.isin(np.arange(len(engines)), there)
    for role in (is_there & is_prefiller, is_there & ~is_prefiller):
        if role.any():
            numbers[role] /= max(numbers[role].mean(), 1e-300)
    return numbers


def _draw_map(axes: Axes, results: Results) -> None:
    summary, recording = results.summary, results.recording
    num_engines, stop_s = len(summary["engines"]), max(summary["duration"], 1e-9)
    unit_s, _ = style.time_unit(stop_s)
    edges_s = np.linspace(0.0, stop_s, _NUM_COLUMNS + 1)
    usage = mean_usage(recording.step_table, num_engines, edges_s)
    image = axes.imshow(
        100.0 * usage,
        aspect="auto",
        origin="lower",
        interpolation="none",
        cmap=_COLOURS,
        vmin=0.0,
        vmax=100.0,
        extent=(0.0, stop_s / unit_s, -0.5, num_engines - 0.5),
    )
    _hatch(axes, summary["engines"], unit_s)
    preempted = recording.preemption_table
    axes.plot(
        preempted["time_s"] / unit_s,
        preempted["engine"] + 0.3,
        linestyle="none",
        marker="|",
        markersize=4.0,
        color=style.VERMILLION,
    )
    axes.set_ylabel(pool_places(summary["engines"]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    style.set_time_axis(axes, stop_s)
    bar = axes.figure.colorbar(
        image, cax=axes.inset_axes((0.6, 1.06, 0.4, 0.025)), orientation="horizontal"
    )
    bar.ax.xaxis.set_ticks_position("top")
    bar.ax.tick_params(labelsize="small")
    is_whole = not any(each.get("absent_s") for each in summary["engines"])
    hatched = "" if is_whole else "hatched: not there; "
    axes.text(
        *(0.58, 1.06, f"{hatched}KV blocks in use (%)"),
        transform=axes.transAxes,
        ha="right",
        fontsize="small",
    )


def _hatch(axes: Axes, engines: Sequence[Mapping[str, Any]], unit_s: float) -> None:
    """Mark when an engine was not there: dead, taken out, or not yet started."""
    for engine in engines:
        spans_s = engine.get("absent_s", ())
        axes.broken_barh(
            [
                (begin_s / unit_s, (end_s - begin_s) / unit_s)
                for begin_s, end_s in spans_s
            ],
            (engine["engine"] - 0.5, 1.0),
            facecolor="white",
            edgecolor=style.GREY,
            hatch="////",
            linewidth=0.0,
        )


def _draw_bars(axes: Axes, values: Floats, label: str) -> None:
    axes.barh(np.arange(len(values)), values, height=0.8)
    axes.set_xlabel(label)
    axes.grid(visible=False, axis="y")


# -- pools ---------------------------------------------------------------------------


def has_pools(results: Results) -> bool:
    """Whether prompts are computed by other engines than their outputs."""
    return "ttft_split" in results.summary


@style.house_style
def pools_figure(results: Results) -> Figure:
    """Draw the KV cache of each pool, transfers and the parts of TTFTs, in time.

    Parameters
    ----------
    results
        Of a fleet that prefills and decodes apart.
    """
    title = "Prefill and decode pools, and what is read between them"
    return _over_time(results, title, (_draw_usage, _draw_transfers, _draw_split))


def _over_time(
    results: Results,
    title: str,
    draws: Sequence[Callable[[Axes, Results, float], None]],
) -> Figure:
    """Draw panels one above the other, with legends beside them."""
    figure = style.titled_figure(title, str(results.summary["title"]))
    figure.subplots(
        nrows=len(draws),
        sharex=True,
        gridspec_kw=style.margins(0.08, 0.8, 0.08, 0.87, hspace=0.22),
    )
    stop_s = max(results.summary["duration"], 1e-9)
    for axes, draw in zip(figure.axes, draws, strict=True):
        draw(axes, results, stop_s)
    style.set_time_axis(figure.axes[-1], stop_s)
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


# -- replicas ------------------------------------------------------------------------


def has_changes(results: Results) -> bool:
    """Whether replicas came, or went."""
    summary = results.summary
    could = bool(summary.get("autoscalers") or summary.get("events"))
    return could and results.recording.fleet_table is not None


@style.house_style
def replicas_figure(results: Results) -> Figure:
    """Draw requests that come, replicas that are there, and their requests, in time.

    Parameters
    ----------
    results
        Of a fleet with an autoscaler, or with events.
    """
    draws = (_draw_traffic, _draw_replicas, _draw_requests)
    return _over_time(results, "Replicas against traffic", draws)


def _draw_traffic(axes: Axes, results: Results, stop_s: float) -> None:
    requests = results.recording.request_table
    unit_s, _ = style.time_unit(stop_s)
    edges_s = np.linspace(0.0, stop_s, _NUM_TRAFFIC_SPANS + 1)
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


def _draw_replicas(axes: Axes, results: Results, stop_s: float) -> None:
    """Stack the replicas of all pools, those that serve below."""
    below: Floats = np.zeros(0)
    for column, label, colour in (
        ("num_ready", "ready", style.GREEN),
        ("num_draining", "draining", style.ORANGE),
        ("num_starting", "starting", style.YELLOW),
    ):
        edges, numbers = _sums(results.recording.fleet_table, column, stop_s)
        below = below if len(below) else np.zeros(len(numbers))
        axes.stairs(
            below + numbers, edges, baseline=below, fill=True, color=colour, label=label
        )
        below = below + numbers
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("replicas")


def _draw_requests(axes: Axes, results: Results, stop_s: float) -> None:
    for column, label, colour in (
        ("num_running", "running", style.BLUE),
        ("num_waiting", "waiting", style.VERMILLION),
        ("num_held", "before the router", style.BLACK),
        ("num_transfers", "prompts being read", style.GREEN),
    ):
        edges, numbers = _sums(results.recording.fleet_table, column, stop_s)
        if column in {"num_running", "num_waiting"} or numbers.any():
            axes.stairs(numbers, edges, color=colour, label=label)
    axes.set_ylabel("requests")


def _sums(
    table: ResultTable | None, column: str, stop_s: float
) -> tuple[Floats, Floats]:
    """Return edges on the axis of time, and the sum over pools between them."""
    assert table is not None
    unit_s, _ = style.time_unit(stop_s)
    times_s, row = np.unique(table["time_s"], return_inverse=True)
    values = table[column]
    if column == "num_held":  # one queue before all pools
        sums: Floats = np.zeros(len(times_s))
        sums[row] = values
    else:
        sums = np.bincount(row, weights=values).astype(np.float64)
    return np.append(times_s, stop_s) / unit_s, sums
