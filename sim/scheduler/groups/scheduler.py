"""What the schedulers before V1 have in common: they schedule sequence groups.

`GroupScheduler` stands between the engine, which knows requests, and a generation's
policy, which knows sequence groups under vLLM's names. A generation is a subclass
that forms the batch (`_schedule`); queues (`group_state`), preemption and accounting
(`group_accounting`) are shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from cache.sequences import SequenceStatus
from sim.errors import SwapSpaceError
from sim.scheduler.base import Preemption, PreemptionMode
from sim.scheduler.groups.accounting import account, num_lost_tokens
from sim.scheduler.groups.state import GroupState
from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from sim.scheduler.groups.output import GroupSchedulerOutput
    from sim.scheduler.groups.sequence import SequenceGroup


class GroupScheduler(GroupState, ABC):
    """Base of the generations that schedule sequence groups; see `GroupState`."""

    @abstractmethod
    def _schedule(self, now_s: float) -> GroupSchedulerOutput:
        """Form the batch: queues, blocks, `scheduled_seq_groups` and the mappings.

        Status of sequences changes here; `schedule` does the accounting.
        """

    @abstractmethod
    def admission_error(self, request: Request) -> str | None:
        """Return why `request` can never be served, or None (invariant 7)."""

    def schedule(self, now_s: float = 0.0) -> GroupSchedulerOutput:
        # Computed tokens advance at once, before the step's output exists.
        output = self._schedule(now_s)
        output.running_queue_size = len(self.running)
        caching = self.cache_config.enable_prefix_caching
        account(
            output,
            now_s,
            self.cache_config.sliding_window,
            self.prefix_cache_stats if caching else None,
        )
        for group in output.ignored_seq_groups:
            self._ignore(group, output)
        output.stuck = not (
            output.scheduled or output.ignored or output.preemptions or self.running
        )
        return output

    def _ignore(self, group: SequenceGroup, output: GroupSchedulerOutput) -> None:
        request = group.request
        assert request is not None
        request.reason = request.reason or (
            f"the scheduler can never admit {group.first_seq.get_len()} tokens"
        )
        request.move_to(RequestStatus.FINISHED_REJECTED)
        output.ignored.append(request)
        self._forget(group)

    # -- preemption -----------------------------------------------------------

    def _victim(
        self, candidates: Items[SequenceGroup], needs: SequenceGroup
    ) -> SequenceGroup:
        """Return which of the groups without a slot in this call loses its blocks.

        The last one, unless a policy was given. Who has its slot keeps it: its copies
        are planned.
        """
        if self._choice is None:
            return candidates[-1]
        assert needs.request is not None
        requests = [group.request for group in candidates if group.request is not None]
        return self.group_of(self._choice.victim(requests, needs.request))

    def _preempt(
        self,
        group: SequenceGroup,
        for_group: SequenceGroup,
        output: GroupSchedulerOutput,
        reason: str | None = None,
        mode: PreemptionMode | None = None,
    ) -> PreemptionMode:
        """Take the GPU blocks of `group`, and say how: `waiting` or `swapped` is next.

        Where it must be swapped and the CPU pool lacks room, the reference ends as
        well: `SwapSpaceError`, and nothing changes for this group.
        """
        assert group.request is not None
        assert for_group.request is not None
        mode = mode or self._preemption_mode(group)
        if self._choice is not None:
            self._choice.note(group.request)
            reason = reason or self._choice.reason
        manager = self.block_manager
        usage_before = self._gpu_usage()
        num_free_before = manager.get_num_free_gpu_blocks()
        seqs = group.get_seqs(SequenceStatus.RUNNING)
        num_blocks_moved = lost = 0
        if mode is PreemptionMode.RECOMPUTE:
            lost = num_lost_tokens(seqs)
            self._release_for_recompute(group)
            group.request.move_to(RequestStatus.PREEMPTED)
            group.request.num_recompute_tokens = max(
                group.request.num_recompute_tokens, lost
            )
            group.request.num_computed_tokens = 0
        else:
            num_before = len(output.blocks_to_swap_out)
            self._swap_out(group, output)
            num_blocks_moved = len(output.blocks_to_swap_out) - num_before
            group.request.move_to(RequestStatus.SWAPPED)
        group.request.num_preemptions += 1
        group.request.end_streak()
        output.preemptions.append(
            Preemption(
                request=group.request,
                for_request=for_group.request,
                reason=reason or "no free block for a running group",
                mode=mode,
                num_tokens_lost=lost,
                num_blocks_freed=manager.get_num_free_gpu_blocks() - num_free_before,
                num_blocks_moved=num_blocks_moved,
                kv_cache_usage_before=usage_before,
                kv_cache_usage_after=self._gpu_usage(),
            )
        )
        return mode

    def _preemption_mode(self, group: SequenceGroup) -> PreemptionMode:
        """Return the forced mode, or the generation's: swap if several sequences."""
        forced = self.scheduler_config.preemption_mode
        if forced is not None:
            return forced
        if group.get_max_num_running_seqs() == 1:
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP

    def _release_for_recompute(self, group: SequenceGroup) -> None:
        for seq in group.get_seqs(SequenceStatus.RUNNING):
            seq.move_to(SequenceStatus.WAITING)
            self.free_seq(seq)
            seq.reset_for_recompute()

    @abstractmethod
    def _swap_out(self, group: SequenceGroup, output: GroupSchedulerOutput) -> None:
        """Move a group's blocks to the CPU, or raise `no_swap_space(group)`."""

    def no_swap_space(self, group: SequenceGroup) -> SwapSpaceError:
        """Return the error of a group that has to be swapped and cannot be."""
        return SwapSpaceError(
            f"the engine of this generation ends when CPU swap space is short: request "
            f"{group.request_id} has to be swapped out and "
            f"{self.block_manager.get_num_free_cpu_blocks()} CPU blocks are free; "
            f"raise swap_space, or set preemption_mode to recompute"
        )
