"""Swapped groups in a call of the V0 scheduler.

Source: vLLM 0.7.3, ``vllm/core/scheduler.py`` (`_schedule_swapped`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache.sequences import AllocStatus, SequenceStatus
from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup

if TYPE_CHECKING:
    from sim.scheduler.groups.sequence import SequenceGroup
    from sim.scheduler.v0.budget import SchedulingBudget
    from sim.scheduler.v0.scheduler import Scheduler

_SWAPPED = SequenceStatus.SWAPPED


@dataclass(slots=True)
class SwappedInOutputs:
    """Batch entries of groups that came back from the CPU."""

    decodes: list[ScheduledSequenceGroup] = field(default_factory=list)
    prefills: list[ScheduledSequenceGroup] = field(default_factory=list)


class SwappedPhase:
    """Brings swapped groups back while they fit, strictly in order, never in chunks."""

    def __init__(self, scheduler: Scheduler) -> None:
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
