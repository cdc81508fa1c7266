"""The block tables of block manager v2: made at admission, moved by swaps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cache.errors import (
    BlockTableError,
    NoFreeBlocksError,
    UnallocatedSequenceError,
    require,
)
from cache.sequences import AllocStatus, Device, SequenceStatus
from cache.v0.block_table import BlockTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.sequences import PagedSequence, PagedSequenceGroup
    from cache.v0.interfaces import Block
    from cache.v0.tiered import CpuGpuBlockAllocator


class SequenceTables:
    """Tables by sequence, and of encoders by request."""

    def __init__(self) -> None:
        # Tables by sequence number.
        self.by_seq: dict[int, BlockTable] = {}
        # Tables of encoders by request id; always on the GPU.
        self.cross: dict[int | str, BlockTable] = {}
        # Numbers of the sequences whose blocks are on the CPU.
        self.swapped_out: set[int] = set()
        # Entries of tables on the GPU, without those that name the null block.
        self.num_logical_blocks = 0

    def find(self, seq: PagedSequence, verb: str) -> BlockTable:
        """Return the table of a sequence."""
        table = self.by_seq.get(seq.seq_id)
        if table is None:
            raise UnallocatedSequenceError(
                f"cannot {verb} sequence {seq.seq_id}: it holds no blocks, it was "
                f"freed or never allocated"
            )
        return table

    def find_on(self, device: Device, seq: PagedSequence, verb: str) -> BlockTable:
        """Return the table of a sequence whose blocks are on `device`."""
        table = self.find(seq, verb)
        if (seq.seq_id in self.swapped_out) != (device is Device.CPU):
            raise BlockTableError(
                f"cannot {verb} sequence {seq.seq_id}: its blocks "
                f"{table.physical_block_ids} are not on the {device.value}"
            )
        return table

    def blocks_of(self, seqs: Iterable[PagedSequence]) -> list[Block]:
        """Return the blocks of several sequences that have tables, in order."""
        return [block for seq in seqs for block in self.by_seq[seq.seq_id].blocks]

    def require_none(
        self, seq_group: PagedSequenceGroup, seqs: Sequence[PagedSequence]
    ) -> None:
        """Refuse a group that has tables already, or no sequence to allocate."""
        request_id = seq_group.request_id
        if not seqs:
            raise BlockTableError(
                f"group {request_id} has no waiting sequence to allocate"
            )
        for seq in seqs:
            self.require_no_table(seq)
        if request_id in self.cross:
            raise BlockTableError(
                f"the encoder of group {request_id} holds blocks "
                f"{self.cross[request_id].physical_block_ids} already; free it first"
            )

    def require_no_table(self, seq: PagedSequence) -> None:
        """Refuse a sequence that has a table."""
        if seq.seq_id in self.by_seq:
            raise BlockTableError(
                f"sequence {seq.seq_id} holds blocks "
                f"{self.by_seq[seq.seq_id].physical_block_ids} already; allocate it "
                f"once, or free it first"
            )

    def add(self, seq_id: int, table: BlockTable, device: Device = Device.GPU) -> None:
        """Take in the table of a sequence."""
        self.by_seq[seq_id] = table
        if device is Device.CPU:
            self.swapped_out.add(seq_id)
        else:
            self.num_logical_blocks += table.num_held_blocks

    def pop(self, seq_id: int) -> BlockTable | None:
        """Drop the table of a sequence and return it; None if there is none."""
        table = self.by_seq.pop(seq_id, None)
        if seq_id in self.swapped_out:
            self.swapped_out.remove(seq_id)
        elif table is not None:
            self.num_logical_blocks -= table.num_held_blocks
        return table

    def move(self, seq_id: int, device: Device) -> None:
        """Note that the blocks of a sequence are on the other tier, `device`, now."""
        table = self.by_seq[seq_id]
        if device is Device.CPU:
            self.swapped_out.add(seq_id)
            self.num_logical_blocks -= table.num_held_blocks
        else:
            self.swapped_out.remove(seq_id)
            self.num_logical_blocks += table.num_held_blocks

    def add_cross(self, request_id: int | str, table: BlockTable) -> None:
        """Take in the table of a group's encoder."""
        self.cross[request_id] = table
        self.num_logical_blocks += table.num_held_blocks

    def pop_cross(self, request_id: int | str) -> BlockTable | None:
        """Drop the table of a group's encoder and return it; None if there is none."""
        table = self.cross.pop(request_id, None)
        if table is not None:
            self.num_logical_blocks -= table.num_held_blocks
        return table

    def check(self, seqs: Iterable[PagedSequence], cpu_ids: range) -> Counter[int]:
        """Prove in O(n) that tables, tiers and counts agree."""
        statuses = {seq.seq_id: seq.status for seq in seqs}
        require(
            statuses.keys() == self.by_seq.keys(),
            f"sequences {sorted(statuses)} should hold blocks, sequences "
            f"{sorted(self.by_seq)} do",
        )
        require(
            self.swapped_out <= self.by_seq.keys(),
            "a sequence without blocks is swapped",
        )
        references: Counter[int] = Counter()
        num_logical = 0
        for seq_id, table in self.by_seq.items():
            swapped = seq_id in self.swapped_out
            # The reference leaves the CPU blocks of an ignored sequence where they are.
            on_cpu = (SequenceStatus.SWAPPED, SequenceStatus.FINISHED_IGNORED)
            require(
                (statuses[seq_id] in on_cpu) == swapped,
                f"sequence {seq_id} is {statuses[seq_id].value}, its blocks are "
                f"{'' if swapped else 'not '}on the CPU",
            )
            table.check()
            held = table.physical_block_ids[table.num_dropped_blocks :]
            require(
                all((block_id in cpu_ids) == swapped for block_id in held),
                f"sequence {seq_id} has blocks {held}, not all of one tier",
            )
            references.update(held)
            num_logical += 0 if swapped else len(held)
        for table in self.cross.values():
            table.check()
            references.update(table.physical_block_ids)
            num_logical += len(table.blocks)
        require(
            num_logical == self.num_logical_blocks,
            f"tables have {num_logical} entries, {self.num_logical_blocks} are counted",
        )
        return references


class Placement:
    """Makes the tables of waiting sequences.

    The waiting sequences of a group share the table of the first of them, as in the
    reference. If the caller says that only so many leading tokens are common (a forked
    group that is computed anew, which the reference never does) they share the full
    blocks of these, and each sequence gets its own rest.
    """

    def __init__(
        self,
        block_size: int,
        allocator: CpuGpuBlockAllocator,
        max_block_sliding_window: int | None,
    ) -> None:
        self._block_size = block_size
        self._allocator = allocator
        self._max_block_sliding_window = max_block_sliding_window
        self.table_type = BlockTable

    def num_blocks(
        self,
        seq_group: PagedSequenceGroup,
        num_shared_tokens: int | None,
        num_lookahead_slots: int = 0,
    ) -> int:
        """Return the distinct blocks of the waiting sequences and of the encoder."""
        seqs = seq_group.get_seqs(SequenceStatus.WAITING)
        size, num_common = self._block_size, 0
        if num_shared_tokens is None:
            seqs = seqs[:1]
        else:
            num_common = num_shared_tokens // size
        num_blocks = num_common + sum(
            -(-(seq.get_len() + num_lookahead_slots) // size) - num_common
            for seq in seqs
        )
        encoder_seq = seq_group.get_encoder_seq()
        if encoder_seq is not None:
            num_blocks += -(-encoder_seq.get_len() // size)
        return num_blocks

    def num_required_blocks(
        self,
        seq_group: PagedSequenceGroup,
        num_shared_tokens: int | None,
        num_lookahead_slots: int,
    ) -> int:
        """Return the blocks that admission asks for: no more than the sliding window.

        All blocks are taken nevertheless, as in the reference.
        """
        num_blocks = self.num_blocks(seq_group, num_shared_tokens, num_lookahead_slots)
        if self._max_block_sliding_window is None:
            return num_blocks
        num_tables = 1
        if num_shared_tokens is not None:
            num_tables = seq_group.num_seqs(SequenceStatus.WAITING)
        return min(num_blocks, self._max_block_sliding_window * num_tables)

    def new_table(
        self, seq: PagedSequence, num_tokens: int | None = None
    ) -> BlockTable:
        """Return a table of a sequence's first `num_tokens` tokens, of all if None."""
        table = self.table_type(
            self._block_size,
            self._allocator,
            max_block_sliding_window=self._max_block_sliding_window,
        )
        token_ids = seq.get_token_ids()
        if num_tokens is not None:
            token_ids = token_ids[:num_tokens]
        if len(token_ids):
            table.allocate(token_ids)
        return table

    def new_tables(
        self, seqs: Sequence[PagedSequence], num_shared_tokens: int | None
    ) -> list[BlockTable]:
        """Return tables of the waiting sequences of one group."""
        if num_shared_tokens is None:
            first = self.new_table(seqs[0])
            return [first, *(first.fork() for _ in seqs[1:])]
        num_common = num_shared_tokens // self._block_size * self._block_size
        if not num_common:
            return [self.new_table(seq) for seq in seqs]
        first = self.new_table(seqs[0], num_common)
        tables = [first, *(first.fork() for _ in seqs[1:])]
        try:
            for seq, table in zip(seqs, tables, strict=True):
                if seq.get_len() > num_common:
                    table.append_unseen(seq.get_token_ids(), num_computed_slots=0)
        except NoFreeBlocksError:
            for table in tables:
                table.free()
            raise
        return tables


BlockPairs = list[tuple[int, int]]
"""(source, destination), in the order of the copies."""


class Swapper:
    """Weighs swaps and does them."""

    def __init__(
        self,
        allocator: CpuGpuBlockAllocator,
        tables: SequenceTables,
        watermark_blocks: int,
    ) -> None:
        self._allocator = allocator
        self._tables = tables
        self._watermark_blocks = watermark_blocks

    def can_swap(
        self, seqs: Sequence[PagedSequence], device: Device, num_lookahead_slots: int
    ) -> AllocStatus:
        """Say whether sequences can be moved to `device`, and then grow.

        The reference counts full blocks and those that the next append touches. It
        overlooks blocks that lookahead slots took ahead of need, and fails when they do
        not fit; hence the second count, of what the swap itself takes.
        """
        allocator = self._allocator
        num_touched = 0
        for seq in seqs:
            table = self._tables.find(seq, "swap")
            num_touched += table.get_num_blocks_touched(
                seq.get_len() - table.num_full_slots + num_lookahead_slots
            )
        blocks = self._tables.blocks_of(seqs)
        num_touched += allocator.get_num_full_blocks_touched(blocks, device)
        num_taken = allocator.get_num_blocks_for_swap_in(blocks, device)
        num_free = allocator.get_num_free_blocks(device)
        num_kept = self._watermark_blocks if device is Device.GPU else 0
        if allocator.get_num_total_blocks(device) < max(num_touched, num_taken):
            return AllocStatus.NEVER
        if num_free - num_touched >= num_kept and num_free >= num_taken:
            return AllocStatus.OK
        return AllocStatus.LATER

    def swap(
        self, seqs: Sequence[PagedSequence], source: Device, target: Device
    ) -> BlockPairs:
        """Move sequences, one after the other."""
        self._require_swappable(seqs, source, target)
        allocator = self._allocator
        pairs: BlockPairs = []
        for seq in seqs:
            blocks = self._tables.by_seq[seq.seq_id].blocks
            pairs += [
                (
                    allocator.get_physical_block_id(source, old),
                    allocator.get_physical_block_id(target, new),
                )
                for old, new in allocator.swap(blocks, source, target).items()
            ]
            self._tables.move(seq.seq_id, target)
        return pairs

    def _require_swappable(
        self, seqs: Sequence[PagedSequence], source: Device, target: Device
    ) -> None:
        for seq in seqs:
            self._tables.find_on(source, seq, "swap")
        allocator = self._allocator
        blocks = self._tables.blocks_of(seqs)
        num_needed = allocator.get_num_blocks_for_swap_in(blocks, target)
        num_free = allocator.get_num_free_blocks(target)
        if num_needed > num_free:
            raise NoFreeBlocksError(
                f"swap without room: sequences {[seq.seq_id for seq in seqs]} need "
                f"{num_needed} blocks on the {target.value}, {num_free} are free; ask "
                f"can_swap_{'out' if target is Device.CPU else 'in'} first"
            )
