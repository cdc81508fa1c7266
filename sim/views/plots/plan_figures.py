"""The figures of a plan, each a function of ``plan.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.views.plots.plan_curves import capacity_curves, latency_load
from sim.views.plots.plan_money import pareto, tornado
from sim.views.plots.style import to_png

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from matplotlib.figure import Figure

PLAN_FIGURES: dict[str, Callable[[Mapping[str, Any]], Figure]] = {
    "capacity_curves": capacity_curves,
    "latency_load": latency_load,
    "pareto": pareto,
    "tornado": tornado,
}
"""File name without its ending, and the function that draws it."""


def draw_plan(plan: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write every figure of `PLAN_FIGURES` into a directory, as PNG."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in PLAN_FIGURES.items():
        path = directory / f"{name}.png"
        path.write_bytes(to_png(draw(plan)))
        paths.append(path)
    return paths
