"""Figures of a run whose ranks are drawn as runs are that one compares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results.fleet.ranks import parts_of, tables_of_rank
from sim.views.plots import FIGURES
from sim.views.plots.drafts import drafts, has_drafts
from sim.views.plots.fleets import engines_figure
from sim.views.plots.overlays import OVERLAYS
from sim.views.plots.pools import has_pools, pools_figure
from sim.views.plots.replicas import has_changes, replicas_figure
from sim.views.plots.runs import MAX_RUNS, Run
from sim.views.plots.tables import Tables
from sim.views.plots.tiers import has_tier, tier, tier_ttft

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.figure import Figure

    from sim.results.run import Results


def figures_of(results: Results) -> tuple[Mapping[str, Callable[[Any], Figure]], Any]:
    """Return the figures of a run, and the runs that they draw: a curve a rank.

    A fleet has one more, of all its engines, one of pools that prefill and decode, and
    one of replicas that come and go.
    A run whose steps verify drafts has one more, and one with a tier behind its pool
    has two; of several engines they are of all together.
    """
    part, ranks = parts_of(results.summary)
    if not ranks:
        tables = Tables.of(results)
        more = {"drafts": drafts} if has_drafts(tables) else {}
        more |= {"tier": tier, "tier_ttft": tier_ttft} if has_tier(tables) else {}
        return FIGURES | more, tables
    drawn = [*range(len(ranks))]
    told = ""
    if len(ranks) > MAX_RUNS:
        places = np.linspace(0, len(ranks) - 1, MAX_RUNS).round().astype(int)
        drawn, told = places.tolist(), f"{MAX_RUNS} of {len(ranks)} {part}s are drawn"
    runs = []
    for rank in drawn:
        found = tables_of_rank(results.recording, rank)
        tables = Tables(
            found.step_table,
            found.request_table,
            found.preemption_table,
            {**results.summary, **ranks[rank]},
            found.group_table,
            tree=found.tree_table,
        )
        runs.append(Run(f"{part} {rank}", tables, told))
    figures: dict[str, Callable[[Any], Figure]] = {**OVERLAYS}
    whole = Tables.of(results)
    if has_drafts(whole):
        figures |= {"drafts": lambda _: drafts(whole)}
    if has_tier(whole):
        figures |= {
            "tier": lambda _: tier(whole),
            "tier_ttft": lambda _: tier_ttft(whole),
        }
    if part == "engine":
        figures |= {"engines": lambda _: engines_figure(results)}
        if has_pools(results):
            figures |= {"pools": lambda _: pools_figure(results)}
        if has_changes(results):
            figures |= {"replicas": lambda _: replicas_figure(results)}
    return figures, runs
