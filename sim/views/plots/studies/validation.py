"""Figures of a validation: predictions laid over the measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.ticker import FuncFormatter

from sim.results.schema import OF_REQUESTS
from sim.studies.validation.compare import relative_errors
from sim.views.plots.binning import cdf_points
from sim.views.plots.style import (
    BLACK,
    BLUE,
    GREY,
    LOG_FROM_RATIO,
    NUM_CDF_POINTS,
    ORANGE,
    VERMILLION,
    house_style,
    latency_unit,
    legend_above,
    plain_number,
    say,
    scale_x,
    set_count_axis,
    set_log_axis,
    set_percent_axis,
    set_time_axis,
    time_unit,
    titled_figure,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.studies.validation.observed import ObservedRequests
    from sim.studies.validation.run import Validation
    from sim.views.plots.binning import Floats

_NAMES: Final = {each.key: each.label for each in OF_REQUESTS} | {"e2el": "E2E latency"}
_DURING: Final = {"ttft": "the wait", "tpot": "decoding", "e2el": "the request"}
_MARGINS: Final = {"left": 0.07, "right": 0.98, "top": 0.83, "bottom": 0.095}
MEASURED: Final = {"color": BLACK, "linewidth": 1.6, "label": "measured"}
PREDICTED: Final = {"color": ORANGE, "linewidth": 1.6, "label": "predicted"}


def figures_of(validation: Validation) -> dict[str, Callable[[Validation], Figure]]:
    """Return the figures that the measurement has something for, by name."""
    figures: dict[str, Callable[[Validation], Figure]] = {}
    if validation.series is not None:
        figures["states"] = states
    if validation.measured.requests is not None:
        figures["latencies"] = latencies
        figures["per_request"] = per_request
        if validation.sharpness.has_pressure:  # else a curve of pressure is of load
            figures["errors_by_kv_usage"] = errors_by_kv_usage
            figures["block_counts"] = block_counts
    return figures


@house_style
def states(validation: Validation) -> Figure:
    """Draw running and waiting requests and KV usage over time."""
    found = validation.to_dict()["curves"]
    parts = [
        f"{name} {found[key]['mean_abs']:.2g}{unit}"
        for key, name, unit in (
            ("num_running", "running", ""),
            ("num_waiting", "waiting", ""),
            ("kv_cache_usage", "KV usage", " points"),
        )
        if key in found
    ]
    figure = titled_figure(
        f"Mean distance of the curves: {', '.join(parts)}", _below(validation)
    )
    measured, predicted = validation.measured.series, validation.series
    assert measured is not None
    assert predicted is not None
    rows = [
        ("num_running", "running requests", 1.0),
        ("num_waiting", "waiting requests", 1.0),
        ("kv_cache_usage", "KV cache usage (%)", 100.0),
    ]
    panels = figure.subplots(
        nrows=3, sharex=True, gridspec_kw=_MARGINS | {"hspace": 0.22}
    )
    stop_s = float(measured.time_s[-1])
    seconds, _ = time_unit(stop_s)
    for axes, (key, label, scale) in zip(panels, rows, strict=True):
        theirs, ours = getattr(measured, key), getattr(predicted, key)
        x = measured.time_s / seconds
        if theirs is not None:
            axes.plot(x, scale * theirs, **MEASURED)
        axes.plot(x, scale * ours, **PREDICTED, linestyle="--")
        if key == "kv_cache_usage":
            set_percent_axis(axes, label, max(float(100.0 * ours.max()), 1.0))
            if theirs is None:
                axes.set_title("not measured", loc="right", size=8.5, color=GREY)
        else:
            set_count_axis(axes, label)
    legend_above(panels[0])
    set_time_axis(panels[-1], stop_s)
    figure.align_ylabels()
    return figure


@house_style
def latencies(validation: Validation) -> Figure:
    """Draw the distributions of the latencies, both over each other."""
    metrics = validation.to_dict()["metrics"]
    facts = ", ".join(
        f"{name} {metrics[f'mean_{key}_ms']['error_pct']:+.1f} %"
        for key, name in _NAMES.items()
        if metrics[f"mean_{key}_ms"]["error_pct"] is not None
    )
    figure = titled_figure(f"Error of the means: {facts}", _below(validation))
    panels = figure.subplots(ncols=3, gridspec_kw=_MARGINS | {"wspace": 0.18})
    for axes, (key, name) in zip(panels, _NAMES.items(), strict=True):
        ours, theirs = _pair(validation, key)
        axes.set_title(f"{name}, n = {theirs.size:,}", loc="left", pad=22, size=10)
        if not theirs.size:
            say(axes, "nothing measured")
            continue
        scale, unit = latency_unit(theirs)
        for values, looks in ((theirs, MEASURED), (ours, PREDICTED)):
            x, share = cdf_points(values * scale, NUM_CDF_POINTS)
            style = "--" if looks is PREDICTED else "-"
            axes.step(x, 100.0 * share, where="post", linestyle=style, **looks)
        low = float(min(ours.min(), theirs.min())) * scale
        high = float(max(ours.max(), theirs.max())) * scale
        scale_x(axes, low, high)
        axes.set_xlabel(f"{name} ({unit})")
        set_percent_axis(axes, "", 100.0)
    panels[0].set_ylabel("requests (%)")
    legend_above(panels[0])
    return figure


@house_style
def per_request(validation: Validation) -> Figure:
    """Draw predicted against measured, a point a request."""
    found = validation.to_dict()["per_request"]
    facts = ", ".join(
        f"{name} {found[key]['p50_abs_pct']:.2g} %"
        for key, name in _NAMES.items()
        if key in found
    )
    figure = titled_figure(
        f"Median error of a single request: {facts}", _below(validation)
    )
    panels = figure.subplots(ncols=3, gridspec_kw=_MARGINS | {"wspace": 0.22})
    judged = validation.judged
    for axes, (key, name) in zip(panels, _NAMES.items(), strict=True):
        rows = _known(validation, key)
        ours, theirs = _values(validation, key)
        if not rows.any():
            say(axes, "nothing measured")
            continue
        scale, unit = latency_unit(theirs[rows])
        groups = [(rows, BLUE, "o", "requests")]
        if judged is not None:
            groups = [
                (rows & judged, BLUE, "o", "judged"),
                (rows & ~judged, VERMILLION, "x", "fitted on"),
            ]
        for mask, colour, marker, label in groups:
            axes.plot(
                scale * theirs[mask],
                scale * ours[mask],
                linestyle="none",
                marker=marker,
                markersize=3.5,
                alpha=0.6,
                color=colour,
                label=label,
            )
        both = np.concatenate([ours[rows], theirs[rows]]) * scale
        low, high = float(both.min()), float(both.max())
        axes.plot([low, high], [low, high], color=GREY, linewidth=0.8, linestyle=":")
        scale_x(axes, low, high)
        _scale_y(axes, low, high)
        axes.set_xlabel(f"measured {name} ({unit})")
        axes.set_ylabel(f"predicted {name} ({unit})")
    legend_above(panels[0])
    return figure


@house_style
def errors_by_kv_usage(validation: Validation) -> Figure:
    """Draw the signed errors of single requests over the KV usage around them."""
    usage = validation.usage
    assert usage is not None
    top = 100.0 * float(np.nanmax(list(usage.values()), initial=0.0))
    figure = titled_figure(
        f"Errors against KV pressure: usage up to {top:.0f} %", _below(validation)
    )
    panels = figure.subplots(ncols=3, gridspec_kw=_MARGINS | {"wspace": 0.2})
    for axes, (key, name) in zip(panels, _NAMES.items(), strict=True):
        ours, theirs = _requests(validation)
        errors = 100.0 * relative_errors(ours, theirs, key)
        rows = ~(np.isnan(errors) | np.isnan(usage[key]))
        if not rows.any():
            say(axes, "nothing measured")
            continue
        x, y = 100.0 * usage[key][rows], errors[rows]
        limit = max(float(np.quantile(np.abs(y), 0.98)) * 1.1, 1.0)
        axes.plot(x, y, "o", markersize=3.0, alpha=0.5, color=BLUE, label="a request")
        _draw_medians(axes, x, y)
        axes.axhline(0.0, color=GREY, linewidth=0.8)
        axes.set_ylim(-limit, limit)
        axes.set_xlim(10.0 * (float(x.min()) // 10.0), max(top * 1.01, 1.0))
        axes.set_xlabel(f"mean KV usage during {_DURING[key]} (%)")
        axes.set_ylabel(f"error of {name} (%)")
        axes.yaxis.set_major_formatter(FuncFormatter(plain_number))
    legend_above(panels[0])
    return figure


@house_style
def block_counts(validation: Validation) -> Figure:
    """Draw the latencies that other numbers of blocks would have predicted."""
    sharpness = validation.sharpness
    figure = titled_figure(
        "How sharp: the same run with more blocks",
        sharpness.verdict,
    )
    panels = figure.subplots(ncols=3, gridspec_kw=_MARGINS | {"wspace": 0.18})
    theirs, ours = validation.measured.requests, validation.predicted.requests
    num_blocks = validation.results.summary["num_gpu_blocks"]
    sides = [
        (theirs, MEASURED),
        (ours, PREDICTED | {"label": f"{num_blocks:,} blocks"}),
    ]
    looks = ({"color": BLUE}, {"color": VERMILLION})
    for each, colour in zip(sharpness.more_blocks, looks, strict=True):
        label = f"{each.num_gpu_blocks:,} blocks, +{each.more_pct} %"
        sides.append(
            (each.predicted.requests, colour | {"linewidth": 1.2, "label": label})
        )
    for axes, (key, name) in zip(panels, _NAMES.items(), strict=True):
        _draw_cdfs(axes, [(getattr(side, f"{key}_s"), look) for side, look in sides])
        axes.set_xlabel(f"{name} (s)")
        set_percent_axis(axes, "", 100.0)
    panels[0].set_ylabel("requests (%)")
    legend_above(panels[0])
    return figure


def _draw_cdfs(axes: Axes, sides: list[tuple[Floats, dict[str, Any]]]) -> None:
    highest, lowest = 0.0, np.inf
    for values, look in sides:
        known = values[~np.isnan(values)]
        if not known.size:
            continue
        x, share = cdf_points(known, NUM_CDF_POINTS)
        axes.step(x, 100.0 * share, where="post", **look)
        highest, lowest = max(highest, float(x[-1])), min(lowest, float(known.min()))
    scale_x(axes, lowest, highest)


def _draw_medians(axes: Axes, x: Floats, y: Floats) -> None:
    """Draw the median of ten groups of as many requests each."""
    order = np.argsort(x, kind="stable")
    groups = [part for part in np.array_split(order, 10) if len(part)]
    axes.plot(
        [float(np.median(x[part])) for part in groups],
        [float(np.median(y[part])) for part in groups],
        color=VERMILLION,
        marker="s",
        markersize=4.0,
        label="median of a tenth",
    )


def _below(validation: Validation) -> str:
    title = validation.results.summary["title"]
    fit = validation.fit
    if fit is None:
        return f"{title}; nothing fitted"
    values = ", ".join(
        f"{key.removeprefix('cost.')} {value:.3g}" for key, value in fit.values.items()
    )
    return f"fitted until {fit.split_s:.0f} s: {values}; {title}"


def _requests(validation: Validation) -> tuple[ObservedRequests, ObservedRequests]:
    ours, theirs = validation.predicted.requests, validation.measured.requests
    assert ours is not None
    assert theirs is not None
    return ours, theirs


def _values(validation: Validation, key: str) -> tuple[Any, Any]:
    ours, theirs = _requests(validation)
    return getattr(ours, f"{key}_s"), getattr(theirs, f"{key}_s")


def _known(validation: Validation, key: str) -> Any:
    ours, theirs = _values(validation, key)
    return (ours > 0.0) & (theirs > 0.0)


def _pair(validation: Validation, key: str) -> tuple[Any, Any]:
    """Return the latencies of the requests that have one on both sides."""
    rows = _known(validation, key)
    ours, theirs = _values(validation, key)
    return ours[rows], theirs[rows]


def _scale_y(axes: Axes, low: float, high: float) -> None:
    if high > LOG_FROM_RATIO * low > 0.0:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.15, high * 1.15)
        set_log_axis(axes.yaxis, low, high)
    else:
        axes.set_ylim(0.0, high * 1.05)
        axes.yaxis.set_major_formatter(FuncFormatter(plain_number))
