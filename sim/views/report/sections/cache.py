"""KV usage and preemptions on one time axis: which request, why, at what price."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from sim.views.plots.run.preemption import bar_edges_s
from sim.views.report import charts
from sim.views.report.html import Markup, count, paragraph, plural
from sim.views.report.looks import Clock, colour, dash, name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from sim.views.plots.binning import Floats
    from sim.views.report.source import Run

MAX_SHOWN: Final = 2000
"""Preemptions that are named on a page; runs share them."""

_LEAST_SHOWN: Final = 250
_SYMBOLS: Final[dict[str, charts.Symbol]] = {
    "recompute": "triangle-up",
    "swap": "square",
}


def show_cache(runs: Sequence[Run]) -> Iterator[Markup | charts.Chart]:
    """Return usage, preemptions one by one, and preemptions per minute."""
    clock = Clock.of(runs)
    panels = [
        charts.Panel(_usage_axis("KV cache (%)"), (*_usage(runs, clock),), weight=2.0)
    ]
    if any(_has_cpu(run) for run in runs):
        cpu = (*_cpu(runs, clock),)
        panels.append(charts.Panel(_usage_axis("CPU blocks (%)"), cpu, weight=0.8))
    panels.append(
        charts.Panel(
            charts.Axis("preemptions per minute", low=0.0), (*_rates(runs, clock),)
        )
    )
    yield charts.Chart(
        "kv-cache-usage",
        "Share of KV blocks in use after each scheduler call (line: mean, band: lowest "
        "to highest), and preemptions where they happened.",
        tuple(panels),
        x=clock.axis(),
        height_px=560 if len(panels) == 2 else 720,
        hint="Drag to zoom, double-click to go back; a mark says which request, for "
        "whom, why, and what was lost.",
    )
    for run in runs:
        if told := _shown_of(run, len(runs)):
            yield paragraph(told, class_="note")


def _usage_axis(title: str) -> charts.Axis:
    return charts.Axis(title, low=0.0, high=104.0)


def _has_cpu(run: Run) -> bool:
    return bool(run.steps.states["cpu_cache_usage"].high.max(initial=0.0) > 0.0)


def _usage(runs: Sequence[Run], clock: Clock) -> Iterator[charts.Series]:
    for run in runs:
        yield _state(runs, run, clock, "kv_cache_usage", "KV usage")
    for run in runs:
        yield from _preemptions(runs, run, clock)


def _cpu(runs: Sequence[Run], clock: Clock) -> Iterator[charts.Series]:
    for run in runs:
        yield _state(runs, run, clock, "cpu_cache_usage", "KV usage")


def _state(
    runs: Sequence[Run], run: Run, clock: Clock, column: str, what: str
) -> charts.Steps:
    state = run.steps.states[column]
    return charts.Steps(
        name(runs, run, what),
        colour(run),
        run.steps.fine_s / clock.seconds,
        100.0 * state.mean,
        100.0 * state.low,
        100.0 * state.high,
        dash=dash(run),
    )


def num_shown(num_runs: int) -> int:
    return max(MAX_SHOWN // num_runs, _LEAST_SHOWN)


def shown_rows(run: Run, num_runs: int) -> npt.NDArray[np.intp]:
    """Return the preemptions that are named: those that lost most tokens, in order."""
    lost = run.preemptions["num_tokens_lost"]
    most = np.argsort(-lost, kind="stable")[: num_shown(num_runs)]
    return np.sort(most)


def _shown_of(run: Run, num_runs: int) -> str | None:
    number, most = len(run.preemptions["time_s"]), num_shown(num_runs)
    if number == 0:
        return f"{run.label}: no preemptions." if num_runs > 1 else "No preemptions."
    whose = f"{run.label}: " if num_runs > 1 else ""
    if number <= most:
        return f"{whose}{plural(number, 'preemption')}, each of them marked."
    return (
        f"{whose}{count(most)} of {count(number)} preemptions are marked, those that "
        f"lost most tokens; the rates count all."
    )


def _preemptions(
    runs: Sequence[Run], run: Run, clock: Clock
) -> Iterator[charts.Points]:
    rows = shown_rows(run, len(runs))
    found = {key: values[rows] for key, values in run.preemptions.items()}
    for mode in sorted(set(found["mode"].tolist())):
        held = np.flatnonzero(found["mode"] == mode)
        alone = mode if mode in _SYMBOLS else "preempted"
        yield charts.Points(
            name(runs, run, f"preempted, {mode}"),
            alone if len(runs) == 1 else colour(run),
            found["time_s"][held] / clock.seconds,
            100.0 * found["kv_cache_usage_before"][held],
            symbol=_SYMBOLS.get(mode, "diamond"),
            texts=tuple(preemption_text(found, int(row)) for row in held),
            size=9,
        )


def preemption_text(found: dict[str, npt.NDArray[np.generic]], row: int) -> str:
    """Return which request gave up its blocks, for whom, why, and what it lost."""
    p = {key: values[row] for key, values in found.items()}
    moved = p["num_blocks_moved"]
    blocks = f"{plural(p['num_blocks_freed'], 'block')} freed"
    blocks += f", {plural(moved, 'block')} swapped out" if moved else ""
    again = f" (its {p['num_preemptions']}th time)" if p["num_preemptions"] > 3 else ""
    again = {2: " (its 2nd time)", 3: " (its 3rd time)"}.get(
        int(p["num_preemptions"]), again
    )
    return (
        f"request {p['request_id']} preempted{again}\n"
        f"at {p['time_s']:,.3f} s, step {p['step']:,}\n"
        f"for request {p['for_request_id']}: {p['reason']}\n"
        f"mode {p['mode']}: {plural(p['num_tokens_lost'], 'token')} lost, "
        f"{plural(p['num_output_tokens'], 'token')} generated so far\n"
        f"{blocks}; cache {p['kv_cache_usage_before']:.1%} to "
        f"{p['kv_cache_usage_after']:.1%}"
    )


def _rates(runs: Sequence[Run], clock: Clock) -> Iterator[charts.Series]:
    for run in runs:
        edges_s = bar_edges_s(run.steps.stop_s)
        if len(runs) > 1:
            yield _rate_line(run, edges_s, clock)
            continue
        floor = np.zeros(edges_s.size - 1)
        for mode in sorted(set(run.preemptions["mode"].tolist())):
            heights = _per_minute(run, edges_s, mode)
            yield charts.Bars(
                f"{mode}, per minute",
                mode if mode in _SYMBOLS else "preempted",
                edges_s[:-1] / clock.seconds,
                edges_s[1:] / clock.seconds,
                heights,
                is_hatched=mode == "swap",
                base=floor,
                texts=_rate_texts(mode, edges_s, heights, clock),
            )
            floor = floor + heights


def _per_minute(run: Run, edges_s: Floats, mode: str | None = None) -> Floats:
    time_s = run.preemptions["time_s"]
    if mode is not None:
        time_s = time_s[run.preemptions["mode"] == mode]
    rates: Floats = np.histogram(time_s, edges_s)[0] * (60.0 / np.diff(edges_s))
    return rates


def _rate_texts(
    mode: str, edges_s: Floats, heights: Floats, clock: Clock
) -> tuple[str, ...]:
    ends = (edges_s / clock.seconds).tolist()
    return tuple(
        f"{begin:,.4g} to {end:,.4g} {clock.unit}\n{mode}: {height:,.4g} a minute"
        for begin, end, height in zip(ends, ends[1:], heights.tolist(), strict=False)
    )


def _rate_line(run: Run, edges_s: Floats, clock: Clock) -> charts.Line:
    heights = _per_minute(run, edges_s)
    return charts.Line(
        f"{run.label}: per minute",
        colour(run),
        edges_s / clock.seconds,
        np.append(heights, heights[-1:]),
        dash=dash(run),
        is_stepped=True,
    )
