"""A block that prefix caching finds again by its content, and its key.

The key chains the block's tokens to the key of the block before it.

Source: vLLM 0.7.3, ``vllm/core/block/prefix_caching_block.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cache.hashing import NONE_HASH, hash_block
from cache.tokens import content_of
from cache.v0.evictor import NEVER_ACCESSED
from cache.v0.naive_block import NaiveBlock

if TYPE_CHECKING:
    from cache.tokens import TokenSlice
    from cache.v0.interfaces import Block, BlockAllocator, BlockId


def hash_block_tokens(
    is_first_block: bool,
    prev_block_hash: int | None,
    cur_block_token_ids: TokenSlice,
    extra_hash: int | None = None,
) -> int:
    """Return the key of a full block."""
    content = (is_first_block, content_of(cur_block_token_ids))
    return hash_block(
        NONE_HASH if prev_block_hash is None else prev_block_hash,
        content if extra_hash is None else (*content, extra_hash),
    )


@runtime_checkable
class FindsByContent(Protocol):
    """What such a block asks of its allocator."""

    def block_is_computed(self, block_id: BlockId) -> bool:
        """Whether the block may answer look-ups."""
        ...

    def get_last_accessed(self, block_id: BlockId) -> float:
        """Return when a block in use was last marked as accessed, in seconds."""
        ...


class PrefixCachingBlock(NaiveBlock):
    """A block that is found by its content once it is full.

    Parameters are those of `NaiveBlock`.
    """

    __slots__ = ("_content_hash",)

    hash_block_tokens = staticmethod(hash_block_tokens)

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
        super().__init__(
            prev_block,
            token_ids,
            block_size,
            allocator,
            block_id,
            extra_hash=extra_hash,
        )
        self._content_hash: int | None = None

    def view(self, prev_block: Block | None) -> Block:
        block = super().view(prev_block)
        if isinstance(block, PrefixCachingBlock):
            block._content_hash = self._content_hash  # not to be hashed again
        return block

    @property
    def content_hash(self) -> int | None:
        if self._content_hash is not None or not self.is_full:
            return self._content_hash
        prev_hash = None
        if self.prev_block is not None:
            prev_hash = self.prev_block.content_hash
            if prev_hash is None:
                return None
        self._content_hash = hash_block_tokens(
            self.prev_block is None, prev_hash, self.token_ids, self.extra_hash
        )
        return self._content_hash

    @property
    def computed(self) -> bool:
        allocator = self.allocator
        return (
            isinstance(allocator, FindsByContent)
            and self.block_id is not None
            and self.content_hash is not None
            and allocator.block_is_computed(self.block_id)
        )

    @property
    def last_accessed(self) -> float:
        allocator = self.allocator
        if self.block_id is None or not isinstance(allocator, FindsByContent):
            return NEVER_ACCESSED
        return allocator.get_last_accessed(self.block_id)
