"""Deprecated: import from `cache.v1.policies`."""

from cache.moved import moved

__getattr__ = moved(__name__, "cache.v1.policies")
