"""The free-block queue: eviction order as a linked list through the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.block import KVCacheBlock
from cache.errors import CacheError, NoFreeBlocksError, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they will be reused, front first.

    A double-ended queue would do but for one operation: a prefix hit revives a block
    from the middle, which must be O(1). So the links live in the blocks, and nothing
    is allocated when a block enters or leaves.

    The order is kept by the callers: initially ascending block ids; whoever frees
    decides at which end, and in which order, blocks come back. Taking from the front
    while appending at the back makes the order least recently used.

    ::

        head <-> b3 <-> b7 <-> ... <-> b1 <-> tail      (head, tail: sentinels)

    Parameters
    ----------
    blocks
        Blocks that are free at the start, in queue order.

    Notes
    -----
    Source: vLLM 0.11.2, ``vllm/v1/core/kv_cache_utils.py``
    (`FreeKVCacheBlockQueue`).
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Remove and return the front block. O(1).

        Raises
        ------
        NoFreeBlocksError
            If the queue is empty.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, num_blocks: int) -> list[KVCacheBlock]:
        """Remove and return the first `num_blocks` blocks, in order. O(num_blocks).

        Raises
        ------
        NoFreeBlocksError
            If fewer blocks are free; the queue is unchanged.
        """
        if num_blocks > self.num_free_blocks:
            raise NoFreeBlocksError(
                f"cannot take {num_blocks} blocks: {self.num_free_blocks} are free"
            )
        taken: list[KVCacheBlock] = []
        block = self._head.next_free_block
        for _ in range(num_blocks):
            assert block is not None
            taken.append(block)
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = after
        assert block is not None
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= num_blocks
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` out of the queue, wherever it stands. O(1).

        Raises
        ------
        CacheError
            If the block is not in the queue.
        """
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise CacheError(f"block {block.block_id} is not in the free queue")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put `block` at the back. O(1)."""
        self.append_n((block,))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put `blocks` at the back, in the given order. O(len(blocks)).

        The blocks must not be in the queue; `BlockPool` sees to that by reference
        counts, so it is proven by `check` and not looked at here.
        """
        last = self._tail.prev_free_block
        assert last is not None
        num_blocks = 0
        for block in blocks:
            last.next_free_block = block
            block.prev_free_block = last
            last = block
            num_blocks += 1
        last.next_free_block = self._tail
        self._tail.prev_free_block = last
        self.num_free_blocks += num_blocks

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put `blocks` at the front, the first of them first. O(len(blocks)).

        As with `append_n`, the blocks must not be in the queue.
        """
        before = self._head
        first = before.next_free_block
        assert first is not None
        num_blocks = 0
        for block in blocks:
            before.next_free_block = block
            block.prev_free_block = before
            before = block
            num_blocks += 1
        before.next_free_block = first
        first.prev_free_block = before
        self.num_free_blocks += num_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Walk the free blocks, front first."""
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free_block

    def __len__(self) -> int:
        return self.num_free_blocks

    def check(self) -> None:
        """Prove links and count in O(n).

        Raises
        ------
        InvariantError
            If a link is one-sided, a block stands twice, or the count is off.
        """
        seen: set[int] = set()
        before = self._head
        for block in self:
            require(
                block.prev_free_block is before,
                "free queue: block {} does not link back to {}",
                block.block_id,
                before.block_id,
            )
            require(
                block.block_id not in seen,
                "free queue: block {} stands twice",
                block.block_id,
            )
            seen.add(block.block_id)
            before = block
        require(
            self._tail.prev_free_block is before,
            f"free queue: the tail does not link back to {before.block_id}",
        )
        require(
            len(seen) == self.num_free_blocks,
            f"free queue: {len(seen)} blocks linked, {self.num_free_blocks} counted",
        )
