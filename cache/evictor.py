"""Deprecated: import from `cache.v0.evictor`."""

from cache.moved import moved

__getattr__ = moved(__name__, "cache.v0.evictor")
