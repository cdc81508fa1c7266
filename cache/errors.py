"""Misuse of a cache structure: the rule that was broken, and by which block."""

from __future__ import annotations


class CacheError(RuntimeError):
    """A cache structure was used against its rules; nothing has changed."""


class CacheConfigError(CacheError, ValueError):
    """Arguments that do not go together, or with the group at hand."""


class KVCacheTooSmallError(CacheConfigError):
    """The pool cannot hold one request of the longest length.

    Parameters
    ----------
    max_model_len
        Tokens of that request.
    needed_bytes, available_bytes
        What it takes, and what there is beside the null block.
    fitting_len
        Tokens of the longest request that fits; 0 where none does.

    Notes
    -----
    The words are those of vLLM 0.33, up to its advice.
    """

    def __init__(
        self,
        max_model_len: int,
        needed_bytes: int,
        available_bytes: int,
        fitting_len: int,
    ) -> None:
        self.max_model_len = max_model_len
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.fitting_len = fitting_len
        super().__init__(self._in_words())

    def _in_words(self) -> str:
        if self.available_bytes <= 0:
            return "No available memory for the cache blocks"
        needed, available = (
            round(size / 2**30, 2) for size in (self.needed_bytes, self.available_bytes)
        )
        words = (
            f"To serve at least one request with the model's max seq len"
            f" ({self.max_model_len}), ({needed} GiB KV cache is needed, which is"
            f" larger than the available KV cache memory ({available} GiB)"
        )
        if not self.fitting_len:
            return words
        return (
            f"{words}. Based on the available memory, the estimated maximum model"
            f" length is {self.fitting_len}"
        )


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


class TierError(CacheError):
    """A tier behind the host did what a tier must not; it may be a user's own."""


class InvariantError(CacheError):
    """A structure's own proof (`check()`) found it inconsistent."""


def require(condition: object, rule: str, *facts: object) -> None:
    """Raise `InvariantError` stating `rule` unless `condition` holds.

    Where blocks are proven one by one, `facts` take the places of ``{}`` in `rule`:
    they are put into words only if it is broken.
    """
    if not condition:
        raise InvariantError(rule.format(*facts) if facts else rule)
