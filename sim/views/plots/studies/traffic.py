"""Figures of traffic: arrivals of requests, their lengths, their shared prefixes.

`draw_traffic` writes those that a workload has something for.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from sim.views.plots import style
from sim.views.plots.output import write_pngs
from sim.views.plots.run.tables import singular
from workloads.analysis.description import window_counts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.binning import Floats
    from workloads.analysis import Description
    from workloads.analysis.description import SessionShape

    Ints = npt.NDArray[np.int64]

NUM_BINS = 60
_WINDOWS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
_MOST_WINDOWS = 180


def draw_traffic(title: str, description: Description, directory: Path) -> list[Path]:
    """Draw all figures that a workload has something for, as PNG files."""
    figures: dict[str, Callable[[str], Figure]] = {
        "arrivals": partial(arrivals, description=description),
        "lengths": partial(lengths, description=description),
    }
    if description.sharing:
        figures["sharing"] = partial(sharing, description=description)
    if description.sessions is not None:
        figures["sessions"] = partial(sessions, shape=description.sessions)
    return write_pngs(figures, title, directory)


@style.house_style
def arrivals(title: str, description: Description) -> Figure:
    """Draw the rate over time, and how gaps and counts scatter beside Poisson's."""
    found = description.arrivals
    rate = "" if found.mean_rate is None else f", {found.mean_rate:.3g}/s on average"
    requests = singular(f"{found.num_requests:,} requests", found.num_requests)
    figure = style.titled_figure(f"Arrivals: {requests}{rate}", title)
    grid = figure.add_gridspec(
        2, 2, left=0.065, right=0.98, top=0.83, bottom=0.09, hspace=0.5, wspace=0.2
    )
    arrival_s = description.columns.arrival_s
    _draw_rate(figure.add_subplot(grid[0, :]), arrival_s, found.mean_rate)
    _draw_gaps(figure.add_subplot(grid[1, 0]), np.diff(arrival_s))
    _draw_dispersion(figure.add_subplot(grid[1, 1]), arrival_s)
    return figure


def _draw_rate(axes: Axes, arrival_s: Floats, mean: float | None) -> None:
    span_s = float(arrival_s[-1] - arrival_s[0])
    fitting = [w for w in _WINDOWS_S if span_s / w <= _MOST_WINDOWS]
    window_s = fitting[0] if fitting else span_s / _MOST_WINDOWS
    counts = window_counts(arrival_s, window_s)
    if len(counts) < 2 or mean is None:
        style.say(axes, "All requests arrive at about the same time")
        axes.set_axis_off()
        return
    seconds, unit = style.time_unit(span_s)
    edges = np.arange(len(counts) + 1, dtype=np.float64) * (window_s / seconds)
    rates = counts.astype(np.float64) / window_s
    style.add_steps(axes, rates, edges, baseline=0.0, fill=True, color=style.SKY)
    label = f"mean {mean:,.3g} requests/s"
    axes.axhline(mean, color=style.BLACK, linestyle="--", linewidth=1.0, label=label)
    axes.set_xlim(0.0, edges[-1])
    axes.set_xlabel(f"arrival ({unit})")
    style.set_count_axis(axes, f"requests/s, per {window_s:g} s")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    style.legend_above(axes)


def _draw_gaps(axes: Axes, gaps_s: Floats) -> None:
    if not gaps_s.size or not gaps_s.max():
        style.say(axes, "No gaps between arrivals")
        axes.set_axis_off()
        return
    ordered, mean = np.sort(gaps_s[gaps_s > 0.0])[::-1], float(gaps_s.mean())
    # A coarse clock has no gaps below its tick: Poisson's line shows even so.
    low = min(max(float(ordered[-1]), mean / 1e3), mean / 10.0)
    # Ranks from the longest gap on, close together where gaps are rare.
    ranks = np.unique(np.geomspace(1, ordered.size, style.NUM_CDF_POINTS).round())
    x, longer = ordered[ranks.astype(np.int64) - 1], 100.0 * ranks / gaps_s.size
    x, longer = np.append(x, min(low, x[-1])), np.append(longer, longer[-1])
    label = f"CV {float(gaps_s.std()) / mean:.3g}"
    axes.step(x, longer, where="post", color=style.BLUE, linewidth=1.6, label=label)
    high = max(1.2 * float(ordered[0]), 5.0 * mean)
    line = np.geomspace(low, high, 200)
    poisson = 100.0 * np.exp(-line / mean)
    axes.plot(line, poisson, color=style.GREY, linestyle="--", label="Poisson")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(50.0 / gaps_s.size, 130.0)
    axes.set_xlim(low, high)
    style.set_log_axis(axes.xaxis, low, high)
    style.set_log_axis(axes.yaxis, 1e-4, 100.0)
    axes.set_xlabel("gap between arrivals (s)")
    axes.set_ylabel("longer gaps (%)")
    style.legend_above(axes)


def _draw_dispersion(axes: Axes, arrival_s: Floats) -> None:
    """Draw variance over mean of counts, by the length of the window."""
    span_s = float(arrival_s[-1] - arrival_s[0])
    windows_s = np.geomspace(max(span_s / 1e5, 1e-3), span_s / 20 or 1.0, 25)
    counts = [window_counts(arrival_s, float(window_s)) for window_s in windows_s]
    ratios = [float(c.var() / c.mean()) if c.any() else np.nan for c in counts]
    if not span_s or np.isnan(ratios).all():
        style.say(axes, "Too short for windows")
        axes.set_axis_off()
        return
    known = np.array(ratios)[np.isfinite(ratios)]
    axes.plot(windows_s, ratios, color=style.BLUE, marker="o", markersize=3.5)
    axes.axhline(1.0, color=style.GREY, linestyle="--", linewidth=1.0, label="Poisson")
    low, high = min(0.5, float(known.min()) / 1.3), max(2.0, float(known.max()) * 1.3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(max(low, 1e-3), high)
    style.set_log_axis(axes.xaxis, float(windows_s[0]), float(windows_s[-1]))
    style.set_log_axis(axes.yaxis, max(low, 1e-3), high)
    axes.set_xlabel("length of windows (s)")
    axes.set_ylabel("variance / mean of counts")
    style.legend_above(axes)


@style.house_style
def lengths(title: str, description: Description) -> Figure:
    """Draw the joint density of prompt and output lengths, and each for itself."""
    rho = description.rank_correlation
    said = "" if rho is None else f", rank correlation {rho:+.3f}"
    figure = style.titled_figure(
        f"Lengths: {description.prompts.mean:,.0f} prompt and "
        f"{description.outputs.mean:,.0f} output tokens on average{said}",
        title,
    )
    grid = figure.add_gridspec(
        2, 2, left=0.065, right=0.98, top=0.83, bottom=0.09, wspace=0.22, hspace=0.5,
        width_ratios=(1.25, 1.0),
    )  # fmt: skip
    columns = description.columns
    prompts, outputs = columns.num_prompt_tokens, columns.num_output_tokens
    _draw_joint(figure.add_subplot(grid[:, 0]), prompts, outputs)
    _draw_cdf(figure.add_subplot(grid[0, 1]), prompts, "prompt (tokens)", style.BLUE)
    _draw_cdf(
        figure.add_subplot(grid[1, 1]), outputs, "output (tokens)", style.VERMILLION
    )
    return figure


def _edges(values: Ints) -> Floats:
    """Return logarithmic bins over `values`, none of them narrower than a token."""
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low, high + 1.0, NUM_BINS + 1)
    whole: Floats = np.unique(np.round(edges)) - 0.5
    return whole


def _draw_joint(axes: Axes, prompts: Ints, outputs: Ints) -> None:
    x, y = _edges(prompts), _edges(outputs)
    counts, _, _ = np.histogram2d(prompts, outputs, bins=(x, y))
    shown = np.ma.masked_equal(counts.T, 0)
    mesh = axes.pcolormesh(
        x, y, shown, norm=LogNorm(1, max(counts.max(), 2)), cmap="viridis_r"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(y[0], y[-1])
    style.set_log_axis(axes.xaxis, float(x[0]), float(x[-1]))
    style.set_log_axis(axes.yaxis, float(y[0]), float(y[-1]))
    axes.xaxis.set_major_formatter(FuncFormatter(style.short_number))
    axes.yaxis.set_major_formatter(FuncFormatter(style.short_number))
    axes.set_xlabel("prompt (tokens)")
    axes.set_ylabel("output (tokens)")
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.05)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(style.plain_number))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_visible(False)
    bar.ax.set_title("requests", size=8.5)


def _draw_cdf(axes: Axes, values: Ints, label: str, colour: str) -> None:
    """Draw a distribution on a logarithmic axis, with its median and tail marked."""
    floats = values.astype(np.float64)
    x = style.draw_cdf(axes, floats, color=colour, linewidth=1.6)
    marks = {50: ("o", style.SKY), 90: ("s", style.ORANGE), 99: ("^", style.GREEN)}
    for percent, (marker, fill) in marks.items():
        value = float(np.quantile(values, percent / 100.0))
        axes.plot(
            value, percent, linestyle="none", marker=marker, markersize=6.5,
            markerfacecolor=fill, markeredgecolor=style.BLACK, markeredgewidth=0.8,
            label=f"p{percent} {style.plain_number(round(value, 1))}",
        )  # fmt: skip
    axes.set_xscale("log")
    low, high = float(x[0]) / 1.15, float(x[-1]) * 1.15
    axes.set_xlim(low, high)
    style.set_log_axis(axes.xaxis, low, high)
    axes.xaxis.set_major_formatter(FuncFormatter(style.short_number))
    axes.set_xlabel(label)
    style.set_percent_axis(axes, "requests (%)")
    style.legend_above(axes)


@style.house_style
def sharing(title: str, description: Description) -> Figure:
    """Draw the part of each prompt that an infinite cache finds, and its warm-up."""
    found = description.sharing[-1]
    statistics = found.statistics
    figure = style.titled_figure(
        f"Prefix sharing: {100 * statistics.token_hit_rate:.2f} % of prompt tokens "
        f"in earlier prompts, {statistics.num_requests_hit:,} of "
        f"{statistics.num_requests:,} requests",
        title,
    )
    left, right = figure.subplots(
        ncols=2,
        gridspec_kw={
            "left": 0.065, "right": 0.98, "top": 0.83, "bottom": 0.09, "wspace": 0.2,
        },
    )  # fmt: skip
    prompts = description.columns.num_prompt_tokens
    _draw_shares(left, found.hit_tokens, prompts, statistics.block_size)
    _draw_warming(right, found.hit_tokens, prompts)
    return figure


def _draw_shares(axes: Axes, hit_tokens: Ints, prompts: Ints, block_size: int) -> None:
    shares = 100.0 * hit_tokens / prompts
    order = np.argsort(shares)
    # From below the least share, where no request is, to the right edge.
    x = np.concatenate((shares[order[:1]], shares[order], [100.0]))
    requests = np.arange(1, shares.size + 1) / shares.size
    axes.plot(
        x,
        100.0 * np.concatenate(([0.0], requests, [1.0])),
        color=style.BLUE,
        drawstyle="steps-post",
        linewidth=1.6,
        label="requests",
    )
    tokens = np.cumsum(prompts[order]) / prompts.sum()
    axes.plot(
        x,
        100.0 * np.concatenate(([0.0], tokens, [1.0])),
        color=style.ORANGE,
        drawstyle="steps-post",
        linewidth=1.6,
        linestyle="--",
        label="their prompt tokens",
    )
    axes.set_xlim(0.0, 100.0)
    axes.set_xlabel(f"found of the prompt, in full blocks of {block_size} (%)")
    style.set_percent_axis(axes, "at most so much is found (%)")
    style.legend_above(axes)


def _draw_warming(axes: Axes, hit_tokens: Ints, prompts: Ints) -> None:
    """Draw the hit rate from the first request on, and of hundredths by themselves."""
    num = prompts.size
    so_far = 100.0 * np.cumsum(hit_tokens) / np.cumsum(prompts)
    parts = np.linspace(0, num, min(num, 100) + 1).astype(np.int64)
    found = np.add.reduceat(hit_tokens, parts[:-1]) / np.add.reduceat(
        prompts, parts[:-1]
    )
    style.add_steps(
        axes,
        100.0 * found,
        parts.astype(np.float64),
        baseline=0.0,
        fill=True,
        color=style.SKY,
        alpha=0.6,
        label="each hundredth of the requests" if num > 100 else "each request",
    )
    line = np.append(so_far[0], so_far)
    axes.plot(np.arange(num + 1), line, color=style.BLUE, linewidth=1.6, label="so far")
    axes.set_xlim(0.0, float(num))
    axes.xaxis.set_major_formatter(FuncFormatter(style.short_number))
    axes.set_xlabel("requests")
    top = min(110.0 * float(found.max()), 100.0) or 100.0
    style.set_percent_axis(axes, "prompt tokens found (%)", top)
    style.legend_above(axes)


@style.house_style
def sessions(title: str, shape: SessionShape) -> Figure:
    """Draw turns, think times and the growth of the context."""
    turns = shape.turns
    figure = style.titled_figure(
        f"Sessions: {shape.num_sessions:,}, {turns.mean():.3g} requests on average, "
        f"{shape.num_chained:,} follow-ups",
        title,
    )
    panels = figure.subplots(
        ncols=3,
        gridspec_kw={
            "left": 0.065, "right": 0.98, "top": 0.8, "bottom": 0.1, "wspace": 0.25,
        },
    )  # fmt: skip
    for axes, values, label, colour in (
        (panels[0], turns, "requests of a session", style.BLUE),
        (panels[1], shape.delays_s, "think or tool time (s)", style.GREEN),
        (
            panels[2],
            shape.growth_tokens,
            "context growth a turn (tokens)",
            style.VERMILLION,
        ),
    ):
        _draw_spread(axes, values.astype(np.float64), label, colour)
    panels[0].set_ylabel("sessions (%)")
    panels[1].set_ylabel("follow-ups (%)")
    return figure


def _draw_spread(axes: Axes, values: Floats, label: str, colour: str) -> None:
    if not values.size:
        style.say(axes, "No follow-ups")
        axes.set_axis_off()
        return
    drawn = np.maximum(values, 0.0)  # a context that shrank stands at 0
    x = style.draw_cdf(axes, drawn, color=colour, linewidth=1.6)
    high = float(x[-1]) or 1.0
    low = max(float(values[values > 0].min(initial=high)), high / 1e4)
    if high > 20.0 * low:
        _wide_scale(axes, low, high, with_zero=bool(values.min() < low))
    else:
        axes.set_xlim(0.0, high * 1.05)
        axes.xaxis.set_major_formatter(FuncFormatter(style.short_number))
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99)).tolist()
    said = f"p50 {p50:,.4g}, p95 {p95:,.4g}, p99 {p99:,.4g}, mean {values.mean():,.4g}"
    axes.set_title(said, loc="left", size=9)
    axes.set_xlabel(label)
    style.set_percent_axis(axes, "")


def _wide_scale(axes: Axes, low: float, high: float, *, with_zero: bool) -> None:
    """Make x logarithmic from `low` to `high`; linear below, where there is less."""
    if not with_zero:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.15, high * 1.15)
        style.set_log_axis(axes.xaxis, low, high)
    else:
        first = 10.0 ** np.ceil(np.log10(low))
        axes.set_xscale("symlog", linthresh=first, linscale=0.5)
        axes.set_xlim(0.0, high * 1.15)
        decades = first * 10.0 ** np.arange(np.floor(np.log10(high / first)) + 1.0)
        axes.set_xticks([0.0, *decades])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(style.short_number))
