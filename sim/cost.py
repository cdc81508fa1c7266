"""Deprecated: import from `sim.costs`."""

from cache.moved import moved

__getattr__ = moved(__name__, "sim.costs")
