"""The block tables of block manager v2: who has one, on which tier."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cache.errors import BlockTableError, UnallocatedSequenceError, require
from cache.sequences import Device, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.sequences import PagedSequence, PagedSequenceGroup
    from cache.v0.block_table import BlockTable
    from cache.v0.interfaces import Block


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
