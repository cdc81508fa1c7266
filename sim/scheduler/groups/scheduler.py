"""The base of the schedulers before V1: they schedule sequence groups.

`GroupScheduler` stands between the engine, which knows requests, and a generation's
policy, which knows sequence groups under vLLM's names. A generation is a subclass
that forms the batch (`_schedule`); queues, preemption and accounting are shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from itertools import count, islice
from typing import TYPE_CHECKING, Any, cast

from cache.errors import require
from cache.sequences import SequenceStatus
from cache.stats import PrefixCacheStats
from cache.tokens import ListTokens
from sim.errors import SchedulerError, SwapSpaceError
from sim.scheduler.base import CacheUsage, Preemption, PreemptionMode
from sim.scheduler.groups.accounting import account, num_lost_tokens
from sim.scheduler.groups.decodes import GroupDecodes
from sim.scheduler.groups.holdings import GroupHoldings
from sim.scheduler.groups.sequence import Sequence, SequenceGroup
from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.victims import VictimChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Items

    from sim.scheduler.groups.output import GroupSchedulerOutput
    from sim.scheduler.groups.sequence import GroupBlockManager
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.settings import CacheConfig


class GroupScheduler(ABC):
    """Base of the generations that schedule sequence groups."""

    block_manager: GroupBlockManager
    schedules_groups = True
    """Whether the samples of a prompt come as one request; see `GroupClient`."""
    num_initial_sequences_is_width = False
    """Whether a group has all its sequences from arrival on (vLLM 0.1)."""

    def __init__(
        self, scheduler_config: SchedulerConfig, cache_config: CacheConfig
    ) -> None:
        self.scheduler_config = scheduler_config
        self.cache_config = cache_config
        # The queues, heads first.
        self.waiting: deque[SequenceGroup] = deque()
        self.running: deque[SequenceGroup] = deque()
        self.swapped: deque[SequenceGroup] = deque()
        self.seq_counter = count()
        self._own_request_ids = count(-1, -1)  # the engine's begin with 0
        self._groups: dict[int, SequenceGroup] = {}
        # Sequences of groups that are gone, whose blocks a generation's reference never
        # gives back.
        self.abandoned_seqs: list[Sequence] = []
        # Look-ups of groups admitted; stays empty without prefix caching.
        self.prefix_cache_stats = PrefixCacheStats()
        policy = scheduler_config.preemption_victim
        self._choice = (
            None if policy is None else VictimChoice(policy, GroupHoldings(self))
        )
        # Decodes that are advanced by counting, once an engine asks for it.
        self.decodes: GroupDecodes | None = None

    # -- queues, under vLLM's names -------------------------------------------

    def add_seq_group(self, seq_group: SequenceGroup) -> None:
        """Put an arrived group at the end of the waiting queue."""
        if seq_group.request is None:
            seq_group.request = self._request_of(seq_group)
        elif seq_group.request.request_id in self._groups:
            raise SchedulerError(
                f"group {seq_group.request_id} (sequence "
                f"{seq_group.first_seq.seq_id}) is queued already; add a group once"
            )
        self._groups[seq_group.request.request_id] = seq_group
        self.waiting.append(seq_group)

    def _request_of(self, seq_group: SequenceGroup) -> Request:
        """Make the engine's request for a group that came without one."""
        seq = seq_group.first_seq
        prompt = seq.get_token_ids()
        return Request(
            request_id=next(self._own_request_ids),
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
                if self.decodes is not None and group.request is not None:
                    self.decodes.leave(group.request)
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
        if self._choice is not None:
            self._choice.forget(group.request)

    # -- the engine's protocol ------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_swapped(self) -> int:
        return len(self.swapped)

    def group_of(self, request: Request) -> SequenceGroup:
        """Return the group that serves `request`."""
        return self._groups[request.request_id]

    def add_request(self, request: Request) -> None:
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
        request.move_to(RequestStatus.FINISHED_ABORTED)
        self.abort_seq_group(self.group_of(request).request_id)

    def update(self, finished: Items[Request]) -> None:
        if self.decodes is None:
            if finished:
                self.free_finished_seq_groups()
            return
        for request in finished:  # their sequences are freed already
            group = self.group_of(request)
            self.running.remove(group)
            self._forget(group)

    # -- decodes on a clock, see `GroupDecodes` -------------------------------

    def keep_decodes(self) -> GroupDecodes | None:
        """Advance plain decodes by counting from now on; None where that is not known.

        A batch then has no entries for them: only their count and their tokens.
        """
        config = self.cache_config
        if self.why_stepwise():
            return None
        tiers = cast("Any", self).tiers()
        self.decodes = GroupDecodes(self, config.block_size, tiers[0])
        return self.decodes

    def why_stepwise(self) -> str:
        """Return why decodes have to be looked at one by one, if they have to."""
        if self.cache_config.sliding_window is not None:
            return "the scheduler has no fast path for sliding windows"
        if self.cache_config.enable_prefix_caching:
            return "the scheduler has no fast path for cached prefixes"
        return ""

    def drop_decodes(self) -> None:
        """Look at decodes one by one again."""
        if self.decodes is not None:
            self.decodes.leave_all()
            self.decodes = None

    def running_key(self) -> Callable[[SequenceGroup], Any] | None:
        """Return the key by which running groups are sorted before a step, if any."""
        return None

    def decodes_together(self, num_decodes: int, num_others: int) -> bool:
        """Whether no budget keeps decodes at the head from computing in one step.

        Behind them run `num_others` groups.
        """
        del num_decodes, num_others
        return True

    def may_be_quiet(self) -> bool:
        """Whether the next call needs no look at the time, nor at other waiting groups.

        A waiting head that was refused is refused until a block or a seat is free.
        """
        return True

    def _take_turn(self, output: GroupSchedulerOutput) -> list[SequenceGroup]:
        """Take groups on the clock, which compute, off the head of `running`."""
        return [] if self.decodes is None else self.decodes.take_turn(output)

    @property
    def num_clocked(self) -> int:
        """Groups on the clock, with which `running` begins."""
        return 0 if self.decodes is None else self.decodes.num_decodes

    # -- a call ---------------------------------------------------------------

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
        looks_at_head = not self.swapped
        output = self._schedule(now_s)
        if self.decodes is not None:
            self.decodes.note_refused(output, was_looked_at=looks_at_head)
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

        The last one, unless a policy was given. A group with its slot keeps it: copies
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
        if self.decodes is not None:
            self.decodes.leave(group.request)
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

    # -- the cache ------------------------------------------------------------

    def is_shared(self, block_id: int) -> bool:
        """Whether several tables hold a GPU block; never without prefix caching."""
        del block_id
        return False

    def _gpu_usage(self) -> float:
        num_blocks = self.cache_config.num_gpu_blocks
        return 1.0 - self.block_manager.get_num_free_gpu_blocks() / num_blocks

    def cache_usage(self) -> CacheUsage:
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
        num_logical_tokens = (
            0 if self.decodes is None else self.decodes.num_computed_tokens
        )
        num_unshared_tokens = 0
        for group in islice(self.running, self.num_clocked, None):
            seqs = group.get_seqs(SequenceStatus.RUNNING)
            num_logical_tokens += sum(seq.num_computed_tokens for seq in seqs)
            if len(seqs) > 1:
                num_unshared_tokens += self._num_empty_shared_slots(seqs)
        block_size = self.cache_config.block_size
        num_null_blocks, num_dropped_blocks = self._window_blocks()
        num_logical_tokens -= num_dropped_blocks * block_size
        num_extra = self.block_manager.num_logical_blocks - (
            num_physical_blocks - num_null_blocks
        )
        num_shared_tokens = num_extra * block_size
        num_physical_tokens = (
            num_logical_tokens - num_shared_tokens + num_unshared_tokens
        )
        # Two equal prompts in chunks share blocks that neither has filled yet.
        return max(num_physical_tokens, 0), num_logical_tokens

    def _window_blocks(self) -> tuple[int, int]:
        """Return null blocks, and table entries that name them, in running tables."""
        return 0, 0

    def _num_empty_shared_slots(self, seqs: list[Sequence]) -> int:
        """Empty slots of blocks, once for each sharer but the one that filled most.

        An entry beyond the first of a shared block would count as a block of tokens;
        where the block is not full it stands for fewer. Lookahead slots may put empty
        blocks behind the last filled one.
        """
        block_size = self.cache_config.block_size
        fewest: dict[int, int] = {}
        num_slots = 0
        for seq in seqs:
            num_full, num_rest = divmod(seq.num_computed_tokens, block_size)
            for block_id in self.block_manager.get_block_table(seq)[num_full:]:
                num_empty = block_size - num_rest
                num_rest = 0
                num_slots += num_empty
                fewest[block_id] = min(num_empty, fewest.get(block_id, block_size))
        return num_slots - sum(fewest.values())

    def summary(self) -> dict[str, Any]:
        return self.prefix_cache_stats.summary(self._num_evictions())

    def _num_evictions(self) -> int:
        """Return how many cached GPU blocks were given up for others."""
        return 0

    def check(self) -> None:
        if self.decodes is not None:
            self.decodes.check()
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
