"""The look of runs on a page: colours, lines, names, and the units of their time.

Data colours are those of Okabe and Ito, which colour-blind readers tell apart, made
lighter or darker until they stand out from the ground; runs differ by their lines and
symbols as well. No two names share a colour in light: static figures are told apart by
it when they are given the page's variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sim.views.plots.style import time_unit
from sim.views.report.charts import DASHES, SYMBOLS, Axis
from sim.views.report.html import Markup, element

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.views.report.charts import Dash, Symbol
    from sim.views.report.source import Run


LIGHT: Final = {
    "ground": "#ffffff",
    "panel": "#f6f7f9",
    "ink": "#1b1f24",
    "muted": "#57606a",
    "rule": "#d9dde2",
    "link": "#0a58a6",
    "run-1": "#0072b2",
    "run-2": "#d55e00",
    "run-3": "#007a5a",
    "run-4": "#aa3a86",
    "run-5": "#7a5c00",
    "run-6": "#3d8fc4",
    "run-7": "#6b4fa0",
    "run-8": "#9a2a2a",
    "recompute": "#e69f00",
    "swap": "#56b4e9",
    "waiting": "#b0b7bf",
    "prefill": "#4a7fc1",
    "decode": "#35a27f",
    "preempted": "#e5760b",
    "part-1": "#00619a",
    "part-2": "#e0a11b",
    "part-3": "#12a07a",
    "part-4": "#c97aa8",
    "part-5": "#d0611a",
    "part-6": "#67b7e6",
    "part-7": "#8d6e63",
    "part-8": "#8b949e",
}
"""On white, and on paper."""

DARK: Final = {
    "ground": "#14171b",
    "panel": "#1d2127",
    "ink": "#e8eaed",
    "muted": "#a8b0ba",
    "rule": "#363c44",
    "link": "#7cc0ff",
    "run-1": "#56b4e9",
    "run-2": "#ff8c42",
    "run-3": "#2fc79b",
    "run-4": "#e59bc9",
    "run-5": "#e3c34a",
    "run-6": "#9ad1f5",
    "run-7": "#b9a3ec",
    "run-8": "#ff8f8f",
    "recompute": "#f0b429",
    "swap": "#6ec1f0",
    "waiting": "#69727d",
    "prefill": "#6fa3e6",
    "decode": "#43bf98",
    "preempted": "#ff9a3d",
    "part-1": "#3f9bd6",
    "part-2": "#edbb4a",
    "part-3": "#2fb98f",
    "part-4": "#dc9ac2",
    "part-5": "#ec8145",
    "part-6": "#9bd3f3",
    "part-7": "#b3968b",
    "part-8": "#9aa3ad",
}
"""On nearly black."""

NUM_RUN_COLOURS: Final = 8


def run_colour(number: int) -> str:
    """Return the name of a run's colour; `number` counts from 1."""
    return f"run-{(number - 1) % NUM_RUN_COLOURS + 1}"


def variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


def colour(run: Run) -> str:
    return run_colour(run.number)


def dash(run: Run) -> Dash:
    """Return how a run's lines are broken, for readers without colour vision."""
    return DASHES[(run.number - 1) % len(DASHES)]


def symbol(run: Run) -> Symbol:
    return SYMBOLS[(run.number - 1) % len(SYMBOLS)]


def name(runs: Sequence[Run], run: Run, what: str) -> str:
    """Return the name of a line: `what` alone while there is one run."""
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
