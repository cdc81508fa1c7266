"""Both tiers of the manager of 2023: whose table is where, and moves between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import BlockTableError, UnallocatedSequenceError, require
from cache.sequences import Device, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.block import KVCacheBlock
    from cache.cacheflow.tier import BlockTable, Tier
    from cache.sequences import PagedSequence, PagedSequenceGroup


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
        """Prove that each of `seqs`, and nobody else, has a table in its tier; O(n)."""
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
