"""Groups for tests of the 2023 block manager: all that counts is their lengths."""

from __future__ import annotations

from cache.sequences import SequenceStatus
from sim.scheduler.groups.sequence import Sequence, SequenceGroup

BLOCK_SIZE = 4


def sequence(seq_id: int, num_tokens: int) -> Sequence:
    """A waiting sequence of so many prompt tokens."""
    return Sequence(seq_id, list(range(num_tokens)), BLOCK_SIZE)


def group(num_tokens: int, *seq_ids: int) -> SequenceGroup:
    """A waiting group of equal sequences; the first number names the group, too."""
    seqs = [sequence(seq_id, num_tokens) for seq_id in seq_ids]
    return SequenceGroup(seq_ids[0], seqs, float(seq_ids[0]))


def run(seq_group: SequenceGroup) -> None:
    """Let all unfinished sequences of the group run."""
    for seq in seq_group.get_unfinished_seqs():
        seq.status = SequenceStatus.RUNNING


def grow(seq: Sequence, num_tokens: int = 1) -> None:
    """Append tokens."""
    for _ in range(num_tokens):
        seq.append_token_id(0)
