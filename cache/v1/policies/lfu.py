"""Least frequently used."""

from __future__ import annotations

from cache.v1.policies.keyed import HeldBlock, KeyedPolicy


class LFU(KeyedPolicy):
    """Evicts what was found least often since it was computed; of those, by LRU.

    Counts are lost with the block: what comes back begins anew (in-cache LFU).

    Source: Coffman and Denning, Operating Systems Theory, 1973, section 6.2.
    """

    def key(self, block: HeldBlock) -> int:
        """See `KeyedPolicy.key`; equal counts go by release."""
        return block.num_hits
