"""The scheduler of spring 2023, as vLLM 0.1.0 released it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cache.sequences import AllocStatus, SequenceStatus
from sim.errors import SchedulerError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.block_space.scheduler import BlockSpaceScheduler, Copies
from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup

if TYPE_CHECKING:
    from sim.scheduler.block_space.stats import Stats
    from sim.scheduler.groups.sequence import SequenceGroup
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.settings import CacheConfig


class Scheduler(BlockSpaceScheduler):
    """Running, swapped and waiting groups in one step, first come, first served.

    1. Running groups get a slot a sequence. Where a group finds fewer free blocks
       than it has sequences, the last running group is preempted, and again.
    2. If nothing was swapped out, swapped groups come back.
    3. If nothing is swapped any more, waiting groups join, and their prompts share
       the step with the decodes.

    A head that cannot be admitted blocks its queue, for good if it never can: this
    generation ignores no prompt.

    Source: vLLM 0.1.0, ``vllm/core/scheduler.py``.
    """

    generation = "cacheflow"
    num_initial_sequences_is_width = True

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        stats: Stats | None = None,
    ) -> None:
        if cache_config.sliding_window is not None:
            raise SchedulerError(
                f"sliding_window must be null in cacheflow, got "
                f"{cache_config.sliding_window}; v0_2 has sliding windows"
            )
        super().__init__(scheduler_config, cache_config, stats=stats)

    def _schedule(self, now_s: float) -> GroupSchedulerOutput:
        output = self.partial_output = GroupSchedulerOutput()
        copies: Copies = {}
        self._schedule_running(now_s, output, copies)
        if self.swapped:
            self.swapped = deque(self.policy.sort_by_priority(now_s, self.swapped))
            # Recomputed victims of this call do not keep swapped groups out.
            if not output.blocks_to_swap_out:
                self._schedule_swapped(output, copies)
        if self.waiting and not self.swapped:
            self._schedule_waiting(output)
        output.blocks_to_copy = self._flatten(copies)
        return output

    def _schedule_waiting(self, output: GroupSchedulerOutput) -> None:
        """Let groups join while everything lasts, strictly in order."""
        budget = self.scheduler_config.max_num_batched_tokens
        # Victims of this call stand in front.
        preempted = {id(preemption.request) for preemption in output.preemptions}
        while self.waiting:
            group = self.waiting[0]
            if id(group.request) in preempted:
                return
            several = self._recomputes_several(group)
            if self._alloc_status(group, several=several) is not AllocStatus.OK:
                return
            num_tokens = (
                self._num_recomputed_tokens(group)
                if several
                else group.first_seq.get_len()
            )
            if output.num_budgeted_tokens + num_tokens > budget:
                return
            if self._too_many(group):
                return
            if not several:
                _revive(group)
            self._admit(group, several=several)
            output.num_budgeted_tokens += num_tokens
            output.scheduled_seq_groups.append(
                ScheduledSequenceGroup(group, num_tokens, is_prefill=True)
            )

    def _alloc_status(self, group: SequenceGroup, *, several: bool) -> AllocStatus:
        manager = self.block_manager
        first = group.first_seq
        if several:
            return manager.can_allocate(group, first.get_prompt_len())
        return manager.alloc_status(manager.num_blocks_for(first.get_len()))

    def _too_many(self, group: SequenceGroup) -> bool:
        # Groups that run are added to sequences that come: a wart of the release.
        num_new_seqs = group.num_seqs(SequenceStatus.WAITING) + group.num_seqs(
            SequenceStatus.SWAPPED
        )
        return len(self.running) + num_new_seqs > self.scheduler_config.max_num_seqs

    def _preemption_mode(self, group: SequenceGroup) -> PreemptionMode:
        forced = self.scheduler_config.preemption_mode
        if forced is not None:
            return forced
        if group.num_seqs(SequenceStatus.RUNNING) == 1:
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP


def _revive(group: SequenceGroup) -> None:
    """Let finished sequences of a group that comes back run again.

    A wart of 0.1.0: admission takes all sequences of a group, with the table of the
    first, so what had finished before a recomputation starts anew.
    """
    for seq in group.get_finished_seqs():
        seq.revive()
        seq.reset_for_recompute()
