"""Autoscalers of a fleet, made from their configuration."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from sim.fleet.autoscaling.autoscaler import Autoscaler, Timing
from sim.fleet.autoscaling.target_tracking import (
    SCALE_DOWN,
    SCALE_UP,
    Behaviour,
    Metric,
    Policy,
    PolicyKind,
    Select,
    TargetTracking,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.config.autoscaling import AutoscalerTable, BehaviourTable
    from sim.config.fleet import FleetTable
    from sim.fleet.replicas import Replicas
    from sim.simulation.pools import Pool

_MOST_REVERSALS = 6
"""In an hour: one in ten minutes."""


def replicas_by_pool(pools: Sequence[Pool]) -> list[list[range]]:
    """Return the places of the engines of each replica, pool by pool."""
    found = []
    first = 0
    for pool in pools:
        num_ranks, last = pool.engine.data_parallel_size, first + pool.num_engines
        found.append([range(i, i + num_ranks) for i in range(first, last, num_ranks)])
        first = last
    return found


def places_off(table: FleetTable, pools: Sequence[Pool]) -> list[int]:
    """Return the places of engines that a fleet has not at first."""
    every = zip(table.pools, replicas_by_pool(pools), strict=True)
    return [
        place
        for pool, replicas in every
        for ranks in replicas[pool.replicas :]
        for place in ranks
    ]


def add_autoscalers(
    replicas: Replicas, table: FleetTable, pools: Sequence[Pool]
) -> None:
    """Let the pools of a fleet be scaled that have an autoscaler."""
    for pool, ranks in zip(table.pools, replicas_by_pool(pools), strict=True):
        own = table.autoscaler_of(pool)
        if own is not None:
            replicas.autoscalers.append(
                Autoscaler(
                    *(replicas.env, replicas, pool.name, [each[0] for each in ranks]),
                    _rule(own),
                    _timing(own),
                    may_be_none=own.min_replicas == 0,
                )
            )


def flapping(replicas: Replicas) -> Iterator[str]:
    """Yield warnings of autoscalers that keep changing their mind."""
    for each in replicas.autoscalers:
        number = each.most_reversals_an_hour()
        if number >= _MOST_REVERSALS:
            yield (
                f"fleet.autoscaler of {each.pool} flaps: within an hour it turned "
                f"{number} times between more replicas and fewer; raise "
                f"scale_down.stabilization_s or tolerance, or smooth what it looks at "
                f"(requests_in_flight rather than waiting_requests)"
            )


def _rule(table: AutoscalerTable) -> TargetTracking:
    return TargetTracking(
        {Metric(name): target for name, target in table.targets.items()},
        max(table.min_replicas, 1),
        table.max_replicas,
        table.tolerance,
        _behaviour(table.scale_up, SCALE_UP),
        _behaviour(table.scale_down, SCALE_DOWN),
    )


def _timing(table: AutoscalerTable) -> Timing:
    return Timing(
        start_s=table.start_s,
        interval_s=table.interval_s,
        scrape_interval_s=table.scrape_interval_s,
        cooldown_s=table.cooldown_s,
        drain_s=inf if table.drain_s is None else table.drain_s,
    )


def _behaviour(table: BehaviourTable | None, default: Behaviour) -> Behaviour:
    """Return the behaviour of a table, with a direction's defaults."""
    if table is None:
        return default
    policies, held_s = default.policies, table.stabilization_s
    if table.policies is not None:
        policies = tuple(
            Policy(PolicyKind(each.kind), each.value, each.period_s)
            for each in table.policies
        )
    return Behaviour(
        policies,
        default.stabilization_s if held_s is None else held_s,
        Select(table.select),
    )
