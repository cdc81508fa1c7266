"""Least recently used: the order of V1's own free queue."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from cache.v1.policies.base import CachePolicy


class LRU(CachePolicy):
    """Evicts what was released longest ago.

    Blocks are used until their release, so recency counts from there; a prompt's last
    block is released first. That is the order in which V1's free queue stands, block
    for block, in every release.

    Source: vLLM 0.11.2, ``vllm/v1/core/block_pool.py``. The rule is as old as paging:
    Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
    """

    exact_on_fast_path: ClassVar[bool] = True
    orders_uncached: ClassVar[bool] = True

    def __init__(self) -> None:
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def cached(self, block_id: int, content: int, depth: int) -> None:
        """See `CachePolicy.cached`; nothing to remember before the release."""

    def hit(self, block_id: int) -> None:
        """See `CachePolicy.hit`."""
        self._evictable.pop(block_id, None)

    def released(self, block_id: int) -> None:
        """See `CachePolicy.released`."""
        self._evictable[block_id] = None

    def evict(self, incoming: int | None) -> int:
        """See `CachePolicy.evict`."""
        return self._evictable.popitem(last=False)[0]

    @property
    def num_evictable(self) -> int:
        """See `CachePolicy.num_evictable`."""
        return len(self._evictable)
