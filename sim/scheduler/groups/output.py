"""Decisions of a scheduler of sequence groups in a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.scheduler.base import SchedulerOutput

if TYPE_CHECKING:
    from sim.scheduler.groups.sequence import SequenceGroup

BlockMapping = list[tuple[int, int]]
"""Block ids ``(from, to)`` in the order in which they are moved."""


@dataclass(slots=True)
class ScheduledSequenceGroup:
    """One entry of a batch.

    Attributes
    ----------
    seq_group
        The group that is scheduled.
    token_chunk_size
        Tokens of a prefill, found in the cache or not; of a decode, its running
        sequences.
    is_prefill
        Whether prompt tokens (or those of a recomputation) are computed.
    num_computed_tokens
        Tokens of a prefill that were computed before this step; 0 for a decode.
    num_cached_tokens
        Tokens of `token_chunk_size` that were found in the prefix cache.
    queries
        What is computed: sequence, query tokens, and the context that they end at.
        A sequence that is recomputed with others of its group has two.
    """

    seq_group: SequenceGroup
    token_chunk_size: int
    is_prefill: bool
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    queries: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class GroupSchedulerOutput(SchedulerOutput):
    """A scheduler call's decisions about groups; the base class is the engine's view.

    Attributes
    ----------
    scheduled_seq_groups
        The batch, in the scheduler's own order.
    prompt_run
        Whether the step is a prompt step (`v0_2`).
    num_budgeted_tokens
        The batch as the generation counts it: padded (`v0_2`), with cached tokens
        (`v0`).
    ignored_seq_groups
        Groups refused in this call.
    blocks_to_swap_in, blocks_to_swap_out, blocks_to_copy
        Moves that the workers perform before the step.
    num_hit_tokens
        By request id: prefix-cache hits of groups that start a prefill in this call.
    num_lookahead_slots
        Slots that each sequence got behind its tokens (`v0`); 0 where only prompts run.
    running_queue_size
        Groups that run after the call.
    num_clocked, num_clocked_tokens
        Decodes on the clock that are in the batch, and the tokens that they attend to;
        they have no entries.
    num_before_clocked
        Entries of the batch before them.
    """

    scheduled_seq_groups: list[ScheduledSequenceGroup] = field(default_factory=list)
    prompt_run: bool = False
    num_budgeted_tokens: int = 0
    ignored_seq_groups: list[SequenceGroup] = field(default_factory=list)
    blocks_to_swap_in: BlockMapping = field(default_factory=list)
    blocks_to_swap_out: BlockMapping = field(default_factory=list)
    blocks_to_copy: BlockMapping = field(default_factory=list)
    num_hit_tokens: dict[int | str, int] = field(default_factory=dict)
    num_lookahead_slots: int = 0
    running_queue_size: int = 0
    num_clocked: int = 0
    num_clocked_tokens: int = 0
    num_before_clocked: int = 0

    @property
    def num_prefill_groups(self) -> int:
        """Entries of the batch that compute prompt tokens."""
        return sum(entry.is_prefill for entry in self.scheduled_seq_groups)

    @property
    def preempted(self) -> int:
        """Groups preempted in this call, by recomputation or swap."""
        return len(self.preemptions)

    def is_empty(self) -> bool:
        """Whether the workers have nothing to do: no batch, and no block to move."""
        return not (
            self.scheduled_seq_groups
            or self.blocks_to_swap_in
            or self.blocks_to_swap_out
            or self.blocks_to_copy
        )
