"""The V1 scheduler, request by request in every step: what the clocked one equals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.base import SchedulerOutput
from sim.scheduler.batch import BatchShape, SharingShape
from sim.scheduler.v1.policies import PrefillInterval
from sim.scheduler.v1.settings import Settings
from tests.oracles.v1_parts import V1Batch, is_prefilling
from tests.oracles.v1_state import V1State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache.block import KVCacheBlock
    from cache.v1.policies.base import CachePolicy
    from sim.scheduler.admission.base import AdmissionRule
    from sim.scheduler.request import Request
    from sim.scheduler.victims.base import VictimPolicy


class V1Scheduler(V1State):
    """One token budget a step, shared out in the order of the queues.

    There is no prefill or decode phase: every request has tokens that are known and
    tokens that are computed, and each step lets the computed ones catch up as far as
    the budget goes. A prompt in chunks, a decode and a recomputation after a
    preemption are all the same to it.

    1. Running requests come first, in order. Where blocks run out, the last running
       request (or, by priority, the least urgent one) is preempted, and again, until
       the blocks suffice or the request has preempted itself.
    2. If nobody was preempted, waiting requests are admitted from the head of the
       queue, strictly in order, while budget, ``max_num_seqs`` and blocks last.

    Parameters
    ----------
    num_gpu_blocks
        Size of the block pool, the null block included.
    block_size
        Tokens a block.
    max_num_batched_tokens
        Token budget of a step.
    max_num_seqs
        Most requests that run at a time.
    max_model_len
        Longest sequence, prompt and output.
    enable_prefix_caching
        Whether full blocks are found again by their content.
    long_prefill_token_threshold
        Most tokens of one request in a step; 0 for no such limit.
    enable_chunked_prefill
        Whether a waiting request may be admitted with part of its tokens.
    scheduling_policy
        ``"fcfs"``, or ``"priority"``: the smallest `Request.priority` first.
    sliding_window
        Tokens that attention looks back, or None for all.
    engine_version
        Release whose rules are followed; see `sim.scheduler.v1.dialect`.
    watermark
        Share of the pool that admissions leave free while something runs.
    scheduler_reserve_full_isl
        Admit a request only if all its known tokens would fit; None for the
        release's default.
    long_prefill_token_threshold_adaptive
        Raise the threshold to a fair share of the budget.
    max_num_active_seqs
        Limit on running requests below `max_num_seqs`, or None.
    prefill_schedule_interval
        Steps from one with prefill to the next while decodes run; 1 for no such rule.
    max_num_scheduled_tokens
        Token budget below `max_num_batched_tokens`, or None.
    evictor
        What makes the policy by which cached blocks are evicted; None for the
        release's own order.
    preemption_victim
        Who is preempted, or None for the engine's own rule; see
        `sim.scheduler.victims`.
    admission
        Asked beside the engine's own rules, or None; see `sim.scheduler.admission`.

    Raises
    ------
    SchedulerError
        If the release does not have a key that is used, or values are impossible.

    Notes
    -----
    Source: vLLM 0.11.2, ``vllm/v1/core/sched/scheduler.py``, synchronous scheduling;
    what other releases do differently is in `sim.scheduler.v1.dialect`.
    """

    generation = "v1"
    _tells_common_prefixes = False

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        long_prefill_token_threshold: int = 0,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        sliding_window: int | None = None,
        engine_version: str = "0.33",
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool | None = None,
        long_prefill_token_threshold_adaptive: bool = False,
        max_num_active_seqs: int | None = None,
        prefill_schedule_interval: int = 1,
        max_num_scheduled_tokens: int | None = None,
        evictor: Callable[[], CachePolicy] | None = None,
        preemption_victim: VictimPolicy | None = None,
        admission: AdmissionRule | None = None,
    ) -> None:
        settings = Settings(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            long_prefill_token_threshold=long_prefill_token_threshold,
            enable_chunked_prefill=enable_chunked_prefill,
            scheduling_policy=scheduling_policy,
            engine_version=engine_version,
            watermark=watermark,
            scheduler_reserve_full_isl=scheduler_reserve_full_isl,
            long_prefill_token_threshold_adaptive=long_prefill_token_threshold_adaptive,
            max_num_active_seqs=max_num_active_seqs,
            prefill_schedule_interval=prefill_schedule_interval,
            max_num_scheduled_tokens=max_num_scheduled_tokens,
        )
        super().__init__(
            settings,
            num_gpu_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            sliding_window=sliding_window,
            evictor=evictor,
            preemption_victim=preemption_victim,
            admission=admission,
        )
        self.max_num_scheduled_tokens = max_num_scheduled_tokens
        self._refused: set[Request] = set()
        self._skips_heads = (
            not enable_chunked_prefill and self.dialect.skips_over_budget_heads
        )
        self._watermark_blocks = int(watermark * num_gpu_blocks)
        self._interval = (
            PrefillInterval(prefill_schedule_interval)
            if prefill_schedule_interval > 1 and self.dialect.spaces_prefills
            else None
        )
        window = self.kv_cache_manager.window
        self._most_held_blocks = (
            None
            if window is None
            else window.most_held_blocks(max_num_batched_tokens, max_model_len)
        )

    # -- a step ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Form the batch of the next step.

        Computed tokens advance at once, before the step's output exists, as the
        real engine does at the end of the call.
        """
        output = SchedulerOutput()
        interval = self._interval
        budget = self.max_num_scheduled_tokens or self.max_num_batched_tokens
        batch = V1Batch(budget)
        batch.threshold = self._threshold() if self.long_prefill_token_threshold else 0
        batch.holds_prefill = interval is not None and interval.holds(
            has_decodes=not all(is_prefilling(request) for request in self.running)
        )
        batch.carries_prefill = False
        if self._plans_first:
            self._schedule_running_by_plan(output, batch)
        else:
            self._schedule_running(output, batch)
        if not output.preemptions:
            if self.waiting:
                self._schedule_waiting(output, batch, now_s)
            if interval is not None and not batch.holds_prefill:
                interval.saw_queue(len(self.waiting))
        num_tokens = budget - batch.budget
        if interval is not None:
            interval.stepped(num_tokens, carries_prefill=batch.carries_prefill)
        output.shape = self._shared(batch.shape(), output)
        output.num_recomputed_tokens = batch.num_recomputed_tokens
        # Nothing has moved, so nothing will. Or the last running request gave up its
        # own blocks with the pool to itself: it can never be served, and would come
        # back for ever.
        output.stuck = not output.scheduled and not (
            output.preemptions and self.running
        )
        self._num_logical_tokens += num_tokens
        return output

    def tell_common_prefixes(self) -> None:
        """Let shapes say what their requests share."""
        self._tells_common_prefixes, self._refused = True, set()

    def _shared(self, shape: BatchShape, output: SchedulerOutput) -> BatchShape:
        """Return a shape with what all that run share, computed before the step."""
        if not (self._tells_common_prefixes and output.scheduled):
            return shape
        computed = min(
            request.num_computed_tokens - num_tokens
            for request, num_tokens in zip(
                output.scheduled, output.num_scheduled_tokens, strict=True
            )
        )
        self._refused = {each for each in self._refused if each in self.waiting}
        if self._refused and self.dialect.counts_refused_heads:
            return shape  # as if they had empty tables
        num_blocks = 0
        for blocks in zip(*(each.block_table for each in self.running), strict=False):
            if any(block is not blocks[0] for block in blocks):
                break
            num_blocks += 1
        size = self.kv_cache_manager.block_size
        num_tokens = min(num_blocks, computed // size) * size
        return SharingShape.of(shape, num_tokens) if num_tokens else shape

    def _threshold(self) -> int:
        """Most tokens of one request in the call that begins; 0 for no limit."""
        threshold = self.long_prefill_token_threshold
        if self.dialect.spares_lone_requests:
            num_requests = len(self.running) + len(self.waiting)
            if num_requests <= 1:
                return 0
            if self.settings.long_prefill_token_threshold_adaptive:
                return max(threshold, self.max_num_batched_tokens // num_requests)
        return threshold

    def _schedule_running(self, output: SchedulerOutput, batch: V1Batch) -> None:
        """Let running requests catch up, in order, preempting from the tail."""
        scheduled = output.scheduled
        num_scheduled_tokens = output.num_scheduled_tokens
        budget = batch.budget
        num_decodes = num_context_tokens = num_passed_over = 0
        # The list may lose its tail while it is walked; a list iterator stops there.
        for request in self.running:
            if not budget:
                break
            num_tokens = request.num_tokens
            if num_tokens <= request.num_quiet_tokens:
                # A plain decode, by far the most frequent case: one token is
                # missing, it has its slot, and it completes no block.
                request.num_computed_tokens = num_tokens
                num_context_tokens += num_tokens
                num_decodes += 1
                budget -= 1
                scheduled.append(request)
                num_scheduled_tokens.append(1)
                continue
            num_new_tokens = 1
            was_prefilling = is_prefilling(request)
            if was_prefilling or request.num_computed_tokens + 1 < num_tokens:
                num_new_tokens = min(self._next_chunk(request, batch), budget)
                if num_new_tokens <= 0:
                    num_passed_over += 1
                    continue
            if not self._allocate_or_preempt(request, num_new_tokens, output):
                break  # the request has preempted itself; it was the last
            if was_prefilling:
                batch.carries_prefill = True
            budget -= num_new_tokens
            self._advance(request, num_new_tokens, output, batch)
        for request in self.running[len(scheduled) + num_passed_over :]:
            # No budget left for it: its tokens stop coming one a step. Those ahead
            # never take more than when it was admitted, so this takes a budget that
            # shrinks meanwhile, or a threshold that grows.
            request.end_streak()
        batch.budget = budget
        batch.num_decodes += num_decodes
        batch.num_decode_context_tokens += num_context_tokens

    def _next_chunk(self, request: Request, batch: V1Batch) -> int:
        """Tokens that a running request asks for, whatever the budget; 0 for none."""
        if batch.holds_prefill and is_prefilling(request):
            return 0
        num_computed_tokens = request.num_computed_tokens
        # The last position is never computed: nothing can be sampled behind it. So
        # a prompt of that length, admitted unchecked, stays in mid-way for ever.
        return min(
            batch.limited(request.num_tokens - num_computed_tokens),
            self.max_model_len - 1 - num_computed_tokens,
        )

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, output: SchedulerOutput
    ) -> bool:
        """Get slots for `request`; False if that took its own preemption."""
        manager = self.kv_cache_manager
        while not manager.allocate_slots(request, num_new_tokens):
            victim = self.running.pop()
            output.preemptions.append(self._preempt(victim, request))
            if victim is request:
                return False
        return True

    def _schedule_running_by_plan(
        self, output: SchedulerOutput, batch: V1Batch
    ) -> None:
        """Let running requests catch up, in order, preempting the least urgent.

        Or whom a policy names, as if the release's own had named it. That one may stand
        ahead, with its tokens planned already; so nothing
        advances before all is planned.
        """
        running = self.running
        planned: dict[Request, int] = {}
        index = 0
        while index < len(running) and batch.budget:
            request = running[index]
            index += 1
            if request.num_tokens <= request.num_quiet_tokens:
                planned[request] = 1  # a plain decode, as above
                batch.budget -= 1
                continue
            num_new_tokens = min(self._next_chunk(request, batch), batch.budget)
            if num_new_tokens <= 0:
                continue
            was_prefilling = is_prefilling(request)
            while not self.kv_cache_manager.allocate_slots(request, num_new_tokens):
                victim = self._victim(request)
                if victim in planned or self.dialect.steps_back_for_unplanned_victims:
                    index -= running.index(victim) < index
                running.remove(victim)
                batch.budget += planned.pop(victim, 0)
                output.preemptions.append(self._preempt(victim, request))
                if victim is request:
                    break
            else:
                if was_prefilling:
                    batch.carries_prefill = True
                batch.budget -= num_new_tokens
                planned[request] = num_new_tokens
                continue
            if not self.dialect.passes_over_self_preempted:
                break
        for request, num_new_tokens in planned.items():
            self._advance(request, num_new_tokens, output, batch)
        for request in running:
            if request not in planned:
                request.end_streak()

    def _schedule_waiting(
        self, output: SchedulerOutput, batch: V1Batch, now_s: float
    ) -> None:
        """Admit from the head of the queue while everything lasts."""
        waiting = self.waiting
        manager = self.kv_cache_manager
        pool = manager.block_pool
        most_running = self.settings.most_running
        set_aside: list[Request] = []
        while waiting and batch.budget and len(self.running) < most_running:
            request = waiting.peek_request()
            if (
                not pool.num_free_blocks
                and not self._skips_heads
                and request.num_tokens <= self.max_model_len
            ):
                self._refused.add(request)
                break  # a token at least gets a slot, so a block at least is taken
            hits = manager.get_computed_blocks(request)
            num_hits = len(hits) * manager.block_size
            num_missing_tokens = request.num_tokens - num_hits
            if batch.holds_prefill and num_missing_tokens > 1:
                break
            num_new_tokens = batch.limited(num_missing_tokens)
            if num_new_tokens > batch.budget:
                if self._skips_heads:
                    set_aside.append(waiting.pop_request())
                    continue
                if not self.settings.enable_chunked_prefill:
                    break
                num_new_tokens = batch.budget
            if not self._allocate_waiting(request, num_new_tokens, hits):
                self._refused.add(request)
                break
            waiting.pop_request()
            self._admit(request, num_hits, now_s)
            output.admitted.append(request)
            batch.carries_prefill |= num_missing_tokens > 1
            batch.budget -= num_new_tokens
            self._advance(request, num_new_tokens, output, batch)
        if set_aside:
            waiting.prepend_requests(set_aside)

    def _allocate_waiting(
        self, request: Request, num_new_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> bool:
        """Get the first slots of a waiting request; False if it must wait."""
        manager = self.kv_cache_manager
        num_spare_blocks = self._watermark_blocks if self.running else 0
        reserves_full = self.settings.reserve_full_isl
        if reserves_full and not manager.can_hold_all(
            request.num_tokens,
            hits,
            num_spare_blocks=num_spare_blocks,
            most_blocks=self._most_held_blocks,
        ):
            return False
        desk = self._admission_desk
        if desk is not None and self.running:
            head = desk.head(
                request,
                num_new_tokens,
                hits,
                reserves_full=reserves_full,
                most_blocks=self._most_held_blocks,
            )
            if not desk.admits(head, num_spare_blocks, self.running):
                return False
        return manager.allocate_slots(request, num_new_tokens, hits, num_spare_blocks)
