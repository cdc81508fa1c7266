"""Schedulers, one generation a file; `SCHEDULERS` names them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.scheduler.v1 import V1Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEDULERS: Mapping[str, type] = MappingProxyType({"v1": V1Scheduler})
"""Built-in schedulers by the name that ``engine.scheduler`` takes."""
