"""Figures of a sweep or a plan, one a file, each a function ``SweepRuns -> Figure``.

To add one: write its file, and name it in `SWEEP_FIGURES`. What these runs cannot fill
raises `NotShownError`: a figure nobody asked for by name is then left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sim.views.plots.sweeps.goodput import goodput
from sim.views.plots.sweeps.heat_map import HeatMap
from sim.views.plots.sweeps.kv_usage import kv_usage
from sim.views.plots.sweeps.preemption_rate import preemption_rate
from sim.views.plots.sweeps.swap_or_recompute import swap_or_recompute

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.views.plots.sweeps.table import SweepRuns

__all__ = ["SWEEP_FIGURES", "HeatMap", "SweepFigure"]


class SweepFigure(Protocol):
    """Draws many runs; its docstring's first line says what."""

    def __call__(self, runs: SweepRuns) -> Figure:
        """Draw."""


SWEEP_FIGURES: dict[str, SweepFigure] = {
    "preemption_rate": preemption_rate,
    "kv_usage": kv_usage,
    "swap_or_recompute": swap_or_recompute,
    "goodput": goodput,
    "heat_map": HeatMap(),
}
"""File name without its ending, and the function that draws it."""
