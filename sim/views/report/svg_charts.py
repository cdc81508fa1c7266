"""Figures as SVG, drawn by matplotlib: small, still, and the same bytes every time.

Text stays text, and colours become variables of the page's palette, so that these
figures follow light and dark as the others do.
"""

from __future__ import annotations

import io
import re
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes  # singledispatch looks at it
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sim.views.plots import style
from sim.views.report import charts
from sim.views.report.html import Markup, element
from sim.views.report.looks import LIGHT

if TYPE_CHECKING:
    from sim.views.plots.binning import Floats

WIDTH_PX: Final = 900
_DPI: Final = 72.0
_MAX_COLUMNS: Final = 500
_DASHES: Final = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_SYMBOLS: Final = {
    "circle": "o",
    "square": "s",
    "triangle-up": "^",
    "x": "x",
    "diamond": "D",
}
_BY_COLOUR: Final = {colour.lower(): name for name, colour in LIGHT.items()}
_GROUP_ID: Final = re.compile(r'(<g) id="[^"]*"')
_COLOUR: Final = re.compile(r"#[0-9a-f]{6}")
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["muted"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "grid.color": LIGHT["rule"],
    "hatch.color": LIGHT["ink"],
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "path.simplify": True,
}


class SvgFigures:
    """Draws each figure as SVG inside of the page, which needs no script then."""

    is_interactive = False

    def figure(self, chart: charts.Chart) -> Markup:
        return element(
            "div",
            Markup(svg(chart)),
            id=f"plot-{chart.key}",
            class_="still",
            role="img",
            aria_label=chart.caption,
        )

    def data(self) -> Markup:
        return Markup()

    def script(self) -> None:
        return


@style.house_style
def svg(chart: charts.Chart) -> str:
    with mpl.rc_context(_STYLE | {"svg.hashsalt": chart.key}):
        figure = Figure((WIDTH_PX / _DPI, chart.height_px / _DPI), dpi=_DPI)
        FigureCanvasSVG(figure)
        _draw(figure, chart)
        buffer = io.StringIO()
        absent = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=absent)
    return _for_a_page(buffer.getvalue())


def _for_a_page(told: str) -> str:
    """Return the element without what a file of its own needs, in page colours."""
    inside = _GROUP_ID.sub(r"\1", told[told.index("<svg") :])
    inside = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", inside)
    return _COLOUR.sub(_variable, re.sub(r"\n\s*", "\n", inside)).strip()


def _variable(found: re.Match[str]) -> str:
    name = _BY_COLOUR.get(found[0])
    return f"var(--{name})" if name else found[0]


def _draw(figure: Figure, chart: charts.Chart) -> None:
    number = len(chart.panels)
    weights = [panel.weight for panel in chart.panels]
    height_in = chart.height_px / _DPI
    edges = {"top": 1 - 0.5 / height_in, "bottom": 0.6 / height_in, "right": 0.985}
    grid: dict[str, Any] = edges | {"left": 0.09, "hspace": 0.16, "wspace": 0.28}
    if chart.is_row:
        panels = figure.subplots(
            ncols=number,
            squeeze=False,
            gridspec_kw=grid | {"width_ratios": weights},
        )[0]
    else:
        panels = figure.subplots(
            nrows=number,
            sharex=True,
            squeeze=False,
            gridspec_kw=grid | {"height_ratios": weights},
        )[:, 0]
    for axes, panel in zip(panels, chart.panels, strict=True):
        _draw_panel(axes, panel, panel.x or chart.x)
    if not chart.is_row:
        for axes in panels[:-1]:
            axes.set_xlabel("")
        figure.align_ylabels()
    _name_all(panels, chart)


def _draw_panel(axes: Axes, panel: charts.Panel, x: charts.Axis | None) -> None:
    assert x is not None
    for axis, set_scale in ((x, axes.set_xscale), (panel.y, axes.set_yscale)):
        set_scale(axis.scale)
    for series in panel.series:
        _add(series, axes)
    _set_axis(axes.xaxis, x, axes.set_xlim, axes.get_xlim)
    _set_axis(axes.yaxis, panel.y, axes.set_ylim, axes.get_ylim)


def _set_axis(axis: Any, told: charts.Axis, set_limits: Any, get_limits: Any) -> None:
    axis.set_label_text(_plain(told.title))
    set_limits(told.low, told.high)
    if told.ticks:
        axis.set_ticks(range(len(told.ticks)), [_plain(name) for name in told.ticks])
        return
    if told.scale == "log":
        low, high = get_limits()
        style.set_log_axis(axis, low, high)
        axis.set_major_formatter(FuncFormatter(style.plain_number))
        return
    axis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(
        FuncFormatter(style.plain_number if told.is_time else style.short_number)
    )


def _name_all(panels: Any, chart: charts.Chart) -> None:
    """Name what is drawn above the figure, once."""
    named: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    if len(named) > 1 or (named and not chart.is_row):
        style.legend_above(panels[0], [*named.values()], num_columns=6)


@singledispatch
def _add(series: charts.Series, axes: Axes) -> None:
    raise TypeError(f"no way to draw {series!r} in {axes!r}")


@_add.register
def _(series: charts.Steps, axes: Axes) -> None:
    mean, width = _fewer(series.mean, series.width, np.nanmean)
    edges = _edges(mean.size, width)
    colour = LIGHT[series.colour]
    if series.low is not None and series.high is not None:
        low, _ = _fewer(series.low, series.width, np.nanmin)
        high, _ = _fewer(series.high, series.width, np.nanmax)
        look = {"color": colour, "alpha": 0.28, "linewidth": 0.0, "fill": True}
        style.add_steps(axes, high, edges, baseline=low, **look)
    style.add_steps(
        axes,
        mean,
        edges,
        baseline=None,
        fill=False,
        edgecolor=colour,
        linestyle=_DASHES[series.dash],
        linewidth=1.2,
        label=_plain(series.name),
    )


@_add.register
def _(series: charts.Stack, axes: Axes) -> None:
    floor = np.zeros(series.layers[0][2].size)
    edges = _edges(floor.size, series.width)
    for name, colour, heights in series.layers:
        top = floor + np.nan_to_num(heights)
        look = {"facecolor": LIGHT[colour], "linewidth": 0.0, "fill": True}
        style.add_steps(axes, top, edges, baseline=floor, label=_plain(name), **look)
        floor = top
    axes.set_ylim(0.0, 1.05 * float(floor.max(initial=0.0)) or 1.0)


@_add.register
def _(series: charts.Line, axes: Axes) -> None:
    axes.plot(
        series.x,
        series.y,
        color=LIGHT[series.colour],
        linestyle=_DASHES[series.dash],
        linewidth=1.5,
        drawstyle="steps-post" if series.is_stepped else "default",
        marker=_SYMBOLS[series.symbol] if series.symbol else None,
        markersize=4,
        label=_plain(series.name),
    )


@_add.register
def _(series: charts.Points, axes: Axes) -> None:
    axes.plot(
        series.x,
        series.y,
        linestyle="none",
        marker=_SYMBOLS[series.symbol],
        markersize=0.7 * series.size,
        markerfacecolor=LIGHT[series.colour],
        markeredgecolor=LIGHT["ink"],
        markeredgewidth=0.5,
        label=_plain(series.name),
    )


@_add.register
def _(series: charts.Bars, axes: Axes) -> None:
    look: dict[str, Any] = {
        "color": LIGHT[series.colour],
        "hatch": "////" if series.is_hatched else None,
        "linewidth": 0.0,
        "label": _plain(series.name),
    }
    length = series.end - series.begin
    if series.is_horizontal:
        axes.barh(series.at, length, series.thickness, left=series.begin, **look)
        return
    base = 0.0 if series.base is None else series.base
    axes.bar(series.begin, series.at, length, bottom=base, align="edge", **look)


@_add.register
def _(series: charts.Level, axes: Axes) -> None:
    axes.axhline(series.y, color=LIGHT["ink"], linewidth=0.8, linestyle="--")
    axes.annotate(
        _plain(series.name),
        (0.01, series.y),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )


@_add.register
def _(series: charts.Heat, axes: Axes) -> None:
    rows, columns = series.values.shape
    image = axes.imshow(
        series.values,
        aspect="auto",
        origin="lower",
        interpolation="none",
        cmap="cividis",
        vmin=0.0,
        vmax=series.high,
        extent=(0.0, columns * series.width, -0.5, rows - 0.5),
    )
    height_px = axes.get_window_extent().height
    above, thick = 1.0 + 5.0 / height_px, 6.0 / height_px
    bar = axes.figure.colorbar(
        image, cax=axes.inset_axes((0.6, above, 0.4, thick)), orientation="horizontal"
    )
    bar.ax.xaxis.set_ticks_position("top")
    axes.text(
        *(0.58, above, _plain(series.name)),
        transform=axes.transAxes,
        ha="right",
        fontsize=8,
    )
    axes.grid(visible=False)


def _edges(number: int, width: float) -> Floats:
    edges: Floats = np.arange(number + 1.0) * width
    return edges


def _fewer(values: Floats, width: float, reduce: Any) -> tuple[Floats, float]:
    """Return values of at most `_MAX_COLUMNS` wider columns, and their width."""
    times = -(-values.size // _MAX_COLUMNS)
    if times < 2:
        return values, width
    whole = np.pad(values, (0, -values.size % times), mode="edge")
    grouped = whole.reshape(-1, times)
    fewer = np.full(grouped.shape[0], np.nan)
    known = np.isfinite(grouped).any(axis=1)
    fewer[known] = reduce(grouped[known], axis=1)
    return fewer, width * times


def _plain(text: str) -> str:
    """Return text that matplotlib shows as it is, without reading formulas in it."""
    return text.replace("$", "\\$")
