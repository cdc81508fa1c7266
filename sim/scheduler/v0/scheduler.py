"""The scheduler of vLLM's V0 engine: prefill first, or chunked prefill."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from cache.sequences import Device, SequenceStatus
from cache.stats import BlockTier
from cache.v0.allocator import NaiveBlockAllocator
from cache.v0.manager import SelfAttnBlockSpaceManager
from sim.errors import SchedulerError, SwapSpaceError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.groups.output import GroupSchedulerOutput
from sim.scheduler.groups.scheduler import GroupScheduler
from sim.scheduler.v0.budget import (
    ChunkRule,
    PartialPrefillMetadata,
    SchedulingBudget,
    finishing_first,
)
from sim.scheduler.v0.limits import AdmissionLimits
from sim.scheduler.v0.phases import (
    RunningOutputs,
    RunningPhase,
    SwappedInOutputs,
    SwappedPhase,
)
from sim.scheduler.v0.waiting import WaitingPhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scheduler.groups.decodes import GroupDecodes
    from sim.scheduler.groups.sequence import SequenceGroup
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig

_RUNNING = SequenceStatus.RUNNING
_SWAPPED = SequenceStatus.SWAPPED


class Scheduler(GroupScheduler):
    """Groups that wait, run or are swapped out, under a budget of tokens and sequences.

    * *Default*: while nothing is swapped, waiting groups are admitted from the head; if
      there are none, running groups decode, and swapped ones come back unless one
      was preempted.
    * *Chunked prefill*: one batch holds running groups, swapped ones and chunks of new
      prompts, in this order of precedence.

    Victims of preemption are taken from the end of the running queue.

    Source: vLLM 0.7.3, ``vllm/core/scheduler.py``. Beyond it, where it ends on an
    assertion:

    * Groups of several sequences may be recomputed, if ``preemption_mode`` forces it.
      Their prefill is never cut into chunks. It waits until the budget holds it or, if
      it is larger than any budget, until nothing else is in the batch: then it exceeds
      the budget.
    * Groups that a more urgent one evicts are always recomputed, also where swapping is
      forced: the reference puts all of them into `waiting`.
    * Decodes alone may exceed both budgets when groups fork; with chunked prefill a
      forked group waits for tokens instead.
    """

    generation = "v0"
    block_manager: SelfAttnBlockSpaceManager

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        lora_config: None = None,
    ) -> None:
        if lora_config is not None:
            raise SchedulerError(
                f"lora_config must be null, got {lora_config!r}: adapters are not "
                f"modelled"
            )
        self.block_manager = SelfAttnBlockSpaceManager(
            cache_config.block_size,
            cache_config.num_gpu_blocks,
            cache_config.num_cpu_blocks,
            cache_config.watermark,
            cache_config.sliding_window,
            cache_config.enable_prefix_caching,
            evictor=cache_config.evictor or "lru",
        )
        super().__init__(scheduler_config, cache_config)
        self.chunk_rule = ChunkRule(scheduler_config, cache_config, self.block_manager)
        self.limits = AdmissionLimits(
            scheduler_config, cache_config, self.block_manager.watermark_blocks
        )
        # Decisions of the call in progress so far. When a call ends in
        # `SwapSpaceError` these are the preemptions before it.
        self.partial_output = GroupSchedulerOutput()
        self._running_phase = RunningPhase(self, self._victim_for, self._preempt)
        self._swapped_phase = SwappedPhase(self)
        self._waiting_phase = WaitingPhase(self)
        self._finished_requests_ids: list[int | str] = []
        self._waiting_is_sorted = True

    # -- public, under vLLM's names -------------------------------------------

    def why_stepwise(self) -> str:
        if self.scheduler_config.num_lookahead_slots:
            return "the scheduler has no fast path for lookahead slots"
        return super().why_stepwise()

    def keep_decodes(self) -> GroupDecodes | None:
        decodes = super().keep_decodes()
        if decodes is not None:
            self.block_manager.make_tables_lazily()
        return decodes

    def running_key(self) -> Callable[[SequenceGroup], Any] | None:
        config = self.scheduler_config
        sorts = config.policy == "priority" and not config.enable_chunked_prefill
        return _urgency if sorts else None

    def decodes_together(self, num_decodes: int, num_others: int) -> bool:
        config = self.scheduler_config
        if not config.enable_chunked_prefill:
            return True
        # The budget must hold a token of the one group behind them, too: a group that
        # gets none, or returns from the CPU, would run ahead of them from then on.
        if config.max_num_batched_tokens <= num_decodes or self.swapped:
            return False
        if num_others:
            return num_others == 1 and self.running[num_decodes].num_seqs() == 1
        return True

    def may_be_quiet(self) -> bool:
        config = self.scheduler_config
        if not self.waiting:
            return not (config.delay_factor and self._waiting_phase.prev_prompt)
        return not (
            config.delay_factor
            or config.policy == "priority"
            or config.max_num_partial_prefills > 1
        )

    def add_seq_group(self, seq_group: SequenceGroup) -> None:
        super().add_seq_group(seq_group)
        self._waiting_is_sorted = False

    def _num_evictions(self) -> int:
        return self.block_manager.num_evictions

    def is_shared(self, block_id: int) -> bool:
        return self.block_manager.block_allocator.is_shared(block_id)

    def _window_blocks(self) -> tuple[int, int]:
        manager = self.block_manager
        if self.cache_config.sliding_window is None:
            return 0, 0
        return manager.num_null_blocks, manager.num_dropped_blocks

    def tiers(self) -> list[BlockTier]:
        tiers, num_ids = [], 0
        for device in (Device.GPU, Device.CPU):
            allocator = self.block_manager.block_allocator.tier(device)
            assert isinstance(allocator, NaiveBlockAllocator)
            num_blocks = allocator.get_num_total_blocks()
            num_ids += num_blocks  # ids go on from tier to tier
            tiers.append(BlockTier(device.value, allocator, num_blocks, num_ids))
        return tiers

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Return hits over look-ups of full blocks; -1 without prefix caching."""
        return self.block_manager.get_prefix_cache_hit_rate(device)

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget all cached blocks of a tier, or of both; False if some are in use."""
        return self.block_manager.reset_prefix_cache(device)

    def get_and_reset_finished_requests_ids(self) -> list[int | str]:
        """Return the requests that finished or were aborted since the last call."""
        ids, self._finished_requests_ids = self._finished_requests_ids, []
        return ids

    def free_finished_seq_groups(self) -> None:
        for group in self.running:
            for seq in group.get_finished_seqs():
                self.free_seq(seq)
        super().free_finished_seq_groups()

    def _forget(self, group: SequenceGroup) -> None:
        super()._forget(group)
        self.block_manager.free_cross(group)
        if not group.num_seqs(SequenceStatus.FINISHED_IGNORED):
            self._finished_requests_ids.append(group.request_id)

    @property
    def max_servable_tokens(self) -> int:
        return self.limits.max_servable_tokens

    def admission_error(self, request: Request) -> str | None:
        return self.limits.error(request)

    # -- the call -------------------------------------------------------------

    def _schedule(self, now_s: float) -> GroupSchedulerOutput:
        config = self.scheduler_config
        output = self.partial_output = GroupSchedulerOutput()
        output.num_lookahead_slots = config.num_lookahead_slots
        budget = SchedulingBudget(config.max_num_batched_tokens, config.max_num_seqs)
        if config.enable_chunked_prefill:
            self._schedule_chunked_prefill(now_s, budget, output)
        else:
            self._schedule_default(now_s, budget, output)
        output.num_budgeted_tokens = (
            budget.num_batched_tokens + budget.num_cached_tokens
        )
        if self.cache_config.enable_prefix_caching:
            self._note_use(output, now_s)
        return output

    def _schedule_default(
        self, now_s: float, budget: SchedulingBudget, output: GroupSchedulerOutput
    ) -> None:
        """Form a batch of new prefills only or, if there is none, of decodes only."""
        if not self.swapped:
            admitted = self._waiting_phase.schedule(now_s, budget, output)
            if admitted:
                self.running.extend(entry.seq_group for entry in admitted)
                output.scheduled_seq_groups = admitted
                output.num_lookahead_slots = 0
                return
        if self.scheduler_config.policy == "priority":
            self._schedule_priority_preemption(budget, output)
        if self.swapped:
            self.count_running_seqs(budget)
        ran = self._schedule_running(budget, output)
        returned = SwappedInOutputs()
        if not (ran.preempted or ran.swapped_out):
            returned = self._swapped_phase.schedule(budget, output)
        batch = ran.decodes + returned.decodes
        self.running.extend(ran.clocked)
        self.running.extend([entry.seq_group for entry in batch])
        self._queue_victims(ran)
        output.scheduled_seq_groups = batch

    def _schedule_chunked_prefill(
        self, now_s: float, budget: SchedulingBudget, output: GroupSchedulerOutput
    ) -> None:
        """Form a batch of everything that the budget holds."""
        partial = None
        if self.scheduler_config.max_num_partial_prefills > 1:  # else no difference
            partial = PartialPrefillMetadata.from_queues(
                self.running, self.waiting, self.chunk_rule.partial_prefills
            )
        ran = self._schedule_running(budget, output, partial)
        returned = SwappedInOutputs()
        if not (ran.preempted or ran.swapped_out):
            returned = self._swapped_phase.schedule(budget, output)
        cannot_return = output.ignored_seq_groups[:]
        output.ignored_seq_groups.clear()
        admitted = self._waiting_phase.schedule(now_s, budget, output, partial)
        output.ignored_seq_groups += cannot_return  # prompts are named first
        # Groups without a share of the budget still stand at the front of `running`.
        self.running.extend(ran.clocked)
        for entries in (
            returned.decodes,
            returned.prefills,
            ran.decodes,
            finishing_first(ran.prefills),
            admitted,
        ):
            self.running.extend(entry.seq_group for entry in entries)
        self._queue_victims(ran)
        output.scheduled_seq_groups = [
            *admitted,
            *ran.prefills,
            *returned.prefills,
            *ran.decodes,
            *returned.decodes,
        ]
        output.num_before_clocked = (
            len(admitted) + len(ran.prefills) + len(returned.prefills)
        )

    def _note_use(self, output: GroupSchedulerOutput, now_s: float) -> None:
        """Tell the prefix cache what was scheduled, and that the batch is computed."""
        manager = self.block_manager
        for entry in output.scheduled_seq_groups:
            for seq in entry.seq_group.get_seqs(_RUNNING):
                manager.access_all_blocks_in_seq(seq, now_s)
        for entry in output.scheduled_seq_groups[:1]:
            # One call marks all blocks that were allocated since the last one.
            manager.mark_blocks_as_computed(entry.seq_group, entry.token_chunk_size)

    # -- running groups -------------------------------------------------------

    def _schedule_running(
        self,
        budget: SchedulingBudget,
        output: GroupSchedulerOutput,
        partial: PartialPrefillMetadata | None = None,
    ) -> RunningOutputs:
        """Let running groups go on; they leave `running` but for those without tokens.

        When the CPU pool lacks room the queues are put in order before the call ends.
        """
        ran = RunningOutputs()
        ran.clocked = self._take_turn(output)
        if ran.clocked:
            budget.num_batched_tokens += len(ran.clocked)
            if self.scheduler_config.enable_chunked_prefill:
                budget.num_curr_seqs += len(ran.clocked)
        try:
            self._running_phase.schedule(ran, budget, output, partial)
        except SwapSpaceError:
            served = [entry.seq_group for entry in (*ran.decodes, *ran.prefills)]
            self.running.extendleft(reversed(served))
            self.running.extendleft(reversed(ran.clocked))
            self._queue_victims(ran)
            raise
        return ran

    def _victim_for(self, group: SequenceGroup) -> SequenceGroup:
        """Choose the group to preempt for one that has left the queue."""
        running = self.running
        if self._choice is None:
            return running[-1] if running else group
        return self._victim((group, *running), group)

    def _queue_victims(self, ran: RunningOutputs) -> None:
        """Let victims wait from the end of the call on: none returns within it."""
        if ran.preempted:
            self.waiting.extendleft(ran.preempted)
            self._waiting_is_sorted = False
        self.swapped.extend(ran.swapped_out)

    def _release_for_recompute(self, group: SequenceGroup) -> None:
        # The reference keeps the encoder's blocks, and fails when it places them anew.
        self.block_manager.free_cross(group)
        super()._release_for_recompute(group)

    def _swap_out(self, group: SequenceGroup, output: GroupSchedulerOutput) -> None:
        if not self.block_manager.can_swap_out(group):
            raise self.no_swap_space(group)
        output.blocks_to_swap_out += self.block_manager.swap_out(group)
        for seq in group.get_seqs(_RUNNING):
            seq.move_to(_SWAPPED)

    # -- priorities -----------------------------------------------------------

    def _schedule_priority_preemption(
        self, budget: SchedulingBudget, output: GroupSchedulerOutput
    ) -> None:
        """Sort both queues, and evict less urgent groups until the head would fit.

        The head is admitted by the next call, if it is still the head then.
        """
        running = deque(sorted(self.running, key=_urgency))
        if self.waiting:
            self.count_running_seqs(budget)
            head = self.waiting.popleft()
            could_admit = self._waiting_phase.admission_of(head, budget)
            while (
                running and _urgency(running[-1]) > _urgency(head) and not could_admit()
            ):
                victim = running.pop()
                num_seqs = victim.num_unfinished_seqs()
                budget.subtract_num_seqs(victim.request_id, num_seqs)
                self._preempt(
                    victim,
                    head,
                    output,
                    "a more urgent group waits",
                    mode=PreemptionMode.RECOMPUTE,
                )
                self.waiting.appendleft(victim)
                self._waiting_is_sorted = False
            self.waiting.appendleft(head)
        if not self._waiting_is_sorted:
            self.waiting = deque(sorted(self.waiting, key=_urgency))
            self._waiting_is_sorted = True
        self.running = running

    # -- counting -------------------------------------------------------------

    def count_running_seqs(self, budget: SchedulingBudget) -> None:
        """Enter the sequences of running groups; once in a call is enough."""
        if not budget.num_curr_seqs:
            budget.num_curr_seqs = self.num_clocked
            for group in islice(self.running, self.num_clocked, None):
                budget.add_num_seqs(group.request_id, group.num_unfinished_seqs())

    def _preemption_mode(self, group: SequenceGroup) -> PreemptionMode:
        forced = self.scheduler_config.preemption_mode
        if forced is not None:
            return forced
        if group.num_unfinished_seqs() == 1:
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP


def _urgency(group: SequenceGroup) -> tuple[int, float]:
    """Key of the priority policy: smaller goes first."""
    return group.priority, group.arrival_time
