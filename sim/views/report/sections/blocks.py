"""How long blocks are kept, held and idle, and when they are found again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.views.report.charts import Axis, Chart, Line, Panel, Series
from sim.views.report.html import (
    Markup,
    count,
    decimal,
    element,
    join,
    paragraph,
    table,
)
from sim.views.report.looks import colour, dash, name, tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.views.report.source import Run

TIMES: Final = {
    "residency": "residency: until content is evicted",
    "time_held": "held: until the last request lets go",
    "reuse_gap": "reuse gap: idle until found again",
    "idle_before_eviction": "idle until evicted",
}
"""Histograms of ``blocks.json``, and what they say."""

_DRAWN: Final = ("residency", "reuse_gap")


def show_blocks(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return histograms of residency and reuse gaps, where they were recorded."""
    recorded = {run.number: run.blocks for run in runs if run.blocks is not None}
    for run in runs:
        if run.number not in recorded:
            flag = element("code", "--record blocks")
            whose = f"{run.label}: not recorded" if len(runs) > 1 else "Not recorded"
            yield paragraph(f"{whose}; 'kvsim run' does so with ", flag, class_="note")
    shown = [run for run in runs if run.number in recorded]
    if not shown:
        return
    panels = [_panel(runs, shown, recorded, what) for what in _DRAWN]
    panels = [panel for panel in panels if panel.series]
    if panels:
        yield Chart(
            "block-times",
            "Residency: how long the content of a KV block stays. Reuse gap: how long "
            "a free block waits until a hit revives it. Shares of all blocks, in "
            "tenths of a decade.",
            tuple(panels),
            height_px=340,
        )
    for run in shown:
        if not _gpu(recorded[run.number])["reuse_gap"]["count"]:
            whose = f"{run.label}: no" if len(runs) > 1 else "No"
            yield paragraph(
                f"{whose} block was found again after it had been released, so there "
                f"is no reuse gap{_why(run)}.",
                class_="note",
            )
    yield _table(runs, shown, recorded)


def _gpu(found: Mapping[str, Any]) -> Mapping[str, Any]:
    tier: Mapping[str, Any] = found["tiers"]["gpu"]
    return tier


def _why(run: Run) -> str:
    engine = run.config.get("engine", {})
    is_off = not engine.get("enable_prefix_caching")
    return ": prefix caching is off" if is_off else ""


def _panel(
    runs: Sequence[Run],
    shown: Sequence[Run],
    recorded: Mapping[int, Mapping[str, Any]],
    what: str,
) -> Panel:
    series: list[Series] = []
    ends: list[float] = []
    for run in shown:
        found = recorded[run.number]
        edges_s = np.array(found["bin_edges_s"])
        histogram = _gpu(found)[what]
        if not histogram["count"]:
            continue
        # Below the first edge and above the last one there are bins of their own.
        counts = np.array(histogram["counts"][1:-1], dtype=np.float64)
        share = 100.0 * counts / histogram["count"]
        kept = np.flatnonzero(counts)
        first, stop = (kept[0], kept[-1] + 1) if kept.size else (0, 1)
        x = edges_s[first : stop + 1]
        y = np.append(share[first:stop], 0.0)
        ends += [float(x[0]), float(x[-1])]
        label = name(runs, run, "blocks" if len(runs) == 1 else "")
        series.append(Line(label, colour(run), x, y, dash(run), is_stepped=True))
    low, high = min(ends, default=1e-3), max(ends, default=1e3)
    x_axis = Axis(f"{what.replace('_', ' ')} (s)", "log", low=low, high=high)
    return Panel(Axis("blocks (%)", low=0.0), tuple(series), x=x_axis)


def _table(
    runs: Sequence[Run], shown: Sequence[Run], recorded: Mapping[int, Mapping[str, Any]]
) -> Markup:
    head = ["tier", "time", "blocks", "mean", "shortest", "longest", "at the end"]
    rows: list[list[object]] = []
    for run in shown:
        for tier, found in recorded[run.number]["tiers"].items():
            for what, meaning in TIMES.items():
                if what in found:
                    where = tier if len(runs) == 1 else join([tag(run), ", ", tier])
                    rows.append([where, meaning, *_cells(found[what])])
    caption = "Times of KV blocks; at the end: not ended with the run, not counted"
    return table(caption, head, rows, left=(1,))


def _cells(found: Mapping[str, Any]) -> list[str]:
    times = (found.get(key) for key in ("mean_s", "min_s", "max_s"))
    censored = found.get("censored")
    left = count(censored["count"]) if censored else "-"
    told = [f"{decimal(each)} s" if each is not None else "-" for each in times]
    return [count(found["count"]), *told, left]
