"""Queues, and what batches are made of, over simulated time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.views.report.charts import Axis, Chart, Panel, Series, Stack, Steps
from sim.views.report.looks import Clock, colour, dash, name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.views.report.html import Markup
    from sim.views.report.source import Run


def show_batch(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return the queues, and tokens of a step by what they are for."""
    clock = Clock.of(runs)
    queues = {"running": "num_running", "waiting": "num_waiting"}
    if any(run.steps.states["num_swapped"].high.max(initial=0.0) for run in runs):
        queues["swapped"] = "num_swapped"
    panels = [
        Panel(
            Axis(f"{what} requests", low=0.0),
            tuple(_queue(runs, run, clock, column, what) for run in runs),
        )
        for what, column in queues.items()
    ]
    composition = tuple(_composition(runs, clock))
    panels.append(Panel(Axis("tokens a step", low=0.0), composition, weight=1.2))
    yield Chart(
        "queues",
        "Requests in each queue right after the scheduler calls (line: mean, band: "
        "lowest to highest), and mean tokens of a step.",
        tuple(panels),
        x=clock.axis(),
        height_px=150 + 150 * len(panels),
    )


def _queue(
    runs: Sequence[Run], run: Run, clock: Clock, column: str, what: str
) -> Steps:
    state = run.steps.states[column]
    width = run.steps.fine_s / clock.seconds
    return Steps(
        name(runs, run, what if len(runs) == 1 else ""),
        colour(run) if len(runs) > 1 else _ALONE[what],
        width,
        state.mean,
        state.low,
        state.high,
        dash=dash(run),
    )


_ALONE = {"running": "run-1", "waiting": "run-2", "swapped": "run-4"}


def _composition(runs: Sequence[Run], clock: Clock) -> Iterator[Series]:
    for run in runs:
        average = run.steps.averages
        width = run.steps.coarse_s / clock.seconds
        prefill = average["num_prefill_tokens"].mean
        decode = average["num_decode_tokens"].mean
        if len(runs) == 1:
            layers = (
                ("decode tokens", "decode", decode),
                ("prefill tokens", "prefill", prefill),
            )
            yield Stack(width, layers)
            again = average["num_recomputed_tokens"].mean
            if run.summary.get("recomputed_tokens"):
                yield Steps(
                    "of these computed again", "preempted", width, again, dash="dot"
                )
        else:
            yield Steps(run.label, colour(run), width, prefill + decode, dash=dash(run))
