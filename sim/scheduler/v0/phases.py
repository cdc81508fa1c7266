"""The phases of a V0 scheduler call: running, swapped and waiting groups.

Source: vLLM 0.7.3, ``vllm/core/scheduler.py`` (`_schedule_running`,
`_schedule_swapped`, `_schedule_prefills`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cache.errors import NoFreeBlocksError
from cache.sequences import AllocStatus, SequenceStatus
from sim.errors import SwapSpaceError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup
from sim.scheduler.v0.budget import (
    num_group_recompute_tokens,
    num_group_shared_tokens,
)

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
_WAITING = SequenceStatus.WAITING


class Queues(Protocol):
    """What the phases need of the scheduler whose queues they walk."""

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


class WaitingPhase:
    """Scans the waiting queue from its head, and starts prefills."""

    def __init__(self, scheduler: Queues) -> None:
        config = scheduler.scheduler_config
        self._scheduler = scheduler
        self._chunking = config.enable_chunked_prefill
        self._delay_factor = config.delay_factor
        self._token_budget = config.max_num_batched_tokens
        self._max_model_len = config.max_model_len
        self._block_size = scheduler.cache_config.block_size
        self._has_window = scheduler.cache_config.sliding_window is not None
        self._enable_caching = scheduler.cache_config.enable_prefix_caching
        # Most tokens of a prefill that are not refused: of a chunk and the cached
        # tokens before it, or of a whole prompt where there is no chunking.
        self.prompt_limit = (
            config.max_model_len
            if self._chunking
            else min(config.max_model_len, config.max_num_batched_tokens)
        )
        # When the queue was last looked at, and whether that started a prefill: then
        # the next look tells how long the prompt step took.
        self._prev_time_s = 0.0
        self.prev_prompt = False
        self._last_prompt_latency_s = 0.0

    # -- the scan -------------------------------------------------------------

    def schedule(
        self,
        now_s: float,
        budget: SchedulingBudget,
        output: GroupSchedulerOutput,
        partial: PartialPrefillMetadata | None = None,
    ) -> list[ScheduledSequenceGroup]:
        """Admit groups while everything lasts; only long prompts are passed over."""
        admitted: list[ScheduledSequenceGroup] = []
        if budget.remaining_token_budget() <= 0:
            return admitted
        waiting = self._scheduler.waiting
        passed_over: list[SequenceGroup] = []
        while self._passed_delay(now_s) and waiting:
            group = waiting[0]
            if partial is not None and not partial.can_schedule(group):
                passed_over.append(waiting.popleft())
                continue
            seqs = group.get_seqs(_WAITING)
            num_uncached, num_cached = self._num_new_tokens(seqs, budget, partial)
            if self._is_too_long(seqs, num_uncached + num_cached):
                self._give_up(group, seqs, self._too_long(seqs), output)
                continue
            status = self._can_allocate(group, seqs)
            if status is AllocStatus.NEVER:
                self._give_up(group, seqs, self._too_large(seqs), output)
                continue
            if status is AllocStatus.LATER:
                break
            if not self._fits(num_uncached, len(seqs), budget):
                break
            waiting.popleft()
            entry = self._start(group, seqs, num_uncached, num_cached, output)
            admitted.append(entry)
            if partial is not None:
                partial.maybe_increment_partial_prefills(group)
            budget.add_num_batched_tokens(group.request_id, num_uncached, num_cached)
            budget.add_num_seqs(group.request_id, len(seqs))
        waiting.extendleft(reversed(passed_over))
        if admitted:
            self.prev_prompt = True
        return admitted

    def admission_of(
        self, group: SequenceGroup, budget: SchedulingBudget
    ) -> Callable[[], bool]:
        """Return a test whether blocks, tokens and sequences are there for a group.

        Its cached tokens are looked up at once, even if the test is never made.
        """
        seqs = group.get_seqs(_WAITING)
        num_uncached, _ = self._num_new_tokens(seqs, budget, None)

        def could_admit() -> bool:
            # The bare estimate, also with a sliding window: nothing is placed yet.
            status = self._scheduler.block_manager.can_allocate(
                group, num_shared_tokens=num_group_shared_tokens(seqs)
            )
            return status is AllocStatus.OK and self._fits(
                num_uncached, len(seqs), budget
            )

        return could_admit

    # -- what a group takes ---------------------------------------------------

    def _num_new_tokens(
        self,
        seqs: list[Sequence],
        budget: SchedulingBudget,
        partial: PartialPrefillMetadata | None,
    ) -> tuple[int, int]:
        if len(seqs) > 1:  # a forked group, recomputed: not in the reference
            return num_group_recompute_tokens(seqs), 0
        return self._scheduler.chunk_rule.num_new_tokens(
            seqs, budget, partial, chunk=self._chunking
        )

    def _is_too_long(self, seqs: list[Sequence], num_tokens: int) -> bool:
        if len(seqs) > 1:
            return max(seq.get_len() for seq in seqs) > self._max_model_len
        return num_tokens > self.prompt_limit

    def _can_allocate(self, group: SequenceGroup, seqs: list[Sequence]) -> AllocStatus:
        manager = self._scheduler.block_manager
        status = manager.can_allocate(
            group, num_shared_tokens=num_group_shared_tokens(seqs)
        )
        if self._has_window and status is AllocStatus.OK:
            # The estimate stops at the window although the whole prompt is placed; the
            # reference ends when it does not fit.
            num_blocks = sum(-(-seq.get_len() // self._block_size) for seq in seqs)
            if num_blocks > manager.get_num_free_gpu_blocks():
                return AllocStatus.LATER
        return status

    def _fits(self, num_tokens: int, num_seqs: int, budget: SchedulingBudget) -> bool:
        """Whether the budget holds a prefill; an oversize one needs all of it."""
        if not num_tokens or budget.num_batched_tokens >= self._token_budget:
            return False
        if not self._chunking:
            self._scheduler.count_running_seqs(budget)
        return budget.can_schedule(
            num_new_tokens=min(num_tokens, self._token_budget), num_new_seqs=num_seqs
        )

    # -- what becomes of it ---------------------------------------------------

    def _start(
        self,
        group: SequenceGroup,
        seqs: list[Sequence],
        num_uncached: int,
        num_cached: int,
        output: GroupSchedulerOutput,
    ) -> ScheduledSequenceGroup:
        manager = self._scheduler.block_manager
        if self._enable_caching:
            # As looked up: a full hit is budgeted with one token less.
            num_hits = manager.get_num_cached_tokens(seqs[0]) if len(seqs) == 1 else 0
            output.num_hit_tokens[group.request_id] = num_hits
        manager.allocate(group, num_shared_tokens=num_group_shared_tokens(seqs))
        for seq in seqs:
            seq.move_to(SequenceStatus.RUNNING)
        return ScheduledSequenceGroup(
            group, num_uncached + num_cached, True, 0, num_cached
        )

    def _give_up(
        self,
        group: SequenceGroup,
        seqs: list[Sequence],
        reason: str,
        output: GroupSchedulerOutput,
    ) -> None:
        """Ignore the head, which can never be admitted."""
        assert group.request is not None
        self._scheduler.waiting.popleft()
        for seq in seqs:
            seq.move_to(SequenceStatus.FINISHED_IGNORED)
        group.request.reason = reason
        output.ignored_seq_groups.append(group)

    def _too_long(self, seqs: list[Sequence]) -> str:
        what = "max_model_len"
        if not self._chunking:
            what = "the lesser of max_model_len and max_num_batched_tokens"
        num_tokens = max(seq.get_len() for seq in seqs)
        return f"{num_tokens} tokens to prefill exceed {self.prompt_limit}, {what}"

    def _too_large(self, seqs: list[Sequence]) -> str:
        manager = self._scheduler.block_manager
        return (
            f"the blocks of {sum(seq.get_len() for seq in seqs)} tokens exceed the "
            f"pool of {manager.num_total_gpu_blocks} less {manager.watermark_blocks} "
            f"below the watermark"
        )

    # -- delay ----------------------------------------------------------------

    def _passed_delay(self, now_s: float) -> bool:
        """Whether prompts have waited long enough to gather company.

        They have when the one that arrived first has waited longer than the delay
        factor times the last prompt step, or when nothing runs.
        """
        if self.prev_prompt:
            self._last_prompt_latency_s = now_s - self._prev_time_s
        self._prev_time_s = now_s
        self.prev_prompt = False
        if not self._delay_factor or not self._scheduler.running:
            return True
        least_s = self._delay_factor * self._last_prompt_latency_s
        return any(
            now_s - group.arrival_time > least_s for group in self._scheduler.waiting
        )
