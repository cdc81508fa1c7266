"""The phases of a V0 scheduler call that walk running and swapped groups.

Source: vLLM 0.7.3, ``vllm/core/scheduler.py`` (`_schedule_running`,
`_schedule_swapped`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cache.errors import NoFreeBlocksError
from cache.sequences import AllocStatus, SequenceStatus
from sim.errors import SwapSpaceError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from collections.abc import Sequence as Items

    from cache.v0.manager import SelfAttnBlockSpaceManager
    from sim.scheduler.groups.sequence import Sequence, SequenceGroup
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v0.budget import (
        ChunkRule,
        PartialPrefillMetadata,
        SchedulingBudget,
    )

    VictimFor = Callable[[SequenceGroup], SequenceGroup]
    Preempt = Callable[
        [SequenceGroup, SequenceGroup, GroupSchedulerOutput], PreemptionMode
    ]

_RUNNING = SequenceStatus.RUNNING
_SWAPPED = SequenceStatus.SWAPPED


class Queues(Protocol):
    """A scheduler, as the phases that walk its queues see it."""

    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    block_manager: SelfAttnBlockSpaceManager
    chunk_rule: ChunkRule
    waiting: deque[SequenceGroup]
    running: deque[SequenceGroup]
    swapped: deque[SequenceGroup]
    abandoned_seqs: list[Sequence]

    def count_running_seqs(self, budget: SchedulingBudget) -> None: ...


@dataclass(slots=True)
class RunningOutputs:
    """Entries of groups that go on, and victims in the order of their preemption.

    Those on the clock have no entries.
    """

    clocked: list[SequenceGroup] = field(default_factory=list)
    decodes: list[ScheduledSequenceGroup] = field(default_factory=list)
    prefills: list[ScheduledSequenceGroup] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    swapped_out: list[SequenceGroup] = field(default_factory=list)


class RunningPhase:
    """Gives running groups their slots in queue order, preempting where they lack."""

    def __init__(
        self, scheduler: Queues, victim_for: VictimFor, preempt: Preempt
    ) -> None:
        config = scheduler.scheduler_config
        cache_config = scheduler.cache_config
        self._scheduler = scheduler
        self._victim_for = victim_for
        self._preempt = preempt
        self._chunking = config.enable_chunked_prefill
        self._has_window = cache_config.sliding_window is not None
        self._num_lookahead_slots = config.num_lookahead_slots
        num_ahead = -(-config.num_lookahead_slots // cache_config.block_size)
        self._most_touched_blocks = 1 + num_ahead

    def schedule(
        self,
        ran: RunningOutputs,
        budget: SchedulingBudget,
        output: GroupSchedulerOutput,
        partial: PartialPrefillMetadata | None = None,
    ) -> None:
        """Take groups from the running queue into `ran`.

        With chunking this ends at the first group for which no tokens are left; it and
        those behind it stay in the queue. Else the queue is empty afterwards.
        """
        running = self._scheduler.running
        append_slots = self._scheduler.block_manager.append_slots
        copies = output.blocks_to_copy
        decodes = ran.decodes
        chunking = self._chunking
        num_sure = 0
        while running:
            group = running[0]
            seqs: Items[Sequence] = (group.first_seq,)
            if group.num_seqs() > 1:
                seqs = group.get_seqs(_RUNNING)
            num_seqs = num_tokens = len(seqs)
            is_prefill = seqs[0].is_prefill
            if chunking and not (num_tokens := self._chunk(seqs, budget, partial)):
                break
            running.popleft()
            num_ahead = 0 if is_prefill else self._num_lookahead_slots
            if num_sure < num_seqs:
                num_sure = self._num_sequences_sure_to_grow()
            if num_sure >= num_seqs:
                num_sure -= num_seqs
                for seq in seqs:
                    if pairs := append_slots(seq, num_ahead):
                        copies += pairs
            else:
                num_sure = 0
                if not self._make_room(group, seqs, num_ahead, ran, output):
                    continue
            # Each group is met once in a call: there is no id to look up.
            budget.num_batched_tokens += num_tokens
            if chunking:
                budget.num_curr_seqs += num_seqs
            if is_prefill:
                num_computed = seqs[0].num_computed_tokens
                ran.prefills.append(
                    ScheduledSequenceGroup(group, num_tokens, True, num_computed)
                )
            else:
                decodes.append(ScheduledSequenceGroup(group, num_seqs, False))

    def _chunk(
        self,
        seqs: Items[Sequence],
        budget: SchedulingBudget,
        partial: PartialPrefillMetadata | None,
    ) -> int:
        """Return the tokens that a running group gets of the budget; 0 for none."""
        rule = self._scheduler.chunk_rule
        if len(seqs) == 1 and not seqs[0].is_prefill:
            return rule.chunk_of(1, budget, partial)
        num_tokens, _ = rule.num_new_tokens(seqs, budget, partial, chunk=True)
        if len(seqs) > 1 and num_tokens > budget.remaining_token_budget():
            return 0  # the reference exceeds the budget, and ends on an assertion
        return num_tokens

    def _num_sequences_sure_to_grow(self) -> int:
        """Return how many sequences `can_append_slots` would allow one after another.

        It asks for `_most_touched_blocks` a sequence at most, and an append takes no
        more; while that many are free, no group has to be asked.
        """
        num_free = self._scheduler.block_manager.get_num_free_gpu_blocks()
        if self._has_window:
            num_free -= 1  # the first append may take the null block, too
        return num_free // self._most_touched_blocks

    def _make_room(
        self,
        group: SequenceGroup,
        seqs: Items[Sequence],
        num_ahead: int,
        ran: RunningOutputs,
        output: GroupSchedulerOutput,
    ) -> bool:
        """Preempt until a group can grow, and let it; False if itself was preempted."""
        running = self._scheduler.running
        while not self._try_append(group, seqs, num_ahead, output):
            victim = self._victim_for(group)
            try:
                mode = self._preempt(victim, group, output)
            except SwapSpaceError:
                running.appendleft(group)
                raise
            if mode is PreemptionMode.RECOMPUTE:
                ran.preempted.append(victim)
            else:
                ran.swapped_out.append(victim)
            if victim is group:
                return False
            if victim is running[-1]:
                running.pop()
            else:
                running.remove(victim)
        return True

    def _try_append(
        self,
        group: SequenceGroup,
        seqs: Items[Sequence],
        num_ahead: int,
        output: GroupSchedulerOutput,
    ) -> bool:
        """Take the slots of a group's running sequences, if its blocks can be had."""
        manager = self._scheduler.block_manager
        if not manager.can_append_slots(group, num_ahead):
            return False
        try:
            for seq in seqs:
                output.blocks_to_copy += manager.append_slots(seq, num_ahead)
        except NoFreeBlocksError:
            # The null block of a sliding window is not counted by can_append_slots;
            # the reference ends here.
            if not self._has_window:
                raise
            return False
        return True


@dataclass(slots=True)
class SwappedInOutputs:
    """Batch entries of groups that came back from the CPU."""

    decodes: list[ScheduledSequenceGroup] = field(default_factory=list)
    prefills: list[ScheduledSequenceGroup] = field(default_factory=list)


class SwappedPhase:
    """Brings swapped groups back while they fit, strictly in order, never in chunks."""

    def __init__(self, scheduler: Queues) -> None:
        self._scheduler = scheduler
        self._num_lookahead_slots = scheduler.scheduler_config.num_lookahead_slots

    def schedule(
        self, budget: SchedulingBudget, output: GroupSchedulerOutput
    ) -> SwappedInOutputs:
        """Take groups from the swapped queue into the batch."""
        returned = SwappedInOutputs()
        scheduler = self._scheduler
        manager = scheduler.block_manager
        while scheduler.swapped:
            group = scheduler.swapped[0]
            seqs = group.get_seqs(_SWAPPED)
            is_prefill = seqs[0].is_prefill
            num_ahead = 0 if is_prefill else self._num_lookahead_slots
            status = manager.can_swap_in(group, num_ahead)
            if status is AllocStatus.LATER:
                break
            if status is AllocStatus.NEVER:
                self._give_up(group, output)
                continue
            num_uncached, num_cached = scheduler.chunk_rule.num_new_tokens(seqs, budget)
            if not budget.can_schedule(
                num_new_tokens=num_uncached, num_new_seqs=len(seqs)
            ):
                break
            scheduler.swapped.popleft()
            output.blocks_to_swap_in += manager.swap_in(group)
            for seq in seqs:
                seq.move_to(SequenceStatus.RUNNING)
                output.blocks_to_copy += manager.append_slots(seq, num_ahead)
            budget.add_num_batched_tokens(group.request_id, num_uncached, num_cached)
            budget.add_num_seqs(group.request_id, len(seqs))
            if is_prefill:
                num_tokens = num_uncached + num_cached
                num_computed = seqs[0].num_computed_tokens
                returned.prefills.append(
                    ScheduledSequenceGroup(
                        group, num_tokens, True, num_computed, num_cached
                    )
                )
            else:
                returned.decodes.append(ScheduledSequenceGroup(group, len(seqs), False))
        return returned

    def _give_up(self, group: SequenceGroup, output: GroupSchedulerOutput) -> None:
        """Ignore the first swapped group, which needs more than the whole GPU.

        Wart of 0.7.3: its CPU blocks are never given back.
        """
        assert group.request is not None
        self._scheduler.swapped.popleft()
        for seq in group.get_seqs(_SWAPPED):
            seq.move_to(SequenceStatus.FINISHED_IGNORED)
            self._scheduler.abandoned_seqs.append(seq)
        group.request.reason = (
            f"its sequences no longer share blocks since they were swapped out, and "
            f"need more than the pool of "
            f"{self._scheduler.block_manager.num_total_gpu_blocks} blocks to return"
        )
        output.ignored_seq_groups.append(group)
