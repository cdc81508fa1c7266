"""Interfaces of block manager v2: the block, and allocators of one tier and of two.

A `Block` is one table's *view* of a physical block: several views may name the same
id, and reference counts say how many. An allocator keeps the ids of one tier; a
device-aware allocator keeps GPU and CPU memory behind one range of ids.

Source: vLLM 0.7.3, ``vllm/core/block/interfaces.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from cache.errors import NoFreeBlocksError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cache.tokens import TokenSlice

BlockId = int


class Block(ABC):
    """``block_size`` consecutive token slots of one sequence."""

    __slots__ = ("allocator", "block_id", "extra_hash", "freed_id", "prev_block")

    allocator: BlockAllocator
    block_id: BlockId | None
    prev_block: Block | None
    extra_hash: int | None
    freed_id: BlockId

    class Factory(Protocol):
        """How an allocator makes its blocks."""

        def __call__(
            self,
            prev_block: Block | None,
            token_ids: TokenSlice,
            block_size: int,
            allocator: BlockAllocator,
            block_id: BlockId | None = None,
            *,
            extra_hash: int | None = None,
        ) -> Block:
            """Return a block of these tokens."""
            ...

    @abstractmethod
    def append_token_ids(self, token_ids: TokenSlice) -> None:
        """Add tokens; a shared block is copied on write."""

    @abstractmethod
    def show_token_ids(self, source: TokenSlice, start: int, num_new: int) -> None:
        """Add `num_new` tokens, all of the block's being ``source[start:]`` now.

        The same as `append_token_ids` without a copy of the tokens; `source` may grow
        but not change otherwise.
        """

    @abstractmethod
    def view(self, prev_block: Block | None) -> Block:
        """Return another view of the same physical block and tokens.

        The caller sees to the reference count.
        """

    @property
    @abstractmethod
    def token_ids(self) -> TokenSlice:
        """Tokens in the block."""

    @property
    @abstractmethod
    def num_tokens_total(self) -> int:
        """Tokens of the sequence up to and including this block."""

    @property
    @abstractmethod
    def num_empty_slots(self) -> int:
        """Slots without a token."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether all slots have tokens."""

    @property
    @abstractmethod
    def computed(self) -> bool:
        """Whether the prefix cache may answer with it."""

    @property
    @abstractmethod
    def last_accessed(self) -> float:
        """When it was last accessed, as far as its allocator was told."""

    @property
    @abstractmethod
    def content_hash(self) -> int | None:
        """Key of the tokens up to here; None unless full and cacheable."""


class BlockAllocator(ABC):
    """Hands out, shares and takes back the blocks of one tier."""

    NoFreeBlocksError = NoFreeBlocksError

    @abstractmethod
    def allocate_mutable_block(
        self, prev_block: Block | None, extra_hash: int | None = None
    ) -> Block:
        """Return an empty block that follows `prev_block`."""

    @abstractmethod
    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: TokenSlice,
        extra_hash: int | None = None,
    ) -> Block:
        """Return a block full of `token_ids` that follows `prev_block`."""

    @abstractmethod
    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: Sequence[TokenSlice],
        extra_hash: int | None = None,
    ) -> list[Block]:
        """Return full blocks in a chain, one for each item."""

    @abstractmethod
    def allocate_chain(
        self, token_ids: TokenSlice, extra_hash: int | None = None
    ) -> list[Block]:
        """Return the blocks of a new table: full ones, then a partial one if needed."""

    @abstractmethod
    def free(self, block: Block, keep_block_object: bool = False) -> None:
        """Give up a block."""

    @abstractmethod
    def fork(self, last_block: Block) -> list[Block]:
        """Return a second view of the chain that ends in `last_block`."""

    @abstractmethod
    def is_shared(self, block_id: BlockId) -> bool:
        """Whether more than one view holds the block."""

    @abstractmethod
    def get_num_total_blocks(self) -> int:
        """Size of the tier."""

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Blocks that can be had, cached ones out of use included."""

    @abstractmethod
    def get_physical_block_id(self, absolute_id: BlockId) -> int:
        """Return the block's index within the tier, from 0."""

    @property
    @abstractmethod
    def all_block_ids(self) -> frozenset[BlockId]:
        """All ids of the tier."""

    @abstractmethod
    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        """Return the id to write to: the block's own, or a copy's if it is shared."""

    @abstractmethod
    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """Return the (source, destination) pairs since the last call."""

    @abstractmethod
    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Settle a full block's content; return the id that holds it from now on."""

    @abstractmethod
    def mark_blocks_as_accessed(self, block_ids: Sequence[BlockId], now: float) -> None:
        """Note that the blocks were used at `now` (seconds)."""

    @abstractmethod
    def mark_blocks_as_computed(self, block_ids: Sequence[BlockId]) -> None:
        """Note that everything allocated so far is computed."""

    @abstractmethod
    def get_common_computed_block_ids(
        self, computed_seq_block_ids: Sequence[Sequence[BlockId]]
    ) -> list[BlockId]:
        """Return the leading blocks that all sequences have in common."""

    @abstractmethod
    def find_cached_blocks_prefix(self, block_hashes: Sequence[int]) -> list[int]:
        """Return the leading keys whose blocks are cached and computed."""

    @abstractmethod
    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """Return how many free blocks a swap to here of the full `blocks` counts."""

    @abstractmethod
    def get_num_blocks_for_swap_in(self, blocks: Sequence[Block]) -> int:
        """Return how many free blocks a swap to here of all `blocks` takes."""

    @abstractmethod
    def swap_out(self, blocks: Sequence[Block]) -> None:
        """Give up the ids of `blocks`, which live on elsewhere."""

    @abstractmethod
    def swap_in(self, blocks: Sequence[Block]) -> None:
        """Give ids of this tier to `blocks`."""

    @abstractmethod
    def get_prefix_cache_hit_rate(self) -> float:
        """Return hits over look-ups of full blocks; -1 without prefix caching."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False if some are in use, and nothing changes."""

    @abstractmethod
    def check(self, references: Mapping[BlockId, int]) -> None:
        """Prove invariant 2 in O(n); `references` counts the views of each id."""
