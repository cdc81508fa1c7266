"""The figure of prefix hits against the size of the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from sim.views.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.studies.prefixes.report import PrefixReport
    from sim.views.plots.binning import Floats

_PANEL = {"left": 0.075, "right": 0.975, "bottom": 0.09}


@style.house_style
def prefix_hits(report: PrefixReport) -> Figure:
    """Draw the hit rate of LRU, and its bounds, by the size of the cache."""
    figure = style.titled_figure(_title(report), report.title)
    top = 0.8 if report.memory is None else 0.755
    (axes,) = figure.subplots(squeeze=False, gridspec_kw=_PANEL | {"top": top}).flat
    if not report.curve.possible_hits:
        style.say(axes, "No prompt begins as an earlier one does")
        axes.set_axis_off()
        return figure
    _draw_curves(axes, report)
    _mark_answer(axes, report)
    _draw_simulated(axes, report)
    _scale(axes, report)
    style.legend_above(axes, num_columns=6)
    if report.memory is not None:
        axes.get_legend().set_bbox_to_anchor((0.0, 1.1))
    return figure


def _title(report: PrefixReport) -> str:
    need = report.need
    if not report.curve.possible_hits:
        return "Prefix hits by cache size: none"
    gib = report.gib(need.num_blocks)
    memory = "" if gib is None else f" ({gib:,.1f} GiB)"
    finding = "at least to find" if report.is_bound else "find"
    return (
        f"Prefix hits by cache size: {need.num_blocks:,} blocks{memory} {finding} "
        f"{100 * need.share:g} % of what can be found"
    )


def _draw_curves(axes: Axes, report: PrefixReport) -> None:
    rows = report.rows()
    sizes = np.array([row["num_blocks"] for row in rows])
    found = 100.0 * np.array([row["lru_hit_rate"] for row in rows], dtype=np.float64)
    margin = 100.0 * np.array([row["lru_margin"] for row in rows], dtype=np.float64)
    curve = report.curve
    possible = 100.0 * curve.token_hit_rate(curve.possible_hits)
    label = f"infinite: {possible:.2f} %"
    axes.axhline(
        possible, color=style.BLACK, linestyle="--", linewidth=1.0, label=label
    )
    _draw_bound(axes, report)
    if curve.sampled is not None:
        low = np.maximum(found - margin, 0.0)
        axes.fill_between(
            sizes, low, found + margin, color=style.SKY, alpha=0.35, linewidth=0.0,
            label="95 % interval",
        )  # fmt: skip
    label = "LRU at most" if report.is_bound else "LRU, as V1's pool"
    axes.plot(sizes, found, color=style.BLUE, linewidth=1.8, label=label)


def _draw_bound(axes: Axes, report: PrefixReport) -> None:
    """Draw the clairvoyant bound at its sizes, and a guide between them."""
    bounds, lru = report.bounds, report.curve.lru
    sizes, found = bounds.num_blocks[1:], bounds.num_hits[1:]
    between = np.geomspace(sizes[0], sizes[-1], 400)
    # A straight guide could pass below LRU, where the bound never is.
    guide = np.interp(np.log(between), np.log(sizes), found)
    guide = np.maximum(guide, lru.hits_at(between))
    axes.plot(between, 100.0 * _rates(report, guide), color=style.GREEN, linestyle=":")
    axes.plot(
        sizes,
        100.0 * _rates(report, found),
        color=style.GREEN,
        linestyle="none",
        marker="o",
        markersize=4.5,
        label="Belady (future known)",
    )


def _rates(report: PrefixReport, num_hits: Floats) -> Floats:
    rates = [report.curve.token_hit_rate(hits) for hits in num_hits.tolist()]
    return np.array(rates, dtype=np.float64)


def _mark_answer(axes: Axes, report: PrefixReport) -> None:
    need, memory = report.need, report.memory
    axes.plot(
        [need.num_blocks],
        [100.0 * need.hit_rate],
        linestyle="none",
        marker="D",
        markersize=7.5,
        markerfacecolor=style.VERMILLION,
        markeredgecolor=style.BLACK,
        markeredgewidth=0.8,
        zorder=4,
        label=f"{100 * need.share:g} %: {need.num_blocks:,} blocks",
    )
    down = [100.0 * need.hit_rate, 0.0]
    axes.plot(
        [need.num_blocks] * 2, down, color=style.GREY, linewidth=0.7, linestyle=":"
    )
    if memory is not None and memory.pool_tokens is not None:
        pool = memory.pool_tokens / report.block_size
        tp = memory.tensor_parallel_size
        gpus = memory.gpu if tp == 1 else f"{tp} x {memory.gpu}"
        axes.axvline(pool, color=style.ORANGE, linestyle="-.", label=f"pool of {gpus}")


def _draw_simulated(axes: Axes, report: PrefixReport) -> None:
    """Draw the hit rates of runs: in the pool, and with the host behind it."""
    runs = report.simulated
    looks: dict[str, Any] = {
        "linestyle": "none",
        "markersize": 7.0,
        "markeredgecolor": style.BLACK,
        "markeredgewidth": 0.8,
        "zorder": 5,
    }
    for each in runs:
        axes.plot(
            [each.num_blocks] * 2,
            [100.0 * each.pool_hit_rate, 100.0 * each.hit_rate],
            color=style.BLACK,
            linewidth=0.9,
            zorder=4,
        )
        axes.annotate(
            each.name,
            (each.num_blocks, 100.0 * each.hit_rate),
            xytext=(8, -4),
            textcoords="offset points",
            va="top",
            fontsize="small",
        )
    if runs:
        axes.plot(
            [each.num_blocks for each in runs],
            [100.0 * each.pool_hit_rate for each in runs],
            marker="o",
            markerfacecolor="white",
            label="simulated: GPU",
            **looks,
        )
        axes.plot(
            [each.num_blocks for each in runs],
            [100.0 * each.hit_rate for each in runs],
            marker="s",
            markerfacecolor=style.SKY,
            label="GPU and host",
            **looks,
        )


def _scale(axes: Axes, report: PrefixReport) -> None:
    """Put sizes on logarithmic axes: blocks below, GiB above."""
    sizes = report.bounds.num_blocks
    low, high = float(sizes[1]) / 1.2, float(sizes[-1]) * 1.2
    if report.memory is not None and report.memory.pool_tokens is not None:
        pool = report.memory.pool_tokens / report.block_size
        low, high = min(low, pool / 1.5), max(high, pool * 1.5)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    _decades(axes, f"KV cache (blocks of {report.block_size} tokens)")
    axes.xaxis.set_major_formatter(FuncFormatter(style.short_number))
    curve = report.curve
    possible = 100.0 * curve.token_hit_rate(curve.lru.most_hits)
    style.set_percent_axis(axes, "prompt tokens found (%)", min(possible * 1.08, 100.0))
    if report.memory is not None:
        memory = report.memory
        above = axes.twiny()
        above.set_xscale("log")
        one = memory.gib(report.block_size)
        above.set_xlim(low * one, high * one)
        _decades(above, f"KV cache (GiB, {memory.model}, {memory.kv_cache_dtype})")
        above.xaxis.set_major_formatter(FuncFormatter(style.plain_number))
        above.grid(visible=False)
        above.spines["top"].set_visible(True)


def _decades(axes: Axes, label: str) -> None:
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
