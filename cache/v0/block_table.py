"""A sequence's logical blocks and the physical ones that hold them.

Source: vLLM 0.7.3, ``vllm/core/block/block_table.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import BlockTableError, NoFreeBlocksError, require
from cache.sequences import Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.tokens import TokenSlice
    from cache.v0.interfaces import Block, BlockId
    from cache.v0.tiered import CpuGpuBlockAllocator


class BlockTable:
    """Logical to physical blocks of one sequence, filled from front to back."""

    __slots__ = (
        "_allocator",
        "_block_size",
        "_max_block_sliding_window",
        "blocks",
        "num_dropped_blocks",
        "num_full_slots",
    )

    def __init__(
        self,
        block_size: int,
        block_allocator: CpuGpuBlockAllocator,
        _blocks: Sequence[Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> None:
        self._block_size = block_size
        self._allocator = block_allocator
        self._max_block_sliding_window = max_block_sliding_window
        self.blocks: list[Block] = list(_blocks or ())
        # Tokens in the table.
        self.num_full_slots = sum(
            block_size - block.num_empty_slots for block in self.blocks
        )
        # Leading entries that name the null block.
        self.num_dropped_blocks = 0

    @staticmethod
    def get_num_required_blocks(
        token_ids: TokenSlice, block_size: int, num_lookahead_slots: int = 0
    ) -> int:
        """Return the blocks that tokens and lookahead slots take if none is shared."""
        return -(-(len(token_ids) + num_lookahead_slots) // block_size)

    @property
    def is_allocated(self) -> bool:
        """Whether the table has blocks."""
        return bool(self.blocks)

    @property
    def physical_block_ids(self) -> list[BlockId]:
        """Ids of the blocks, in the numbering of all tiers."""
        return [block.block_id for block in self.blocks if block.block_id is not None]

    @property
    def num_held_blocks(self) -> int:
        """Entries, without those that a sliding window has dropped."""
        return len(self.blocks) - self.num_dropped_blocks

    # -- life -----------------------------------------------------------------

    def allocate(
        self,
        token_ids: TokenSlice,
        device: Device = Device.GPU,
        extra_hash: int | None = None,
    ) -> None:
        """Take the blocks for a sequence's tokens: full ones, then a partial one."""
        if self.blocks:
            raise BlockTableError(
                f"the table holds blocks {self.physical_block_ids} already; allocate "
                f"a table once, or free it first"
            )
        if not len(token_ids):
            raise BlockTableError("a table cannot be allocated for no tokens")
        self.blocks = self._allocator.allocate_chain(token_ids, device, extra_hash)
        self.num_full_slots = len(token_ids)

    def update(self, blocks: Sequence[Block]) -> None:
        """Replace the blocks, of which there must be as many tokens as before."""
        self.blocks = list(blocks)

    def fork(self) -> BlockTable:
        """Return a table of another sequence that shares all blocks."""
        self._require_allocated("forked")
        forked = BlockTable(
            self._block_size,
            self._allocator,
            max_block_sliding_window=self._max_block_sliding_window,
        )
        forked.num_dropped_blocks = self.num_dropped_blocks
        forked.blocks = self.blocks[: self.num_dropped_blocks]
        forked.blocks += self._allocator.fork(self.blocks[-1])
        forked.num_full_slots = self.num_full_slots
        return forked

    def free(self) -> None:
        """Give up all blocks, front to back."""
        self._require_allocated("freed")
        free = self._allocator.free
        for block in self.blocks:
            free(block)
        self.blocks = []
        self.num_full_slots = 0
        self.num_dropped_blocks = 0

    # -- growth ---------------------------------------------------------------

    def get_unseen_token_ids(self, sequence_token_ids: TokenSlice) -> TokenSlice:
        """Return the tokens of the sequence that are not in the table yet."""
        return sequence_token_ids[self.num_full_slots :]

    def get_num_blocks_touched_by_append_slots(
        self, token_ids: TokenSlice, num_lookahead_slots: int
    ) -> int:
        """Return how many blocks an append may take: a bound that ignores free slots.

        Every block written to counts, whether it is new, would be copied or neither.
        """
        return self.get_num_blocks_touched(len(token_ids) + num_lookahead_slots)

    def get_num_blocks_touched(self, num_slots: int) -> int:
        """Return `get_num_blocks_touched_by_append_slots` for a number of slots."""
        room = self._block_size - self.num_full_slots % self._block_size
        return 1 - (room - num_slots) // self._block_size

    def append_token_ids(
        self,
        token_ids: TokenSlice,
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
        extra_hash: int | None = None,
    ) -> None:
        """Append tokens, and see to empty slots behind them."""
        self._require_allocated("appended to")
        num_new = len(token_ids)
        self._make_room(num_new, num_lookahead_slots, num_computed_slots, extra_hash)
        size, done = self._block_size, 0
        while done < num_new:
            index, used = divmod(self.num_full_slots, size)
            taken = min(size - used, num_new - done)
            self.blocks[index].append_token_ids(token_ids[done : done + taken])
            self.num_full_slots += taken
            done += taken

    def append_unseen(
        self,
        sequence_token_ids: TokenSlice,
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
        extra_hash: int | None = None,
    ) -> None:
        """Append the unseen tokens of the sequence, without a copy of them.

        The same as `append_token_ids` with `get_unseen_token_ids`; see there.
        """
        num_full = self.num_full_slots
        num_new = len(sequence_token_ids) - num_full
        size = self._block_size
        blocks = self.blocks
        if (
            num_new + num_lookahead_slots > len(blocks) * size - num_full
            or self._max_block_sliding_window is not None
            or num_new != 1
            or not blocks
        ):
            self._require_allocated("appended to")
            if num_new < 0:
                raise BlockTableError(
                    f"the sequence has {len(sequence_token_ids)} tokens, its table "
                    f"{num_full}: free the table before tokens are taken back"
                )
            self._make_room(
                num_new, num_lookahead_slots, num_computed_slots, extra_hash
            )
            blocks = self.blocks
        end = num_full + num_new
        while num_full < end:
            index, used = divmod(num_full, size)
            taken = min(size - used, end - num_full)
            blocks[index].show_token_ids(sequence_token_ids, index * size, taken)
            num_full += taken
            self.num_full_slots = num_full

    def ensure_num_empty_slots(
        self, num_empty_slots: int, extra_hash: int | None = None
    ) -> None:
        """Take GPU blocks until there are `num_empty_slots` empty slots."""
        self._require_allocated("extended")
        num_new = self._num_new_blocks(num_empty_slots)
        self._require_free(num_new)
        for _ in range(num_new):
            self.blocks.append(
                self._allocator.allocate_mutable_block(
                    self.blocks[-1], Device.GPU, extra_hash
                )
            )

    def open_block(self) -> None:
        """Take the block behind the last one, which is full or will be shown so."""
        self.blocks.append(
            self._allocator.allocate_mutable_block(self.blocks[-1], Device.GPU)
        )

    def show(self, sequence_token_ids: TokenSlice, num_tokens: int) -> None:
        """Show the sequence's tokens up to `num_tokens`, for which there is room.

        As `append_unseen`, of blocks that nobody shares and whose content nothing
        looks up.
        """
        size = self._block_size
        for index in range(self.num_full_slots // size, -(-num_tokens // size)):
            used = max(self.num_full_slots - index * size, 0)
            taken = min(num_tokens - index * size, size) - used
            self.blocks[index].show_token_ids(sequence_token_ids, index * size, taken)
        self.num_full_slots = num_tokens

    def check(self) -> None:
        """Prove in O(n) that the blocks hold the tokens of the table, in order."""
        size = self._block_size
        require(
            all(block.block_id is not None for block in self.blocks),
            "a table holds a block without an id",
        )
        require(
            self.num_full_slots <= len(self.blocks) * size,
            f"{self.num_full_slots} tokens are in {len(self.blocks)} blocks",
        )
        for index in range(self.num_dropped_blocks, len(self.blocks)):
            block = self.blocks[index]
            expected = min(max(self.num_full_slots - index * size, 0), size)
            require(
                size - block.num_empty_slots == expected == len(block.token_ids),
                "{!r} is entry {} of a table of {} tokens, and should hold {}",
                block,
                index,
                self.num_full_slots,
                expected,
            )

    # -- steps of an append ---------------------------------------------------

    def _make_room(
        self,
        num_new: int,
        num_lookahead_slots: int,
        num_computed_slots: int | None,
        extra_hash: int | None,
    ) -> None:
        """Check that an append has its blocks; then move the window, and take them."""
        num_window_blocks = self._max_block_sliding_window
        first_visible = 0
        if num_window_blocks is not None:
            if num_computed_slots is None:
                raise ValueError("a sliding window needs num_computed_slots")
            first_visible = num_computed_slots // self._block_size - num_window_blocks
        num_slots = num_new + num_lookahead_slots
        self._require_free(
            self._num_new_blocks(num_slots)
            + self._num_copies(num_new)
            + self._num_window_costs(first_visible)
        )
        if num_window_blocks is not None:
            self._drop_blocks_before(first_visible)
        self.ensure_num_empty_slots(num_slots, extra_hash)

    def _num_new_blocks(self, num_empty_slots: int) -> int:
        num_empty = len(self.blocks) * self._block_size - self.num_full_slots
        return max(0, -((num_empty - num_empty_slots) // self._block_size))

    def _num_copies(self, num_new: int) -> int:
        """Shared blocks that `num_new` tokens are written to."""
        if not num_new:
            return 0
        first = self.num_full_slots // self._block_size
        last = (self.num_full_slots + num_new - 1) // self._block_size
        return sum(
            block.block_id is not None and block.allocator.is_shared(block.block_id)
            for block in self.blocks[first : last + 1]
        )

    def _num_window_costs(self, first_visible: int) -> int:
        """Blocks that moving the window takes (the null block), less those it frees."""
        if self._max_block_sliding_window is None:
            return 0
        dropped = self.blocks[self.num_dropped_blocks : max(first_visible, 0)]
        return (not self._allocator.has_null_block) - sum(
            block.block_id is not None and not block.allocator.is_shared(block.block_id)
            for block in dropped
        )

    def _drop_blocks_before(self, first_visible: int) -> None:
        null_block = self._allocator.allocate_or_get_null_block()
        for index in range(self.num_dropped_blocks, first_visible):
            self._allocator.free(self.blocks[index])
            self.blocks[index] = null_block
            self.num_dropped_blocks = index + 1

    def _require_free(self, num_blocks: int) -> None:
        num_free = (
            self._allocator.get_num_free_blocks(Device.GPU) if num_blocks > 0 else 0
        )
        if num_blocks > num_free:
            raise NoFreeBlocksError(
                f"a table of {self.num_full_slots} tokens needs {num_blocks} more GPU "
                f"blocks, {num_free} are free; ask can_append_slots first"
            )

    def _require_allocated(self, verb: str) -> None:
        if not self.blocks:
            raise BlockTableError(
                f"the table holds no blocks, it cannot be {verb}; allocate it first"
            )
