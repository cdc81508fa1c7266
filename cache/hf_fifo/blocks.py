"""Blocks of transformers' continuous batching: two free queues and an index."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from cache.errors import (
    BlockTableError,
    CacheError,
    DoubleFreeError,
    NoFreeBlocksError,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from cache.stats import BlockObserver


class BlockManager:
    """Hands out blocks, counts references, and remembers what blocks hold.

    A block is in use, or free; and it is *complete* once its content is computed and
    has a key. Free blocks stand in one of two queues::

        uninitialized   without content:  first freed, first taken
        initialized     complete:         taken when the others are used up,
                                          the one that was freed last goes first

    Both kinds count as free.

    Source: transformers 5.17, ``generation/continuous_batching/cache_manager.py``
    (`BlockManager`). That initialized blocks are given up in reverse order, so that
    content used long ago outlives content used just now, is the release's.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.observer: BlockObserver | None = None
        # Blocks so far that lost their content because others were used up.
        self.num_evictions = 0
        self._uninitialized = deque(range(num_blocks))
        self._initialized: dict[int, None] = {}
        self._block_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._ref_counts = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks without references, with content or without."""
        return len(self._uninitialized) + len(self._initialized)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content a look-up finds."""
        return len(self._block_of)

    def cached_block_ids(self) -> Collection[int]:
        """Return the blocks that a look-up finds, in use or free."""
        return self._block_of.values()

    def is_complete(self, block_id: int) -> bool:
        """Whether the content of a block is computed and has a key."""
        return block_id in self._key_of

    def find(self, key: int) -> int | None:
        """Return the block of that content, or None."""
        return self._block_of.get(key)

    def is_shared(self, block_id: int) -> bool:
        """Whether several tables hold a block."""
        return self._ref_counts[block_id] > 1

    # -- references -----------------------------------------------------------

    def take(self, num_blocks: int) -> list[int]:
        """Return blocks for new content, with one reference each."""
        if num_blocks > self.num_free_blocks:
            raise NoFreeBlocksError(
                f"cannot take {num_blocks} blocks: {self.num_free_blocks} are free"
            )
        self._uninitialize(num_blocks - len(self._uninitialized))
        taken = [self._uninitialized.popleft() for _ in range(num_blocks)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        if self.observer is not None and taken:
            self.observer.taken(taken)
        return taken

    def _uninitialize(self, num_blocks: int) -> None:
        """Forget the content of free blocks, the one freed last first."""
        evicted = [self._initialized.popitem()[0] for _ in range(num_blocks)]
        for block_id in evicted:
            del self._block_of[self._key_of.pop(block_id)]
        self._uninitialized.extend(evicted)
        self.num_evictions += len(evicted)
        if self.observer is not None and evicted:
            self.observer.evicted(evicted)

    def hold(self, block_id: int) -> None:
        """Add a reference to a complete block, in use or free."""
        if block_id not in self._key_of:
            raise CacheError(f"block {block_id} is not complete and cannot be shared")
        self._ref_counts[block_id] += 1
        if self._ref_counts[block_id] == 1:
            del self._initialized[block_id]
            if self.observer is not None:
                self.observer.revived((block_id,))

    def release(self, block_ids: Sequence[int]) -> int:
        """Take a reference of each block away, in order; return how many came free."""
        freed = [block_id for block_id in block_ids if self._drop(block_id)]
        if self.observer is not None and freed:
            self.observer.released(freed)
        return len(freed)

    def _drop(self, block_id: int) -> bool:
        """Take a reference away; True if it was the last one."""
        left = self._ref_counts[block_id] - 1
        if left < 0:
            raise DoubleFreeError(f"double free: block {block_id} is free already")
        self._ref_counts[block_id] = left
        if left:
            return False
        if block_id in self._key_of:
            self._initialized[block_id] = None
        else:
            self._uninitialized.append(block_id)
        return True

    # -- content --------------------------------------------------------------

    def complete(self, block_id: int, key: int) -> int:
        """Settle the content of a block in use; return the block to refer to instead.

        Where another block holds the same already, that one gets the reference, and
        `block_id` is free again.
        """
        if block_id in self._key_of or self._ref_counts[block_id] != 1:
            raise CacheError(
                f"block {block_id} must be incomplete and in use by one request, it "
                f"has {self._ref_counts[block_id]} references"
            )
        known = self._block_of.get(key)
        if known is None:
            self._key_of[block_id] = key
            self._block_of[key] = block_id
            return block_id
        self.hold(known)
        self.release((block_id,))
        return known

    # -- proof ----------------------------------------------------------------

    def check(self, references: Mapping[int, int]) -> None:
        """Prove invariant 2 in O(n)."""
        waiting = set(self._uninitialized)
        require(len(waiting) == len(self._uninitialized), "a block is free twice")
        for block_id, count in enumerate(self._ref_counts):
            held = references.get(block_id, 0)
            require(
                count == held,
                "block {} counts {} references, {} tables hold it",
                block_id,
                count,
                held,
            )
            places = (
                (held > 0) + (block_id in waiting) + (block_id in self._initialized)
            )
            require(
                places == 1,
                "block {} must be in use or in one free queue, it is in {} of them",
                block_id,
                places,
            )
            require(
                (block_id in self._initialized) <= (block_id in self._key_of)
                and not (block_id in waiting and block_id in self._key_of),
                "free block {} stands in the wrong queue for its content",
                block_id,
            )
        index = {key: block_id for block_id, key in self._key_of.items()}
        require(index == self._block_of, "keys and blocks do not match each other")


class CpuPool:
    """Blocks in host memory, the smallest free id first, and their owners.

    Source: transformers 5.17, ``generation/continuous_batching/offloading_manager.py``
    (`OffloadingManager`).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.observer: BlockObserver | None = None
        self._free = list(range(num_blocks))
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request owns."""
        return len(self._free)

    def __contains__(self, request_id: object) -> bool:
        """Whether a request owns blocks here."""
        return request_id in self._tables

    def table(self, request_id: int) -> list[int]:
        """Return the blocks of a request, in the order of its tokens."""
        return self._tables[request_id]

    def cached_block_ids(self) -> Iterable[int]:
        """Return no block: contents are not looked up here."""
        return ()

    def put(self, request_id: int, num_blocks: int) -> list[int]:
        """Give blocks to a request and return them."""
        if request_id in self._tables:
            raise BlockTableError(f"request {request_id} is on the CPU already")
        if num_blocks > len(self._free):
            raise NoFreeBlocksError(
                f"cannot take {num_blocks} CPU blocks: {len(self._free)} are free"
            )
        table = [heappop(self._free) for _ in range(num_blocks)]
        self._tables[request_id] = table
        if self.observer is not None and table:
            self.observer.taken(table)
        return table

    def pop(self, request_id: int) -> list[int]:
        """Take the blocks of a request back and return them."""
        table = self._tables.pop(request_id)
        for block_id in table:
            heappush(self._free, block_id)
        if self.observer is not None and table:
            self.observer.released(table)
        return table

    def check(self) -> None:
        """Prove invariant 2 of this tier in O(n log n)."""
        held = [block_id for table in self._tables.values() for block_id in table]
        require(
            sorted(held + self._free) == list(range(self.num_blocks)),
            f"CPU pool: {len(held)} blocks owned and {len(self._free)} free do not "
            f"make up {self.num_blocks}",
        )
        ordered = self._free.copy()
        heapify(ordered)
        require(ordered == self._free, "CPU pool: the free blocks are out of order")
