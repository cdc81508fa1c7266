"""vLLM's V1 engine, releases 0.8 to 0.33."""

from __future__ import annotations

from sim.scheduler.v1.scheduler import V1Scheduler

__all__ = ["V1Scheduler"]
