"""Tables of block manager v2 that make their blocks when these are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.sequences import Device
from cache.v0.allocator import NaiveBlock, NaiveBlockAllocator
from cache.v0.block_table import BlockTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.block import KVCacheBlock
    from cache.tokens import TokenSlice
    from cache.v0.interfaces import Block, BlockId
    from cache.v0.tiered import CpuGpuBlockAllocator


class LazyBlockTable(BlockTable):
    """A table on the GPU of physical blocks only, as long as that is all one asks for.

    A look at `blocks` (by a fork, a swap, a proof) turns it into a table like any
    other, for good.
    """

    __slots__ = ("_made", "_physical", "_tier", "_tokens")

    def __init__(
        self,
        block_size: int,
        block_allocator: CpuGpuBlockAllocator,
        _blocks: Sequence[Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> None:
        self._physical: list[KVCacheBlock] | None = None
        self._made: list[Block] = []
        self._tokens: TokenSlice = ()
        tier = block_allocator.tier(Device.GPU)
        assert isinstance(tier, NaiveBlockAllocator)
        self._tier = tier
        super().__init__(block_size, block_allocator, _blocks, max_block_sliding_window)

    @property
    def blocks(self) -> list[Block]:
        """The blocks, which are made now if they were not."""
        if self._physical is not None:
            self._make()
        return self._made

    @blocks.setter
    def blocks(self, blocks: list[Block]) -> None:
        self._physical = None
        self._made = blocks

    def _make(self) -> None:
        physical, self._physical = self._physical, None
        tier, size, tokens = self._tier, self._block_size, self._tokens
        blocks: list[Block] = []
        block: Block | None = None
        for each in physical or ():
            block = NaiveBlock(block, (), size, tier)
            start = len(blocks) * size
            block.show_token_ids(
                tokens, start, max(min(self.num_full_slots - start, size), 0)
            )
            block.block_id = each.block_id
            blocks.append(block)
        self._made = blocks

    @property
    def is_allocated(self) -> bool:
        return bool(self._physical or self._made)

    @property
    def physical_block_ids(self) -> list[BlockId]:
        if self._physical is None:
            return super().physical_block_ids
        return [block.block_id for block in self._physical]

    @property
    def num_held_blocks(self) -> int:
        if self._physical is None:
            return super().num_held_blocks
        return len(self._physical)

    def allocate(
        self,
        token_ids: TokenSlice,
        device: Device = Device.GPU,
        extra_hash: int | None = None,
    ) -> None:
        if device is not Device.GPU or self.is_allocated or not len(token_ids):
            super().allocate(token_ids, device, extra_hash)
            return
        self._physical = self._tier.take_all(-(-len(token_ids) // self._block_size))
        self._tokens = token_ids
        self.num_full_slots = len(token_ids)

    def append_unseen(
        self,
        sequence_token_ids: TokenSlice,
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
        extra_hash: int | None = None,
    ) -> None:
        physical, num_tokens = self._physical, len(sequence_token_ids)
        if not physical or num_tokens < self.num_full_slots:
            super().append_unseen(
                *(sequence_token_ids, num_lookahead_slots),
                *(num_computed_slots, extra_hash),
            )
            return
        num_blocks = -(-(num_tokens + num_lookahead_slots) // self._block_size)
        num_more = num_blocks - len(physical)
        if num_more > 0:
            self._require_free(num_more)
            physical += self._tier.take_all(num_more)
        self.show(sequence_token_ids, num_tokens)

    def open_block(self) -> None:
        if self._physical is None:
            super().open_block()
        else:
            self._physical.append(self._tier.take())

    def show(self, sequence_token_ids: TokenSlice, num_tokens: int) -> None:
        if self._physical is None:
            super().show(sequence_token_ids, num_tokens)
        else:
            self._tokens = sequence_token_ids
            self.num_full_slots = num_tokens

    def free(self) -> None:
        physical = self._physical
        if physical is None:
            super().free()
            return
        self._tier.release_all(physical)
        self.blocks = []
        self.num_full_slots = 0
