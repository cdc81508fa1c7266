"""Figures of a run: the cache, the queues, preemptions, steps and latencies.

Every figure is a function ``Tables -> matplotlib Figure`` in `FIGURES`; the
same tables give the same PNG, byte for byte. This package
and `calibrate.figures` are the only places that import matplotlib, and they never touch
pyplot.

To add a figure: write such a function in the file of its family, add it to
`FIGURES`; a value of steps that it draws gets a name in `sim.views.plots.run.curves`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sim.views.plots.run.latency import latency_cdfs
from sim.views.plots.run.memory import fragmentation, kv_cache_usage
from sim.views.plots.run.preemption import preemption_history
from sim.views.plots.run.steps import queues, step_costs
from sim.views.plots.run.tables import Tables
from sim.views.plots.style import to_png

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "FIGURES",
    "RunFigure",
    "Tables",
    "fragmentation",
    "kv_cache_usage",
    "latency_cdfs",
    "preemption_history",
    "queues",
    "step_costs",
    "to_png",
]


class RunFigure(Protocol):
    """Draws one run: a function of its tables, its docstring's first line a legend."""

    def __call__(self, tables: Tables, on: Sequence[Axes] | None = None) -> Figure: ...


FIGURES: dict[str, RunFigure] = {
    "kv_cache_usage": kv_cache_usage,
    "queues": queues,
    "preemptions": preemption_history,
    "steps": step_costs,
    "latency_cdfs": latency_cdfs,
    "fragmentation": fragmentation,
}
"""File name without its ending, and the function that draws it."""
