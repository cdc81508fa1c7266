"""The pool of physical blocks where nothing is cached and what is freed goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import NoFreeBlocksError, require
from cache.v1.block_pool import BlockPool

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence

    from cache.block import KVCacheBlock


class FreeStack:
    """Free blocks of which the one freed last is the next one taken.

    Parameters
    ----------
    blocks
        Blocks that are free at the start, in the order in which they will be taken.

    Attributes
    ----------
    stack
        The next one last.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.stack = list(reversed(blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self.stack)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Walk the free blocks, the next one first."""
        return reversed(self.stack)


class PlainBlockPool(BlockPool):
    """A `BlockPool` without prefix caching, whose blocks are in one table or free.

    No block is shared and none is found again, so that references need no counting,
    and lists of blocks are cut and joined at the speed of memory.

    Parameters
    ----------
    num_gpu_blocks
        See `BlockPool`.
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        super().__init__(num_gpu_blocks, enable_caching=False, unhashed_first=True)
        free = FreeStack(self.blocks[1:])
        self.free_block_queue = free  # type: ignore[assignment]
        self._stack = free.stack
        self.take_block = self._stack.pop  # type: ignore[method-assign]
        self.drop_block = self._stack.append  # type: ignore[assignment, method-assign]

    @property
    def num_free_blocks(self) -> int:
        return len(self._stack)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        stack = self._stack
        if num_blocks > len(stack):
            raise NoFreeBlocksError(
                f"cannot take {num_blocks} blocks: {len(stack)} of "
                f"{self.num_usable_blocks} are free"
            )
        if not num_blocks:
            return []
        taken = stack[: -num_blocks - 1 : -1]
        del stack[-num_blocks:]
        if self.observer is not None:
            self.observer.taken([block.block_id for block in taken])
        return taken

    def free_blocks(self, ordered_blocks: Sequence[KVCacheBlock]) -> None:
        if self.observer is not None and ordered_blocks:
            self.observer.released([block.block_id for block in ordered_blocks])
        self._stack += reversed(ordered_blocks)

    def check(self) -> None:
        free = [block.block_id for block in self._stack]
        require(
            len(set(free)) == len(free) and 0 not in free,
            "pool: a block stands twice among the free ones, or is the null block",
        )

    def check_references(self, references: Counter[int]) -> None:
        free = {block.block_id for block in self._stack}
        for block in self.blocks[1:]:
            require(
                references[block.block_id] + (block.block_id in free) == 1,
                "block {}: {} tables hold it, and it is {}free",
                block.block_id,
                references[block.block_id],
                "" if block.block_id in free else "not ",
            )
