"""What block manager v2 places of a group at admission, and what that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import NoFreeBlocksError
from cache.sequences import SequenceStatus
from cache.v0.block_table import BlockTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.sequences import PagedSequence, PagedSequenceGroup
    from cache.v0.interfaces import DeviceAwareBlockAllocator


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
        allocator: DeviceAwareBlockAllocator,
        max_block_sliding_window: int | None,
    ) -> None:
        self._block_size = block_size
        self._allocator = allocator
        self._max_block_sliding_window = max_block_sliding_window

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
        """Return what admission asks for: no more than the sliding window.

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
        table = BlockTable(
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
