"""The section on the parts of step time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from sim.costs.base import STEP_PARTS
from sim.views.report.charts import Axis, Bars, Chart, Panel, Series, Stack, Steps
from sim.views.report.html import Markup, decimal, paragraph, percent, table
from sim.views.report.looks import Clock, colour, dash, tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.views.report.source import Run

PART_NAMES: Final = {
    "gemm_s": "matrix products",
    "prefill_attention_s": "attention of prompts",
    "decode_attention_s": "attention of decodes",
    "head_s": "output head",
    "allreduce_s": "all-reduce",
    "swap_s": "swapping",
    "copy_s": "copy on write",
    "host_s": "host",
}
"""Parts of a step's latency, for readers."""


def show_step_time(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    clock = Clock.of(runs)
    shown = _parts_there(runs)
    if not shown:
        yield paragraph("There is not a single step.", class_="note")
        return
    if len(runs) == 1:
        caption = "Mean price of a step and its parts, over the run."
        panels = (Panel(Axis("ms a step", low=0.0), (_stack(runs[0], clock, shown),)),)
    else:
        caption = "Mean price of a step, over the run."
        lines = tuple(_mean(run, clock) for run in runs)
        panels = (Panel(Axis("ms a step", low=0.0), lines),)
    yield Chart("step-parts", caption, panels, x=clock.axis(), height_px=380)
    if len(runs) > 1:
        yield _shares(runs, shown)
    yield _table(runs, shown)
    if any(run.summary.get("overlapped_s") for run in runs):
        yield paragraph(
            "Steps are formed while others run: these are their prices, of which the "
            "mean step of the summary, from one output to the next, leaves out what is "
            "hidden.",
            class_="note",
        )


def _parts_there(runs: Sequence[Run]) -> list[str]:
    return [p for p in STEP_PARTS if any(run.steps.seconds[p] > 0.0 for run in runs)]


def _part_colour(part: str) -> str:
    return f"part-{STEP_PARTS.index(part) + 1}"


def _stack(run: Run, clock: Clock, shown: Sequence[str]) -> Series:
    layers = tuple(
        (PART_NAMES[part], _part_colour(part), 1e3 * run.steps.averages[part].mean)
        for part in shown
    )
    return Stack(run.steps.coarse_s / clock.seconds, layers)


def _mean(run: Run, clock: Clock) -> Series:
    mean_ms = 1e3 * run.steps.averages["latency_s"].mean
    width = run.steps.coarse_s / clock.seconds
    return Steps(run.label, colour(run), width, mean_ms, dash=dash(run))


def _shares(runs: Sequence[Run], shown: Sequence[str]) -> Chart:
    """Return a bar a run: shares of all its steps' time."""
    places = np.arange(len(runs), dtype=np.float64)
    begin = np.zeros(len(runs))
    bars = []
    for part in shown:
        share = np.array([100.0 * _share(run, part) for run in runs])
        texts = tuple(
            f"{run.label}\n{PART_NAMES[part]}: {value:.1f} %"
            for run, value in zip(runs, share.tolist(), strict=True)
        )
        bars.append(
            Bars(
                PART_NAMES[part],
                _part_colour(part),
                begin,
                begin + share,
                places,
                is_horizontal=True,
                texts=texts,
            )
        )
        begin = begin + share
    names = tuple(run.label for run in runs)
    y = Axis("", low=len(runs) - 0.5, high=-0.5, ticks=names)
    return Chart(
        "step-shares",
        "Shares of the time of all steps.",
        (Panel(y, tuple(bars)),),
        x=Axis("time of all steps (%)", low=0.0, high=100.0),
        height_px=130 + 36 * len(runs),
    )


def _share(run: Run, part: str) -> float:
    total_s = run.steps.seconds["latency_s"]
    return run.steps.seconds[part] / total_s if total_s > 0.0 else 0.0


def _table(runs: Sequence[Run], shown: Sequence[str]) -> Markup:
    head = ["part", *(tag(run) if len(runs) > 1 else "time" for run in runs)]
    rows: list[list[object]] = [
        [
            PART_NAMES[part],
            *(
                f"{decimal(run.steps.seconds[part])} s ({percent(_share(run, part))})"
                for run in runs
            ),
        ]
        for part in shown
    ]
    rows.append(
        ["all steps", *(f"{decimal(r.steps.seconds['latency_s'])} s" for r in runs)]
    )
    return table("Simulated time of all steps, by part", head, rows)
