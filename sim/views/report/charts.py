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
    """A scale of a panel.

    Parameters
    ----------
    title
        Name and unit.
    scale
        Linear or logarithmic.
    low, high
        Ends; None for where the data ends.
    ticks
        Names of whole places from 0 on; empty for numbers.
    """

    title: str
    scale: Literal["linear", "log"] = "linear"
    low: float | None = None
    high: float | None = None
    ticks: tuple[str, ...] = ()
    is_time: bool = False


@dataclass(frozen=True, slots=True)
class Steps:
    """Values that hold over equal columns of time, NaN for a gap.

    Parameters
    ----------
    name, colour, dash
        In the legend, and the looks.
    width
        Of a column, in units of the x axis; the first begins at 0.
    mean
        One value a column, which the line shows.
    low, high
        Extremes of each column, between which a band is drawn; None for no band.
    """

    name: str
    colour: str
    width: float
    mean: Floats
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
    """Bars between two x of every y, or of y from 0 between two x.

    Parameters
    ----------
    name, colour
        In the legend, and the looks; `is_hatched` tells it apart without colour.
    begin, end
        Along x.
    at
        Of horizontal bars their middle, of vertical ones their height.
    base
        Of vertical ones, where they begin; None for 0.
    texts
        Shown on hovering.
    """

    name: str
    colour: str
    begin: Floats
    end: Floats
    at: Floats
    is_horizontal: bool = False
    is_hatched: bool = False
    base: Floats | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """A line across the panel at `y`, with its name."""

    name: str
    y: float


Series: TypeAlias = Steps | Stack | Line | Points | Bars | Level


@dataclass(frozen=True, slots=True)
class Panel:
    """A pair of axes and what is drawn in them; `x` is None where it is shared."""

    y: Axis
    series: tuple[Series, ...]
    x: Axis | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: panels below each other on one x axis, or side by side.

    Parameters
    ----------
    key
        Unique on the page: letters and hyphens.
    caption
        What to see in it; a line or two.
    panels
        From the top, or from the left where each has an x axis of its own.
    x
        The shared axis; None for panels side by side.
    height_px
        On a screen.
    hint
        What a reader can do with it where it is interactive; empty for nothing special.
    """

    key: str
    caption: str
    panels: tuple[Panel, ...]
    x: Axis | None = None
    height_px: int = 420
    hint: str = ""

    @property
    def is_row(self) -> bool:
        """Whether panels stand side by side."""
        return self.x is None
