"""The CPU pool of transformers' continuous batching: where evicted blocks wait."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from cache.errors import BlockTableError, NoFreeBlocksError, require

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.stats import BlockObserver


class CpuPool:
    """Blocks in host memory, the smallest free id first, and who owns them.

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
        """Return no block: nobody looks contents up here."""
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
