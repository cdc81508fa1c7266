"""One look for all figures: colours, axes, legends, titles, PNG bytes."""

from __future__ import annotations

import io
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from sim.errors import ConfigError
from sim.views.plots.binning import cdf_points
from sim.views.plots.png import png_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.legend import Legend
    from matplotlib.text import Text

    from sim.views.plots.binning import Envelope, Floats, StepColumns
    from sim.views.plots.run.tables import Tables

# The palette of Okabe and Ito, told apart by colour-blind readers; their lightness
# differs as well, so that they stay apart in grey.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#555555"
COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK, GREY)
"""Of runs that are compared, in this order."""

DPI = 150
WIDTH_PX, HEIGHT_PX = 1600, 900
MAX_TITLE_CHARACTERS = 110
MAX_SUBTITLE_CHARACTERS = 120
"""Longer lines are measured, and written smaller so that they fit."""
_SMALLEST = 0.6
"""Of the size of letters; a line that is too long at that is cut."""

NUM_CDF_POINTS = 1000
_TITLE_PAD = 22.0
"""Points above axes of the user's, where the legend is."""
LOG_FROM_RATIO = 20.0
"""Values that differ by more than this are drawn on a logarithmic scale."""

_NOT_LOOKS = ("backend", "interactive", "toolbar", "timezone", "date", "webagg")
_STYLE = {
    key: value
    for key, value in mpl.rcParamsDefault.items()
    if not key.startswith(_NOT_LOOKS)
} | {
    "figure.figsize": (WIDTH_PX / DPI, HEIGHT_PX / DPI),
    "figure.dpi": DPI,
    "figure.titlesize": 12.0,
    "figure.titleweight": "bold",
    "axes.prop_cycle": cycler(color=COLOURS),
    "font.family": "DejaVu Sans",
    "text.hinting": "no_hinting",  # as legible at this size, and quicker
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.1,
}

_user_style: ContextVar[Mapping[Any, Any]] = ContextVar(
    "user_style", default=MappingProxyType({})
)


@contextmanager
def _styled() -> Iterator[None]:
    with mpl.rc_context({**_STYLE, **_user_style.get()}):
        yield


house_style = _styled()
"""Decorator: draw in our style, whatever the user's matplotlibrc says."""


@contextmanager
def on_top(settings: Mapping[Any, Any]) -> Iterator[None]:
    """Let matplotlib settings win over ours, where our figures do not say themselves.

    Colours that mean something stay; fonts, grids, spines, sizes and the colours of
    runs that are compared change.
    """
    looks = {k: v for k, v in settings.items() if not k.startswith(_NOT_LOOKS)}
    token = _user_style.set(looks)
    try:
        yield
    finally:
        _user_style.reset(token)


def margins(
    left: float, right: float, bottom: float, top: float, **spaces: Any
) -> dict[str, Any]:
    """Return as ``gridspec_kw`` where panels lie, as shares of the figure's size."""
    return {"left": left, "right": right, "bottom": bottom, "top": top, **spaces}


def new_figure(
    tables: Tables,
    title: str,
    heights: Sequence[float] = (1.0,),
    *,
    right: float = 0.98,
) -> Figure:
    """Return a figure with a panel per height, one above the other, sharing x."""
    figure = blank_figure(tables, title)
    figure.subplots(
        nrows=len(heights),
        sharex=True,
        squeeze=False,
        gridspec_kw=margins(
            0.075,
            right,
            0.085,
            0.845,
            hspace=0.1 + 0.09 * len(heights),
            height_ratios=list(heights),
        ),
    )
    figure.align_ylabels()
    return figure


def blank_figure(tables: Tables, title: str) -> Figure:
    """Return a figure with its two title lines and no panel yet."""
    return titled_figure(title, str(tables.summary.get("title") or ""))


class ShownFigure(Figure):
    """A figure that notebooks show, though pyplot knows nothing of it."""

    def _repr_png_(self) -> bytes:
        return to_png(self)


def titled_figure(title: str, below: str) -> Figure:
    """Return a figure with a title, a line below it and no panel yet."""
    figure = ShownFigure()
    FigureCanvasAgg(figure)
    headline = figure.text(
        0.02,
        0.955,
        " ".join(title.split()),
        fontsize=mpl.rcParams["figure.titlesize"],
        fontweight=mpl.rcParams["figure.titleweight"],
    )
    line = " ".join(below.split())
    under = figure.text(0.02, 0.918, line, color=GREY, parse_math=False)
    _fit(headline, MAX_TITLE_CHARACTERS)
    _fit(under, MAX_SUBTITLE_CHARACTERS)
    return figure


def fit_legend(legend: Legend) -> None:
    """Write the rows of a figure's legend smaller where they are too long for it."""
    figure = legend.get_figure()
    assert figure is not None
    box, width_px = legend.get_window_extent(), figure.bbox.width
    room_px = width_px - 2 * box.x0
    if box.width > room_px:
        for text in legend.get_texts():
            size = float(text.get_fontsize()) * max(room_px / box.width, _SMALLEST)
            text.set_fontsize(size)


def _fit(line: Text, max_characters: int) -> None:
    """Write a line smaller if it is long, and cut it where that is not enough."""
    if len(line.get_text()) <= max_characters:
        return
    figure = line.get_figure()
    assert figure is not None
    room_px = (1.0 - 2 * line.get_position()[0]) * figure.bbox.width
    share = room_px / line.get_window_extent().width
    line.set_fontsize(float(line.get_fontsize()) * min(1.0, max(share, _SMALLEST)))
    words = line.get_text()
    while line.get_window_extent().width > room_px:
        words = words[: int(len(words) * 0.97) - 1]
        line.set_text(f"{words}…")


@house_style
def to_png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes, the same for the same figure at any time."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=figure.dpi)
    pixels = np.frombuffer(buffer.getbuffer(), dtype=np.uint8)
    width_px = int(figure.bbox.width)
    return png_bytes(pixels.reshape(-1, width_px, 4), figure.dpi)


def plain_number(value: float, _position: int | None = None) -> str:
    """Return a number with thousands separators and no superfluous digits."""
    return f"{value:,.10g}"


def short_number(value: float, _position: int | None = None) -> str:
    """Return a number of few characters: 950, 12.5k, 3.2M."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.6g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.6g}k"
    return plain_number(value)


def time_unit(stop_s: float) -> tuple[float, str]:
    """Return the seconds and the name of the unit that suits a time axis."""
    if stop_s <= 600.0:
        return 1.0, "s"
    if stop_s <= 3 * 3600.0:
        return 60.0, "min"
    return 3600.0, "h"


def set_time_axis(axes: Axes, stop_s: float) -> None:
    seconds, name = time_unit(stop_s)
    axes.set_xlim(0.0, stop_s / seconds)
    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 3, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(plain_number))
    axes.set_xlabel(f"simulated time ({name})")


def set_count_axis(axes: Axes, label: str) -> None:
    """Make y a count from zero: whole numbers, thousands as k."""
    axes.set_ylim(0.0, max(axes.get_ylim()[1], 1.0))
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(short_number))


def set_wide_count_axis(axes: Axes, label: str, values: Floats) -> None:
    """Make y a count from zero, logarithmic over the decades that `values` span."""
    known = values[values > 0.0]
    top = max(1.5 * float(known.max(initial=0.0)), 2.0)
    low = 10.0 ** np.floor(np.log10(max(float(known.min(initial=top)), 1.0)))
    axes.set_yscale("symlog", linthresh=low, linscale=0.4)
    decades = low * 10.0 ** np.arange(np.floor(np.log10(top / low)) + 1.0)
    digits = (1.0, 2.0, 5.0) if decades.size < 3 else (1.0,)
    ticks = np.outer(decades, digits).ravel()
    axes.set_yticks([0.0, *ticks[ticks <= top]])
    axes.set_ylim(0.0, top)
    axes.set_ylabel(label)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(short_number))


def set_percent_axis(axes: Axes, label: str, top: float = 100.0) -> None:
    axes.set_ylim(0.0, top * 1.04)
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(FuncFormatter(plain_number))


def scale_x(axes: Axes, low: float, high: float) -> None:
    """Choose a linear axis from 0, or a logarithmic one where the range needs it."""
    if high > LOG_FROM_RATIO * low > 0.0:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.15, high * 1.15)
        set_log_axis(axes.xaxis, low, high)
        return
    axes.set_xlim(0.0, high * 1.05 or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(plain_number))


def set_log_axis(axis: Axis, low: float, high: float) -> None:
    """Put plain numbers on a logarithmic axis from `low` to `high`.

    The axis' scale is set by the caller; ticks stand at 1, 2, 5 where there is
    room, at 1 and 3 where there is less, at powers of ten else.
    """
    ratio = high / low
    digits: tuple[float, ...] = (1.0,)
    if ratio < 300.0:
        digits = (1.0, 2.0, 5.0) if ratio < 50.0 else (1.0, 3.0)
    axis.set_major_locator(LogLocator(subs=digits, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(plain_number))
    axis.set_minor_formatter(NullFormatter())


def legend_above(
    axes: Axes, artists: Sequence[Artist] | None = None, num_columns: int = 8
) -> None:
    """Put the legend above the panel, where no data is."""
    handles = axes.get_legend_handles_labels()[0] if artists is None else artists
    if handles:
        axes.legend(
            handles=list(handles),
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=num_columns,
            borderaxespad=0.15,
            borderpad=0.2,
            columnspacing=1.1,
            handlelength=1.5,
            handletextpad=0.5,
        )


def say(axes: Axes, text: str) -> None:
    """Write one line in the middle of a panel that has nothing to draw."""
    axes.text(
        0.5,
        0.5,
        text,
        transform=axes.transAxes,
        ha="center",
        va="center",
        fontsize=13,
        color=GREY,
    )


def add_steps(axes: Axes, heights: Floats, edges: Floats, **looks: Any) -> None:
    """Add a step patch, as `Axes.stairs` does but without its search for limits."""
    axes.add_artist(StepPatch(heights, edges, **looks))
    known = heights[np.isfinite(heights)]
    if known.size:
        corners = [(edges[0], known.min()), (edges[-1], known.max())]
        axes.update_datalim(corners)
        axes.autoscale_view()


def draw_band(axes: Axes, envelope: Envelope, colour: str, label: str) -> None:
    edges_s = envelope.columns.edges_s
    add_steps(
        axes,
        envelope.high,
        edges_s / time_unit(float(edges_s[-1]))[0],
        baseline=envelope.low,
        fill=True,
        color=colour,
        alpha=0.35,
        linewidth=0.0,
        label=label,
    )


def draw_line(
    axes: Axes,
    columns: StepColumns,
    heights: Floats,
    colour: str,
    label: str,
    *,
    linestyle: str = "-",
) -> None:
    """Draw one value per column as a step line with gaps where it is NaN."""
    seconds, _ = time_unit(float(columns.edges_s[-1]))
    add_steps(
        axes,
        heights,
        columns.edges_s / seconds,
        baseline=None,
        fill=False,
        edgecolor=colour,
        linestyle=linestyle,
        linewidth=1.1,
        label=label,
    )


def draw_mean(
    axes: Axes, envelope: Envelope, colour: str, label: str, *, linestyle: str = "-"
) -> None:
    columns, mean = envelope.columns, envelope.mean
    draw_line(axes, columns, mean, colour, label, linestyle=linestyle)


def draw_stack(
    axes: Axes,
    columns: StepColumns,
    layers: Sequence[tuple[str, Floats]],
    looks: Sequence[tuple[str, str]],
) -> None:
    """Stack areas, one height per column each, in (colour, hatch) looks."""
    seconds, _ = time_unit(float(columns.edges_s[-1]))
    floor = columns.edges_s[:-1] * 0.0
    for (label, heights), (colour, hatch) in zip(layers, looks, strict=False):
        add_steps(
            axes,
            floor + heights,
            columns.edges_s / seconds,
            baseline=floor,
            fill=True,
            facecolor=colour,
            edgecolor=GREY if hatch else colour,
            hatch=hatch or None,
            linewidth=0.0,
            label=label,
        )
        floor = floor + heights


@dataclass(frozen=True, slots=True)
class Panels:
    """Where a figure is drawn: panels of its own, or axes of the user's."""

    figure: Figure  # of the axes
    axes: Sequence[Axes]  # top to bottom, or left to right

    def set_time_axes(self, stop_s: float) -> None:
        """Make x simulated time: of the last panel, and of those not tied to it."""
        last = self.axes[-1]
        for each in self.axes:
            if each is last or not last.get_shared_x_axes().joined(each, last):
                set_time_axis(each, stop_s)


def new_panels(
    tables: Tables,
    title: str,
    heights: Sequence[float] = (1.0,),
    *,
    right: float = 0.98,
    on: Sequence[Axes] | None = None,
) -> Panels:
    """Return a panel per height: those of a new figure, or the user's own axes."""
    if on is None:
        figure = new_figure(tables, title, heights, right=right)
        return Panels(figure, figure.axes)
    panels = given_panels(on, len(heights))
    panels.axes[0].set_title(title, loc="left", pad=_TITLE_PAD, fontsize="medium")
    return panels


def given_panels(on: Sequence[Axes], num_panels: int) -> Panels:
    if len(on) != num_panels:
        raise ConfigError(
            f"ax: this figure has {num_panels} panels, got {len(on)} axes; give those "
            f"of plt.subplots({num_panels}), or none"
        )
    figure = on[0].get_figure(root=True)
    assert figure is not None
    return Panels(figure, on)


def latency_unit(values_s: Floats) -> tuple[float, str]:
    """Return parts of a second and their name that suit an axis of latencies."""
    return (1e3, "ms") if float(np.quantile(values_s, 0.9)) < 2.0 else (1.0, "s")


def draw_cdf(axes: Axes, values: Floats, **looks: Any) -> Floats:
    """Draw the share of values that is no larger than each; return the places."""
    x, share = cdf_points(values, NUM_CDF_POINTS)
    x, share = np.append(x[0], x), np.append(0.0, share)
    axes.step(x, 100.0 * share, where="post", **looks)
    return x
