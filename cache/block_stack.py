"""Physical blocks with reference counts and a last-in, first-out free list.

What the generations before V1 allocate from: the block freed last is the next one
used. V1's pool (`cache.v1.block_pool`) keeps a queue instead, since it evicts from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.block import KVCacheBlock
from cache.errors import CacheError, DoubleFreeError, NoFreeBlocksError, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cache.stats import BlockObserver


class BlockStack:
    """A pool of blocks, handed out from the top of a stack."""

    def __init__(self, block_ids: Iterable[int], name: str) -> None:
        self.name = name
        self.observer: BlockObserver | None = None
        self._free = [KVCacheBlock(block_id) for block_id in block_ids]
        self._blocks = {block.block_id: block for block in self._free}

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks on the stack."""
        return len(self._free)

    @property
    def free_blocks(self) -> list[KVCacheBlock]:
        """A copy of the stack, its top last."""
        return self._free.copy()

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks

    def block(self, block_id: int) -> KVCacheBlock:
        """Return the block of that id."""
        if block_id not in self._blocks:
            raise CacheError(f"the {self.name} pool has no block {block_id}")
        return self._blocks[block_id]

    def take(self) -> KVCacheBlock:
        """Return the top block, with one reference. O(1)."""
        if not self._free:
            raise NoFreeBlocksError(
                f"out of memory: none of the {self.num_blocks} blocks of the "
                f"{self.name} pool is free"
            )
        block = self._free.pop()
        block.ref_cnt = 1
        if self.observer is not None:
            self.observer.taken((block.block_id,))
        return block

    def take_all(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take so many blocks one after the other, or none if they are not there."""
        num_left = len(self._free) - num_blocks
        if num_left < 0:
            raise NoFreeBlocksError(
                f"{num_blocks} blocks are needed, {len(self._free)} of "
                f"{self.num_blocks} are free"
            )
        taken = self._free[num_left:]
        taken.reverse()
        del self._free[num_left:]
        for block in taken:
            block.ref_cnt = 1
        if self.observer is not None and taken:
            self.observer.taken([block.block_id for block in taken])
        return taken

    def release_all(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take a reference of each away; they are different ones."""
        for block in blocks:
            if block.ref_cnt != 1:
                for each in blocks:
                    self.release(each)
                return
        for block in blocks:
            block.ref_cnt = 0
        self._free.extend(blocks)
        if self.observer is not None and blocks:
            self.observer.released([block.block_id for block in blocks])

    def retain(self, block: KVCacheBlock) -> None:
        """Add a reference to a block in use."""
        if block.ref_cnt <= 0:
            raise CacheError(
                f"block {block.block_id} of the {self.name} pool is free; only a block "
                f"in use can be shared"
            )
        block.ref_cnt += 1

    def drop(self, block: KVCacheBlock) -> int:
        """Take a reference away and return how many are left; the stack is unchanged.

        For callers that keep unreferenced blocks elsewhere (cached, evictable); others
        call `release`.
        """
        if block.ref_cnt <= 0:
            raise DoubleFreeError(
                f"double free: block {block.block_id} of the {self.name} pool is free "
                f"already; free a table once"
            )
        block.ref_cnt -= 1
        if self.observer is not None and not block.ref_cnt:
            self.observer.released((block.block_id,))
        return block.ref_cnt

    def release(self, block: KVCacheBlock) -> bool:
        """Take a reference away; True if it was the last, and the block is free now."""
        if self.drop(block):
            return False
        self._free.append(block)
        return True

    def put_back(self, block: KVCacheBlock) -> None:
        """Put a block without references, which `drop` left outside, on the stack."""
        self._free.append(block)

    def revive(self, block: KVCacheBlock) -> None:
        """Give its first reference to a block that `drop` left outside the stack."""
        block.ref_cnt = 1
        if self.observer is not None:
            self.observer.revived((block.block_id,))

    def retake(self, block: KVCacheBlock) -> None:
        """Do so for new content: what the block was kept outside for is lost."""
        block.ref_cnt = 1
        if self.observer is not None:
            self.observer.evicted((block.block_id,))
            self.observer.taken((block.block_id,))

    def check(
        self, references: Mapping[int, int], outside: frozenset[int] = frozenset()
    ) -> None:
        """Prove invariant 2 in O(n).

        `references` counts the tables that hold a block, by id; blocks in `outside`
        have none, and the caller keeps them off the stack.
        """
        free = {block.block_id for block in self._free}
        require(
            len(free) == len(self._free), f"{self.name} pool: a block is free twice"
        )
        # Most blocks of a large pool are free, and nothing else.
        idle = {block.block_id for block in self._free if not block.ref_cnt}
        idle = idle.difference(references, outside)
        for block_id in [each for each in self._blocks if each not in idle]:
            block, held = self._blocks[block_id], references.get(block_id, 0)
            require(
                block.ref_cnt == held,
                f"{self.name} pool: block {block_id} counts {block.ref_cnt} references,"
                f" {held} tables hold it",
            )
            places = (held > 0) + (block_id in free) + (block_id in outside)
            require(
                places == 1,
                f"{self.name} pool: block {block_id} is held {held} times, "
                f"{'' if block_id in free else 'not '}free and "
                f"{'' if block_id in outside else 'not '}kept outside",
            )
