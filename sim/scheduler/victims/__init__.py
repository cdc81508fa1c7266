"""Which request is preempted when one finds no block: one policy a file."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.scheduler.victims.base import VictimPolicy
from sim.scheduler.victims.cheapest_to_recompute import CheapestToRecompute
from sim.scheduler.victims.choice import VictimChoice
from sim.scheduler.victims.latest_arrival import LatestArrival
from sim.scheduler.victims.least_progress import LeastProgress
from sim.scheduler.victims.lowest_priority import LowestPriority
from sim.scheduler.victims.most_blocks import MostBlocks

if TYPE_CHECKING:
    from collections.abc import Mapping

VICTIMS: Mapping[str, type[VictimPolicy]] = MappingProxyType(
    {
        "cheapest_to_recompute": CheapestToRecompute,
        "latest_arrival": LatestArrival,
        "least_progress": LeastProgress,
        "lowest_priority": LowestPriority,
        "most_blocks": MostBlocks,
    }
)
"""Victim policies by the ``kind`` of ``engine.preemption_victim``."""

__all__ = [
    "VICTIMS",
    "CheapestToRecompute",
    "LatestArrival",
    "LeastProgress",
    "LowestPriority",
    "MostBlocks",
    "VictimChoice",
    "VictimPolicy",
]
