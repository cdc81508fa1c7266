"""The block manager of 2023: generations `cacheflow` and `v0_2`.

Sequences of a group share blocks until one of them writes into a block that others
hold, too: then it gets a copy (copy-on-write). Groups move between the two tiers as a
whole and keep their sharing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.cacheflow.tier import BlockAllocator, Tier
from cache.errors import (
    BlockTableError,
    CacheConfigError,
    UnallocatedSequenceError,
    require,
)
from cache.sequences import AllocStatus, Device, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.block import KVCacheBlock
    from cache.cacheflow.tier import BlockTable
    from cache.sequences import PagedSequence, PagedSequenceGroup

__all__ = ["BlockAllocator", "BlockSpaceManager"]


class BlockSpaceManager:
    """Block tables of sequences in both tiers.

    Source: vLLM 0.1.0 and 0.2.7, ``vllm/core/block_manager.py``. 0.1.0 has neither
    the window nor `AllocStatus.NEVER`: its scheduler asks for OK only.

    Where a table goes round *and* is shared, 0.2.7 counts a repeated block once per
    entry in forks, copies and swaps, and once per table when it allocates and frees.
    Counts are the same here: what is too much is lost, and a block that counts too
    little is written to without a copy. But where 0.2.7 then frees a block in use,
    and mostly ends in a double free, here the last table frees it.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        sliding_window: int | None = None,
    ) -> None:
        if block_size < 1 or num_gpu_blocks < 0 or num_cpu_blocks < 0:
            raise CacheConfigError(
                f"block_size must be at least 1 and the pools at least 0 blocks, got "
                f"{block_size}, {num_gpu_blocks} and {num_cpu_blocks}"
            )
        if watermark < 0:
            raise CacheConfigError(f"watermark must be at least 0, got {watermark}")
        if sliding_window is not None and (
            sliding_window < 1 or sliding_window % block_size
        ):
            raise CacheConfigError(
                f"sliding_window must be a multiple of block_size {block_size}, got "
                f"{sliding_window}; set it to null for attention over all tokens"
            )
        self.block_size = block_size
        self.num_total_gpu_blocks = num_gpu_blocks
        self.num_total_cpu_blocks = num_cpu_blocks
        self.block_sliding_window = (
            None if sliding_window is None else sliding_window // block_size
        )
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        window = self.block_sliding_window
        self._gpu = Tier(Device.GPU, block_size, num_gpu_blocks, window)
        self._cpu = Tier(Device.CPU, block_size, num_cpu_blocks, window)
        self._tables = TieredTables(self._gpu, self._cpu)
        self.gpu_allocator = self._gpu.allocator
        self.cpu_allocator = self._cpu.allocator
        self._gpu_tables = self._gpu.tables
        self._cpu_tables = self._cpu.tables
        # Entries of all GPU tables.
        self.num_logical_blocks = 0

    # -- admission ------------------------------------------------------------

    def can_allocate(
        self, seq_group: PagedSequenceGroup, num_shared_tokens: int | None = None
    ) -> AllocStatus:
        """Return whether the waiting sequences of a group can be given their blocks."""
        waiting = _waiting(seq_group)
        return self.alloc_status(self._num_blocks(waiting, num_shared_tokens))

    def alloc_status(self, num_blocks: int) -> AllocStatus:
        """Return whether that many blocks can be had above the watermark."""
        if self.num_total_gpu_blocks - num_blocks < self.watermark_blocks:
            return AllocStatus.NEVER
        num_free = self.gpu_allocator.get_num_free_blocks()
        if num_free - num_blocks >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many physical blocks a sequence of that length takes."""
        num_blocks = -(-num_tokens // self.block_size)
        window = self.block_sliding_window
        return num_blocks if window is None else min(num_blocks, window)

    def allocate(
        self, seq_group: PagedSequenceGroup, num_shared_tokens: int | None = None
    ) -> None:
        """Let the waiting sequences of a group share the table of the first of them.

        Where their ends differ, `num_shared_tokens` leading tokens are common: only
        full blocks of these are shared then. The releases know no such groups.
        """
        waiting = _waiting(seq_group)
        for seq in waiting:
            self._tables.require_no_table(seq, "allocated")
        self._gpu.require_free(
            self._num_blocks(waiting, num_shared_tokens),
            f"group {seq_group.request_id} (sequences {seq_ids(waiting)})",
        )
        num_shared = self._num_shared_blocks(waiting, num_shared_tokens)
        shared = self._gpu.extend([], num_shared)
        num_sharers = len(waiting)
        if num_shared_tokens is None:
            # Wart of 0.2.7: every sequence of the group counts, finished ones, which
            # get no table, too. What they hold is never given back.
            num_sharers = seq_group.num_seqs()
        self._gpu.share(shared, num_sharers - 1, num_lost=num_sharers - len(waiting))
        for seq in waiting:
            num_blocks = num_shared
            if num_shared_tokens is not None:
                num_blocks = -(-seq.get_len() // self.block_size)
            table = self._gpu.extend(shared.copy(), num_blocks)
            self._gpu_tables[seq.seq_id] = table
            self.num_logical_blocks += len(table)

    def _num_shared_blocks(
        self, waiting: Sequence[PagedSequence], num_shared_tokens: int | None
    ) -> int:
        """Leading table entries that all of `waiting` share."""
        if num_shared_tokens is None:
            return -(-waiting[0].get_len() // self.block_size)
        longest = max(seq.get_len() for seq in waiting)
        window = self.block_sliding_window
        if window is not None and longest > window * self.block_size:
            return 0  # a table that goes round overwrites its first blocks
        return num_shared_tokens // self.block_size

    def _num_blocks(
        self, waiting: Sequence[PagedSequence], num_shared_tokens: int | None
    ) -> int:
        """Physical blocks that `allocate` would take."""
        if num_shared_tokens is None:
            return self.num_blocks_for(waiting[0].get_len())
        num_shared = self._num_shared_blocks(waiting, num_shared_tokens)
        return num_shared + sum(
            self.num_blocks_for(seq.get_len()) - num_shared for seq in waiting
        )

    # -- growth ---------------------------------------------------------------

    def can_append_slot(self, seq_group: PagedSequenceGroup) -> bool:
        """Return whether every running sequence of a group could take a block.

        A heuristic: whether they need one is not looked at.
        """
        num_seqs = seq_group.num_seqs(SequenceStatus.RUNNING)
        return num_seqs <= self.gpu_allocator.get_num_free_blocks()

    def append_slot(self, seq: PagedSequence) -> tuple[int, int] | None:
        """Give the last token of a sequence its slot. O(1) unless it copies.

        Returns source and target of the copy to be made first, where the slot lies in
        a block that other sequences hold as well.
        """
        table = self._gpu_tables.get(seq.seq_id)
        if table is None:
            raise self._tables.no_table(seq, "only a sequence on the GPU can grow")
        if len(table) * self.block_size < seq.get_len():
            window = self.block_sliding_window
            if window is None or len(table) < window:
                self._gpu.require_free(1, f"sequence {seq.seq_id}")
                table.append(self.gpu_allocator.allocate())
                self.num_logical_blocks += 1
                return None
            reused = table[len(table) % window]
            if reused.ref_cnt > 1:
                self._gpu.require_free(1, f"sequence {seq.seq_id}")
            table.append(reused)
            self.num_logical_blocks += 1
        last = table[-1]
        if last.ref_cnt == 1:
            return None
        return self._gpu.copy_last(seq, table)

    def open_block(self, seq: PagedSequence) -> None:
        """Give the next token of a sequence that shares nothing a block. O(1)."""
        self._gpu_tables[seq.seq_id].append(self.gpu_allocator.allocate())
        self.num_logical_blocks += 1

    def show_tokens(self, seq: PagedSequence) -> None:
        """Do nothing: tables of this manager do not hold tokens."""

    def fork(self, parent_seq: PagedSequence, child_seq: PagedSequence) -> None:
        """Let a new sequence share all blocks of its parent."""
        table = self._gpu_tables.get(parent_seq.seq_id)
        if table is None:
            raise self._tables.no_table(
                parent_seq, "only a sequence on the GPU can be forked"
            )
        self._tables.require_no_table(child_seq, "forked into")
        self._gpu_tables[child_seq.seq_id] = self._gpu.fork(table)
        self.num_logical_blocks += len(table)

    # -- swapping -------------------------------------------------------------

    def can_swap_in(self, seq_group: PagedSequenceGroup) -> bool:
        """Return whether a group fits the GPU, with a block more for each sequence."""
        num_blocks = self._cpu.num_distinct(seq_group.get_seqs())
        num_seqs = seq_group.num_seqs(SequenceStatus.SWAPPED)
        num_free = self.gpu_allocator.get_num_free_blocks()
        return num_free - (num_blocks + num_seqs) >= self.watermark_blocks

    def can_swap_out(self, seq_group: PagedSequenceGroup) -> bool:
        """Return whether a group fits the free CPU blocks."""
        num_blocks = self._gpu.num_distinct(seq_group.get_seqs())
        return num_blocks <= self.cpu_allocator.get_num_free_blocks()

    def swap_in(self, seq_group: PagedSequenceGroup) -> dict[int, int]:
        """Move a group to the GPU; return CPU to GPU block ids, in order."""
        moved = self._tables.swap(seq_group, to=Device.GPU)
        self.num_logical_blocks += self._tables.num_entries(seq_group)
        return moved

    def swap_out(self, seq_group: PagedSequenceGroup) -> dict[int, int]:
        """Move a group to the CPU; return GPU to CPU block ids, in order."""
        moved = self._tables.swap(seq_group, to=Device.CPU)
        self.num_logical_blocks -= self._tables.num_entries(seq_group)
        return moved

    # -- release --------------------------------------------------------------

    def free(self, seq: PagedSequence) -> None:
        """Give up the table of a sequence, front to back.

        Nothing to do if it has none: the abort of a waiting group relies on that.
        """
        self.num_logical_blocks -= self._gpu.drop(seq.seq_id)
        self._cpu.drop(seq.seq_id)

    def reset(self) -> None:
        """Give up all tables."""
        for tier in (self._gpu, self._cpu):
            for seq_id in list(tier.tables):
                tier.drop(seq_id)
            tier.reclaim()
        self.num_logical_blocks = 0

    # -- views ----------------------------------------------------------------

    @property
    def block_tables(self) -> dict[int, BlockTable]:
        """All tables of both tiers by sequence number; not to be changed. O(tables)."""
        return self._gpu_tables | self._cpu_tables

    def get_block_table(self, seq: PagedSequence) -> list[int]:
        """Return the block ids of a sequence, of the tier that it is in."""
        table = self._tables.table(seq)
        if table is None:
            raise self._tables.no_table(seq, "there is no table to show")
        return [block.block_id for block in table]

    def num_stored_tokens(self, seqs: Sequence[PagedSequence]) -> tuple[int, int]:
        """Return filled GPU slots and tokens of a group; see `Tier`."""
        return self._gpu.num_stored_tokens(seqs)

    def get_num_free_gpu_blocks(self) -> int:
        """Return the free blocks of the GPU pool."""
        return self.gpu_allocator.get_num_free_blocks()

    def get_num_free_cpu_blocks(self) -> int:
        """Return the free blocks of the CPU pool."""
        return self.cpu_allocator.get_num_free_blocks()

    def check(self, seqs: Iterable[PagedSequence]) -> None:
        """Prove invariant 2 for both pools, in O(n)."""
        self._tables.check(seqs)
        num_entries = sum(map(len, self._gpu_tables.values()))
        require(
            num_entries == self.num_logical_blocks,
            f"{num_entries} table entries on the GPU, {self.num_logical_blocks} "
            f"counted",
        )


def _waiting(seq_group: PagedSequenceGroup) -> Sequence[PagedSequence]:
    """Return the sequences to be admitted, at least one."""
    waiting = seq_group.get_seqs(SequenceStatus.WAITING)
    if not waiting:
        raise BlockTableError(
            f"group {seq_group.request_id} has no waiting sequence; only waiting ones "
            f"can be given a table"
        )
    return waiting


class TieredTables:
    """The GPU's tier and the CPU's: a sequence has a table in one of them at most."""

    def __init__(self, gpu: Tier, cpu: Tier) -> None:
        self.gpu = gpu
        self.cpu = cpu

    # -- tables ---------------------------------------------------------------

    def table(self, seq: PagedSequence) -> BlockTable | None:
        """Return the table of a sequence, wherever it is; None if it has none."""
        table = self.gpu.tables.get(seq.seq_id)
        return self.cpu.tables.get(seq.seq_id) if table is None else table

    def require_no_table(self, seq: PagedSequence, what: str) -> None:
        """Refuse a sequence that has a table already."""
        table = self.table(seq)
        if table is not None:
            raise BlockTableError(
                f"sequence {seq.seq_id} holds blocks {[b.block_id for b in table]}: a "
                f"sequence that is {what} must hold none; free it first"
            )

    def no_table(self, seq: PagedSequence, rule: str) -> BlockTableError:
        """Return the error for a sequence whose table is not where `rule` wants it."""
        where = "no block"
        error: type[BlockTableError] = UnallocatedSequenceError
        for tier in (self.gpu, self.cpu):
            if seq.seq_id in tier.tables:
                ids = [block.block_id for block in tier.tables[seq.seq_id]]
                where, error = f"blocks on the {tier.name}, {ids}", BlockTableError
        return error(
            f"sequence {seq.seq_id} ({seq.status.value}) holds {where}: {rule}; "
            f"allocate, fork or swap it before"
        )

    # -- swapping -------------------------------------------------------------

    def swap(self, seq_group: PagedSequenceGroup, to: Device) -> dict[int, int]:
        """Move a group, table by table and block by block.

        The target is taken first, then the source freed.
        """
        source, target = self.gpu, self.cpu
        if to is Device.GPU:
            source, target = target, source
        seqs = [seq for seq in seq_group.get_seqs() if not seq.is_finished()]
        for seq in seqs:
            if seq.seq_id not in source.tables:
                raise self.no_table(
                    seq, f"only what is on the {source.name} can go to the {to.name}"
                )
        target.require_free(
            source.num_distinct(seqs),
            f"group {seq_group.request_id} (sequences {seq_ids(seqs)})",
        )
        mapping: dict[KVCacheBlock, KVCacheBlock] = {}
        for seq in seqs:
            source.move(seq.seq_id, target, mapping)
        return {old.block_id: new.block_id for old, new in mapping.items()}

    def num_entries(self, seq_group: PagedSequenceGroup) -> int:
        """Return the table entries of a group's unfinished sequences, wherever."""
        return sum(
            len(self.table(seq) or ())
            for seq in seq_group.get_seqs()
            if not seq.is_finished()
        )

    # -- own proof ------------------------------------------------------------

    def check(self, seqs: Iterable[PagedSequence]) -> None:
        """Prove that each of `seqs`, and no other, has a table in its tier; O(n)."""
        holders = {seq.seq_id: seq for seq in seqs}
        held = {*self.gpu.tables, *self.cpu.tables}
        require(
            held == set(holders)
            and len(held) == len(self.gpu.tables) + len(self.cpu.tables),
            f"sequences {sorted(holders)} should hold a table each, "
            f"{sorted(self.gpu.tables)} do on the GPU and {sorted(self.cpu.tables)} "
            f"on the CPU",
        )
        for seq_id, seq in holders.items():
            require(
                (seq_id in self.cpu.tables) == (seq.status is SequenceStatus.SWAPPED),
                f"the table of sequence {seq_id} is in the wrong tier: it is "
                f"{seq.status.value}",
            )
        self.gpu.check()
        self.cpu.check()


def seq_ids(seqs: Iterable[PagedSequence]) -> str:
    """Return the numbers of sequences as text, for messages."""
    return ", ".join(str(seq.seq_id) for seq in seqs)
