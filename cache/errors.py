"""Misuse of a cache structure: the rule that was broken, and by which block."""

from __future__ import annotations


class CacheError(RuntimeError):
    """A cache structure was used against its rules; nothing has changed."""


class CacheConfigError(CacheError, ValueError):
    """Arguments that do not go together, or with the group at hand."""


class NoFreeBlocksError(CacheError, ValueError):
    """More blocks were asked for than are free."""


class DoubleFreeError(CacheError, ValueError):
    """A block without references was freed."""


class ImmutableBlockError(CacheError, ValueError):
    """Tokens were appended to a block whose content is settled."""


class BlockTableError(CacheError, ValueError):
    """A block table was allocated twice, or used without being allocated."""


class UnallocatedSequenceError(BlockTableError, KeyError):
    """A sequence that holds no blocks was asked to share, grow or show them."""

    def __str__(self) -> str:
        return str(self.args[0])


class PolicyError(CacheError):
    """An eviction policy chose a block that is not evictable."""


class InvariantError(CacheError):
    """A structure's own proof (`check()`) found it inconsistent."""


def require(condition: object, rule: str) -> None:
    """Raise `InvariantError` stating `rule` unless `condition` holds."""
    if not condition:
        raise InvariantError(rule)
