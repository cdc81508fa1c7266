"""The figure of draft tokens: their acceptance, time and blocks by load."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.results import schema
from sim.results.tables.steps import span_columns, spans_s
from sim.views.plots import style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.results.tables.steps import StepTable
    from sim.views.plots.binning import Floats
    from sim.views.plots.run.tables import Tables

_NUM_BINS = 24
"""Loads that are told apart: between the fewest and the most verifications."""
_LEAST_STEPS = 20
"""Loads of fewer steps are left out, if others have as many."""


class Loads(NamedTuple):
    """Means of the steps that verify so many requests' drafts."""

    num_drafts: Floats
    """Requests, rising."""
    num_tokens: Floats
    """Outputs of a step."""
    step_s: Floats
    """From a step to the next one."""
    num_draft_blocks: Floats
    """Blocks that tables hold for drafts."""

    @property
    def length(self) -> Floats:
        """Tokens of a verification."""
        return self.num_tokens / self.num_drafts

    @property
    def token_ms(self) -> Floats:
        """Milliseconds of a token of one request."""
        return 1000.0 * self.step_s / self.length


def has_drafts(tables: Tables) -> bool:
    """Whether the run's steps verify draft tokens."""
    return tables.has_steps and verifies(tables.step_table)


def verifies(steps: StepTable) -> bool:
    """Whether steps have the columns of draft tokens."""
    return set(schema.DRAFT_STEPS) <= set(steps.kinds)


@style.house_style
def drafts(tables: Tables, on: Sequence[Axes] | None = None) -> Figure:
    """Draw tokens of a verification and of a step, their time, and blocks, by load."""
    facts = tables.facts(
        spec_decode_acceptance_length="{:.2f} tokens a verification",
        spec_decode_draft_tokens="{:,.0f} draft tokens",
        spec_decode_acceptance_rate="{:.1f}% of them accepted",
    )
    title = f"Drafts: {facts}" if facts else "Drafts"
    panels = style.new_panels(tables, title, (1.0, 1.0, 1.0, 1.0), on=on)
    length, whole, each, held = panels.axes
    loads = loads_of(tables.step_table) if has_drafts(tables) else None
    if loads is None or not len(loads.num_drafts):
        style.say(length, "No step of this run verifies drafts")
        return panels.figure
    drawn = loads.length, loads.num_tokens, loads.token_ms, loads.num_draft_blocks
    for axes, values in zip(panels.axes, drawn, strict=True):
        axes.plot(loads.num_drafts, values, color=style.BLUE, marker=".", linewidth=1.2)
        axes.set_ylim(0.0, 1.1 * max(float(values.max()), 1e-9))
    length.set_ylabel("tokens a\nverification")
    whole.set_ylabel("tokens a step")
    each.set_ylabel("ms a token\nof a request")
    held.set_ylabel("blocks held\nfor drafts")
    held.set_xlabel("requests whose drafts a step verifies")
    return panels.figure


def loads_of(steps: StepTable) -> Loads:
    """Return means of steps by load, for steps with columns of drafts."""
    names = ["num_drafts", "num_accepted_tokens", "num_draft_blocks"]
    columns: list[list[Floats]] = [[] for _ in (*names, "spans")]
    for batch in steps.batches([*names, *span_columns(steps)]):
        verifies_some = np.asarray(batch["num_drafts"]) > 0
        values = [*(batch[name] for name in names), spans_s(batch)]
        for gathered, column in zip(columns, values, strict=True):
            gathered.append(np.asarray(column, np.float64)[verifies_some])
    none = np.zeros(0)
    load, accepted, blocks, step_s = (np.concatenate([none, *c]) for c in columns)
    if not len(load):
        return Loads(load, accepted, step_s, blocks)
    edges = np.unique(np.rint(np.geomspace(1.0, load.max() + 1.0, _NUM_BINS + 1)))
    places = np.searchsorted(edges, load, side="right") - 1
    counts = np.bincount(places, minlength=len(edges))
    kept = counts >= min(_LEAST_STEPS, counts.max())
    means = [
        np.bincount(places, values, len(edges))[kept] / counts[kept]
        for values in (load, load + accepted, step_s, blocks)
    ]
    return Loads(*means)
