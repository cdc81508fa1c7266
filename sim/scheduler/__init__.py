"""Schedulers, one generation a file; `SCHEDULERS` names them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.scheduler.base import Scheduler
from sim.scheduler.block_space.cacheflow import Scheduler as CacheflowScheduler
from sim.scheduler.block_space.v0_2 import Scheduler as V02Scheduler
from sim.scheduler.hf_fifo.scheduler import FIFOScheduler
from sim.scheduler.hosted.scheduler import VllmScheduler
from sim.scheduler.v0.scheduler import Scheduler as V0Scheduler
from sim.scheduler.v1.scheduler import V1Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEDULERS: Mapping[str, type] = MappingProxyType(
    {
        "cacheflow": CacheflowScheduler,
        "v0_2": V02Scheduler,
        "v0": V0Scheduler,
        "v1": V1Scheduler,
        "hf_fifo": FIFOScheduler,
        "vllm": VllmScheduler,
    }
)
"""Built-in schedulers by the name that ``engine.scheduler`` takes."""

__all__ = ["SCHEDULERS", "Scheduler"]
