"""The base of the two schedulers over `BlockSpaceManager`.

`cacheflow` and `v0_2` let running groups go on in the same way, preempting from the
tail, and swap groups back in one by one. They differ in what a call may mix, in what a
group counts against ``max_num_seqs``, and in admission.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cache.cacheflow.manager import BlockSpaceManager
from cache.sequences import SequenceStatus
from cache.stats import BlockTier
from sim.errors import SchedulerError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup
from sim.scheduler.groups.scheduler import GroupScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sim.scheduler.block_space.stats import Stats
    from sim.scheduler.groups.decodes import GroupDecodes
    from sim.scheduler.groups.sequence import SequenceGroup
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig

_WAITING = SequenceStatus.WAITING
_RUNNING = SequenceStatus.RUNNING
_SWAPPED = SequenceStatus.SWAPPED

Copies = dict[int, list[int]]
"""Targets of copy-on-write by source block, in order of first use."""


class BlockSpaceScheduler(GroupScheduler):
    """Base of the 2023 schedulers."""

    block_manager: BlockSpaceManager

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        stats: Stats | None = None,
    ) -> None:
        self.block_manager = BlockSpaceManager(
            cache_config.block_size,
            cache_config.num_gpu_blocks,
            cache_config.num_cpu_blocks,
            cache_config.watermark,
            cache_config.sliding_window,
        )
        super().__init__(scheduler_config, cache_config)
        self.policy = PolicyFactory.get_policy(scheduler_config.policy)
        self.stats = stats
        # Decisions of the call in progress so far. When a call ends in
        # `SwapSpaceError` these are the preemptions before it.
        self.partial_output = GroupSchedulerOutput()

    def schedule(self, now_s: float = 0.0) -> GroupSchedulerOutput:
        output = super().schedule(now_s)
        if self.stats is not None:
            self.stats.record(now_s, output, self)
        return output

    def keep_decodes(self) -> GroupDecodes | None:
        return super().keep_decodes() if self.stats is None else None

    def running_key(self) -> Callable[[SequenceGroup], Any] | None:
        return _arrival_time

    def tiers(self) -> list[BlockTier]:
        manager = self.block_manager
        num_gpu, num_cpu = manager.num_total_gpu_blocks, manager.num_total_cpu_blocks
        return [
            BlockTier("gpu", manager.gpu_allocator, num_gpu, num_gpu),
            BlockTier("cpu", manager.cpu_allocator, num_cpu, num_cpu),
        ]

    # -- running groups -------------------------------------------------------

    def _schedule_running(
        self, now_s: float, output: GroupSchedulerOutput, copies: Copies
    ) -> None:
        """Give running groups their slots, in order, preempting from the tail."""
        self.running = deque(self.policy.sort_by_priority(now_s, self.running))
        running = self.running
        served = self._take_turn(output)
        output.num_budgeted_tokens += len(served)
        try:
            while running:
                if self._make_room(running[0], output):
                    group = running.popleft()
                    served.append(group)
                    self._decode(group, output, copies)
        finally:
            running.extendleft(reversed(served))

    def _make_room(self, group: SequenceGroup, output: GroupSchedulerOutput) -> bool:
        """Preempt until `group` can grow; False if that took its own preemption."""
        running = self.running
        while not self.block_manager.can_append_slot(group):
            victim = self._victim(running, group)
            mode = self._preempt(victim, group, output)
            if victim is running[-1]:
                running.pop()
            else:
                running.remove(victim)
            if mode is PreemptionMode.RECOMPUTE:
                self.waiting.appendleft(victim)
            else:
                self.swapped.append(victim)
            if victim is group:
                return False
        return True

    def _decode(
        self, group: SequenceGroup, output: GroupSchedulerOutput, copies: Copies
    ) -> None:
        """Give the sequences of a group their slots, and put it into the batch."""
        append_slot = self.block_manager.append_slot
        seqs = group.get_seqs(_RUNNING)
        for seq in seqs:
            pair = append_slot(seq)
            if pair is not None:
                copies.setdefault(pair[0], []).append(pair[1])
        output.num_budgeted_tokens += len(seqs)
        output.scheduled_seq_groups.append(
            ScheduledSequenceGroup(group, len(seqs), is_prefill=False)
        )

    # -- swapping -------------------------------------------------------------

    def _swap_out(self, group: SequenceGroup, output: GroupSchedulerOutput) -> None:
        if not self.block_manager.can_swap_out(group):
            raise self.no_swap_space(group)
        output.blocks_to_swap_out += self.block_manager.swap_out(group).items()
        for seq in group.get_seqs(_RUNNING):
            seq.move_to(_SWAPPED)

    def _schedule_swapped(self, output: GroupSchedulerOutput, copies: Copies) -> None:
        """Bring groups back while they fit, strictly in order."""
        while self.swapped:
            group = self.swapped[0]
            if not self.block_manager.can_swap_in(group) or self._too_many(group):
                return
            self.swapped.popleft()
            output.blocks_to_swap_in += self.block_manager.swap_in(group).items()
            for seq in group.get_seqs(_SWAPPED):
                seq.move_to(_RUNNING)
            self._decode(group, output, copies)
            self.running.append(group)

    @abstractmethod
    def _too_many(self, group: SequenceGroup) -> bool:
        """Whether ``max_num_seqs`` keeps a waiting or swapped group out."""

    # -- admission ------------------------------------------------------------

    def _recomputes_several(self, group: SequenceGroup) -> bool:
        """Whether a waiting group was preempted with several running sequences.

        The releases assert that this does not happen: they swap such groups, and a
        forced recomputation ends them. Ours, beyond the reference: the group comes
        back with the full blocks of its prompt shared and a rest for each sequence;
        its prefill computes the prompt once, then each output.
        """
        waiting = group.get_seqs(_WAITING)
        return len(waiting) > 1 and any(seq.get_output_len() for seq in waiting)

    def _num_recomputed_tokens(self, group: SequenceGroup) -> int:
        """Tokens that the prefill of such a group computes."""
        num_output_tokens = sum(
            seq.get_output_len() for seq in group.get_seqs(_WAITING)
        )
        return group.first_seq.get_prompt_len() + num_output_tokens

    def _admit(self, group: SequenceGroup, *, several: bool) -> None:
        """Give the head of the waiting queue its blocks, and let it run."""
        self.waiting.popleft()
        self.block_manager.allocate(
            group, group.first_seq.get_prompt_len() if several else None
        )
        for seq in group.get_seqs(_WAITING):
            seq.move_to(_RUNNING)
        self.running.append(group)

    # -- accounting -----------------------------------------------------------

    def _num_tokens(self, num_physical_blocks: int) -> tuple[int, int]:
        # Decodes on the clock share nothing.
        num_tokens = 0 if self.decodes is None else self.decodes.num_computed_tokens
        num_physical_tokens = num_logical_tokens = num_tokens
        stored = self.block_manager.num_stored_tokens
        for group in islice(self.running, self.num_clocked, None):
            physical, logical = stored(group.get_seqs(_RUNNING))
            num_physical_tokens += physical
            num_logical_tokens += logical
        return num_physical_tokens, num_logical_tokens

    # -- the batch ------------------------------------------------------------

    @staticmethod
    def _flatten(copies: Copies) -> list[tuple[int, int]]:
        return [(src, dst) for src, targets in copies.items() for dst in targets]

    # -- invariant 7 ----------------------------------------------------------

    @property
    def max_servable_tokens(self) -> int:
        """Longest single sequence that pool and budgets let come to its end.

        ``max_model_len`` is not looked at; it is what this bounds.
        """
        manager = self.block_manager
        num_blocks = manager.num_total_gpu_blocks - manager.watermark_blocks - 1
        window = manager.block_sliding_window
        limits = []
        if window is None or num_blocks < window:
            limits.append(max(num_blocks, 0) * manager.block_size)
        if window is not None and not limits:
            limits.append(self.scheduler_config.max_model_len)
        if self._may_recompute:
            limits.append(self.scheduler_config.max_num_batched_tokens)
        return min(limits)

    @property
    def _may_recompute(self) -> bool:
        return self.scheduler_config.preemption_mode is not PreemptionMode.SWAP

    def admission_error(self, request: Request) -> str | None:
        # Refused is what, alone in an empty engine, could get stuck before its end:
        # admission, the slots of a step, and the way back from a preemption.
        return (
            self._width_error(request)
            or self._length_error(request)
            or self._pool_error(request)
        )

    def _width_error(self, request: Request) -> str | None:
        limit = self.scheduler_config.max_num_seqs
        if request.num_sequences > limit:
            return (
                f"{request.num_sequences} sequences cannot run within max_num_seqs "
                f"{limit}; raise it, or sample fewer"
            )
        return None

    def _length_error(self, request: Request) -> str | None:
        config = self.scheduler_config
        num_prompt_tokens = request.num_prompt_tokens
        longest = request.max_num_tokens
        if num_prompt_tokens > config.max_model_len:
            return (
                f"a prompt of {num_prompt_tokens} tokens exceeds max_model_len "
                f"{config.max_model_len}"
            )
        budget = config.max_num_batched_tokens
        if num_prompt_tokens > budget:
            return (
                f"a prompt of {num_prompt_tokens} tokens exceeds "
                f"max_num_batched_tokens {budget}, and this generation has no "
                f"chunks; raise it"
            )
        if not self._may_recompute:
            return None
        num_tokens = longest
        if config.preemption_mode is PreemptionMode.RECOMPUTE:
            num_tokens += (request.num_sequences - 1) * (longest - num_prompt_tokens)
        if num_tokens > budget:
            return (
                f"a request that may grow to {num_tokens} tokens could not be "
                f"recomputed within max_num_batched_tokens {budget}; raise it, lower "
                f"max_tokens, or set preemption_mode to swap"
            )
        return None

    def _pool_error(self, request: Request) -> str | None:
        manager = self.block_manager
        width = request.num_sequences
        longest = manager.num_blocks_for(request.max_num_tokens)
        shared = request.num_prompt_tokens // manager.block_size
        window = manager.block_sliding_window
        goes_round = -(-request.max_num_tokens // manager.block_size) > (
            window or longest
        )
        if width > 1 and goes_round:
            return (
                f"{width} sequences of {request.max_num_tokens} tokens outgrow "
                f"sliding_window, where this generation miscounts what they share and "
                f"loses blocks; set it to null, or sample one sequence"
            )
        num_blocks = shared + width * (longest - shared)
        need = num_blocks + width + manager.watermark_blocks
        if need > manager.num_total_gpu_blocks:
            return (
                f"{width} x {request.max_num_tokens} tokens need {num_blocks} blocks, "
                f"{width} to grow and {manager.watermark_blocks} below the watermark; "
                f"the cache has {manager.num_total_gpu_blocks}; state "
                f"max_tokens (workload.max_tokens), or lower max_model_len"
            )
        return None


_arrival_time = attrgetter("arrival_time")


class Policy(ABC):
    """An order of sequence groups.

    Source: vLLM 0.2.7, ``vllm/core/policy.py``.
    """

    @abstractmethod
    def get_priority(self, now: float, seq_group: SequenceGroup) -> float:
        """Return how urgent a group is at time `now`, in seconds; more goes first."""

    def sort_by_priority(
        self, now: float, seq_groups: Iterable[SequenceGroup]
    ) -> list[SequenceGroup]:
        """Return the groups, most urgent first; equals keep their order."""
        return sorted(
            seq_groups,
            key=lambda group: self.get_priority(now, group),
            reverse=True,
        )


class FCFS(Policy):
    """First come, first served."""

    def get_priority(self, now: float, seq_group: SequenceGroup) -> float:
        return now - seq_group.arrival_time

    def sort_by_priority(
        self, now: float, seq_groups: Iterable[SequenceGroup]
    ) -> list[SequenceGroup]:
        return sorted(seq_groups, key=_arrival_time)


POLICIES: Mapping[str, type[Policy]] = MappingProxyType({"fcfs": FCFS})
"""Policies of the 2023 schedulers by name."""


class PolicyFactory:
    """Makes policies by name."""

    @staticmethod
    def get_policy(policy_name: str) -> Policy:
        """Return a policy."""
        if policy_name not in POLICIES:
            raise SchedulerError(
                f"policy must be {' or '.join(map(repr, POLICIES))} in this "
                f"generation, got {policy_name!r}; v0 and v1 know priorities"
            )
        return POLICIES[policy_name]()
