"""The figures of a tier behind the pool: its chunks, its link, prompts it spares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results.recording.transfers import LOADS
from sim.views.plots import style
from sim.views.plots.run.tables import column, words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.binning import Floats
    from sim.views.plots.run.tables import Tables

_NUM_BINS = 120
_COLOURS = style.BLUE, style.GREEN, style.ORANGE


def has_tier(tables: Tables) -> bool:
    """Whether there was a tier behind the run's pool."""
    return tables.transfers is not None and tables.tier is not None


@style.house_style
def tier(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw the chunks of the tier, the traffic of its link, and sources of prompts."""
    facts = tables.facts(
        num_tier_chunks="{:,.0f} chunks",
        cpu_cache_usage_mean="{:.0%} used on average",
        num_tier_evictions="{:,.0f} evicted",
    )
    title = f"CPU tier: {facts}" if facts else "CPU tier"
    panels = style.new_panels(tables, title, (1.0, 1.0, 1.0), on=on)
    usage, link, sources = panels.axes
    if tables.transfers is None or tables.tier is None:
        style.say(usage, "This run has no tier behind its pool")
        return panels.figure
    edges_s = np.linspace(0.0, tables.stop_s, _NUM_BINS + 1)
    unit_s, _ = style.time_unit(tables.stop_s)
    _draw_usage(usage, tables, tables.tier, unit_s)
    _draw_link(link, tables.transfers, edges_s, unit_s)
    _draw_sources(sources, tables, edges_s, unit_s)
    for axes in panels.axes:
        axes.set_ylim(bottom=0.0)
        style.legend_above(axes)
    panels.set_time_axes(tables.stop_s)
    return panels.figure


@style.house_style
def tier_ttft(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw TTFT by where most of a prompt came from."""
    loaded = {"external_prefix_cache_hits": "{:,.0f} prompt tokens loaded"}
    if is_apart(tables.requests):  # what decoders read are hits, too
        loaded = {"loaded_blocks": "{:,.0f} blocks loaded"}
    facts = tables.facts(
        **loaded, loaded_link_utilisation="link busy {:.2%} of the time"
    )
    title = f"TTFT by source: {facts}" if facts else "TTFT by source"
    panels = style.new_panels(tables, title, on=on)
    if has_tier(tables):
        _draw_ttft(panels.axes[0], tables)
    else:
        style.say(panels.axes[0], "This run has no tier behind its pool")
    return panels.figure


def _draw_usage(
    axes: Axes, tables: Tables, rows: Mapping[str, Any], unit_s: float
) -> None:
    num_chunks = tables.number("num_tier_chunks") or 1.0
    times_s = np.append(column(rows, "time_s"), tables.stop_s) / unit_s
    for name, label, colour in (
        ("num_used_chunks", "used", style.BLUE),
        ("num_writing_chunks", "being written", style.ORANGE),
        ("num_reading_chunks", "being read", style.GREEN),
    ):
        values = 100.0 * column(rows, name) / num_chunks
        if len(values):
            axes.step(
                times_s,
                np.append(values, values[-1]),
                where="post",
                color=colour,
                label=label,
                linewidth=1.0,
            )
    axes.set_ylabel("chunks (%)")


def _draw_link(
    axes: Axes, rows: Mapping[str, Any], edges_s: Floats, unit_s: float
) -> None:
    kinds = words(rows, "kind")
    middles = (edges_s[1:] + edges_s[:-1]) / 2 / unit_s
    for of, label, colour in (
        (("store",), "to the host", style.ORANGE),
        (LOADS, "to the GPU", style.GREEN),
    ):
        is_own = np.isin(kinds, of)
        rate = moved_bytes(
            column(rows, "begin_s")[is_own],
            column(rows, "end_s")[is_own],
            column(rows, "num_bytes")[is_own],
            edges_s,
        ) / np.diff(edges_s)
        axes.plot(middles, rate / 1e9, color=colour, label=label, linewidth=1.2)
    axes.set_ylabel("GB/s")


def moved_bytes(
    begin_s: Floats, end_s: Floats, sizes: Floats, edges_s: Floats
) -> Floats:
    """Return the bytes of copies that fall between edges, each evenly over its time."""
    found = np.zeros(len(edges_s))
    for start_s, stop_s, size in zip(begin_s, end_s, sizes, strict=True):
        length_s = max(stop_s - start_s, 1e-12)
        found += size * np.clip((edges_s - start_s) / length_s, 0.0, 1.0)
    moved: Floats = np.diff(found)
    return moved


def _draw_sources(axes: Axes, tables: Tables, edges_s: Floats, unit_s: float) -> None:
    """Draw the shares of prompt tokens by where they came from, by first scheduling."""
    at_s = column(tables.requests, "first_scheduled_s")
    served = np.isfinite(at_s)
    sources = by_source(tables.requests)
    parts = np.array([values[served] for values in sources.values()])
    places = np.clip(np.searchsorted(edges_s, at_s[served]) - 1, 0, _NUM_BINS - 1)
    sums = np.array([np.bincount(places, each, _NUM_BINS) for each in parts])
    whole = np.maximum(sums.sum(axis=0), 1.0)
    low = np.zeros(_NUM_BINS)
    shares = 100.0 * sums / whole
    for label, colour, values in zip(sources, _COLOURS, shares, strict=False):
        axes.bar(
            edges_s[:-1] / unit_s,
            values,
            np.diff(edges_s) / unit_s,
            low,
            align="edge",
            color=colour,
            label=label,
            linewidth=0.0,
        )
        low = low + values
    axes.set_ylabel("prompt\ntokens (%)")
    axes.set_ylim(0.0, 100.0)


def is_apart(requests: pd.DataFrame | Mapping[str, Any]) -> bool:
    """Whether these are requests of a fleet that prefills and decodes apart."""
    return "num_transferred_tokens" in requests


def by_source(requests: pd.DataFrame | Mapping[str, Any]) -> dict[str, Floats]:
    """Return tokens of each prompt by where they came from.

    Rows of a fleet that prefills and decodes apart are of decoders, which find what
    they have read: there it is not told what a prefiller has found on its GPU.
    """
    num_tokens, loaded, cached = (
        column(requests, f"num_{name}_tokens")
        for name in ("prompt", "loaded", "cached")
    )
    if is_apart(requests):
        loaded = np.minimum(loaded, num_tokens)
        return {
            "found on a GPU or computed": num_tokens - loaded,
            "loaded from the host": loaded,
        }
    loaded = np.minimum(loaded, cached)
    return {
        "found on the GPU": cached - loaded,
        "loaded from the host": loaded,
        "computed": num_tokens - cached,
    }


def _draw_ttft(axes: Axes, tables: Tables) -> None:
    """Draw TTFT by the source of most of a prompt."""
    ttft_s = column(tables.requests, "ttft_s")
    sources = by_source(tables.requests)
    most = np.argmax(np.array([*sources.values()]), axis=0)
    for place, (label, colour) in enumerate(zip(sources, _COLOURS, strict=False)):
        values = ttft_s[(most == place) & np.isfinite(ttft_s)]
        if len(values):
            style.draw_cdf(axes, values, color=colour, label=f"mostly {label}")
    axes.set_xscale("log")
    axes.set_xlabel("time to first token (s)")
    axes.set_ylabel("requests (%)")
    style.legend_above(axes)
