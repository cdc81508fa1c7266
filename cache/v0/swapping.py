"""Moving the blocks of a group between GPU and CPU, for block manager v2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import NoFreeBlocksError
from cache.sequences import AllocStatus, Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.sequences import PagedSequence
    from cache.v0.interfaces import DeviceAwareBlockAllocator
    from cache.v0.tables import SequenceTables

BlockPairs = list[tuple[int, int]]
"""(source, destination), in the order of the copies."""


class Swapper:
    """Weighs swaps and does them."""

    def __init__(
        self,
        allocator: DeviceAwareBlockAllocator,
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
