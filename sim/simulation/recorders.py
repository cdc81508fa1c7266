"""From a configuration to what takes its run down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.results.drafts import DraftRecorder
from sim.results.group_usage import GroupUsage
from sim.results.ranks import RankRecorders
from sim.results.recorder import Recorder
from sim.results.transfers import OffloadRecorder
from sim.scheduler.v1.connectors.pulling import ProducerConnector
from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler
from sim.simulation.offloading import transfer_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.config.tables import RunConfig
    from sim.engine.lock_step import LockStep
    from sim.hardware.capacity import CapacityEstimate
    from sim.scheduler.base import Scheduler


def make_recorder(
    config: RunConfig,
    capacity: CapacityEstimate,
    schedulers: Sequence[Scheduler],
    lock: LockStep | None,
    *,
    keeps_steps: bool,
) -> Recorder | RankRecorders:
    """Make the recorder of a run, or of its ranks.

    Parameters
    ----------
    config, capacity
        What is run, and the KV cache of each engine.
    schedulers
        One for each engine.
    lock
        Says when engines that step together waited.
    keeps_steps
        See `Recorder`.
    """
    front_end_s, drafts = config.front_end_s, config.engine.speculative
    groups = [
        _group_usage(capacity, schedulers[0]) if keeps_steps else None
        for _ in schedulers
    ]
    if config.fleet is None and isinstance(schedulers[0], ConnectorScheduler):
        log = transfer_log(config.engine, capacity, schedulers[0])
        return OffloadRecorder(
            log, keeps_steps=keeps_steps, groups=groups[0], front_end_s=front_end_s
        )
    if drafts is not None:
        return DraftRecorder(
            drafts.num_speculative_tokens,
            keeps_steps=keeps_steps,
            groups=groups[0],
            front_end_s=front_end_s,
        )
    if config.fleet is None and len(groups) == 1:
        return Recorder(
            keeps_steps=keeps_steps, groups=groups[0], front_end_s=front_end_s
        )
    waits_s = [
        () if lock is None else lock.ranks[i].waits_s for i in range(len(groups))
    ]
    return RankRecorders(
        waits_s,
        keeps_steps=keeps_steps,
        groups=groups,
        front_end_s=front_end_s,
        part="rank" if config.fleet is None else "engine",
        prompts_only=[_is_producer(each) for each in schedulers],
    )


def _is_producer(scheduler: Scheduler) -> bool:
    connector = getattr(scheduler, "connector", None)
    return isinstance(connector, ProducerConnector)


def _group_usage(capacity: CapacityEstimate, scheduler: Scheduler) -> GroupUsage | None:
    """Return what takes what groups hold, where there are several kinds."""
    kinds = capacity.kv_cache_groups
    if len(kinds) < 2 or not getattr(scheduler, "groups", None):
        return None
    return GroupUsage([kind["num_groups"] for kind in kinds])
