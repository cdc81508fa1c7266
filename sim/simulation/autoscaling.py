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
    from collections.abc import Iterator

    from sim.config.autoscaling import AutoscalerTable, BehaviourTable
    from sim.config.fleet import FleetTable
    from sim.fleet.replicas import Replicas

_MOST_REVERSALS = 6
"""In an hour: one in ten minutes."""


def places_off(table: FleetTable) -> list[int]:
    """Return the places of replicas that a fleet has not at first."""
    off: list[int] = []
    first = 0
    for pool in table.pools:
        most = table.most_replicas(pool)
        off += range(first + pool.replicas, first + most)
        first += most
    return off


def add_autoscalers(replicas: Replicas, table: FleetTable) -> None:
    """Let the pools of a fleet be scaled that have an autoscaler."""
    first = 0
    for pool in table.pools:
        places = range(first, first + table.most_replicas(pool))
        first += len(places)
        own = table.autoscaler_of(pool)
        if own is not None:
            replicas.autoscalers.append(
                Autoscaler(
                    *(replicas.env, replicas, pool.name, places),
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
