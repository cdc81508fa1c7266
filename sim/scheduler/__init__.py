"""Schedulers: what they have in common here, a folder a generation."""

from __future__ import annotations

from sim.scheduler.base import Scheduler

__all__ = ["Scheduler"]
