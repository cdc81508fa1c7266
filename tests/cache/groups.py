"""Sequences and groups for the tests of block manager v2, and their moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.sequences import SequenceStatus
from sim.scheduler.groups.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from cache.tokens import TokenSlice
    from cache.v0.manager import SelfAttnBlockSpaceManager

SIZE = 4


def group(
    seq_id: int, tokens: int | TokenSlice, *, encoder: int | None = None
) -> SequenceGroup:
    """A group of one waiting sequence; a number makes as many distinct tokens."""
    if isinstance(tokens, int):
        tokens = list(range(1000 * seq_id, 1000 * seq_id + tokens))
    encoder_seq = None
    if encoder is not None:
        encoder_seq = Sequence(seq_id + 900, [5] * encoder, SIZE)
    return SequenceGroup(
        f"r{seq_id}", [Sequence(seq_id, tokens, SIZE)], 0.0, encoder_seq=encoder_seq
    )


def move(seq_group: SequenceGroup, status: SequenceStatus) -> None:
    """Move all unfinished sequences."""
    for seq in seq_group.get_unfinished_seqs():
        seq.move_to(status)


def run(manager: SelfAttnBlockSpaceManager, seq_group: SequenceGroup) -> Sequence:
    """Admit a group and compute its prompt."""
    manager.allocate(seq_group)
    move(seq_group, SequenceStatus.RUNNING)
    manager.mark_blocks_as_computed(seq_group, 0)
    for seq in seq_group.get_seqs():
        seq.num_computed_tokens = seq.get_len()
    return seq_group.first_seq


def fork(
    manager: SelfAttnBlockSpaceManager, seq_group: SequenceGroup, seq_id: int
) -> Sequence:
    """Add a copy of the first sequence to a group."""
    child = seq_group.first_seq.fork(seq_id)
    manager.fork(seq_group.first_seq, child)
    seq_group.add(child)
    return child
