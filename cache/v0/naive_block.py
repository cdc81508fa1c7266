"""The block of an allocator without prefix caching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import ImmutableBlockError
from cache.tokens import TokenRuns
from cache.v0.evictor import NEVER_ACCESSED
from cache.v0.interfaces import Block

if TYPE_CHECKING:
    from cache.tokens import TokenSlice
    from cache.v0.interfaces import BlockAllocator, BlockId


def join_tokens(first: TokenSlice, second: TokenSlice) -> TokenSlice:
    """Return `first` followed by `second`, both plain ids or both runs."""
    if isinstance(first, TokenRuns) and isinstance(second, TokenRuns):
        return first + second
    if isinstance(first, TokenRuns) or isinstance(second, TokenRuns):
        raise TypeError("plain token ids and token runs do not mix in a block")
    return [*first, *second]


class NaiveBlock(Block):
    """A block whose content nobody looks up.

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
