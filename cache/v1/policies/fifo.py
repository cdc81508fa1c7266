"""First in, first out."""

from __future__ import annotations

from cache.v1.policies.keyed import HeldBlock, KeyedPolicy


class FIFO(KeyedPolicy):
    """Evicts what was first released longest ago, however often it was found since.

    A block enters the queue when its first holder lets go of it, deepest first: in the
    order of computing, a prompt would lose its beginning first, and all behind it would
    be held for nothing. A block in use keeps its place and is passed over.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer,
    IBM Systems Journal 5(2), 1966.
    """

    def key(self, block: HeldBlock) -> int:
        """See `KeyedPolicy.key`."""
        return block.first_released_at
