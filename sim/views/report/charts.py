"""Figures of a page as values: what is drawn, not with what.

A section says in these what it shows; `sim.views.report.plotly_charts` and
`sim.views.report.svg_charts` draw them. Colours are names of the page's palette
(``run-1``, ``recompute``, ``ink``...), so that a figure follows light and dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from sim.views.plots.binning import Floats

Dash: TypeAlias = Literal["solid", "dash", "dot", "dashdot"]
Symbol: TypeAlias = Literal["circle", "square", "triangle-up", "x", "diamond"]

DASHES: Final[tuple[Dash, ...]] = ("solid", "dash", "dot", "dashdot")
SYMBOLS: Final[tuple[Symbol, ...]] = ("circle", "square", "triangle-up", "diamond")


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale of a panel."""

    title: str  # name and unit
    scale: Literal["linear", "log"] = "linear"  # linear or logarithmic
    low: float | None = None  # ends; None for where the data ends
    high: float | None = None
    ticks: tuple[str, ...] = ()  # names of whole places from 0 on; empty for numbers
    is_time: bool = False


@dataclass(frozen=True, slots=True)
class Steps:
    """Values that hold over equal columns of time, NaN for a gap."""

    name: str  # in the legend, and the looks
    colour: str
    width: float  # of a column, in units of the x axis; the first begins at 0
    mean: Floats  # one value a column, which the line shows
    # extremes of each column, between which a band is drawn; None for no band
    low: Floats | None = None
    high: Floats | None = None
    dash: Dash = "solid"


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers of equal columns, one on the other: name, colour, heights."""

    width: float
    layers: tuple[tuple[str, str, Floats], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined by lines; `texts` are shown on hovering."""

    name: str
    colour: str
    x: Floats
    y: Floats
    dash: Dash = "solid"
    is_stepped: bool = False
    symbol: Symbol | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Points:
    """Marks, each with a text that is shown on hovering."""

    name: str
    colour: str
    x: Floats
    y: Floats
    symbol: Symbol = "circle"
    texts: tuple[str, ...] = ()
    size: int = 7


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars between two x of every y, or of y from 0 between two x."""

    # in the legend, and the looks; `is_hatched` tells it apart without colour
    name: str
    colour: str
    begin: Floats  # along x
    end: Floats
    at: Floats  # of horizontal bars their middle, of vertical ones their height
    is_horizontal: bool = False
    is_hatched: bool = False
    thickness: float = 0.8  # of horizontal ones, which are 1 apart
    base: Floats | None = None  # of vertical ones, where they begin; None for 0
    texts: tuple[str, ...] = ()  # shown on hovering


@dataclass(frozen=True, slots=True)
class Level:
    """A line across the panel at `y`, with its name."""

    name: str
    y: float


@dataclass(frozen=True, slots=True)
class Heat:
    """Cells of equal columns, a row for each whole y from 0 on: the darker the more."""

    name: str  # of the values, with their unit
    width: float  # of a column, in units of the x axis; the first begins at 0
    values: Floats  # rows, and columns
    high: float  # the value of the darkest cell


Series: TypeAlias = Steps | Stack | Line | Points | Bars | Level | Heat


@dataclass(frozen=True, slots=True)
class Panel:
    """A pair of axes and what is drawn in them; `x` is None where it is shared."""

    y: Axis
    series: tuple[Series, ...]
    x: Axis | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: panels below each other on one x axis, or side by side."""

    key: str  # unique on the page: letters and hyphens
    caption: str  # what to see in it; a line or two
    # from the top, or from the left where each has an x axis of its own
    panels: tuple[Panel, ...]
    x: Axis | None = None  # the shared axis; None for panels side by side
    height_px: int = 420  # on a screen
    # what a reader can do with it where it is interactive; empty for nothing
    # special
    hint: str = ""

    @property
    def is_row(self) -> bool:
        return self.x is None
