"""Figures as plotly.js specifications: JSON that the page draws when it is looked at.

plotly is imported for its script only, when a page is written.
"""

from __future__ import annotations

import json
from functools import singledispatch
from html import escape
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.views.report import charts
from sim.views.report.html import Markup, element

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.views.plots.binning import Floats

_GAP_PX: Final = 34
_MARGINS_PX: Final = {"l": 64, "r": 16, "t": 34, "b": 44}
_COLUMN_GAP: Final = 0.11
_BAND_OPACITY: Final = 0.28
_SIGNIFICANT_DIGITS: Final = 6
_HOVER: Final = "%{xaxis.title.text}: %{x:,.6~g}<br>%{fullData.name}: %{y:,.5~g}"

Spec = dict[str, Any]


class PlotlyFigures:
    """Draws with plotly.js, which is put into the page once.

    Figures are described in the page and drawn by its script.
    """

    is_interactive = True

    def __init__(self, script: str) -> None:
        self._script = script
        self._specs: dict[str, Spec] = {}

    def figure(self, chart: charts.Chart) -> Markup:
        self._specs[chart.key] = specification(chart)
        return element(
            "div",
            id=f"plot-{chart.key}",
            class_="plot",
            role="group",
            aria_label=chart.caption,
            style=f"height:{chart.height_px}px",
        )

    def data(self) -> Markup:
        """Return all figures as JSON in an element that is not run."""
        told = json.dumps(self._specs, separators=(",", ":"), allow_nan=False)
        # Nothing in it may end the element or begin a comment.
        inside = Markup(told.replace("<", "\\u003c").replace("\u2028", "\\u2028"))
        return element("script", inside, type="application/json", id="figures")

    def script(self) -> str:
        return self._script


def has_plotly() -> bool:
    return find_spec("plotly") is not None


def plotly_script() -> str | None:
    """Return plotly.js of the installed package, or None without it."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415  # an extra
    except ImportError:
        return None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def specification(chart: charts.Chart) -> Spec:
    """Return the traces and the layout of a figure.

    Colours are names of the page's palette behind a ``$``, and a share of opacity
    behind an ``@``.
    """
    traces: list[Spec] = []
    layout: Spec = {"margin": _MARGINS_PX, "shapes": []}
    named: set[str] = set()
    domains = [*_domains(chart)]
    last = len(chart.panels)
    for number, panel in enumerate(chart.panels, 1):
        suffix = "" if number == 1 else str(number)
        x_domain, y_domain = domains[number - 1]
        x_axis = panel.x or chart.x
        assert x_axis is not None
        layout[f"yaxis{suffix}"] = _axis(panel.y) | {
            "domain": y_domain,
            "anchor": f"x{suffix}",
        }
        shared: Spec = {} if number == 1 or chart.is_row else {"matches": "x"}
        is_named = chart.is_row or number == last
        layout[f"xaxis{suffix}"] = (
            _axis(x_axis)
            | {"domain": x_domain, "anchor": f"y{suffix}", "showticklabels": is_named}
            | shared
        )
        if not is_named:
            layout[f"xaxis{suffix}"]["title"] = {
                "text": _safe(x_axis.title),
                "font": {"size": 1, "color": "rgba(0,0,0,0)"},
            }
        for series in panel.series:
            if isinstance(series, charts.Level):
                layout["shapes"].append(_level(series, suffix))
                continue
            for trace in _traces(series):
                _name_once(trace, named)
                traces.append(trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"})
    layout["showlegend"] = len(named) > 1
    layout["meta"] = {"isRow": chart.is_row, "heightPx": chart.height_px}
    return {"data": traces, "layout": layout}


def _domains(chart: charts.Chart) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the parts of width and height that each panel fills."""
    weights = [panel.weight for panel in chart.panels]
    if chart.is_row:
        free = 1.0 - _COLUMN_GAP * (len(weights) - 1)
        ends = [*accumulate(free * w / sum(weights) for w in weights)]
        for place, (end, weight) in enumerate(zip(ends, weights, strict=True)):
            left = end - free * weight / sum(weights) + place * _COLUMN_GAP
            right = min(end + place * _COLUMN_GAP, 1.0)
            yield [round(left, 4), round(right, 4)], [0.0, 1.0]
        return
    gap = _GAP_PX / (chart.height_px - _MARGINS_PX["t"] - _MARGINS_PX["b"])
    free = 1.0 - gap * (len(weights) - 1)
    top = 1.0
    for weight in weights:
        height = free * weight / sum(weights)
        yield [0.0, 1.0], [round(max(top - height, 0.0), 4), round(top, 4)]
        top -= height + gap


def _axis(axis: charts.Axis) -> Spec:
    told: Spec = {"title": {"text": _safe(axis.title)}, "type": axis.scale}
    if axis.ticks:
        told |= {
            "tickmode": "array",
            "tickvals": [*range(len(axis.ticks))],
            "ticktext": [_safe(name) for name in axis.ticks],
        }
    low, high = axis.low, axis.high
    if axis.scale == "log":
        told |= {"dtick": 1 if _decades(axis) > 2.5 else "D2"}
        told |= {"minorloglabels": "complete"}
        ends = [None if end is None else float(np.log10(end)) for end in (low, high)]
        return told | ({"range": ends} if low is not None or high is not None else {})
    if low is not None and high is not None:
        return told | {"range": [low, high]}
    if low == 0.0:
        return told | {"rangemode": "tozero"}
    return told


def _decades(axis: charts.Axis) -> float:
    """Return how many powers of ten the ends of an axis lie apart, 0 if unknown."""
    if axis.low is None or axis.high is None:
        return 0.0
    return float(np.log10(axis.high / axis.low))


def _name_once(trace: Spec, named: set[str]) -> None:
    """Let the legend name what stands in several panels once, and toggle all of it."""
    name = trace["name"]
    trace["legendgroup"] = name
    if name in named:
        trace["showlegend"] = False
    elif trace.get("showlegend", True):
        named.add(name)


@singledispatch
def _traces(series: charts.Series) -> list[Spec]:
    raise TypeError(f"no way to draw {series!r}")


@_traces.register
def _(series: charts.Steps) -> list[Spec]:
    shape: Spec = {"type": "scatter", "mode": "lines", "name": _safe(series.name)}
    shape |= {"x0": 0, "dx": _rounded(series.width)}
    traces = []
    if series.low is not None and series.high is not None:
        hidden = {"hoverinfo": "skip", "showlegend": False}
        line = {"shape": "hv", "width": 0}
        fill = {"fill": "tonexty", "fillcolor": f"${series.colour}@{_BAND_OPACITY}"}
        traces += [
            shape | hidden | {"y": _stepped(series.low), "line": line},
            shape | hidden | fill | {"y": _stepped(series.high), "line": line},
        ]
    look = {
        "shape": "hv",
        "width": 1.5,
        "color": f"${series.colour}",
        "dash": series.dash,
    }
    mean = {"y": _stepped(series.mean), "line": look}
    traces.append(shape | mean | {"hovertemplate": f"{_HOVER}<extra></extra>"})
    return traces


@_traces.register
def _(series: charts.Stack) -> list[Spec]:
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": _safe(name),
            "x0": 0,
            "dx": _rounded(series.width),
            "y": _stepped(np.nan_to_num(heights)),
            "stackgroup": "all",
            "line": {"shape": "hv", "width": 0.5, "color": f"${colour}"},
            "fillcolor": f"${colour}@0.85",
            "hovertemplate": f"{_HOVER}<extra></extra>",
        }
        for name, colour, heights in series.layers
    ]


@_traces.register
def _(series: charts.Line) -> list[Spec]:
    line = {
        "color": f"${series.colour}",
        "dash": series.dash,
        "shape": "hv" if series.is_stepped else "linear",
        "width": 1.8,
    }
    trace: Spec = {
        "type": "scatter",
        "mode": "lines+markers" if series.symbol else "lines",
        "name": _safe(series.name),
        "x": _numbers(series.x),
        "y": _numbers(series.y),
        "line": line,
    }
    if series.symbol:
        trace["marker"] = {"color": line["color"], "symbol": series.symbol, "size": 7}
    return [trace | _hover(series.texts)]


@_traces.register
def _(series: charts.Points) -> list[Spec]:
    marker = {
        "color": f"${series.colour}",
        "symbol": series.symbol,
        "size": series.size,
        "line": {"width": 0.8, "color": "$ink"},
    }
    trace: Spec = {
        "type": "scatter",
        "mode": "markers",
        "name": _safe(series.name),
        "x": _numbers(series.x),
        "y": _numbers(series.y),
        "marker": marker,
        "cliponaxis": False,
    }
    return [trace | _hover(series.texts)]


@_traces.register
def _(series: charts.Bars) -> list[Spec]:
    marker: Spec = {"color": f"${series.colour}", "line": {"width": 0}}
    if series.is_hatched:
        marker["pattern"] = {
            "fillmode": "overlay",
            "shape": "/",
            "fgcolor": "$ink",
            "size": 5,
            "solidity": 0.2,
        }
    trace: Spec = {"type": "bar", "name": _safe(series.name), "marker": marker}
    if series.is_horizontal:
        trace |= {
            "orientation": "h",
            "base": _numbers(series.begin),
            "x": _numbers(series.end - series.begin),
            "y": _numbers(series.at),
            "width": series.thickness,
        }
    else:
        trace |= {
            "x": _numbers((series.begin + series.end) / 2),
            "width": _numbers(series.end - series.begin),
            "y": _numbers(series.at),
        }
        if series.base is not None:
            trace["base"] = _numbers(series.base)
    return [trace | _hover(series.texts)]


@_traces.register
def _(series: charts.Heat) -> list[Spec]:
    rows, columns = series.values.shape
    trace: Spec = {
        "type": "heatmap",
        "name": _safe(series.name),
        "x": [_rounded((place + 0.5) * series.width) for place in range(columns)],
        "y": list(range(rows)),
        "z": [_numbers(row) for row in series.values],
        "zmin": 0.0,
        "zmax": series.high,
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": _safe(series.name), "side": "right"}},
        "hovertemplate": (
            "%{yaxis.title.text} %{y}, %{x:,.6~g}: %{z:,.4~g}<extra></extra>"
        ),
    }
    return [trace]


def _hover(texts: Sequence[str]) -> Spec:
    if not texts:
        return {"hovertemplate": f"{_HOVER}<extra></extra>"}
    told = [_safe(text).replace("\n", "<br>") for text in texts]
    # Not as "text", which would be written beside the marks.
    return {"customdata": told, "hovertemplate": "%{customdata}<extra></extra>"}


def _level(level: charts.Level, suffix: str) -> Spec:
    return {
        "type": "line",
        "xref": f"x{suffix} domain",
        "yref": f"y{suffix}",
        "x0": 0,
        "x1": 1,
        "y0": level.y,
        "y1": level.y,
        "line": {"color": "$ink", "width": 1, "dash": "dash"},
        "label": {
            "text": _safe(level.name),
            "textposition": "start",
            "yanchor": "bottom",
            "font": {"size": 11, "color": "$ink"},
        },
    }


def _safe(text: str) -> str:
    """Return text that plotly.js, which knows some tags, shows as it is."""
    return escape(text, quote=False)


def _stepped(values: Floats) -> list[float | None]:
    """Return one value a column as corners: the last column ends where it ends."""
    return _numbers(np.append(values, values[-1:]))


def _numbers(values: Floats) -> list[float | None]:
    return [_rounded(value) for value in values.tolist()]


def _rounded(value: float) -> float | None:
    """Return a number of few digits, which are fewer bytes; None for a gap."""
    if not np.isfinite(value):
        return None
    if value == int(value):
        return int(value)
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
