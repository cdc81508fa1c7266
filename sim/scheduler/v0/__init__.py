"""vLLM's V0 engine, release 0.7.3."""

from __future__ import annotations

from sim.scheduler.v0.scheduler import Scheduler

__all__ = ["Scheduler"]
