"""Figures of a sweep or a plan, each a function ``SweepRuns -> Figure``.

To add one: write its function, and name it in `SWEEP_FIGURES`. What these runs cannot
fill raises `NotShownError`: it is left out unless it was asked for by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sim.views.plots.sweeps.heat_map import HeatMap
from sim.views.plots.sweeps.over_load import (
    goodput,
    kv_usage,
    preemption_rate,
    swap_or_recompute,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.views.plots.sweeps.table import SweepRuns

__all__ = ["SWEEP_FIGURES", "HeatMap", "SweepFigure"]


class SweepFigure(Protocol):
    """Draws many runs; its docstring's first line says what."""

    def __call__(self, runs: SweepRuns) -> Figure: ...


SWEEP_FIGURES: dict[str, SweepFigure] = {
    "preemption_rate": preemption_rate,
    "kv_usage": kv_usage,
    "swap_or_recompute": swap_or_recompute,
    "goodput": goodput,
    "heat_map": HeatMap(),
}
"""File name without its ending, and the function that draws it."""
