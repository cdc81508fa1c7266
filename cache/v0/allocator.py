"""The allocator without prefix caching.

`NaiveBlockAllocator` hands out ids from a `BlockStack`: ascending at first, then the
one freed last. `cache.v0.prefix_caching` adds the cache of full blocks to it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from cache.block_stack import BlockStack
from cache.errors import (
    CacheError,
    DoubleFreeError,
    ImmutableBlockError,
    NoFreeBlocksError,
)
from cache.tokens import TokenRuns
from cache.v0.evictor import NEVER_ACCESSED
from cache.v0.interfaces import Block, BlockAllocator, BlockId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cache.block import KVCacheBlock
    from cache.stats import BlockObserver
    from cache.tokens import TokenSlice
    from cache.v0.interfaces import BlockId


class NaiveBlockAllocator(BlockAllocator):
    """Hands out, shares and takes back blocks; content is never looked up.

    Source: vLLM 0.7.3, ``vllm/core/block/naive_block.py``.
    """

    def __init__(
        self,
        create_block: Block.Factory | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        block_ids: Iterable[BlockId] | None = None,
        block_pool: BlockStack | None = None,
    ) -> None:
        if block_ids is None:
            if num_blocks is None:
                raise ValueError("give num_blocks or block_ids")
            block_ids = range(num_blocks)
        ids = list(block_ids)
        if num_blocks is not None and len(set(ids)) != num_blocks:
            raise ValueError(
                f"num_blocks is {num_blocks}, but there are {len(set(ids))} block_ids"
            )
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self._create_block: Block.Factory = create_block or NaiveBlock
        self._stack = block_pool or BlockStack(reversed(ids), "KV block")
        self._ids = sorted(ids)
        self._copy_on_writes: list[tuple[BlockId, BlockId]] = []

    @property
    def observer(self) -> BlockObserver | None:
        return self._stack.observer

    @observer.setter
    def observer(self, observer: BlockObserver | None) -> None:
        self._stack.observer = observer

    def cached_block_ids(self) -> Iterable[int]:
        return ()

    # -- to have and to give up -----------------------------------------------

    def allocate_mutable_block(
        self, prev_block: Block | None, extra_hash: int | None = None
    ) -> Block:
        block = self._new_block(prev_block, extra_hash)
        block.block_id = self.take().block_id
        return block

    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: TokenSlice,
        extra_hash: int | None = None,
    ) -> Block:
        return self.allocate_immutable_blocks(prev_block, [token_ids], extra_hash)[0]

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: Sequence[TokenSlice],
        extra_hash: int | None = None,
    ) -> list[Block]:
        blocks: list[Block] = []
        for token_ids in block_token_ids:
            if len(token_ids) != self.block_size:
                raise ValueError(
                    f"an immutable block holds {self.block_size} tokens, got "
                    f"{len(token_ids)}"
                )
            prev_block = self._new_block(prev_block, extra_hash)
            prev_block.show_token_ids(token_ids, 0, self.block_size)
            blocks.append(prev_block)
        self._place_all(blocks)
        return blocks

    def allocate_immutable(
        self, prev_block: Block | None, token_ids: TokenSlice
    ) -> Block:
        """`allocate_immutable_block` under its name before vLLM 0.6."""
        return self.allocate_immutable_block(prev_block, token_ids)

    def allocate_mutable(self, prev_block: Block | None) -> Block:
        """`allocate_mutable_block` under its name before vLLM 0.6."""
        return self.allocate_mutable_block(prev_block)

    def allocate_chain(
        self, token_ids: TokenSlice, extra_hash: int | None = None
    ) -> list[Block]:
        blocks: list[Block] = []
        prev_block: Block | None = None
        block_size, num_tokens = self.block_size, len(token_ids)
        for start in range(0, num_tokens, block_size):
            prev_block = self._new_block(prev_block, extra_hash)
            prev_block.show_token_ids(
                token_ids, start, min(block_size, num_tokens - start)
            )
            blocks.append(prev_block)
        self._place_all(blocks)
        return blocks

    def free(self, block: Block, keep_block_object: bool = False) -> None:
        if block.block_id is None:
            raise DoubleFreeError(
                f"double free: {block!r} has no physical block, it was freed before; "
                f"free a block once"
            )
        if block.allocator is not self:
            raise CacheError(
                f"{block!r} is another allocator's: free it where it was allocated"
            )
        self._release(self._stack.block(block.block_id), block)
        block.freed_id = block.block_id
        block.block_id = None

    def fork(self, last_block: Block) -> list[Block]:
        # Blocks that a sliding window has dropped, and all before them, are left out.
        if last_block.block_id is None:
            raise CacheError(
                f"{last_block!r} was freed: only a block in use can be forked"
            )
        chain: list[Block] = []
        block: Block | None = last_block
        while block is not None and block.block_id is not None:
            chain.append(block)
            block = block.prev_block
        chain.reverse()
        physical = [
            self._stack.block(held.block_id)
            for held in chain
            if held.block_id is not None
        ]
        for one in physical:
            if one.ref_cnt <= 0:
                raise CacheError(f"block {one.block_id} is free: it cannot be forked")
        forked: list[Block] = []
        prev_block: Block | None = chain[0].prev_block
        for source, one in zip(chain, physical, strict=True):
            self._stack.retain(one)
            prev_block = source.view(prev_block)
            forked.append(prev_block)
        return forked

    # -- copy on write --------------------------------------------------------

    def is_shared(self, block_id: BlockId) -> bool:
        return self._stack.block(block_id).ref_cnt > 1

    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        # The pair is kept for `clear_copy_on_writes`, and the reference to the shared
        # block is given up.
        block_id = block.block_id
        if block_id is None:
            raise CacheError(f"{block!r} was freed: nothing can be written to it")
        shared = self._stack.block(block_id)
        if shared.ref_cnt <= 1:
            return block_id
        if not self.get_num_free_blocks():
            raise NoFreeBlocksError(
                f"block {block_id} is shared, it must be copied before it is written "
                f"to, and none of {self.get_num_total_blocks()} blocks is free"
            )
        # The reference drops the shared block first; as others hold it, it does not
        # become free by that, and the order cannot be told.
        copy_id = self.take().block_id
        self._stack.drop(shared)
        self._copy_on_writes.append((block_id, copy_id))
        return copy_id

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        if not self._copy_on_writes:
            return []
        pairs = self._copy_on_writes
        self._copy_on_writes = []
        return pairs

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        # (The reference never asks, and has no such method.)
        if block.block_id is None:
            raise CacheError(f"{block!r} was freed: it cannot be promoted")
        if not block.is_full:
            raise CacheError(f"{block!r} is not full: it cannot be promoted")
        return block.block_id

    # -- numbers --------------------------------------------------------------

    def get_num_total_blocks(self) -> int:
        return self._stack.num_blocks

    def get_num_free_blocks(self) -> int:
        return self._stack.num_free_blocks

    def get_physical_block_id(self, absolute_id: BlockId) -> int:
        self._stack.block(absolute_id)
        return bisect_left(self._ids, absolute_id)

    @property
    def all_block_ids(self) -> frozenset[BlockId]:
        return frozenset(self._ids)

    # -- prefix caching, which there is none of -------------------------------

    def mark_blocks_as_accessed(self, block_ids: Sequence[BlockId], now: float) -> None:
        """Do nothing: nothing is evicted."""

    def mark_blocks_as_computed(self, block_ids: Sequence[BlockId]) -> None:
        """Do nothing: nothing is looked up."""

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: Sequence[Sequence[BlockId]]
    ) -> list[BlockId]:
        return []

    def find_cached_blocks_prefix(self, block_hashes: Sequence[int]) -> list[int]:
        return []

    def get_prefix_cache_hit_rate(self) -> float:
        return -1.0

    def reset_prefix_cache(self) -> bool:
        return True

    # -- swapping -------------------------------------------------------------

    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        return sum(block.is_full for block in blocks)

    def get_num_blocks_for_swap_in(self, blocks: Sequence[Block]) -> int:
        return len(blocks)

    def swap_out(self, blocks: Sequence[Block]) -> None:
        seen: set[int] = set()
        for block in blocks:
            if block.block_id is None:
                raise DoubleFreeError(f"{block!r} was freed: it cannot be swapped out")
            if id(block) in seen:
                raise DoubleFreeError(f"{block!r} is to be swapped out twice at once")
            seen.add(id(block))
        for block in blocks:
            self.free(block, keep_block_object=True)

    def swap_in(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.block_id is not None:
                raise CacheError(
                    f"{block!r} is placed already: swap it out, or free it, first"
                )
        self._place_all(blocks)

    def _place_all(self, blocks: Sequence[Block]) -> None:
        """Place new blocks, or none if they do not all fit."""
        num_needed = self.get_num_blocks_for_swap_in(blocks)
        num_free = self.get_num_free_blocks()
        if num_needed > num_free:
            raise NoFreeBlocksError(
                f"{num_needed} blocks are needed, {num_free} of "
                f"{self.get_num_total_blocks()} are free"
            )
        for block in blocks:
            self._place(block)

    # -- physical blocks alone, for tables that make theirs later --------------

    def take(self) -> KVCacheBlock:
        """Return a free block, with one reference."""
        return self._stack.take()

    def take_all(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks in the order of `allocate_chain`, or none if they do not fit."""
        return self._stack.take_all(num_blocks)

    def release_all(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give up different blocks, in that order."""
        self._stack.release_all(blocks)

    # -- own proof ------------------------------------------------------------

    def check(self, references: Mapping[BlockId, int]) -> None:
        self._stack.check(references)

    # -- what prefix caching replaces -----------------------------------------

    def _release(self, physical: KVCacheBlock, block: Block) -> None:
        """Take away the reference of `block`, a view of `physical`."""
        self._stack.release(physical)

    def _place(self, block: Block) -> None:
        """Give a block with content its id."""
        block.block_id = self.take().block_id
        block.allocator = self

    def _new_block(self, prev_block: Block | None, extra_hash: int | None) -> Block:
        """Return an empty block without an id."""
        return self._create_block(
            prev_block, (), self.block_size, self, extra_hash=extra_hash
        )


def join_tokens(first: TokenSlice, second: TokenSlice) -> TokenSlice:
    """Return `first` followed by `second`, both plain ids or both runs."""
    if isinstance(first, TokenRuns) and isinstance(second, TokenRuns):
        return first + second
    if isinstance(first, TokenRuns) or isinstance(second, TokenRuns):
        raise TypeError("plain token ids and token runs do not mix in a block")
    return [*first, *second]


class NaiveBlock(Block):
    """A block whose content is not looked up.

    Its tokens are a window on some list that may grow beyond it (the sequence's own):
    a block costs the same whatever it holds.

    Source: vLLM 0.7.3, ``vllm/core/block/naive_block.py``.
    """

    __slots__ = (
        "_source",
        "_start",
        "block_size",
        "index",
        "num_tokens",
    )

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: TokenSlice,
        block_size: int,
        allocator: BlockAllocator,
        block_id: BlockId | None = None,
        *,
        extra_hash: int | None = None,
    ) -> None:
        self.prev_block = prev_block
        self.block_size = block_size
        self.allocator = allocator
        self.block_id = block_id
        self.extra_hash = extra_hash
        self.index: int = (
            prev_block.index + 1 if isinstance(prev_block, NaiveBlock) else 0
        )
        self._source = token_ids
        self._start = 0
        self.num_tokens = len(token_ids)
        if self.num_tokens > block_size:
            raise ImmutableBlockError(
                f"block {block_id}: {self.num_tokens} tokens do not fit its "
                f"{block_size} slots"
            )

    def append_token_ids(self, token_ids: TokenSlice) -> None:
        if self.num_tokens:
            source = join_tokens(self.token_ids, token_ids)
            self.show_token_ids(source, 0, len(token_ids))
        else:
            self.show_token_ids(token_ids, 0, len(token_ids))

    def show_token_ids(self, source: TokenSlice, start: int, num_new: int) -> None:
        num_tokens = self.num_tokens + num_new
        if num_tokens > self.block_size:
            raise ImmutableBlockError(
                f"block {self.block_id} holds {self.num_tokens} tokens in "
                f"{self.block_size} slots: {num_new} more cannot be appended; a full "
                f"block is immutable, allocate another"
            )
        if not num_new:
            return
        if self.block_id is not None:
            self.block_id = self.allocator.cow_block_if_not_appendable(self)
        self._source = source
        self._start = start
        self.num_tokens = num_tokens
        if num_tokens == self.block_size and self.block_id is not None:
            self.block_id = self.allocator.promote_to_immutable_block(self)

    def view(self, prev_block: Block | None) -> Block:
        block = type(self)(
            prev_block,
            (),
            self.block_size,
            self.allocator,
            self.block_id,
            extra_hash=self.extra_hash,
        )
        block._source = self._source
        block._start = self._start
        block.num_tokens = self.num_tokens
        return block

    @property
    def token_ids(self) -> TokenSlice:
        return self._source[self._start : self._start + self.num_tokens]

    @property
    def num_tokens_total(self) -> int:
        return self.index * self.block_size + self.num_tokens

    @property
    def num_empty_slots(self) -> int:
        return self.block_size - self.num_tokens

    @property
    def is_full(self) -> bool:
        return self.num_tokens == self.block_size

    @property
    def computed(self) -> bool:
        return False

    @property
    def last_accessed(self) -> float:
        return NEVER_ACCESSED

    @property
    def content_hash(self) -> int | None:
        return None

    def __repr__(self) -> str:
        block_id = str(self.block_id)
        if self.block_id is None and hasattr(self, "freed_id"):
            block_id += f", was {self.freed_id}"
        return (
            f"{type(self).__name__}(block_id={block_id}, index={self.index}, "
            f"num_tokens={self.num_tokens})"
        )
