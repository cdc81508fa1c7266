"""Measured against fitted: a few curves, and the errors on points held out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from calibrate.figures.axes import (
    axis_label,
    curve_label,
    fixed_label,
    set_octaves,
    title_of,
)
from calibrate.figures.subject import NUM_CURVES
from sim.views.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    house_style,
    legend_above,
    plain_number,
    say,
    set_log_axis,
    titled_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from calibrate.figures.subject import Curve, Family, Subject

    Floats = NDArray[np.float64]

LOOKS: Final = (
    (BLUE, "o"),
    (VERMILLION, "s"),
    (GREEN, "^"),
    (PURPLE, "D"),
    (ORANGE, "v"),
    (SKY, "P"),
)
"""Colour and marker of each curve; there are at most `NUM_CURVES`."""

_PANELS: Final = {
    "left": 0.085,
    "right": 0.98,
    "top": 0.835,
    "bottom": 0.085,
    "hspace": 0.17,
    "height_ratios": [2.0, 1.0],
}
_BEYOND: Final = 4.0
"""Times the longest measured point, up to where the fit is drawn."""
_MANY: Final = 1000
"""Held-out points from which they are drawn as quantiles along the axis."""
_BINS_AN_OCTAVE: Final = 2
_FEW_MARKERS: Final = 150
"""Points of all curves up to which their errors are told apart."""
_CROWDED: Final = 25
"""Points of a curve from which its markers are small."""


class _Quantiles(NamedTuple):
    """Errors by stretches of the leading axis."""

    at: Floats
    levels: Floats
    """(5, n) percentiles 5, 25, 50, 75 and 95."""


@house_style
def measured_and_fitted(subject: Subject, source: str) -> Figure:
    """Draw times over the leading axis, and below them the errors held out."""
    family = subject.leading()
    fixed = fixed_label(family.fixed, subject.points.codes)
    below = f"{source}; curves: {fixed}" if fixed else source
    figure = titled_figure(_title(subject), below)
    above, errors = figure.subplots(nrows=2, sharex=True, gridspec_kw=_PANELS)
    for curve, look in zip(family.curves, LOOKS[:NUM_CURVES], strict=False):
        _draw_curve(above, subject, family, curve, look)
    _scale_times(above)
    _legend(above)
    _draw_errors(errors, subject, family)
    _scale_along(above, errors, subject, family)
    figure.align_ylabels()
    return figure


def _title(subject: Subject) -> str:
    errors = subject.errors
    name = title_of(subject.name)
    mape, p90 = errors.mape(), errors.p90()
    if mape is None or p90 is None:
        return f"{name}: {len(subject.time_s):,} points, too few to hold any out"
    title = f"{name}: {mape:.1f} % off on points held out (p90 {p90:.1f} %)"
    further = errors.mape(beyond=True)
    if further is None:
        return title
    return f"{title}, {further:.1f} % beyond the lengths it saw"


def _draw_curve(
    axes: Axes, subject: Subject, family: Family, curve: Curve, look: tuple[str, str]
) -> None:
    colour, marker = look
    measured = subject.columns[family.along][curve.places]
    axes.plot(
        measured,
        1e6 * subject.time_s[curve.places],
        color=colour,
        marker=marker,
        linestyle="none",
        markersize=4.5 if len(measured) < _CROWDED else 3.0,
        label=curve_label(curve.values, subject.points.codes),
    )
    ends = np.log2([measured[0], measured[-1] * _BEYOND])
    along = np.unique(np.rint(np.exp2(np.arange(ends[0], ends[1] + 0.01, 0.125))))
    columns = family.columns(list(subject.columns), curve, along)
    fitted_us = 1e6 * subject.estimator.predict(columns)
    outside = subject.estimator.extrapolated(columns)
    within = np.where(outside, np.nan, fitted_us)
    # the first point outside hangs on the last inside
    touching = outside.copy()
    touching[:-1] |= outside[1:]
    touching[1:] |= outside[:-1]
    further = np.where(touching, fitted_us, np.nan)
    axes.plot(along, within, color=colour, linewidth=1.1)
    axes.plot(along, further, color=colour, linewidth=0.9, linestyle=(0, (3, 2)))


def _scale_times(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(y=0.06)
    axes.set_ylabel("time of one call")
    set_log_axis(axes.yaxis, *axes.get_ylim())
    axes.yaxis.set_major_formatter(FuncFormatter(_time_text))


def _time_text(time_us: float, _position: int | None = None) -> str:
    """Return a time with its unit: 20 µs, 3 ms, 1 s."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if time_us >= 0.999 * size:
            return f"{plain_number(time_us / size)} {unit}"
    return f"{plain_number(time_us)} µs"


def _legend(axes: Axes) -> None:
    looks = [
        Line2D([], [], color=GREY, linewidth=1.1, label="fit"),
        Line2D([], [], color=GREY, linewidth=0.9, linestyle=(0, (3, 2)),
               label="fit, extrapolated"),
    ]  # fmt: skip
    handles = axes.get_legend_handles_labels()[0]
    legend_above(axes, [*handles, *looks], num_columns=len(handles) + 2)


def _draw_errors(axes: Axes, subject: Subject, family: Family) -> None:
    errors, p90 = subject.errors, subject.errors.p90()
    if p90 is None:
        say(axes, "Too few points to hold any out")
        return
    along = subject.columns[family.along].astype(np.float64)
    top = _limit(subject)
    axes.axhspan(
        -p90, p90, color=SKY, alpha=0.25, linewidth=0.0,
        label=f"nine in ten: within {p90:.1f} %",
    )  # fmt: skip
    axes.axhline(0.0, color=BLACK, linewidth=0.8)
    _draw_all(axes, along, errors.inside, top)
    few = sum(len(curve.places) for curve in family.curves) <= _FEW_MARKERS
    for curve, (colour, marker) in zip(
        family.curves if few else (), LOOKS, strict=False
    ):
        axes.plot(
            along[curve.places], _clipped(errors.inside[curve.places], top),
            color=colour, marker=marker, linestyle="none", markersize=3.6,
        )  # fmt: skip
    _draw_beyond(axes, along, errors.beyond, top)
    axes.set_ylim(-1.06 * top, 1.06 * top)
    cut = int((np.abs(errors.inside) > top).sum() + (np.abs(errors.beyond) > top).sum())
    if cut:
        label = f"{cut:,} errors above {top:.0f} %, drawn at the edge"
        axes.plot([], [], linestyle="none", label=label)
    legend_above(axes)


def _limit(subject: Subject) -> float:
    """Return the error in percent up to which the panel reaches."""
    inside, beyond = subject.errors.p90(), subject.errors.p90(beyond=True)
    return max(5.0, 2.5 * (inside or 0.0), 1.1 * (beyond or 0.0))


def _clipped(errors: Floats, top: float) -> Floats:
    found: Floats = np.clip(errors, -top, top)
    return found


def _draw_all(axes: Axes, along: Floats, errors: Floats, top: float) -> None:
    """Draw every point held out, or their quantiles where there are many."""
    known = np.isfinite(errors) & (along > 0)
    along, errors = along[known], errors[known]
    if len(errors) < _MANY:
        axes.plot(
            along, _clipped(errors, top), color=GREY, marker=".", linestyle="none",
            markersize=4.0, alpha=0.55, markeredgewidth=0.0, label="a point held out",
        )  # fmt: skip
        return
    found = _quantiles(along, errors)
    p5, p25, middle, p75, p95 = _clipped(found.levels, top)
    thin: dict[str, Any] = {"color": GREY, "alpha": 0.6}
    axes.vlines(found.at, p5, p95, **thin, linewidth=1.0, label="p5 to p95 held out")
    axes.vlines(found.at, p25, p75, **thin, linewidth=3.5, label="p25 to p75")
    axes.plot(
        found.at, middle, color=GREY, marker="_", linestyle="none", markersize=6.0
    )


def _quantiles(along: Floats, errors: Floats) -> _Quantiles:
    bins = np.rint(_BINS_AN_OCTAVE * np.log2(along))
    own = [errors[bins == value] for value in np.unique(bins)]
    levels = [np.percentile(values, (5, 25, 50, 75, 95)) for values in own]
    return _Quantiles(np.exp2(np.unique(bins) / _BINS_AN_OCTAVE), np.array(levels).T)


def _draw_beyond(axes: Axes, along: Floats, errors: Floats, top: float) -> None:
    """Draw what a fit without the longest lengths makes of them."""
    known = np.isfinite(errors) & (along > 0)
    if not known.any():
        return
    found = _quantiles(along[known], errors[known])
    low, _, middle, _, high = _clipped(found.levels, top)
    at = found.at * 2.0**0.12  # beside the others
    axes.vlines(at, low, high, color=BLACK, linewidth=1.3)
    axes.plot(
        at, middle, color=BLACK, marker="d", linestyle="none", markersize=4.0,
        label="longest eighth held out, p5 to p95",
    )  # fmt: skip


def _scale_along(above: Axes, below: Axes, subject: Subject, family: Family) -> None:
    along = subject.columns[family.along]
    shown = np.concatenate([along[curve.places] for curve in family.curves])
    low, high = float(shown.min()), float(along.max())
    high = max(high, _BEYOND * float(shown.max()))
    above.set_xlim(low / 1.25, high * 1.25)
    set_octaves(below.xaxis, family.along, (low / 1.25, high * 1.25))
    below.set_xlabel(axis_label(family.along))
    below.set_ylabel("predicted / measured - 1 (%)")
    below.yaxis.set_major_locator(MaxNLocator(6))
    below.yaxis.set_major_formatter(FuncFormatter(plain_number))
