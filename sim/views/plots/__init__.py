"""Figures of a run: the cache, the queues, preemptions, steps and latencies.

Every figure is a function ``Tables -> matplotlib Figure`` in `FIGURES`; `draw_all`
writes each as a PNG, byte for byte the same for the same tables. This package
and `calibrate.figures` are the only places that import matplotlib, and they never touch
pyplot.

To add a figure: write such a function in the file of its family, add it to
`FIGURES`; what it draws of the steps, name in `sim.views.plots.curves`.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from sim.views.plots.latency import latency_cdfs
from sim.views.plots.memory import fragmentation, kv_cache_usage
from sim.views.plots.preemption import preemption_history
from sim.views.plots.stepping import queues, step_costs
from sim.views.plots.style import to_png
from sim.views.plots.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "FIGURES",
    "RunFigure",
    "Tables",
    "draw_all",
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

    def __call__(self, tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
        """Draw on new panels, or on axes of the user's."""


FIGURES: dict[str, RunFigure] = {
    "kv_cache_usage": kv_cache_usage,
    "queues": queues,
    "preemptions": preemption_history,
    "steps": step_costs,
    "latency_cdfs": latency_cdfs,
    "fragmentation": fragmentation,
}
"""File name without its ending, and the function that draws it."""


def draw_all(tables: Tables, directory: Path) -> list[Path]:
    """Write every figure of `FIGURES` as a PNG; return the paths in their order."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    with _collecting_by_figure() as collect:
        for name, draw in FIGURES.items():
            path = directory / f"{name}.png"
            path.write_bytes(to_png(draw(tables)))
            paths.append(path)
            collect()
    return paths


@contextmanager
def _collecting_by_figure() -> Iterator[Callable[[], object]]:
    """Let Python look for garbage after each figure only, when all of it is.

    A figure is tens of thousands of objects that live until it is drawn; to search
    them while they come takes a tenth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield partial(gc.collect, 0)  # the youngest: what came since the last one
    finally:
        if was_on:
            gc.enable()
