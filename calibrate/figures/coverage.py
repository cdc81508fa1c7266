"""Maps of measured shapes, and of those beyond which a fit extrapolates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from calibrate.figures.axes import (
    LAYOUTS,
    TIED,
    axis_label,
    curve_label,
    fixed_label,
    set_octaves,
    title_of,
)
from calibrate.figures.subject import spread
from sim.views.plots.style import BLUE, GREY, house_style, titled_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from calibrate.figures.subject import Family, Subject

    Floats = NDArray[np.float64]

NUM_PANELS: Final = 6
"""On one figure."""

_MARGIN: Final = 8.0
"""Times the largest measured value, up to where a map reaches; below, a half."""
_CELLS_AN_OCTAVE: Final = 4
_MOST_ROWS: Final = 9
_NUM_TICKS: Final = {1: 12, 2: 6, 3: 4}
_NUM_CHARACTERS: Final = {1: 120, 2: 84, 3: 54}
"""Ticks and characters that fit, by panels beside each other."""
_LONGEST_LABEL: Final = 16
_INSIDE: Final[dict[str, Any]] = {"facecolor": "#D5ECF9", "edgecolor": "none"}
_OUTSIDE: Final[dict[str, Any]] = {
    "facecolor": "#FDF3E0",
    "edgecolor": "#C9B58F",
    "hatch": "////",
}
"""Hatched, so that the two stay apart in grey."""

Panel = tuple["Subject", "tuple[str, str] | None"]
"""An operation, and the axes of a map; None for rows, one a curve."""


def panels_of(subjects: Sequence[Subject]) -> list[Panel]:
    """Return the maps of all operations, those along which nothing varies left out.

    Of transfers that differ in direction or host memory only, one is shown: their
    points lie on one grid.
    """
    found: list[Panel] = []
    shown = {(".".join(s.name.split(".")[:2])): s for s in reversed(subjects)}
    for subject in subjects:
        if subject not in shown.values():
            continue
        maps = [
            pair
            for pair in LAYOUTS[subject.points.operation].maps
            if all(len(np.unique(subject.columns[name])) > 1 for name in pair)
        ]
        found += [(subject, pair) for pair in maps] or [(subject, None)]
    return found


@house_style
def coverage(panels: Sequence[Panel], source: str) -> Figure:
    """Draw up to `NUM_PANELS` maps.

    Points measured, and where a fit lies in their hull.
    """
    figure = titled_figure("What was measured, and what is extrapolated", source)
    num_rows = 1 if len(panels) <= 2 else 2
    num_columns = -(-len(panels) // num_rows)
    grid = figure.subplots(
        num_rows,
        num_columns,
        squeeze=False,
        gridspec_kw={
            "left": 0.095,
            "right": 0.985,
            "top": 0.80,
            "bottom": 0.085,
            "hspace": 0.52,
            "wspace": 0.10 + 0.11 * num_columns,
        },
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (subject, pair) in zip(grid.flat, panels, strict=False):
        if pair is None:
            _draw_rows(axes, subject, num_columns)
        else:
            _draw_map(axes, subject, pair, num_columns)
    _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    figure.legend(
        handles=[
            Line2D([], [], color=BLUE, marker="o", linestyle="none", markersize=3.5,
                   label="measured"),
            Patch(**_INSIDE, label="within the hull: interpolated"),
            Patch(**_OUTSIDE, label="outside: extrapolated, and said so"),
        ],
        loc="upper left",
        bbox_to_anchor=(0.015, 0.905),
        ncols=3,
        borderaxespad=0.0,
    )  # fmt: skip


def _draw_map(
    axes: Axes, subject: Subject, pair: tuple[str, str], num_columns: int
) -> None:
    along, across = pair
    family = subject.family(along, (across,))
    places = np.concatenate([curve.places for curve in family.curves])
    x, y = (subject.columns[name][places].astype(float) for name in (along, across))
    axes.set_xscale("log")
    axes.set_yscale("log")
    # an axis that begins at nothing is drawn from its first value above it
    nothing = float(y[y > 0].min()) / 2.0 if y.min() == 0.0 else 0.0
    y = np.maximum(y, nothing)
    xs, ys = _range(x), _range(y)
    outside = _outside(subject, family, across, (xs, ys), nothing)
    _fill(axes, xs, ys, outside)
    axes.plot(x, y, color=BLUE, marker="o", linestyle="none", markersize=2.6)
    axes.set_xlim(xs[0], xs[-1])
    axes.set_ylim(ys[0], ys[-1])
    most = _NUM_TICKS[num_columns]
    set_octaves(axes.xaxis, along, (xs[0], xs[-1]), most)
    set_octaves(axes.yaxis, across, (ys[0], ys[-1]), 6, nothing)
    axes.set_xlabel(axis_label(along).partition(",")[0])
    axes.set_ylabel(axis_label(across))
    _name(axes, subject, family, num_columns)


def _fill(axes: Axes, xs: Floats, ys: Floats, outside: Floats) -> None:
    areas = axes.contourf(
        xs, ys, outside, levels=[-0.5, 0.5, 1.5],
        colors=[_INSIDE["facecolor"], _OUTSIDE["facecolor"]],
        hatches=[None, _OUTSIDE["hatch"]],
    )  # fmt: skip
    areas.set_edgecolor(_OUTSIDE["edgecolor"])
    areas.set_linewidth(0.0)


def _range(values: Floats) -> Floats:
    low = np.log2(max(values.min() / 2.0, 0.7))
    count = int(np.ceil(_CELLS_AN_OCTAVE * (np.log2(values.max() * _MARGIN) - low)))
    grid: Floats = np.exp2(low + np.arange(count + 1) / _CELLS_AN_OCTAVE)
    return grid


def _outside(
    subject: Subject,
    family: Family,
    across: str,
    axes: tuple[Floats, Floats],
    nothing: float,
) -> Floats:
    """Return (len(ys), len(xs)) ones where the fit says that it extrapolates.

    Up to `nothing` the second axis stands for 0.
    """
    xs, ys = axes
    x, y = (values.ravel() for values in np.meshgrid(*axes))
    y = np.where(y <= nothing, 0.0, np.maximum(y, 1.0))
    columns = {}
    for name in subject.columns:
        if name == family.along:
            columns[name] = np.rint(x).astype(np.int64)
        elif name == across:
            columns[name] = np.rint(y).astype(np.int64)
        elif name in TIED:
            columns[name] = np.rint(x).astype(np.int64) * family.fixed[name]
        else:
            columns[name] = np.full(len(x), family.fixed[name])
    found: Floats = subject.estimator.extrapolated(columns).astype(np.float64)
    return found.reshape(len(ys), len(xs))


def _draw_rows(axes: Axes, subject: Subject, num_columns: int) -> None:
    """Draw a row for each curve, where they have no order of their own."""
    layout = LAYOUTS[subject.points.operation]
    family = subject.family(layout.along, layout.by[0])
    curves = spread(family.curves, _MOST_ROWS)
    along = subject.columns[family.along]
    shown = np.concatenate([along[curve.places] for curve in curves]).astype(float)
    xs = _range(shown)
    axes.set_xscale("log")
    for row, curve in enumerate(curves):
        columns = family.columns(list(subject.columns), curve, xs)
        outside = subject.estimator.extrapolated(columns)
        for own, look in ((outside, _OUTSIDE), (~outside, _INSIDE)):
            axes.fill_between(
                xs, row - 0.4, row + 0.4, where=own, step="mid", linewidth=0.0, **look
            )
        x = along[curve.places]
        axes.plot(x, np.full(len(x), row), color=BLUE, marker="o", linestyle="none",
                  markersize=2.6)  # fmt: skip
    labels = [curve_label(curve.values, subject.points.codes) for curve in curves]
    axes.set_yticks(range(len(curves)), [_shortened(label) for label in labels])
    axes.set_ylim(-0.7, len(curves) - 0.3)
    axes.set_xlim(xs[0], xs[-1])
    set_octaves(axes.xaxis, family.along, (xs[0], xs[-1]), _NUM_TICKS[num_columns])
    axes.set_xlabel(axis_label(family.along).partition(",")[0])
    _name(axes, subject, family, num_columns)


def _shortened(label: str, most: int = _LONGEST_LABEL) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"


def _name(axes: Axes, subject: Subject, family: Family, num_columns: int) -> None:
    shown = sum(len(curve.places) for curve in family.curves)
    axes.set_title(
        f"{title_of(subject.name)}: {shown:,} of {len(subject.time_s):,} points",
        loc="left", fontsize=9.5, pad=16.0,
    )  # fmt: skip
    text = fixed_label(family.fixed, subject.points.codes)
    axes.text(
        0.0, 1.02, _shortened(text, _NUM_CHARACTERS[num_columns]),
        transform=axes.transAxes, color=GREY, fontsize=8.0,
    )  # fmt: skip
