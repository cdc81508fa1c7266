"""From a configuration to what takes its run down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.results.fleet.pulls import (
    DraftPromptRecorder,
    OffloadPromptRecorder,
    PromptRecorder,
)
from sim.results.fleet.ranks import RankRecorders
from sim.results.recording.drafts import DraftRecorder
from sim.results.recording.recorder import Recorder
from sim.results.recording.step_columns import ColumnMaker
from sim.results.recording.transfers import OffloadRecorder, TransferLog
from sim.results.recording.usage import GroupUsage, PrefixTreeUsage
from sim.simulation.offloading import transfer_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.config.tables import RunConfig
    from sim.hardware.capacity import CapacityEstimate
    from sim.results.fleet.ranks import Part
    from sim.scheduler.base import Scheduler
    from sim.simulation.pools import Pool


def make_recorder(
    config: RunConfig,
    capacity: CapacityEstimate,
    schedulers: Sequence[Scheduler],
    *,
    keeps_steps: bool,
    pools: Sequence[Pool],
) -> Recorder | RankRecorders:
    """Make the recorder of a run, or of its ranks.

    Parameters
    ----------
    config, capacity
        What is run, and the KV cache of each engine.
    schedulers
        One for each engine.
    keeps_steps
        See `Recorder`.
    pools
        Of the run, which have the schedulers in this order.
    """
    owners = [pool for pool in pools for _ in pool.schedulers]
    drafts = [each for pool in pools if (each := pool.engine.speculative) is not None]
    has_tiers = any(pool.engine.has_tier for pool in pools)
    most_drafts = max((each.num_speculative_tokens for each in drafts), default=0)

    maker = ColumnMaker()

    def one(scheduler: Scheduler, pool: Pool) -> Recorder:
        more: dict[str, Any] = {
            "keeps_steps": keeps_steps,
            "groups": _group_usage(pool.capacity, scheduler) if keeps_steps else None,
            "tree": _tree_usage(scheduler) if keeps_steps else None,
            "front_end_s": config.front_end_s,
            "num_recorders": len(schedulers),
            "maker": maker,
        }
        if most_drafts:  # of any: tables of all engines have the same columns
            more["num_speculative_tokens"] = most_drafts
        if has_tiers:
            more["transfers"] = (
                transfer_log(pool.engine, pool.capacity, scheduler)
                if pool.engine.has_tier
                else TransferLog()
            )
        kinds: tuple[type[Recorder], ...] = Recorder, DraftRecorder, OffloadRecorder
        if pool.role == "prefill":
            kinds = PromptRecorder, DraftPromptRecorder, OffloadPromptRecorder
        return kinds[1 if most_drafts else 2 * has_tiers](**more)

    own = [*map(one, schedulers, owners)]
    if config.fleet is None and len(own) == 1:
        return own[0]
    paces = [pace for pool in pools for pace in pool.paces]
    waits_s = [None if pace is None else pace.waits_s for pace in paces]
    part: Part = "rank" if config.fleet is None else "engine"
    return RankRecorders(own, waits_s, part=part)


def _group_usage(capacity: CapacityEstimate, scheduler: Scheduler) -> GroupUsage | None:
    """Return the recorder of groups' usage, where there are several kinds."""
    kinds = capacity.kv_cache_groups
    if len(kinds) < 2 or not getattr(scheduler, "groups", None):
        return None
    return GroupUsage([kind["num_groups"] for kind in kinds])


def _tree_usage(scheduler: Scheduler) -> PrefixTreeUsage | None:
    """Return the recorder of a prefix tree's usage, where the scheduler has one."""
    if not hasattr(scheduler, "note_tree"):
        return None
    usage = PrefixTreeUsage()
    scheduler.note_tree = usage.note
    return usage
