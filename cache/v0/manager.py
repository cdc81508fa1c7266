"""Block manager v2, which vLLM's V0 engine places sequences with.

Source: vLLM 0.7.3, ``vllm/core/block_manager.py`` (`SelfAttnBlockSpaceManager`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import CacheConfigError, NoFreeBlocksError, UnallocatedSequenceError
from cache.sequences import AllocStatus, Device, SequenceStatus
from cache.v0.lazy_table import LazyBlockTable
from cache.v0.prefix_caching import hash_block_tokens
from cache.v0.tables import BlockPairs, Placement, SequenceTables, Swapper
from cache.v0.tiered import CpuGpuBlockAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.sequences import PagedSequence, PagedSequenceGroup
    from cache.v0.block_table import BlockTable
    from cache.v0.evictor import EvictionPolicy


class SelfAttnBlockSpaceManager:
    """Places sequence groups on the GPU, and on the CPU while they are swapped out.

    Statuses of sequences are read, never written: a scheduler calls `allocate` while
    sequences are WAITING, `swap_out` while they are RUNNING and `swap_in` while they
    are SWAPPED, and moves them afterwards.
    """

    def __init__(  # noqa: PLR0917  (positional as in vLLM)
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        enable_caching: bool = False,
        *,
        evictor: EvictionPolicy = "lru",
    ) -> None:
        if not 0 <= watermark <= 1:
            raise CacheConfigError(f"watermark must be from 0 to 1, got {watermark}")
        if enable_caching and sliding_window is not None:
            raise CacheConfigError(
                f"prefix caching does not go with a sliding window ({sliding_window}); "
                f"switch one of them off"
            )
        self.num_total_gpu_blocks = num_gpu_blocks
        self.num_total_cpu_blocks = num_cpu_blocks
        self.sliding_window = sliding_window
        self.max_block_sliding_window: int | None = None
        if sliding_window is not None:
            # The window may begin and end within a block.
            self.max_block_sliding_window = sliding_window // block_size + 2
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        allocator = CpuGpuBlockAllocator.create(
            "prefix_caching" if enable_caching else "naive",
            num_gpu_blocks,
            num_cpu_blocks,
            block_size,
            eviction_policy=evictor,
        )
        self.block_size = block_size
        self.block_allocator = allocator
        self._gpu_tier = allocator.tier(Device.GPU)
        self.enable_caching = enable_caching
        self._computed = ComputedBlocksTracker(allocator, block_size)
        self._last_access = LastAccessBlocksTracker()
        self._placement = Placement(
            block_size, self.block_allocator, self.max_block_sliding_window
        )
        self._tables = SequenceTables()
        self._swapper = Swapper(
            self.block_allocator, self._tables, self.watermark_blocks
        )
        # By sequence number.
        self.block_tables: dict[int, BlockTable] = self._tables.by_seq
        # By request id, of encoder-decoder models.
        self.cross_block_tables: dict[int | str, BlockTable] = self._tables.cross

    @property
    def num_logical_blocks(self) -> int:
        """Entries of all tables on the GPU: a block counts for each that holds it.

        Blocks that a sliding window has dropped do not count.
        """
        return self._tables.num_logical_blocks

    @property
    def num_evictions(self) -> int:
        """Cached GPU blocks given up for others so far."""
        return self.block_allocator.num_evictions

    @property
    def num_null_blocks(self) -> int:
        """GPU blocks that stand for what sliding windows have dropped: 0 or 1."""
        return int(self.block_allocator.has_null_block)

    @property
    def num_dropped_blocks(self) -> int:
        """Entries of tables on the GPU that name the null block. O(tables)."""
        tables = self._tables
        return sum(
            table.num_dropped_blocks
            for seq_id, table in tables.by_seq.items()
            if seq_id not in tables.swapped_out
        )

    # -- admission ------------------------------------------------------------

    def can_allocate(
        self,
        seq_group: PagedSequenceGroup,
        num_lookahead_slots: int = 0,
        *,
        num_shared_tokens: int | None = None,
    ) -> AllocStatus:
        """Say whether the waiting sequences of a group can be placed.

        Hits of the prefix cache are not counted on.
        """
        self._require_plain_encoder_decoder(seq_group)
        num_required = self._placement.num_required_blocks(
            seq_group, num_shared_tokens, num_lookahead_slots
        )
        if self.num_total_gpu_blocks - num_required < self.watermark_blocks:
            return AllocStatus.NEVER
        if self.get_num_free_gpu_blocks() - num_required >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def allocate(
        self, seq_group: PagedSequenceGroup, *, num_shared_tokens: int | None = None
    ) -> None:
        """Place the waiting sequences of a group, and its encoder's.

        Where their ends differ, `num_shared_tokens` leading tokens are common: only
        full blocks of these are shared then. The release knows no such groups.
        """
        self._require_plain_encoder_decoder(seq_group)
        seqs = seq_group.get_seqs(SequenceStatus.WAITING)
        self._tables.require_none(seq_group, seqs)
        placement = self._placement
        encoder_seq = seq_group.get_encoder_seq()
        if len(seqs) > 1 or encoder_seq is not None:
            # One table checks itself, and knows what the prefix cache spares it.
            num_blocks = placement.num_blocks(seq_group, num_shared_tokens)
            self._require_free(seq_group, num_blocks)
        try:
            tables = placement.new_tables(seqs, num_shared_tokens)
        except NoFreeBlocksError as error:
            raise NoFreeBlocksError(
                f"group {seq_group.request_id} (sequence {seqs[0].seq_id}): {error}; "
                f"ask can_allocate first"
            ) from None
        for seq, table in zip(seqs, tables, strict=True):
            self._tables.add(seq.seq_id, table)
        if encoder_seq is not None:
            table = placement.new_table(encoder_seq)
            self._tables.add_cross(seq_group.request_id, table)

    # -- growth ---------------------------------------------------------------

    def can_append_slots(
        self, seq_group: PagedSequenceGroup, num_lookahead_slots: int
    ) -> bool:
        """Say whether the running sequences can grow by their unseen tokens.

        A bound: each block that is written to counts, needed or not.
        """
        tables = self.block_tables
        num_touched = 0
        for seq in seq_group.get_seqs(SequenceStatus.RUNNING):
            table = tables.get(seq.seq_id)
            if table is None:
                table = self._tables.find(seq, "append slots to")  # refuses
            num_touched += table.get_num_blocks_touched(
                seq.get_len() - table.num_full_slots + num_lookahead_slots
            )
        return num_touched <= self.block_allocator.get_num_free_blocks(Device.GPU)

    def append_slots(self, seq: PagedSequence, num_lookahead_slots: int) -> BlockPairs:
        """Take the slots for a sequence's unseen tokens, and lookahead slots."""
        tables = self._tables
        table = tables.find_on(Device.GPU, seq, "append slots to")
        num_held = table.num_held_blocks
        try:
            table.append_unseen(
                seq.get_token_ids(), num_lookahead_slots, seq.num_computed_tokens
            )
        except NoFreeBlocksError as error:
            raise NoFreeBlocksError(f"sequence {seq.seq_id}: {error}") from None
        tables.num_logical_blocks += table.num_held_blocks - num_held
        return self.block_allocator.clear_copy_on_writes()

    def open_block(self, seq: PagedSequence) -> None:
        """Give the next token of a sequence that shares nothing a block. O(1).

        Until `show_tokens` its table does not know of tokens since the last append.
        """
        self.block_tables[seq.seq_id].open_block()
        self._tables.num_logical_blocks += 1

    def show_tokens(self, seq: PagedSequence) -> None:
        """Put the computed tokens of a sequence into its table, which has room."""
        self.block_tables[seq.seq_id].show(seq.get_token_ids(), seq.num_computed_tokens)

    def make_tables_lazily(self) -> None:
        """Let new tables make their blocks when these are asked for.

        For tables without window and cached prefixes; ids and order stay the same.
        """
        self._placement.table_type = LazyBlockTable

    # -- life of a sequence ---------------------------------------------------

    def fork(self, parent_seq: PagedSequence, child_seq: PagedSequence) -> None:
        """Let a new sequence share all blocks of `parent_seq`."""
        parent = self._tables.find(parent_seq, "fork")
        self._tables.require_no_table(child_seq)
        swapped = parent_seq.seq_id in self._tables.swapped_out
        device = Device.CPU if swapped else Device.GPU
        self._tables.add(child_seq.seq_id, parent.fork(), device)

    def free(self, seq: PagedSequence) -> None:
        """Give up a sequence's blocks, front to back.

        A sequence without blocks is ignored, as in the reference: schedulers free what
        they abort in any state.
        """
        seq_id = seq.seq_id
        self._computed.remove_seq(seq_id)
        last_access = self._last_access.pop(seq_id)
        swapped = seq_id in self._tables.swapped_out
        table = self._tables.pop(seq_id)
        if table is None or not table.is_allocated:
            return
        if last_access is not None and not swapped:
            self.block_allocator.mark_blocks_as_accessed(
                table.physical_block_ids, last_access
            )
        table.free()

    def free_cross(self, seq_group: PagedSequenceGroup) -> None:
        """Give up the encoder's blocks of a group; without any, do nothing."""
        table = self._tables.pop_cross(seq_group.request_id)
        if table is not None and table.is_allocated:
            table.free()

    def get_block_table(self, seq: PagedSequence) -> list[int]:
        return self._tables.find(seq, "show the blocks of").physical_block_ids

    def get_cross_block_table(self, seq_group: PagedSequenceGroup) -> list[int]:
        """Return the ids of the encoder's blocks, in order."""
        table = self.cross_block_tables.get(seq_group.request_id)
        if table is None:
            raise UnallocatedSequenceError(
                f"the encoder of group {seq_group.request_id} holds no blocks"
            )
        return table.physical_block_ids

    # -- swapping -------------------------------------------------------------

    def can_swap_in(
        self, seq_group: PagedSequenceGroup, num_lookahead_slots: int
    ) -> AllocStatus:
        """Say whether a group's swapped sequences can return, and grow."""
        seqs = seq_group.get_seqs(SequenceStatus.SWAPPED)
        return self._swapper.can_swap(seqs, Device.GPU, num_lookahead_slots)

    def can_swap_out(self, seq_group: PagedSequenceGroup) -> bool:
        """Say whether the CPU has room for a group's running sequences."""
        seqs = seq_group.get_seqs(SequenceStatus.RUNNING)
        return self._swapper.can_swap(seqs, Device.CPU, 0) is AllocStatus.OK

    def swap_in(self, seq_group: PagedSequenceGroup) -> BlockPairs:
        """Move a group's swapped sequences to the GPU."""
        seqs = seq_group.get_seqs(SequenceStatus.SWAPPED)
        return self._swapper.swap(seqs, Device.CPU, Device.GPU)

    def swap_out(self, seq_group: PagedSequenceGroup) -> BlockPairs:
        """Move a group's running sequences to the CPU.

        What sequences share is copied for each of them, unless prefixes are cached.
        """
        seqs = seq_group.get_seqs(SequenceStatus.RUNNING)
        return self._swapper.swap(seqs, Device.GPU, Device.CPU)

    # -- numbers --------------------------------------------------------------

    def get_num_free_gpu_blocks(self) -> int:
        """GPU blocks that can be had, cached ones out of use included."""
        return self._gpu_tier.get_num_free_blocks()

    def get_num_free_cpu_blocks(self) -> int:
        """CPU blocks that can be had, cached ones out of use included."""
        return self.block_allocator.get_num_free_blocks(Device.CPU)

    def check(self, seqs: Iterable[PagedSequence]) -> None:
        """Prove invariants 1 and 2 in O(n)."""
        num_gpu_blocks = self.num_total_gpu_blocks
        cpu_ids = range(num_gpu_blocks, num_gpu_blocks + self.num_total_cpu_blocks)
        self.block_allocator.check(self._tables.check(seqs, cpu_ids))

    # -- cached prefixes ------------------------------------------------------

    def get_num_cached_tokens(self, seq: PagedSequence) -> int:
        """Return the tokens of `seq` found cached and computed when first asked.

        The answer stands until the sequence is freed. 0 without prefix caching.
        """
        return self._computed.get_num_cached_tokens(seq) if self.enable_caching else 0

    def remove_seq_from_computed_blocks_tracker(self, seq: PagedSequence) -> None:
        """Let `get_num_cached_tokens` look up a sequence anew."""
        self._computed.remove_seq(seq.seq_id)

    def access_all_blocks_in_seq(self, seq: PagedSequence, now: float) -> None:
        """Note that the sequence is scheduled at `now` (seconds)."""
        if self.enable_caching:
            self._last_access.update_last_access(seq.seq_id, now)

    def mark_blocks_as_computed(
        self, seq_group: PagedSequenceGroup, token_chunk_size: int
    ) -> None:
        """Note at the end of a scheduler call that its blocks are computed.

        All blocks filled since the last call, of any group, as in the reference.
        """
        if self.enable_caching:
            self.block_allocator.mark_blocks_as_computed([])

    def get_common_computed_block_ids(self, seqs: Sequence[PagedSequence]) -> list[int]:
        """Return the leading blocks that need not be computed for any of `seqs`."""
        if not self.enable_caching:
            return []
        return self.block_allocator.get_common_computed_block_ids(
            [
                self.get_block_table(seq)[
                    : self.get_num_cached_tokens(seq) // self.block_size
                ]
                for seq in seqs
            ]
        )

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Return hits over look-ups of full blocks; -1 without prefix caching."""
        return self.block_allocator.get_prefix_cache_hit_rate(device)

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget all cached blocks of a tier, or of both; False if some are in use."""
        return self.block_allocator.reset_prefix_cache(device)

    # -- refusals -------------------------------------------------------------

    def _require_free(self, seq_group: PagedSequenceGroup, num_blocks: int) -> None:
        num_free = self.get_num_free_gpu_blocks()
        if num_blocks > num_free:
            raise NoFreeBlocksError(
                f"group {seq_group.request_id} needs {num_blocks} GPU blocks, "
                f"{num_free} are free; ask can_allocate first"
            )

    def _require_plain_encoder_decoder(self, seq_group: PagedSequenceGroup) -> None:
        if not seq_group.is_encoder_decoder():
            return
        if self.enable_caching or self.sliding_window is not None:
            what = "prefix caching" if self.enable_caching else "a sliding window"
            raise CacheConfigError(
                f"group {seq_group.request_id} has an encoder, which does not go with "
                f"{what}; switch it off"
            )


class ComputedBlocksTracker:
    """How many tokens of each sequence were cached when it was first looked at."""

    def __init__(self, allocator: CpuGpuBlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._num_cached_tokens: dict[int, int] = {}

    def get_num_cached_tokens(self, seq: PagedSequence) -> int:
        """Return the tokens in leading blocks that are cached and computed.

        The answer of the first call stands until `remove_seq`, although blocks may be
        evicted or added meanwhile: budgets and batches are made of the same number.
        """
        known = self._num_cached_tokens.get(seq.seq_id)
        if known is None:
            hashes = self._block_hashes(seq)
            found = self._allocator.find_cached_blocks_prefix(hashes, Device.GPU)
            known = len(found) * self._block_size
            self._num_cached_tokens[seq.seq_id] = known
        return known

    def remove_seq(self, seq_id: int) -> None:
        """Forget a sequence, which need not be known."""
        self._num_cached_tokens.pop(seq_id, None)

    def _block_hashes(self, seq: PagedSequence) -> list[int]:
        token_ids, size = seq.get_token_ids(), self._block_size
        hashes: list[int] = []
        parent: int | None = None
        for start in range(0, seq.get_len() - size + 1, size):
            parent = hash_block_tokens(
                parent is None, parent, token_ids[start : start + size]
            )
            hashes.append(parent)
        return hashes


class LastAccessBlocksTracker:
    """When each sequence was last scheduled; its blocks learn it when it is freed."""

    def __init__(self) -> None:
        self._last_access: dict[int, float] = {}

    def update_last_access(self, seq_id: int, now: float) -> None:
        """Note that the sequence is scheduled at `now` (seconds)."""
        self._last_access[seq_id] = now

    def pop(self, seq_id: int) -> float | None:
        """Forget the sequence and return when it was last scheduled, in seconds."""
        return self._last_access.pop(seq_id, None)
