"""State of the V1 scheduler: queues, blocks, counters, and moves between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.stats import PrefixCacheStats
from cache.v1.specs import KVCacheLayout
from sim.errors import SchedulerError
from sim.scheduler.base import CacheUsage, Preemption, PreemptionMode, check_queues
from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.v1.limits import admission_error
from sim.scheduler.v1.queues import REQUEST_QUEUES, urgency
from sim.scheduler.victims import LatestArrival, LowestPriority, VictimChoice
from tests.oracles.v1_manager import KVCacheManager
from tests.oracles.v1_parts import V1AdmissionDesk, V1Holdings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache.v1.policies.base import CachePolicy
    from sim.scheduler.admission.base import AdmissionRule
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.v1.settings import Settings
    from sim.scheduler.victims.base import VictimPolicy
    from tests.oracles.v1_parts import V1Batch


class V1State:
    """Requests in their queues, with their blocks; the scheduler decides the moves.

    Parameters
    ----------
    settings
        The engine arguments.
    num_gpu_blocks, block_size, enable_prefix_caching, sliding_window, evictor
        Of the KV cache; see `tests.oracles.v1.V1Scheduler`.
    preemption_victim, admission
        Policies in place of, and beside, the engine's own rules.

    Attributes
    ----------
    waiting
        Requests that hold no blocks, new and preempted ones.
    running
        Requests that hold blocks, in the order in which they were admitted.
    kv_cache_manager
        The blocks.
    prefix_cache_stats
        Queries and hits of admissions.
    """

    def __init__(
        self,
        settings: Settings,
        num_gpu_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        sliding_window: int | None,
        evictor: Callable[[], CachePolicy] | None = None,
        preemption_victim: VictimPolicy | None = None,
        admission: AdmissionRule | None = None,
    ) -> None:
        if sliding_window is not None and sliding_window < 1:
            raise SchedulerError(
                f"sliding_window must be at least 1, got {sliding_window}"
            )
        self.settings = settings
        self.dialect = settings.dialect
        self.max_num_batched_tokens = settings.max_num_batched_tokens
        self.max_num_seqs = settings.max_num_seqs
        self.max_model_len = settings.max_model_len
        self.long_prefill_token_threshold = settings.long_prefill_token_threshold
        self.kv_cache_manager = KVCacheManager(
            num_gpu_blocks,
            block_size,
            enable_caching=enable_prefix_caching,
            sliding_window=sliding_window,
            unhashed_first=self.dialect.reuses_unhashed_first(
                caching=enable_prefix_caching, windowed=sliding_window is not None
            ),
            max_model_len=settings.max_model_len,
            policy=evictor() if evictor is not None and enable_prefix_caching else None,
        )
        self.waiting = REQUEST_QUEUES[settings.scheduling_policy]()
        self.running: list[Request] = []
        self.prefix_cache_stats = PrefixCacheStats()
        self._by_priority = settings.scheduling_policy == "priority"
        self._choice = (
            None
            if preemption_victim is None
            else VictimChoice(preemption_victim, V1Holdings(self.kv_cache_manager))
        )
        self._admission_desk = (
            None
            if admission is None
            else V1AdmissionDesk(admission, self.kv_cache_manager)
        )
        self._reason = (
            self._choice.reason
            if self._choice is not None
            else LowestPriority.reason
            if self._by_priority
            else LatestArrival.reason
        )
        # Whether a victim may stand ahead of the request that needs its blocks.
        self._plans_first = self._by_priority or self._choice is not None
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
        manager = self.kv_cache_manager
        return admission_error(
            request,
            self.settings,
            manager.block_pool.num_usable_blocks,
            KVCacheLayout.of_one_group(
                manager.block_pool.num_gpu_blocks,
                manager.block_size,
                None if manager.window is None else manager.window.window,
            ),
        )

    def add_request(self, request: Request) -> None:
        """Put an arrived request into the waiting queue."""
        self.waiting.add_request(request)

    def abort(self, request: Request) -> None:
        """Withdraw an unfinished request and free its blocks."""
        request.move_to(RequestStatus.FINISHED_ABORTED)
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        if self._choice is not None:
            self._choice.forget(request)

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
        if self._choice is not None:
            for request in finished:
                self._choice.forget(request)
        if self._admission_desk is not None:
            self._admission_desk.finished(finished)

    def _release(self, request: Request) -> int:
        self._num_logical_tokens -= request.num_computed_tokens
        return self.kv_cache_manager.free(request)

    # -- moves ----------------------------------------------------------------

    def _victim(self, needs: Request) -> Request:
        """Return the running request that loses its blocks; `needs` runs, too."""
        if self._choice is None:
            return max(self.running, key=urgency)
        return self._choice.victim(self.running, needs)

    def _preempt(self, victim: Request, for_request: Request) -> Preemption:
        """Take all blocks from `victim`, and queue it again."""
        manager = self.kv_cache_manager
        if self._choice is not None:
            self._choice.note(victim)
        usage_before = manager.usage
        num_blocks_freed = self._release(victim)
        num_tokens_lost = victim.preempt()
        self.waiting.prepend_request(victim)
        return Preemption(
            request=victim,
            for_request=for_request,
            reason=self._reason,
            mode=PreemptionMode.RECOMPUTE,
            num_tokens_lost=num_tokens_lost,
            num_blocks_freed=num_blocks_freed,
            num_blocks_moved=0,
            kv_cache_usage_before=usage_before,
            kv_cache_usage_after=manager.usage,
        )

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
        batch: V1Batch,
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
        """Return the usage of the cache. O(1)."""
        manager = self.kv_cache_manager
        num_physical_blocks = manager.block_pool.num_used_blocks
        num_logical_blocks = manager.num_logical_blocks
        # Only full blocks lie behind a window, and only full blocks are ever shared:
        # each null block, and each extra entry, is a block of tokens.
        num_logical_tokens = (
            self._num_logical_tokens - manager.num_skipped_blocks * manager.block_size
        )
        num_shared_tokens = (
            num_logical_blocks - num_physical_blocks
        ) * manager.block_size
        return CacheUsage(
            num_physical_blocks,
            num_logical_blocks,
            num_logical_tokens - num_shared_tokens,
            num_logical_tokens,
            num_physical_blocks / manager.block_pool.num_usable_blocks,
            0.0,
        )

    def summary(self) -> dict[str, Any]:
        """Return prefix-cache counters, in tokens of first admissions."""
        return self.prefix_cache_stats.summary(
            self.kv_cache_manager.block_pool.num_evictions
        )

    def check(self) -> None:
        """Prove queues, blocks and counters in O(n).

        Raises
        ------
        InvariantError
            With the rule and the values that break it.
        """
        self.kv_cache_manager.check(self.running)
        check_queues(self.running, self.waiting, self.max_num_seqs)
        for request in self.waiting:
            require(
                not request.block_table,
                f"request {request.request_id} waits with {len(request.block_table)} "
                f"blocks",
            )
        num_tokens = sum(request.num_computed_tokens for request in self.running)
        require(
            num_tokens == self._num_logical_tokens,
            f"{num_tokens} computed tokens held, {self._num_logical_tokens} counted",
        )
