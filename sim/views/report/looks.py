"""What runs look like on a page: names, colours, lines, and the units of their time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.views.plots.style import time_unit
from sim.views.report.charts import DASHES, SYMBOLS, Axis
from sim.views.report.html import Markup, element
from sim.views.report.palette import run_colour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.views.report.charts import Dash, Symbol
    from sim.views.report.source import Run


def colour(run: Run) -> str:
    """Return the name of a run's colour."""
    return run_colour(run.number)


def dash(run: Run) -> Dash:
    """Return how a run's lines are broken, for readers who see no colours."""
    return DASHES[(run.number - 1) % len(DASHES)]


def symbol(run: Run) -> Symbol:
    """Return how a run's points look."""
    return SYMBOLS[(run.number - 1) % len(SYMBOLS)]


def name(runs: Sequence[Run], run: Run, what: str) -> str:
    """Return what a line is called: `what` alone while there is one run."""
    return what if len(runs) == 1 else f"{run.label}: {what}" if what else run.label


def tag(run: Run) -> Markup:
    """Return a run's label with its colour, for headings and tables."""
    look = f"background:var(--{colour(run)})"
    key = element("span", class_="key", style=look, aria_hidden="true")
    return Markup(key + element("span", run.label))


@dataclass(frozen=True, slots=True)
class Clock:
    """The unit in which a page tells simulated time."""

    seconds: float  # that one unit has
    unit: str  # its name
    stop_s: float  # where the axis ends, in seconds

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Clock:
        """Take the unit that suits the longest run."""
        stop_s = max(run.steps.stop_s for run in runs)
        return cls(*time_unit(stop_s), stop_s)

    def axis(self, what: str = "simulated time") -> Axis:
        """Return the axis from the start to the end of the longest run."""
        stop = self.stop_s / self.seconds
        return Axis(f"{what} ({self.unit})", low=0.0, high=stop, is_time=True)
