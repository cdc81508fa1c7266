"""The scheduler of vLLM 0.2.7: prompt steps and decode steps apart."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from cache.sequences import AllocStatus, SequenceStatus
from sim.scheduler.block_space.scheduler import BlockSpaceScheduler, Copies
from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup

if TYPE_CHECKING:
    from sim.scheduler.block_space.stats import Stats
    from sim.scheduler.groups.sequence import SequenceGroup
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.settings import CacheConfig


class Scheduler(BlockSpaceScheduler):
    """A step computes prompts or decodes, prompts first; first come, first served.

    * Prompt step: while nothing is swapped, waiting groups are admitted from the head.
      Prompts are padded to the longest, and ``max_paddings`` bounds the waste. Those
      that can never be admitted are ignored; a step that only ignores computes
      nothing.
    * Decode step: running groups get a slot a sequence, preempting from the tail; if
      no group was preempted, swapped groups come back.

    Source: vLLM 0.2.7, ``vllm/core/scheduler.py``.
    """

    generation = "v0_2"

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        stats: Stats | None = None,
    ) -> None:
        super().__init__(scheduler_config, cache_config, stats=stats)
        self.prompt_limit = min(
            scheduler_config.max_model_len, scheduler_config.max_num_batched_tokens
        )

    def _schedule(self, now_s: float) -> GroupSchedulerOutput:
        output = self.partial_output = GroupSchedulerOutput()
        if self.waiting and not self.swapped:
            self._schedule_waiting(output)
            if output.scheduled_seq_groups or output.ignored_seq_groups:
                output.prompt_run = True
                return output
        copies: Copies = {}
        self._schedule_running(now_s, output, copies)
        if self.swapped:
            self.swapped = deque(self.policy.sort_by_priority(now_s, self.swapped))
            if not output.preemptions:
                self._schedule_swapped(output, copies)
        output.blocks_to_copy = self._flatten(copies)
        return output

    def _schedule_waiting(self, output: GroupSchedulerOutput) -> None:
        """Admit prompts while everything lasts, strictly in order."""
        config = self.scheduler_config
        num_curr_seqs = self._num_curr_seqs()
        longest = total = 0
        while self.waiting:
            group = self.waiting[0]
            several = self._recomputes_several(group)
            num_tokens = (
                self._num_recomputed_tokens(group)
                if several
                else group.get_seqs(SequenceStatus.WAITING)[0].get_len()
            )
            status = self.block_manager.can_allocate(
                group, group.first_seq.get_prompt_len() if several else None
            )
            limit = config.max_num_batched_tokens if several else self.prompt_limit
            if num_tokens > limit or status is AllocStatus.NEVER:
                self._give_up(group, num_tokens, output)
                continue
            if status is AllocStatus.LATER:
                return
            batch_size = len(output.scheduled_seq_groups) + 1
            padded = batch_size * max(longest, num_tokens)
            if padded > config.max_num_batched_tokens:
                return
            num_new_seqs = group.get_max_num_running_seqs()
            if num_curr_seqs + num_new_seqs > config.max_num_seqs:
                return
            if padded - (total + num_tokens) > config.max_paddings:
                return
            longest = max(longest, num_tokens)
            total += num_tokens
            num_curr_seqs += num_new_seqs
            output.num_budgeted_tokens = padded
            self._admit(group, several=several)
            output.scheduled_seq_groups.append(
                ScheduledSequenceGroup(group, num_tokens, is_prefill=True)
            )

    def _give_up(
        self, group: SequenceGroup, num_tokens: int, output: GroupSchedulerOutput
    ) -> None:
        """Ignore the head, which can never be admitted."""
        assert group.request is not None
        self.waiting.popleft()
        for seq in group.get_seqs(SequenceStatus.WAITING):
            seq.move_to(SequenceStatus.FINISHED_IGNORED)
        if num_tokens > self.prompt_limit:
            reason = (
                f"{num_tokens} tokens to prefill exceed {self.prompt_limit}, the "
                f"lesser of max_model_len and max_num_batched_tokens"
            )
        else:
            manager = self.block_manager
            reason = (
                f"the blocks of {num_tokens} tokens exceed the pool of "
                f"{manager.num_total_gpu_blocks} less {manager.watermark_blocks} below "
                f"the watermark"
            )
        group.request.reason = reason
        output.ignored_seq_groups.append(group)

    def _num_curr_seqs(self) -> int:
        """Sequences that running groups may come to have."""
        others = islice(self.running, self.num_clocked, None)
        return self.num_clocked + sum(
            group.get_max_num_running_seqs() for group in others
        )

    def _too_many(self, group: SequenceGroup) -> bool:
        num_seqs = self._num_curr_seqs() + group.get_max_num_running_seqs()
        return num_seqs > self.scheduler_config.max_num_seqs
