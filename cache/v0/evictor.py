"""Which cached block without references is given up first.

A policy is a sort key over what is known of a block; the smallest key goes first.
`KeyedEvictor` keeps the order, a policy says the key, `EVICTORS` names the policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from cache.errors import CacheError, require

NEVER_ACCESSED = -1.0
"""Last access of a block that no sequence has freed since it was cached or revived."""

NUM_STALE_ENTRIES_ALLOWED = 64


class CachedBlock(NamedTuple):
    """A cached block as an eviction policy sees it, read-only."""

    block_id: int
    content_hash: int
    num_hashed_tokens: int
    """Tokens of the prefix that ends with this block."""
    last_accessed: float
    """In seconds."""


class Evictor(ABC):
    """Holds the cached blocks without references.

    Source: vLLM 0.7.3, ``vllm/core/evictor.py``.
    """

    @abstractmethod
    def __contains__(self, block_id: int) -> bool: ...

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks held."""

    @abstractmethod
    def add(
        self,
        block_id: int,
        content_hash: int,
        num_hashed_tokens: int,
        last_accessed: float,
    ) -> None:
        """Take in a block."""

    @abstractmethod
    def evict(self) -> tuple[int, int]:
        """Choose a block, drop it and return its id and content hash."""

    @abstractmethod
    def update(self, block_id: int, last_accessed: float) -> None:
        """Note a later access of a block held."""

    @abstractmethod
    def remove(self, block_id: int) -> None:
        """Drop a block that is in use again."""


class KeyedEvictor(Evictor):
    """Evicts in the order of a key, O(log n) each.

    Subclasses define `key`. The heap may hold entries that were removed or updated
    since; they are skipped, and swept once they are the majority.
    """

    def __init__(self) -> None:
        self._held: dict[int, CachedBlock] = {}
        self._heap: list[tuple[Any, CachedBlock]] = []

    @abstractmethod
    def key(self, block: CachedBlock) -> tuple[float, ...]:
        """Return the sort key of a block; the smallest is evicted first."""

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._held

    @property
    def num_blocks(self) -> int:
        return len(self._held)

    def add(
        self,
        block_id: int,
        content_hash: int,
        num_hashed_tokens: int,
        last_accessed: float,
    ) -> None:
        if block_id in self._held:
            raise CacheError(f"block {block_id} is in the evictor already")
        self._push(
            CachedBlock(block_id, content_hash, num_hashed_tokens, last_accessed)
        )

    def evict(self) -> tuple[int, int]:
        while self._heap:
            _, block = heappop(self._heap)
            if self._held.get(block.block_id) is block:
                del self._held[block.block_id]
                return block.block_id, block.content_hash
        raise CacheError("the evictor holds no block to evict")

    def update(self, block_id: int, last_accessed: float) -> None:
        self._push(self._find(block_id)._replace(last_accessed=last_accessed))

    def remove(self, block_id: int) -> None:
        self._find(block_id)
        del self._held[block_id]

    def check(self) -> None:
        """Prove in O(n) that every block held has its entry in the heap."""
        live = {
            block.block_id
            for _, block in self._heap
            if self._held.get(block.block_id) is block
        }
        require(live == self._held.keys(), "evictor: a block held cannot be evicted")

    def _find(self, block_id: int) -> CachedBlock:
        if block_id not in self._held:
            raise CacheError(f"block {block_id} is not in the evictor")
        return self._held[block_id]

    def _push(self, block: CachedBlock) -> None:
        held, heap = self._held, self._heap
        held[block.block_id] = block
        if len(heap) > 2 * len(held) + NUM_STALE_ENTRIES_ALLOWED:
            heap[:] = [(self.key(other), other) for other in held.values()]
            heapify(heap)
        else:
            heappush(heap, (self.key(block), block))


class LRUEvictor(KeyedEvictor):
    """Least recently used first; of those, the deepest in its prefix; then by id."""

    def key(self, block: CachedBlock) -> tuple[float, ...]:
        return block.last_accessed, -block.num_hashed_tokens, block.block_id


EVICTORS: dict[str, type[Evictor]] = {"lru": LRUEvictor}
"""Policies by name."""


EvictionPolicy = str | Callable[[], Evictor]
"""A name of `EVICTORS`, or what makes an evictor."""


def make_evictor(eviction_policy: EvictionPolicy) -> Evictor:
    """Return a new evictor."""
    if not isinstance(eviction_policy, str):
        return eviction_policy()
    if eviction_policy not in EVICTORS:
        raise ValueError(
            f"no evictor is named {eviction_policy!r}; there are: "
            f"{', '.join(sorted(EVICTORS))}"
        )
    return EVICTORS[eviction_policy]()
