"""How requests fared: distributions, over time, and against the load offered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.results.schema import LATENCIES, OF_REQUESTS, SHOWN_STATISTICS
from sim.results.summary.objectives import parse_objectives
from sim.views.plots.binning import cdf_points
from sim.views.plots.style import LOG_FROM_RATIO
from sim.views.report.charts import Axis, Chart, Line, Panel, Points, Series
from sim.views.report.html import Markup, datum, milliseconds, paragraph, table
from sim.views.report.looks import (
    Clock,
    colour,
    dash,
    name,
    symbol,
    tag,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.results.schema import Latency
    from sim.results.summary.objectives import Objective
    from sim.views.plots.binning import Floats
    from sim.views.report.charts import Dash, Symbol
    from sim.views.report.source import Run

MIN_WINDOWS, MAX_WINDOWS = 10, 100
"""Windows of arrivals, each of which has a median and a load."""

REQUESTS_A_WINDOW: Final = 20
"""So many there should be; a short run has fewer windows."""

NUM_CDF_POINTS: Final = 800
_LEAST_OF_TAILS: Final = 20
"""Requests of a window below which its 99th percentile is just its slowest."""
_OVER_TIME: Final = {"median": 50.0, "p95": 95.0, "p99": 99.0}
_TAILS: Final[dict[str, tuple[str, Dash]]] = {
    "p95": ("run-4", "dash"),
    "p99": ("run-2", "dot"),
}
"""Colour and line of what is drawn beside the median of a run alone."""
_MARKS: Final[tuple[tuple[int, Symbol], ...]] = (
    (50, "circle"),
    (95, "square"),
    (99, "triangle-up"),
)


def show_latency(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return percentiles, distributions, latencies over time and against load."""
    yield percentiles(runs)
    if not any(run.served.any() for run in runs):
        yield paragraph("No request was served to its end.", class_="note")
        return
    yield distributions(runs)
    windows = {run.number: windows_of(run) for run in runs}
    yield _over_time(runs, windows)
    yield _against_load(runs, windows)


def distributions(runs: Sequence[Run]) -> Chart:
    """Return the latencies of requests, with what was promised of them."""
    objectives = [*_promised(runs)]
    limits = " A cross is an objective: the line has to pass above it."
    return Chart(
        "latency-cdfs",
        "Share of the served requests that were no slower; marks at p50, p95 and p99."
        + limits * bool(objectives),
        tuple(_cdf_panel(runs, metric, objectives) for metric in OF_REQUESTS),
        height_px=340,
    )


def _promised(runs: Sequence[Run]) -> Iterator[Objective]:
    """Yield the objectives of percentiles of latencies, of all runs, each once."""
    seen = set()
    for run in runs:
        asked = run.config.get("objectives")
        for each in parse_objectives(asked) if asked else ():
            if each.percent is not None and each.label() not in seen:
                seen.add(each.label())
                yield each


def percentiles(runs: Sequence[Run]) -> Markup:
    several = len(runs) > 1
    head = [*(["run"] if several else []), "", *SHOWN_STATISTICS]
    rows: list[list[object]] = []
    for latency in LATENCIES.values():
        for run in runs:
            keys = (f"{each}_{latency.key}_ms" for each in SHOWN_STATISTICS)
            cells = [_cell(run, key) for key in keys]
            rows.append([*([tag(run)] if several else []), latency.label, *cells])
    caption = "Latency of served requests (ITL: of every token)"
    return table(caption, head, rows, left=(1,) if several else ())


def _cell(run: Run, key: str) -> object:
    value = run.summary.get(key)
    return "-" if value is None else datum(run, key, milliseconds(value))


def _cdf_panel(
    runs: Sequence[Run], metric: Latency, objectives: Sequence[Objective]
) -> Panel:
    series: list[Series] = []
    ends: list[float] = []
    for run in runs:
        values = run.requests[metric.column][run.served]
        values = values[np.isfinite(values)]
        if not values.size:
            continue
        x, share = cdf_points(values, NUM_CDF_POINTS)
        x, share = np.append(x[:1], x), np.append(0.0, share)
        ends += [float(x[0]), float(x[-1])]
        label = name(runs, run, "" if len(runs) > 1 else "requests")
        y = 100.0 * share
        line = Line(label, colour(run), x, y, dash(run), is_stepped=True)
        series.append(line)
        series += _marks(runs, run, metric)
    for each in objectives:
        if each.of == metric.key and ends:
            series += _limit(each)
            ends.append(each.limit / 1e3)
    return Panel(
        Axis("requests (%)" if metric.key == "ttft" else "", low=0.0, high=102.0),
        tuple(series),
        x=value_axis(f"{metric.meaning} (s)", ends),
    )


def _marks(runs: Sequence[Run], run: Run, metric: Latency) -> Iterator[Points]:
    for percent, mark in _MARKS:
        value = run.summary.get(f"p{percent}_{metric.key}_ms")
        if value is None:
            continue
        told = f"{metric.label} p{percent}: {milliseconds(value)}"
        yield Points(
            f"p{percent}",
            colour(run),
            np.array([value / 1e3]),
            np.array([float(percent)]),
            symbol=mark,
            texts=(told if len(runs) == 1 else f"{run.label}\n{told}",),
            size=9,
        )


def _limit(objective: Objective) -> Iterator[Series]:
    """Yield a cross where an objective is, and a line up to it."""
    limit_s, percent = objective.limit / 1e3, objective.percent
    assert percent is not None
    x, y = np.array([limit_s, limit_s]), np.array([0.0, percent])
    yield Line("objective", "ink", x, y, dash="dot")
    told = (f"objective: {objective.label()} ms",)
    yield Points("objective", "ink", x[1:], y[1:], symbol="x", texts=told, size=10)


def value_axis(title: str, values: Sequence[float]) -> Axis:
    """Return an axis from 0, or a logarithmic one where the range needs it."""
    known = [value for value in values if value > 0.0]
    low, high = min(known, default=1.0), max(known, default=1.0)
    if min(values, default=0.0) > 0.0 and high > LOG_FROM_RATIO * low:
        return Axis(title, "log", low=low / 1.15, high=high * 1.15)
    return Axis(title, low=0.0, high=1.05 * high)


@dataclass(frozen=True, slots=True)
class Windows:
    """Equal windows of arrivals, and what became of the requests of each."""

    edges_s: Floats  # borders in seconds, one more than windows
    rate: Floats  # requests that arrived per second
    # by metric and then ``median``, ``p95`` and ``p99``, in seconds; NaN without
    # served requests (of the tails: without enough of them)
    latency: dict[str, dict[str, Floats]]


def windows_of(run: Run) -> Windows:
    """Return the windows of a run; requests belong where they arrived."""
    arrival_s = run.requests["arrival_s"]
    last_s = float(arrival_s.max(initial=0.0)) or 1.0
    number = min(max(len(arrival_s) // REQUESTS_A_WINDOW, MIN_WINDOWS), MAX_WINDOWS)
    edges_s: Floats = np.linspace(0.0, last_s, number + 1)
    place = np.clip(np.searchsorted(edges_s, arrival_s, "right") - 1, 0, number - 1)
    counts = np.bincount(place, minlength=number).astype(np.float64)
    rate: Floats = counts * (number / last_s)
    windows = Windows(edges_s, rate, {})
    served = run.served
    for latency in OF_REQUESTS:
        metric, values = latency.key, run.requests[latency.column]
        known = served & np.isfinite(values)
        groups = _grouped(place[known], values[known], number)
        windows.latency[metric] = {
            what: _of_groups(groups, percent, _LEAST_OF_TAILS if what in _TAILS else 1)
            for what, percent in _OVER_TIME.items()
        }
    return windows


def _grouped(place: Any, values: Floats, number: int) -> list[Floats]:
    order = np.argsort(place, kind="stable")
    borders = np.searchsorted(place[order], np.arange(1, number))
    return np.split(values[order], borders)


def _of_groups(groups: Sequence[Floats], percent: float, least: int) -> Floats:
    return np.array(
        [
            np.percentile(group, percent) if group.size >= least else np.nan
            for group in groups
        ]
    )


def _over_time(runs: Sequence[Run], windows: dict[int, Windows]) -> Chart:
    clock = Clock.of(runs)
    panels = []
    for metric in [each.key for each in OF_REQUESTS]:
        series: list[Series] = []
        values: list[float] = []
        for run in runs:
            found = windows[run.number]
            for what, heights in found.latency[metric].items():
                if what in _TAILS and len(runs) > 1:
                    continue
                label = name(runs, run, what if len(runs) == 1 else "")
                look, broken = _TAILS.get(what, (colour(run), dash(run)))
                x = found.edges_s / clock.seconds
                y = np.append(heights, heights[-1:])
                series.append(Line(label, look, x, y, broken, is_stepped=True))
                values += heights[np.isfinite(heights)].tolist()
        title = f"{LATENCIES[metric].label} (s)"
        panels.append(Panel(value_axis(title, values), tuple(series)))
    panels.append(_offered(runs, windows, clock))
    what, tails = "Median", ""
    if len(runs) == 1:
        what = "Median, 95th and 99th percentile"
        tails = f"; tails of windows with {_LEAST_OF_TAILS} served requests or more"
    return Chart(
        "latency-over-time",
        f"{what} of the requests that arrived in each of equal windows of time, and "
        f"how many arrived{tails}.",
        tuple(panels),
        x=clock.axis("time of arrival"),
        height_px=620,
    )


def _offered(runs: Sequence[Run], windows: dict[int, Windows], clock: Clock) -> Panel:
    lines = tuple(
        Line(
            name(runs, run, "arrivals" if len(runs) == 1 else ""),
            colour(run) if len(runs) > 1 else "run-3",
            windows[run.number].edges_s / clock.seconds,
            np.append(windows[run.number].rate, windows[run.number].rate[-1:]),
            dash(run),
            is_stepped=True,
        )
        for run in runs
    )
    return Panel(Axis("arrivals/s", low=0.0), lines, weight=0.8)


def _against_load(runs: Sequence[Run], windows: dict[int, Windows]) -> Chart:
    panels = []
    for metric in ("ttft", "tpot"):
        series: list[Series] = []
        values: list[float] = []
        rates: list[float] = []
        for run in runs:
            found = windows[run.number]
            y = found.latency[metric]["median"]
            known = np.isfinite(y)
            values += y[known].tolist()
            rates += found.rate[known].tolist()
            label = name(runs, run, "a window of time" if len(runs) == 1 else "")
            texts = tuple(
                f"{run.label}\narrived from {begin:,.0f} s on\n"
                f"{rate:.3g} requests/s, median {LATENCIES[metric].label} {value:.4g} s"
                for begin, rate, value in zip(
                    found.edges_s[:-1][known].tolist(),
                    found.rate[known].tolist(),
                    y[known].tolist(),
                    strict=True,
                )
            )
            series.append(
                Points(
                    label, colour(run), found.rate[known], y[known], symbol(run), texts
                )
            )
        x = Axis(
            "offered load (requests/s)", low=0.0, high=1.05 * max(rates, default=1.0)
        )
        title = f"median {LATENCIES[metric].label} (s)"
        panels.append(Panel(value_axis(title, values), tuple(series), x=x))
    return Chart(
        "latency-against-load",
        "Latency against offered load: each point is the requests that arrived in one "
        "window of time.",
        tuple(panels),
        height_px=360,
    )
