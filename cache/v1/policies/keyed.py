"""Policies that are a sort key."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from cache.errors import CacheError, require
from cache.v1.policies.base import CachePolicy

NEVER = -1
"""No release yet."""

_NUM_STALE_ENTRIES_ALLOWED = 64


@dataclass(slots=True, eq=False)
class HeldBlock:
    """A block as a sort key sees it. Times are numbers of releases, of any block."""

    block_id: int
    content: int
    depth: int
    """Blocks before it in its prompt."""
    num_hits: int = 0
    """Times that it was found since it was computed."""
    first_released_at: int = NEVER
    released_at: int = NEVER
    """The latest release: greater is more recent."""
    is_evictable: bool = False


class KeyedPolicy(CachePolicy):
    """Evicts in the order of a key, O(log n) each.

    Subclasses define `key`, which is asked when a block is released. A block in use has
    no place in the order.
    """

    def __init__(self) -> None:
        self._held: dict[int, HeldBlock] = {}
        self._heap: list[tuple[Any, int, HeldBlock]] = []
        self._num_released = 0
        self._num_evictable = 0

    @abstractmethod
    def key(self, block: HeldBlock) -> Any:
        """Return the sort key of a block; the smallest is evicted first.

        Equal keys go by release, so the deepest block of a prompt goes first.
        """

    def cached(self, block_id: int, content: int, depth: int) -> None:
        """See `CachePolicy.cached`."""
        self._held[block_id] = HeldBlock(block_id, content, depth)

    def hit(self, block_id: int) -> None:
        """See `CachePolicy.hit`."""
        block = self._held[block_id]
        block.num_hits += 1
        self._num_evictable -= block.is_evictable
        block.is_evictable = False

    def released(self, block_id: int) -> None:
        """See `CachePolicy.released`."""
        block = self._held[block_id]
        block.released_at = self._num_released
        if block.first_released_at == NEVER:
            block.first_released_at = self._num_released
        block.is_evictable = True
        self._num_released += 1
        self._num_evictable += 1
        self._push(block)

    def evict(self, incoming: int | None) -> int:
        """See `CachePolicy.evict`."""
        del incoming
        while self._heap:
            _, released_at, block = heappop(self._heap)
            if block.is_evictable and block.released_at == released_at:
                return self._forget(block)
        raise CacheError("the policy holds no block that could be evicted")

    @property
    def num_evictable(self) -> int:
        """See `CachePolicy.num_evictable`."""
        return self._num_evictable

    def check(self) -> None:
        """Prove that every evictable block has one entry in the heap."""
        live = [
            block.block_id
            for _, released_at, block in self._heap
            if block.is_evictable and block.released_at == released_at
        ]
        evictable = [b.block_id for b in self._held.values() if b.is_evictable]
        require(
            sorted(live) == sorted(evictable),
            "policy: the heap does not hold each evictable block once",
        )
        require(
            len(evictable) == self._num_evictable,
            f"policy: {len(evictable)} evictable blocks, {self._num_evictable} counted",
        )

    def _forget(self, block: HeldBlock) -> int:
        block.is_evictable = False
        self._num_evictable -= 1
        del self._held[block.block_id]
        return block.block_id

    def _push(self, block: HeldBlock) -> None:
        heap = self._heap
        if len(heap) > 2 * self._num_evictable + _NUM_STALE_ENTRIES_ALLOWED:
            evictable = [b for b in self._held.values() if b.is_evictable]
            heap[:] = [
                (self.key(other), other.released_at, other) for other in evictable
            ]
            heapify(heap)
        else:
            heappush(heap, (self.key(block), block.released_at, block))
