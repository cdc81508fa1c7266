"""What the schedulers before V1 have in common: they schedule sequence groups.

`GroupScheduler` stands between the engine, which knows requests, and a generation's
policy, which knows sequence groups under vLLM's names. A generation is a subclass
that forms the batch (`_schedule`); queues, life cycles, preemption and accounting are
here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from cache.errors import require
from cache.sequences import SequenceStatus
from cache.tokens import ListTokens
from sim.errors import SwapSpaceError
from sim.request import Request, RequestStatus
from sim.scheduler.base import (
    CacheUsage,
    Preemption,
    PreemptionMode,
    SchedulerOutput,
)
from sim.scheduler.batch import Batch
from sim.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Items

    from sim.scheduler.settings import CacheConfig, SchedulerConfig

BlockMapping = list[tuple[int, int]]
"""Block ids ``(from, to)`` in the order in which they are moved."""


@dataclass(slots=True)
class ScheduledSequenceGroup:
    """One entry of a batch.

    Attributes
    ----------
    seq_group
        Who.
    token_chunk_size
        Tokens of a prefill, found in the cache or not; of a decode, its running
        sequences.
    is_prefill
        Whether prompt tokens (or those of a recomputation) are computed.
    num_computed_tokens
        Tokens of a prefill that were computed before this step; 0 for a decode.
    num_cached_tokens
        Tokens of `token_chunk_size` that were found in the prefix cache.
    """

    seq_group: SequenceGroup
    token_chunk_size: int
    is_prefill: bool
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0


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
    """

    scheduled_seq_groups: list[ScheduledSequenceGroup] = field(default_factory=list)
    prompt_run: bool = False
    num_budgeted_tokens: int = 0
    ignored_seq_groups: list[SequenceGroup] = field(default_factory=list)
    blocks_to_swap_in: BlockMapping = field(default_factory=list)
    blocks_to_swap_out: BlockMapping = field(default_factory=list)
    blocks_to_copy: BlockMapping = field(default_factory=list)
    num_hit_tokens: dict[int | str, int] = field(default_factory=dict)


class GroupBlockManager(Protocol):
    """What this module asks of a generation's block manager."""

    @property
    def num_logical_blocks(self) -> int:
        """Entries of all GPU tables."""
        ...

    def fork(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Let the child share all blocks of its parent."""
        ...

    def free(self, seq: Sequence) -> None:
        """Give up a sequence's table; nothing to do if it has none."""
        ...

    def get_block_table(self, seq: Sequence) -> list[int]:
        """Return the physical block ids of a sequence."""
        ...

    def get_num_free_gpu_blocks(self) -> int:
        """Free blocks of the GPU pool."""
        ...

    def get_num_free_cpu_blocks(self) -> int:
        """Free blocks of the CPU pool."""
        ...

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Prove invariant 2 for pools and the tables of `seqs`, all that hold one."""
        ...


class GroupScheduler(ABC):
    """Base of the generations that schedule sequence groups.

    Parameters
    ----------
    scheduler_config, cache_config
        Under vLLM's names.

    Attributes
    ----------
    waiting, running, swapped
        The queues, heads first.
    block_manager
        Made by the subclass, before it calls this constructor's `super`.
    abandoned_seqs
        Sequences of groups that are gone, whose blocks a generation's reference never
        gives back.
    """

    block_manager: GroupBlockManager
    num_initial_sequences_is_width = False
    """Whether a group has all its sequences from arrival on (vLLM 0.1)."""

    def __init__(
        self, scheduler_config: SchedulerConfig, cache_config: CacheConfig
    ) -> None:
        self.scheduler_config = scheduler_config
        self.cache_config = cache_config
        self.waiting: deque[SequenceGroup] = deque()
        self.running: deque[SequenceGroup] = deque()
        self.swapped: deque[SequenceGroup] = deque()
        self.seq_counter = count()
        self._groups: dict[int, SequenceGroup] = {}
        self.num_swap_preemptions = 0
        self.abandoned_seqs: list[Sequence] = []

    # -- the policy -----------------------------------------------------------

    @abstractmethod
    def _schedule(self, now_s: float) -> GroupSchedulerOutput:
        """Form the batch: queues, blocks, `scheduled_seq_groups` and the mappings.

        Status of sequences changes here; `schedule` does the accounting.
        """

    @abstractmethod
    def admission_error(self, request: Request) -> str | None:
        """Return why `request` can never be served, or None (invariant 7)."""

    # -- queues, under vLLM's names -------------------------------------------

    def add_seq_group(self, seq_group: SequenceGroup) -> None:
        """Put an arrived group at the end of the waiting queue."""
        if seq_group.request is None:
            seq_group.request = self._request_of(seq_group)
        self._groups[seq_group.request.request_id] = seq_group
        self.waiting.append(seq_group)

    def _request_of(self, seq_group: SequenceGroup) -> Request:
        """Make the engine's request for a group that came without one."""
        seq = seq_group.first_seq
        prompt = seq.get_token_ids()
        return Request(
            request_id=len(self._groups),
            arrival_s=seq_group.arrival_time,
            num_prompt_tokens=seq.get_prompt_len(),
            tokens=ListTokens(prompt if isinstance(prompt, list) else []),
            max_num_tokens=self.scheduler_config.max_model_len,
            oracle_num_tokens=self.scheduler_config.max_model_len,
            num_sequences=seq_group.sampling_params.width,
            use_beam_search=seq_group.sampling_params.use_beam_search,
        )

    def abort_seq_group(self, request_id: int | str | Iterable[int | str]) -> None:
        """Withdraw unfinished groups, wherever they stand; unknown ids are ignored."""
        ids = {request_id} if isinstance(request_id, int | str) else set(request_id)
        for queue in (self.waiting, self.running, self.swapped):
            for group in [group for group in queue if group.request_id in ids]:
                queue.remove(group)
                for seq in group.get_unfinished_seqs():
                    seq.move_to(SequenceStatus.FINISHED_ABORTED)
                    self.free_seq(seq)
                self._forget(group)

    def has_unfinished_seqs(self) -> bool:
        """Whether any group is queued."""
        return bool(self.waiting or self.running or self.swapped)

    def get_num_unfinished_seq_groups(self) -> int:
        """Return the number of groups in the queues."""
        return len(self.waiting) + len(self.running) + len(self.swapped)

    def fork_seq(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Let a new sequence share its parent's blocks."""
        self.block_manager.fork(parent_seq, child_seq)

    def free_seq(self, seq: Sequence) -> None:
        """Give up a sequence's blocks."""
        self.block_manager.free(seq)

    def free_finished_seq_groups(self) -> None:
        """Drop finished groups from the running queue."""
        finished = [group for group in self.running if group.is_finished()]
        if finished:
            self.running = deque(g for g in self.running if not g.is_finished())
            for group in finished:
                self._forget(group)

    def _forget(self, group: SequenceGroup) -> None:
        """Drop a group that has left for good."""
        assert group.request is not None
        self._groups.pop(group.request.request_id, None)

    # -- the engine's protocol ------------------------------------------------

    @property
    def num_running(self) -> int:
        """Groups whose blocks are on the GPU."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Groups without blocks."""
        return len(self.waiting)

    @property
    def num_swapped(self) -> int:
        """Groups whose blocks are on the CPU."""
        return len(self.swapped)

    def group_of(self, request: Request) -> SequenceGroup:
        """Return the group that serves `request`."""
        return self._groups[request.request_id]

    def add_request(self, request: Request) -> None:
        """Make the group of an arrived request, and queue it."""
        num_seqs = request.num_sequences if self.num_initial_sequences_is_width else 1
        prompt = request.tokens.prompt()
        group = SequenceGroup(
            request.request_id,
            [
                Sequence(next(self.seq_counter), prompt, self.cache_config.block_size)
                for _ in range(num_seqs)
            ],
            request.arrival_s,
            request.sampling_params,
            priority=request.priority,
        )
        for branch, seq in enumerate(group.get_seqs()):
            seq.branch = branch
        group.request = request
        self.add_seq_group(group)

    def abort(self, request: Request) -> None:
        """Withdraw an unfinished request and free what it holds."""
        request.move_to(RequestStatus.FINISHED_ABORTED)
        self.abort_seq_group(self.group_of(request).request_id)

    def update(self, finished: Items[Request]) -> None:
        """Drop the groups of finished requests."""
        if finished:
            self.free_finished_seq_groups()

    def schedule(self, now_s: float) -> GroupSchedulerOutput:
        """Form the batch of the next step.

        Computed tokens advance at once, before the step's output exists.
        """
        output = self._schedule(now_s)
        self._account(output, now_s)
        return output

    # -- preemption -----------------------------------------------------------

    def _preempt(
        self,
        group: SequenceGroup,
        for_group: SequenceGroup,
        output: GroupSchedulerOutput,
        reason: str = "no free block for a running group",
        mode: PreemptionMode | None = None,
    ) -> PreemptionMode:
        """Take the GPU blocks of `group`, and say where it has to queue.

        Parameters
        ----------
        group, for_group
            Who loses its blocks, and who needs them.
        output
            Takes the record, and the moves of a swap.
        reason
            For the record.
        mode
            How; None for what `_preemption_mode` says.

        Returns
        -------
        PreemptionMode
            RECOMPUTE: the caller puts it into `waiting`; SWAP: into `swapped`.

        Raises
        ------
        SwapSpaceError
            If it must be swapped and the CPU pool lacks room, where the reference
            ends as well; nothing changed for this group.
        """
        assert group.request is not None
        assert for_group.request is not None
        mode = mode or self._preemption_mode(group)
        manager = self.block_manager
        usage_before = self._gpu_usage()
        num_free_before = manager.get_num_free_gpu_blocks()
        seqs = group.get_seqs(SequenceStatus.RUNNING)
        num_tokens = sum(seq.num_computed_tokens for seq in seqs)
        num_blocks_moved = 0
        if mode is PreemptionMode.RECOMPUTE:
            self._release_for_recompute(group)
            lost = num_tokens
            group.request.move_to(RequestStatus.PREEMPTED)
            group.request.num_recompute_tokens = max(
                group.request.num_recompute_tokens, lost
            )
            group.request.num_computed_tokens = 0
        else:
            lost = 0
            num_before = len(output.blocks_to_swap_out)
            self._swap_out(group, output)
            num_blocks_moved = len(output.blocks_to_swap_out) - num_before
            group.request.move_to(RequestStatus.SWAPPED)
            self.num_swap_preemptions += 1
        group.request.num_preemptions += 1
        group.request.end_streak()
        output.preemptions.append(
            Preemption(
                request=group.request,
                for_request=for_group.request,
                reason=reason,
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

    # -- accounting -----------------------------------------------------------

    def _account(self, output: GroupSchedulerOutput, now_s: float) -> None:
        """Advance computed tokens and fill the engine's view of the output."""
        batch = Batch(0, self.cache_config.sliding_window)
        for entry in output.scheduled_seq_groups:
            group = entry.seq_group
            request = group.request
            assert request is not None
            if request.status is not RequestStatus.RUNNING:
                self._note_admission(request, entry, output, now_s)
            if entry.is_prefill:
                num_tokens = self._account_prefill(entry, request, batch)
            else:
                num_tokens = 0
                for seq in group.get_seqs(SequenceStatus.RUNNING):
                    num_tokens += 1
                    length = seq.get_len()
                    seq.num_computed_tokens = length
                    batch.add(1, length)
            output.scheduled.append(request)
            output.num_scheduled_tokens.append(num_tokens)
        for group in output.ignored_seq_groups:
            self._ignore(group, output)
        output.shape = batch.shape()._replace(
            num_swapped_in_blocks=len(output.blocks_to_swap_in),
            num_swapped_out_blocks=len(output.blocks_to_swap_out),
            num_copied_blocks=len(output.blocks_to_copy),
        )
        output.num_recomputed_tokens = batch.num_recomputed_tokens
        output.stuck = not (
            output.scheduled or output.ignored or output.preemptions or self.running
        )

    def _note_admission(
        self,
        request: Request,
        entry: ScheduledSequenceGroup,
        output: GroupSchedulerOutput,
        now_s: float,
    ) -> None:
        if request.status is RequestStatus.WAITING:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = entry.num_cached_tokens
        output.admitted.append(request)
        request.move_to(RequestStatus.RUNNING)

    def _account_prefill(
        self, entry: ScheduledSequenceGroup, request: Request, batch: Batch
    ) -> int:
        """Count a prefill and return its computed (not cached) tokens."""
        seqs = entry.seq_group.get_seqs(SequenceStatus.RUNNING)
        # A group of vLLM 0.1.0 may revive finished sequences: its prefill is as long as
        # the first of them and computes nothing for the others.
        revived = entry.token_chunk_size == seqs[0].get_len()
        if len(seqs) > 1 and seqs[0].get_output_len() and not revived:
            return self._account_group_recompute(entry, request, batch, seqs)
        after = entry.num_computed_tokens + entry.token_chunk_size
        for seq in seqs:
            seq.update_num_computed_tokens(
                min(after, seq.get_len()) - seq.num_computed_tokens
            )
        num_new_tokens = entry.token_chunk_size - entry.num_cached_tokens
        # A whole prompt in the cache: its last token is computed for the logits.
        num_new_tokens = max(num_new_tokens, 1)
        self._note_recomputed(request, after - num_new_tokens, after, batch)
        batch.add(num_new_tokens, after)
        return num_new_tokens

    def _account_group_recompute(
        self,
        entry: ScheduledSequenceGroup,
        request: Request,
        batch: Batch,
        seqs: list[Sequence],
    ) -> int:
        """Count a recomputation of several sequences: the prompt once, then each."""
        num_prompt_tokens = seqs[0].get_prompt_len()
        for seq in seqs:
            seq.update_num_computed_tokens(seq.get_len() - seq.num_computed_tokens)
        self._note_recomputed(request, 0, entry.token_chunk_size, batch)
        batch.add(num_prompt_tokens, num_prompt_tokens)
        for seq in seqs:
            batch.add(seq.get_output_len(), seq.get_len())
        return entry.token_chunk_size

    def _note_recomputed(
        self, request: Request, before: int, after: int, batch: Batch
    ) -> None:
        if before < request.num_recompute_tokens:
            num_again = min(after, request.num_recompute_tokens) - before
            request.num_recomputed_tokens += num_again
            batch.num_recomputed_tokens += num_again

    def _ignore(self, group: SequenceGroup, output: GroupSchedulerOutput) -> None:
        request = group.request
        assert request is not None
        request.reason = request.reason or (
            f"the scheduler can never admit {group.first_seq.get_len()} tokens"
        )
        request.move_to(RequestStatus.FINISHED_REJECTED)
        output.ignored.append(request)
        self._forget(group)

    def _gpu_usage(self) -> float:
        num_blocks = self.cache_config.num_gpu_blocks
        return 1.0 - self.block_manager.get_num_free_gpu_blocks() / num_blocks

    def cache_usage(self) -> CacheUsage:
        """Return what the cache holds. O(running sequences)."""
        config = self.cache_config
        manager = self.block_manager
        num_physical = config.num_gpu_blocks - manager.get_num_free_gpu_blocks()
        num_physical_tokens, num_logical_tokens = self._num_tokens(num_physical)
        return CacheUsage(
            num_physical_blocks=num_physical,
            num_logical_blocks=manager.num_logical_blocks,
            num_physical_tokens=num_physical_tokens,
            num_logical_tokens=num_logical_tokens,
            kv_cache_usage=num_physical / config.num_gpu_blocks,
            cpu_cache_usage=1.0
            - manager.get_num_free_cpu_blocks() / config.num_cpu_blocks
            if config.num_cpu_blocks
            else 0.0,
        )

    def _num_tokens(self, num_physical_blocks: int) -> tuple[int, int]:
        """Return tokens in the physical blocks, and those of all tables."""
        num_logical_tokens = 0
        num_unshared_tokens = 0
        for group in self.running:
            seqs = group.get_seqs(SequenceStatus.RUNNING)
            num_logical_tokens += sum(seq.num_computed_tokens for seq in seqs)
            if len(seqs) > 1:
                num_unshared_tokens += self._num_empty_shared_slots(seqs)
        num_extra = self.block_manager.num_logical_blocks - num_physical_blocks
        num_shared_tokens = num_extra * self.cache_config.block_size
        num_physical_tokens = (
            num_logical_tokens - num_shared_tokens + num_unshared_tokens
        )
        return num_physical_tokens, num_logical_tokens

    def _num_empty_shared_slots(self, seqs: list[Sequence]) -> int:
        """Empty slots of partly filled blocks, once for each sharer but one.

        An entry beyond the first of a shared block would count as a block of tokens;
        where the block is not full it stands for fewer.
        """
        block_size = self.cache_config.block_size
        seen: set[int] = set()
        num_slots = 0
        for seq in seqs:
            num_tokens = seq.num_computed_tokens % block_size
            if not num_tokens:
                continue
            last = self.block_manager.get_block_table(seq)[-1]
            if last in seen:
                num_slots += block_size - num_tokens
            seen.add(last)
        return num_slots

    def summary(self) -> dict[str, Any]:
        """Return counters of this policy; a generation adds its own."""
        return {}

    def check(self) -> None:
        """Prove queues, statuses and blocks in O(n).

        Raises
        ------
        InvariantError
            With the rule and who breaks it.
        """
        holders = list(self.abandoned_seqs)
        for queue, status in (
            (self.waiting, SequenceStatus.WAITING),
            (self.running, SequenceStatus.RUNNING),
            (self.swapped, SequenceStatus.SWAPPED),
        ):
            for group in queue:
                seqs = group.get_unfinished_seqs()
                wrong = [seq for seq in seqs if seq.status is not status]
                require(
                    seqs and not wrong,
                    f"group {group.request_id} is queued as {status.value}: {seqs}",
                )
                if status is not SequenceStatus.WAITING:
                    holders += seqs
        self.block_manager.check(holders)
        ids = [g.request_id for g in (*self.waiting, *self.running, *self.swapped)]
        require(len(set(ids)) == len(ids), "a group stands twice in the queues")
