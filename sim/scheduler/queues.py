"""Deprecated: import from `sim.scheduler.v1.queues`."""

from cache.moved import moved

__getattr__ = moved(__name__, "sim.scheduler.v1.queues")
