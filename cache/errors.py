"""Misuse of a cache structure: the rule that was broken, and by which block."""

from __future__ import annotations


class CacheError(RuntimeError):
    """A cache structure was used against its rules; nothing has changed."""


class NoFreeBlocksError(CacheError):
    """More blocks were asked for than are free."""


class DoubleFreeError(CacheError):
    """A block without references was freed."""


class InvariantError(CacheError):
    """A structure's own proof (`check()`) found it inconsistent."""


def require(condition: object, rule: str) -> None:
    """Raise `InvariantError` stating `rule` unless `condition` holds."""
    if not condition:
        raise InvariantError(rule)
