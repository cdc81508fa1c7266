"""The free-block queue: eviction order as a stack before a linked list."""

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
    is allocated when a block enters or leaves. What is put at the front, though, has
    no content to be found by: it stands on a stack, which moves at the speed of memory.

    The order is kept by the callers: initially ascending block ids; whoever frees
    decides at which end, and in which order, blocks come back. Taking from the front
    while appending at the back makes the order least recently used.

    ::

        [b9, b4, b6] head <-> b3 <-> b7 <-> ... <-> b1 <-> tail
                  ^ the front                         (head, tail: sentinels)

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
        self._stack: list[KVCacheBlock] = []  # before the linked ones, front last
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Remove and return the front block. O(1).

        Raises
        ------
        NoFreeBlocksError
            If the queue is empty.
        """
        stack = self._stack
        if not stack:
            return self.popleft_n(1)[0]
        self.num_free_blocks -= 1
        return stack.pop()

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
        self.num_free_blocks -= num_blocks
        stack = self._stack
        taken = stack[: -num_blocks - 1 : -1] if num_blocks else []
        if taken:
            del stack[-len(taken) :]
            if len(taken) == num_blocks:
                return taken
        block = self._head.next_free_block
        for _ in range(num_blocks - len(taken)):
            assert block is not None
            taken.append(block)
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = after
        assert block is not None
        self._head.next_free_block = block
        block.prev_free_block = self._head
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` out of the queue, wherever it stands. O(1) unless prepended.

        Raises
        ------
        CacheError
            If the block is not in the queue.
        """
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            if block not in self._stack:
                raise CacheError(f"block {block.block_id} is not in the free queue")
            self._stack.remove(block)
            self.num_free_blocks -= 1
            return
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

    def prepend(self, block: KVCacheBlock) -> None:
        """Put `block` at the front. O(1)."""
        self._stack.append(block)
        self.num_free_blocks += 1

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the front, the first of them first. O(len(blocks)).

        As with `append_n`, the blocks must not be in the queue.
        """
        num_before = len(self._stack)
        self._stack += reversed(blocks)
        self.num_free_blocks += len(self._stack) - num_before

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Walk the free blocks, front first."""
        yield from reversed(self._stack)
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
        before, num_stacked = self._head, len(self._stack)
        for position, block in enumerate(self):
            is_linked = position >= num_stacked
            require(
                block.prev_free_block is (before if is_linked else None),
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
            if is_linked:
                before = block
        require(
            self._tail.prev_free_block is before,
            f"free queue: the tail does not link back to {before.block_id}",
        )
        require(
            len(seen) == self.num_free_blocks,
            f"free queue: {len(seen)} blocks linked, {self.num_free_blocks} counted",
        )
