"""The scheduler of vLLM's V1 engine, release 0.11."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.managers.v1 import NO_BLOCKS, KVCacheManager
from cache.stats import PrefixCacheStats
from sim.request import Request, RequestStatus
from sim.scheduler.base import (
    CacheUsage,
    Preemption,
    PreemptionMode,
    SchedulerOutput,
)
from sim.scheduler.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence


class V1Scheduler:
    """First come, first served, with one token budget a step.

    There is no prefill or decode phase: every request has tokens that are known and
    tokens that are computed, and each step lets the computed ones catch up as far as
    the budget goes. A prompt in chunks, a decode and a recomputation after a
    preemption are all the same to it.

    1. Running requests come first, in order. Where blocks run out, the last running
       request is preempted, and again, until the blocks suffice or the request has
       preempted itself.
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

    Notes
    -----
    Source: vLLM 0.11.2, ``vllm/v1/core/sched/scheduler.py``, FCFS policy, chunked
    prefill on, synchronous scheduling.
    """

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
    ) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.kv_cache_manager = KVCacheManager(
            num_gpu_blocks, block_size, enable_caching=enable_prefix_caching
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefix_cache_stats = PrefixCacheStats()
        self._num_logical_tokens = 0

    # -- queues ---------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: new and preempted ones."""
        return len(self.waiting)

    @property
    def num_swapped(self) -> int:
        """Always 0: this generation preempts by recomputation only."""
        return 0

    def admission_error(self, request: Request) -> str | None:
        """Return why `request` can never be served, or None (invariant 7)."""
        num_tokens = request.num_prompt_tokens
        if num_tokens >= self.max_model_len:
            return (
                f"a prompt of {num_tokens} tokens leaves no room for output within "
                f"max_model_len {self.max_model_len}"
            )
        num_usable = self.kv_cache_manager.block_pool.num_usable_blocks
        for what, length in (
            ("a prompt", num_tokens),
            ("a prompt and its longest output", request.max_num_tokens),
        ):
            num_blocks = self.kv_cache_manager.num_blocks_for(length)
            if num_blocks > num_usable:
                return (
                    f"{what} of {length} tokens needs {num_blocks} blocks; the cache "
                    f"has {num_usable}"
                )
        return None

    def add_request(self, request: Request) -> None:
        """Put an arrived request at the end of the waiting queue."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Withdraw an unfinished request and free what it holds."""
        request.move_to(RequestStatus.FINISHED_ABORTED)
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def update(self, finished: Sequence[Request]) -> None:
        """Release finished requests, in batch order."""
        if not finished:
            return
        for request in finished:
            self._release(request)
        self.running = [
            request
            for request in self.running
            if request.status is RequestStatus.RUNNING
        ]

    def _release(self, request: Request) -> int:
        self._num_logical_tokens -= request.num_computed_tokens
        return self.kv_cache_manager.free(request)

    # -- a step ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Form the batch of the next step.

        Computed tokens advance at once, before the step's output exists, as the
        real engine does at the end of the call.
        """
        output = SchedulerOutput()
        batch = Batch(self.max_num_batched_tokens)
        self._schedule_running(output, batch)
        if not output.preemptions and self.waiting:
            self._schedule_waiting(output, batch, now_s)
        output.shape = batch.shape()
        output.num_recomputed_tokens = batch.num_recomputed_tokens
        # Nothing runs, so all blocks are free, and still the head does not fit.
        output.stuck = not self.running
        self._num_logical_tokens += self.max_num_batched_tokens - batch.budget
        return output

    def _schedule_running(self, output: SchedulerOutput, batch: Batch) -> None:
        """Let running requests catch up, in order, preempting from the tail."""
        scheduled = output.scheduled
        num_scheduled_tokens = output.num_scheduled_tokens
        budget = batch.budget
        num_decodes = num_context_tokens = 0
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
            num_new_tokens = self._limited(
                num_tokens - request.num_computed_tokens, budget
            )
            if not self._allocate_or_preempt(request, num_new_tokens, output):
                break  # the request has preempted itself; it was the last
            budget -= num_new_tokens
            self._advance(request, num_new_tokens, output, batch)
        for request in self.running[len(scheduled) :]:
            # No budget left for it: its tokens stop coming one a step. Those ahead
            # never take more than when it was admitted, so this takes a budget that
            # shrinks meanwhile.
            request.end_streak()
        batch.budget = budget
        batch.num_decodes += num_decodes
        batch.num_decode_context_tokens += num_context_tokens

    def _limited(self, num_new_tokens: int, budget: int) -> int:
        """Cut missing tokens to the per-request threshold and the budget."""
        threshold = self.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        return min(num_new_tokens, budget)

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

    def _preempt(self, victim: Request, for_request: Request) -> Preemption:
        """Take all blocks from `victim` and put it at the head of the queue."""
        manager = self.kv_cache_manager
        usage_before = manager.usage
        num_blocks_freed = self._release(victim)
        num_tokens_lost = victim.preempt()
        self.waiting.appendleft(victim)
        return Preemption(
            request=victim,
            for_request=for_request,
            reason="no free block for a running request",
            mode=PreemptionMode.RECOMPUTE,
            num_tokens_lost=num_tokens_lost,
            num_blocks_freed=num_blocks_freed,
            num_blocks_moved=0,
            kv_cache_usage_before=usage_before,
            kv_cache_usage_after=manager.usage,
        )

    def _schedule_waiting(
        self, output: SchedulerOutput, batch: Batch, now_s: float
    ) -> None:
        """Admit from the head of the queue while everything lasts."""
        waiting = self.waiting
        manager = self.kv_cache_manager
        pool = manager.block_pool
        while waiting and batch.budget and len(self.running) < self.max_num_seqs:
            if not pool.num_free_blocks:
                break  # a token at least is computed, so a block at least is taken
            request = waiting[0]
            hits = manager.get_computed_blocks(request)
            num_hits = len(hits) * manager.block_size
            num_new_tokens = self._limited(request.num_tokens - num_hits, batch.budget)
            if not manager.allocate_slots(request, num_new_tokens, hits or NO_BLOCKS):
                break
            waiting.popleft()
            self._admit(request, num_hits, now_s)
            output.admitted.append(request)
            batch.budget -= num_new_tokens
            self._advance(request, num_new_tokens, output, batch)

    def _admit(self, request: Request, num_hits: int, now_s: float) -> None:
        """Move a request that got its blocks to the running queue."""
        resumed = request.status is RequestStatus.PREEMPTED
        if self.kv_cache_manager.enable_caching:
            self.prefix_cache_stats.record(
                request.num_tokens, num_hits, preempted=resumed
            )
        request.move_to(RequestStatus.RUNNING)
        request.num_computed_tokens = num_hits
        self._num_logical_tokens += num_hits
        if not resumed:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = num_hits
        self.running.append(request)

    def _advance(
        self,
        request: Request,
        num_new_tokens: int,
        output: SchedulerOutput,
        batch: Batch,
    ) -> None:
        """Put `request`, whose slots are there, into the batch."""
        before = request.num_computed_tokens
        after = before + num_new_tokens
        request.num_computed_tokens = after
        output.scheduled.append(request)
        output.num_scheduled_tokens.append(num_new_tokens)
        if before < request.num_recompute_tokens:
            num_again = min(after, request.num_recompute_tokens) - before
            request.num_recomputed_tokens += num_again
            batch.num_recomputed_tokens += num_again
        batch.add(num_new_tokens, after)
        if after < request.num_tokens:
            request.num_quiet_tokens = 0  # the next step brings another chunk

    # -- proof ----------------------------------------------------------------

    def cache_usage(self) -> CacheUsage:
        """Return what the cache holds. O(1)."""
        manager = self.kv_cache_manager
        num_physical_blocks = manager.block_pool.num_used_blocks
        num_logical_blocks = manager.num_logical_blocks
        # Only full blocks are ever shared, so each extra entry is a block of tokens.
        num_shared_tokens = (
            num_logical_blocks - num_physical_blocks
        ) * manager.block_size
        return CacheUsage(
            num_physical_blocks,
            num_logical_blocks,
            self._num_logical_tokens - num_shared_tokens,
            self._num_logical_tokens,
            num_physical_blocks / manager.block_pool.num_usable_blocks,
            0.0,
        )

    def summary(self) -> dict[str, Any]:
        """Return prefix-cache counters, in tokens of first admissions."""
        stats = self.prefix_cache_stats
        return {
            "prefix_cache_queries": stats.queries,
            "prefix_cache_hits": stats.hits,
            "prefix_cache_hit_rate": stats.hits / stats.queries
            if stats.queries
            else 0.0,
            "prefix_cache_preempted_queries": stats.preempted_queries,
            "prefix_cache_preempted_hits": stats.preempted_hits,
            "num_evictions": self.kv_cache_manager.block_pool.num_evictions,
        }

    def check(self) -> None:
        """Prove queues, blocks and counters in O(n).

        Raises
        ------
        InvariantError
            With the rule and who breaks it.
        """
        self.kv_cache_manager.check(self.running)
        require(
            len(self.running) <= self.max_num_seqs,
            f"{len(self.running)} requests run, max_num_seqs is {self.max_num_seqs}",
        )
        for request in self.running:
            require(
                request.status is RequestStatus.RUNNING,
                f"request {request.request_id} runs as {request.status.value}",
            )
        for request in self.waiting:
            require(
                request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
                and not request.block_table
                and request.num_computed_tokens == 0,
                f"request {request.request_id} waits as {request.status.value} with "
                f"{len(request.block_table)} blocks and "
                f"{request.num_computed_tokens} computed tokens",
            )
        ids = [request.request_id for request in (*self.running, *self.waiting)]
        require(len(set(ids)) == len(ids), "a request stands twice in the queues")
        num_tokens = sum(request.num_computed_tokens for request in self.running)
        require(
            num_tokens == self._num_logical_tokens,
            f"{num_tokens} computed tokens held, {self._num_logical_tokens} counted",
        )
