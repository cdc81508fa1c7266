"""Figures of several runs, one a file, each a function ``Sequence[Run] -> Figure``.

They have the names of the figures of one run. To add one: write its file, and name it
in `OVERLAYS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sim.views.plots.overlays.fragmentation import fragmentation
from sim.views.plots.overlays.kv_cache_usage import kv_cache_usage
from sim.views.plots.overlays.latency_cdfs import latency_cdfs
from sim.views.plots.overlays.preemptions import preemptions
from sim.views.plots.overlays.queues import queues
from sim.views.plots.overlays.steps import steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from sim.views.plots.runs import Run

__all__ = ["OVERLAYS", "OverlayFigure"]


class OverlayFigure(Protocol):
    """Draws several runs; its docstring's first line says what."""

    def __call__(self, runs: Sequence[Run]) -> Figure:
        """Draw."""


OVERLAYS: dict[str, OverlayFigure] = {
    "kv_cache_usage": kv_cache_usage,
    "queues": queues,
    "preemptions": preemptions,
    "steps": steps,
    "latency_cdfs": latency_cdfs,
    "fragmentation": fragmentation,
}
"""File name without its ending, and the function that draws it."""
