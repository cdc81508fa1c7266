"""Fleets: every engine over time, load and hits, pools, replicas, GPU hours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.results.fleet.pulls import PARTS, in_flight, pulls_of
from sim.results.fleet.summary import fleet_rows, places_there
from sim.results.summary.compared import compared_lines
from sim.results.summary.verdict import verdict_lines
from sim.views.plots.run.fleets import mean_usage, pool_places
from sim.views.report.charts import Axis, Bars, Chart, Heat, Line, Panel, Points, Stack
from sim.views.report.html import (
    Markup,
    bullets,
    count,
    data,
    decimal,
    element,
    join,
    milliseconds,
    paragraph,
    percent,
    table,
)
from sim.views.report.looks import Clock, name, run_colour, tag
from sim.views.report.sections.cache import MAX_SHOWN
from sim.views.report.sections.summary import numbers_table, served, urgent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.results.tables.memory import ResultTable
    from sim.views.plots.binning import Floats
    from sim.views.report.charts import Series
    from sim.views.report.source import Run

_NUM_BINS: Final = 200
_NUM_SPANS: Final = 100
_MOST_CELLS: Final = 40_000
"""Of a map: many engines have fewer columns of time."""
_ROW_PX: Final = 14
_MOST_IN_TABLE: Final = 50


def show_fleet_summary(runs: Sequence[Run]) -> Iterator[Markup]:
    """Return each fleet in sentences, then in numbers."""
    for run in runs:
        if len(runs) > 1:
            yield element("h3", tag(run))
        yield element("div", bullets(_sentences(run)), class_="lead")
    if len(runs) > 1:
        yield element("h3", "Compared")
        configs, summaries = zip(*((r.config, r.summary) for r in runs), strict=True)
        lines = compared_lines([r.label for r in runs], configs, summaries)
        yield element("div", bullets(lines), class_="lead")
    yield numbers_table(runs)


def _sentences(run: Run) -> Iterator[Markup]:
    yield from urgent(run)
    for line in verdict_lines(run.summary):
        yield element("strong", line)
    for what, text in fleet_rows(run.summary):
        yield join([element("strong", f"{what[:1].upper()}{what[1:]}"), f": {text}."])
    yield from served(run)


def show_engines(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return the cache of every engine over time, and what came to each."""
    clock = Clock.of(runs)
    for run in runs:
        if len(runs) > 1:
            yield element("h3", tag(run))
        if not run.is_fleet:
            yield paragraph("One engine, without a router.", class_="note")
            continue
        yield _map(run, clock)
        yield _bars(run)
        yield _numbers(run)


def _map(run: Run, clock: Clock) -> Chart:
    engines = run.summary["engines"]
    columns = max(min(_NUM_BINS, _MOST_CELLS // len(engines)), 20)
    edges_s = np.linspace(0.0, run.steps.stop_s, columns + 1)
    usage = mean_usage(run.folder.step_table, len(engines), edges_s)
    width = run.steps.stop_s / columns / clock.seconds
    series: list[Series] = [Heat("KV blocks in use (%)", width, 100.0 * usage, 100.0)]
    absent = [
        (begin_s, end_s, each["engine"])
        for each in engines
        for begin_s, end_s in each.get("absent_s", ())
    ]
    if absent:
        begin_s, end_s, at = (
            np.array(each, float) for each in zip(*absent, strict=True)
        )
        series.append(
            Bars(
                "not there",
                "waiting",
                begin_s / clock.seconds,
                end_s / clock.seconds,
                at,
                is_horizontal=True,
                is_hatched=True,
                thickness=1.0,
            )
        )
    preempted = run.folder.columns("preemptions", ("time_s", "engine"))
    number = len(preempted["time_s"])
    some = np.linspace(0, number - 1, min(number, MAX_SHOWN)).astype(int)
    if number:
        series.append(
            Points(
                "preemptions",
                "preempted",
                preempted["time_s"][some] / clock.seconds,
                preempted["engine"][some].astype(float),
                symbol="triangle-up",
                size=6,
            )
        )
    told = f"{count(len(some))} of {count(number)} preemptions are marked."
    return Chart(
        f"engines-{run.number}",
        "Share of KV blocks in use of every engine over time; hatched where it was "
        f"dead, off or starting. {told}",
        (
            Panel(
                Axis(pool_places(engines), low=-0.5, high=len(engines) - 0.5),
                tuple(series),
            ),
        ),
        x=clock.axis(),
        height_px=min(200 + _ROW_PX * len(engines), 700),
    )


def _bars(run: Run) -> Chart:
    engines = run.summary["engines"]
    columns: dict[str, list[float]] = {
        "requests": [each.get("num_prompts", each["num_requests"]) for each in engines],
        "preemptions": [each["num_preemptions"] for each in engines],
        "seconds in steps": [each["busy_s"] for each in engines],
    }
    if run.summary.get("prefix_cache_queries"):
        columns["hit rate (%)"] = [
            100.0 * (each.get("prefix_cache_hit_rate") or 0.0) for each in engines
        ]
    at = np.arange(len(engines), dtype=np.float64)
    zero = np.zeros(len(engines))
    panels: list[Panel] = []
    for number, (what, values) in enumerate(columns.items(), 1):
        ends = np.array(values, np.float64)
        bars = Bars(what, run_colour(number), zero, ends, at, is_horizontal=True)
        high = 100.0 if what == "hit rate (%)" else 1.05 * float(ends.max()) or 1.0
        panels.append(
            Panel(
                Axis("" if panels else "engine", low=-0.5, high=len(engines) - 0.5),
                (bars,),
                x=Axis(what, low=0.0, high=high),
            )
        )
    return Chart(
        f"engine-loads-{run.number}",
        "What came to each engine, and what its cache spared.",
        tuple(panels),
        height_px=min(200 + _ROW_PX * len(engines), 700),
    )


def _numbers(run: Run) -> Markup:
    engines = [run.summary["engines"][place] for place in places_there(run.summary)]
    busiest = sorted(engines, key=lambda each: -each["busy_s"])[:_MOST_IN_TABLE]
    shown = sorted(busiest, key=lambda each: each["engine"])
    some = f", the {_MOST_IN_TABLE} busiest" if len(shown) < len(engines) else ""
    if len(engines) < len(run.summary["engines"]):
        some = f" that were there{some}"
    head = [
        "engine",
        "pool",
        "requests",
        "mean TTFT",
        "KV usage",
        "preemptions",
        "hits",
    ]
    body = [
        [
            count(each["engine"]),
            each["pool"],
            *_of(run, each, f"engines.{each['engine']}"),
        ]
        for each in shown
    ]
    return table(f"Engines{some}", head, body, left=(1,))


def _of(run: Run, part: Mapping[str, Any], key: str) -> list[object]:
    """Return numbers of an engine or pool."""
    prompts = "num_prompts" if "num_prompts" in part else "num_requests"
    usage = "kv_cache_usage_mean"
    if f"{usage}_up" in part:
        usage += "_up"
    cells: list[object] = []
    for what, show in (
        (prompts, count),
        ("mean_ttft_ms", milliseconds),
        (usage, percent),
        ("num_preemptions", count),
        ("prefix_cache_hit_rate", percent),
    ):
        value = part.get(what)
        cells.append(
            "-"
            if value is None
            else data(show(value), value, f"{key}.{what}", run.number)
        )
    return cells


def has_pools(runs: Sequence[Run]) -> bool:
    """Whether any of the runs is a fleet: each has a pool at least."""
    return any(run.is_fleet for run in runs)


def show_pools(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return pools in numbers with what their GPUs cost, and in time."""
    fleets = [run for run in runs if run.is_fleet]
    yield _pool_numbers(fleets)
    clock = Clock.of(runs)
    for run in fleets:
        if len(run.summary["pools"]) > 1:
            yield _pools_over_time(run, clock)


def _pool_numbers(runs: Sequence[Run]) -> Markup:
    body: list[list[object]] = []
    for run in runs:
        for place, pool in enumerate(run.summary["pools"]):
            key = f"pools.{place}"
            cost: list[object] = ["-", "-"]
            if "gpu_hours" in pool:
                hours = pool["gpu_hours"]
                cost[0] = data(decimal(hours), hours, f"{key}.gpu_hours", run.number)
            if "cost" in pool:
                told = f"{pool['cost']:,.2f} {run.summary['currency']}"
                cost[1] = data(told, pool["cost"], f"{key}.cost", run.number)
            num_gpus = pool["num_gpus"] * pool["data_parallel_size"]
            gpus = f"{num_gpus} x {pool['gpu']}"
            what = f"{pool['replicas']} on {gpus} each, {pool['role']}"
            body.append([tag(run), pool["pool"], what, *_of(run, pool, key), *cost])
    head = ["run", "pool", "engines", "requests", "mean TTFT", "KV usage"]
    head += ["preemptions", "hits", "GPU hours", "cost"]
    return table("Pools, and what their GPUs cost", head, body, left=(1, 2))


def _pools_over_time(run: Run, clock: Clock) -> Chart:
    summary, stop_s = run.summary, run.steps.stop_s
    engines = summary["engines"]
    edges_s = np.linspace(0.0, stop_s, _NUM_BINS + 1)
    at = edges_s / clock.seconds
    usage = mean_usage(run.folder.step_table, len(engines), edges_s)
    lines = []
    for number, pool in enumerate(summary["pools"], 1):
        own = [each["pool"] == pool["pool"] for each in engines]
        mean = 100.0 * usage[own].mean(axis=0)
        lines.append(_curve(pool["pool"], run_colour(number), at, mean))
    panels = [Panel(Axis("KV blocks in use (%)", low=0.0), tuple(lines))]
    transfers = run.folder.transfer_table
    if "ttft_split" in summary and transfers is not None:
        pulls = pulls_of(transfers)
        times_s, numbers = in_flight(pulls["begin_s"], pulls["end_s"])
        area = np.concatenate([[0.0], np.cumsum(np.diff(times_s) * numbers[:-1])])
        mean = (
            np.diff(np.interp(edges_s, times_s, area)) / np.diff(edges_s)
            if len(times_s)
            else np.zeros(_NUM_BINS)
        )
        line = _curve("transfers under way", "run-3", at, mean)
        panels.append(Panel(Axis("transfers", low=0.0), (line,)))
        panels.append(Panel(Axis("mean TTFT (s)", low=0.0), (_split(run, clock),)))
    return Chart(
        f"pools-{run.number}",
        "The KV cache of each pool and, where some prefill for others, transfers under "
        "way and what the time to the first token was spent on, by arrival.",
        tuple(panels),
        x=clock.axis(),
        height_px=180 + 150 * len(panels),
    )


def _split(run: Run, clock: Clock) -> Stack:
    columns = [f"ttft_{part}_s" for part in PARTS]
    found = run.folder.columns("requests", ("arrival_s", "first_token_s", *columns))
    known = np.isfinite(found["first_token_s"])
    edges_s = np.linspace(0.0, run.steps.stop_s, _NUM_SPANS + 1)
    arrival_s = found["arrival_s"][known]
    counts = np.maximum(np.histogram(arrival_s, edges_s)[0], 1)
    layers = tuple(
        (
            f"TTFT: {part}",
            f"part-{number}",
            np.histogram(arrival_s, edges_s, weights=found[column][known])[0] / counts,
        )
        for number, (part, column) in enumerate(zip(PARTS, columns, strict=True), 1)
    )
    return Stack(run.steps.stop_s / _NUM_SPANS / clock.seconds, layers)


def _curve(label: str, colour: str, at: Floats, values: Floats) -> Line:
    """Return values that hold between edges."""
    return Line(label, colour, at, np.append(values, values[-1:]), is_stepped=True)


def has_series(runs: Sequence[Run]) -> bool:
    """Whether any of the runs tells its replicas and requests over time."""
    return any(run.folder.fleet_table is not None for run in runs)


def show_series(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return requests that come and end, replicas, and the requests that these have."""
    clock = Clock.of(runs)
    for run in runs:
        series = run.folder.fleet_table
        if series is not None:
            yield _series(runs, run, series, clock)


def _series(runs: Sequence[Run], run: Run, series: ResultTable, clock: Clock) -> Chart:
    edges_s = np.linspace(0.0, run.steps.stop_s, _NUM_SPANS + 1)
    found = run.folder.columns("requests", ("arrival_s", "finish_s"))
    traffic = []
    for column, what, colour in (
        ("arrival_s", "arrive", "waiting"),
        ("finish_s", "end", "run-7"),
    ):
        times_s = found[column][np.isfinite(found[column])]
        rate = np.histogram(times_s, edges_s)[0] / np.diff(edges_s)
        traffic.append(
            _curve(name(runs, run, what), colour, edges_s / clock.seconds, rate)
        )
    times_s, row = np.unique(series["time_s"], return_inverse=True)
    at = np.append(times_s, run.steps.stop_s) / clock.seconds
    replicas: list[Line] = []
    queues: list[Line] = []
    for panel, column, what, colour in (
        (replicas, "num_ready", "ready", "run-3"),
        (replicas, "num_starting", "starting", "run-5"),
        (replicas, "num_draining", "draining", "run-2"),
        (queues, "num_running", "running", "run-1"),
        (queues, "num_waiting", "waiting", "run-4"),
        (queues, "num_held", "before the router", "ink"),
        (queues, "num_transfers", "prompts being read", "part-3"),
    ):
        if column == "num_held":  # one queue before all pools
            values: Floats = np.zeros(len(times_s))
            values[row] = series[column]
        else:
            values = np.bincount(row, weights=series[column]).astype(np.float64)
        if values.any() or column in {"num_ready", "num_running", "num_waiting"}:
            panel.append(_curve(name(runs, run, what), colour, at, values))
    return Chart(
        f"replicas-{run.number}",
        "Requests that arrive and end, replicas that are there, and the requests that "
        "these have." + (f" {run.label}." if len(runs) > 1 else ""),
        (
            Panel(Axis("requests/s", low=0.0), tuple(traffic)),
            Panel(Axis("replicas", low=0.0), tuple(replicas)),
            Panel(Axis("requests", low=0.0), tuple(queues)),
        ),
        x=clock.axis(),
        height_px=600,
    )
