"""Schedulers of all pools of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.results.summary.warnings import scheduler_warnings
from sim.scheduler.groups.scheduler import GroupScheduler
from sim.simulation.pools import named_pool, transfer_settings
from sim.simulation.schedulers import make_scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.config.tables import RunConfig
    from sim.scheduler.base import Scheduler
    from sim.simulation.pools import Pool
    from workloads.spec import RequestSpec


def make_all_schedulers(
    config: RunConfig, pools: Sequence[Pool], specs: Sequence[RequestSpec], reason: str
) -> tuple[str, list[str]]:
    """Construct the schedulers of all pools, which take their steps in the same way.

    Parameters
    ----------
    config
        The run.
    pools
        Their capacity becomes what schedulers serve, which may be less.
    specs
        The workload.
    reason
        Why requests are looked at one by one, as known before; empty for none.

    Returns
    -------
    tuple
        That reason, which may be of a scheduler, and warnings of what is served.
    """
    warnings: list[str] = []
    on_clock: list[Pool] = []
    for place, pool in enumerate(pools):
        before = pool.capacity
        with named_pool(config, place):
            pool.schedulers = make_schedulers(pool, specs, on_clock=not reason)
        if not reason:
            on_clock.append(pool)
            reason = _why_own(pool.schedulers[0])
        warnings += scheduler_warnings(before, pool.capacity, pool.config)
    if reason:  # of a later pool's: then no other leaves decodes on a clock
        for pool in on_clock[:-1]:
            pool.schedulers = make_schedulers(pool, specs, on_clock=False)
    return reason, warnings


def make_schedulers(
    pool: Pool,
    specs: Sequence[RequestSpec],
    *,
    on_clock: bool,
    number: int | None = None,
) -> list[Scheduler]:
    """Construct the schedulers of a pool, by default all that it has.

    Its capacity becomes what they serve.
    """
    schedulers = []
    estimated = pool.capacity
    for _ in range(pool.num_engines if number is None else number):
        scheduler, pool.capacity = make_scheduler(
            pool.engine,
            estimated,
            pool.model,
            specs=specs,
            on_clock=on_clock,
            kv_transfer=transfer_settings(pool),
            shared_tiers=pool.shared_tiers,
        )
        schedulers.append(scheduler)
    return schedulers


def _why_own(scheduler: Scheduler) -> str:
    """Return why a scheduler takes its steps one by one; empty if it does not."""
    if isinstance(scheduler, GroupScheduler):
        return scheduler.why_stepwise()
    return getattr(scheduler, "stepwise_reason", "")
