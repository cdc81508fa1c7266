"""The figure of draft tokens: what becomes of them under load, and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.results import schema
from sim.views.plots import style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.binning import Floats
    from sim.views.plots.tables import Tables

_NUM_BINS = 24
"""Loads that are told apart: between the fewest and the most verifications."""
_LEAST_STEPS = 20
"""Loads of fewer steps are left out, if others have as many."""


def has_drafts(tables: Tables) -> bool:
    """Whether the run's steps verify draft tokens."""
    return tables.has_steps and set(schema.DRAFT_STEPS) <= set(tables.step_table.kinds)


@style.house_style
def drafts(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw tokens of a step, of a request, and what drafts hold, against load."""
    facts = tables.facts(
        spec_decode_acceptance_length="{:.2f} tokens a verification",
        spec_decode_draft_tokens="{:,.0f} draft tokens",
        spec_decode_acceptance_rate="{:.1f}% of them accepted",
    )
    title = f"Drafts: {facts}" if facts else "Drafts"
    panels = style.new_panels(tables, title, (1.0, 1.0, 1.0), on=on)
    whole, each, held = panels.axes
    if not has_drafts(tables) or not len((binned := _binned(tables))[0]):
        style.say(whole, "No step of this run verifies drafts")
        return panels.figure
    load, tokens, latency_s, blocks = binned
    per_request_ms = 1000.0 * latency_s * load / tokens
    for axes, values in zip(panels.axes, (tokens, per_request_ms, blocks), strict=True):
        axes.plot(load, values, color=style.BLUE, marker=".", linewidth=1.2)
    for axes in panels.axes:
        axes.set_ylim(bottom=0.0)
    whole.set_ylabel("tokens a step")
    each.set_ylabel("ms a token\nof a request")
    held.set_ylabel("blocks held\nfor drafts")
    held.set_xlabel("requests whose drafts a step verifies")
    return panels.figure


def _binned(tables: Tables) -> tuple[Floats, Floats, Floats, Floats]:
    """Return means of steps by load: verifications, tokens, seconds and blocks."""
    names = ["num_drafts", "num_accepted_tokens", "latency_s", "num_draft_blocks"]
    batches = list(tables.step_table.batches(names))
    columns = [
        np.concatenate([np.asarray(batch[name], np.float64) for batch in batches])
        for name in names
    ]
    load, accepted, latency_s, blocks = (column[columns[0] > 0] for column in columns)
    if not len(load):
        return load, accepted, latency_s, blocks
    edges = np.unique(np.rint(np.geomspace(1.0, load.max() + 1.0, _NUM_BINS + 1)))
    places = np.searchsorted(edges, load, side="right") - 1
    counts = np.bincount(places, minlength=len(edges))
    kept = counts >= min(_LEAST_STEPS, counts.max())
    means = [
        np.bincount(places, values, len(edges))[kept] / counts[kept]
        for values in (load, load + accepted, latency_s, blocks)
    ]
    return means[0], means[1], means[2], means[3]
