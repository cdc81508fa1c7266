"""The phase of a V0 scheduler call that starts prefills of waiting groups.

Source: vLLM 0.7.3, ``vllm/core/scheduler.py`` (`_schedule_prefills`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.sequences import AllocStatus, SequenceStatus
from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup
from sim.scheduler.v0.budget import (
    num_group_recompute_tokens,
    num_group_shared_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scheduler.groups.sequence import Sequence, SequenceGroup
    from sim.scheduler.v0.budget import (
        PartialPrefillMetadata,
        SchedulingBudget,
    )
    from sim.scheduler.v0.phases import Queues

_WAITING = SequenceStatus.WAITING


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
