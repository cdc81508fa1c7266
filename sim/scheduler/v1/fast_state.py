"""What the fast V1 scheduler holds: queues, blocks, the decode clock, and moves."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.stats import PrefixCacheStats
from cache.v1.fast_tables import NOTHING_FOUND
from cache.v1.id_tables import IdTables
from cache.v1.runs.tables import RunTables
from sim.scheduler.base import CacheUsage, Preemption, PreemptionMode
from sim.scheduler.checks import check_queues
from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.v1.decodes import DecodeClock
from sim.scheduler.v1.limits import admission_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.v1.fast_tables import FastTables
    from sim.scheduler.v1.settings import V1Settings

# Looked up once: members of an enum are found by a call.
_RUNNING, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED


class FastV1State:
    """Requests in their queues, with their blocks; who moves when is decided above.

    The counterpart of `sim.scheduler.v1.state.V1State`.

    Parameters
    ----------
    settings
        The engine arguments.
    num_gpu_blocks, block_size, enable_prefix_caching
        Of the KV cache.

    Attributes
    ----------
    step
        Index of the step that `schedule` will form next, or, while a step is in
        progress, of the one behind it.
    waiting
        Requests that hold no blocks, new and preempted ones.
    running
        Requests that hold blocks, in running order.
    clock
        The decodes among them.
    partial
        The prompt in mid-way, or None.
    prompts
        Prompts of the latest call's batch, in order: request, and tokens computed
        before and after. All other running requests decode.
    completing
        Those of them whose last chunk it was.
    preemptions
        Of the latest call.
    num_recomputed_tokens
        Tokens of its batch that had been computed before.
    tables
        The blocks.
    num_chunk_tokens
        Computed tokens held off the clock.
    head_is_blocked
        Whether the head of the queue waits for something to change.
    prefix_cache_stats
        Queries and hits of admissions.
    most_unquestioned_tokens
        A request whose prompt is shorter and whose output ends here at the latest has
        no `admission_error`.
    """

    def __init__(
        self,
        settings: V1Settings,
        num_gpu_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
    ) -> None:
        self.settings = settings
        self.max_num_seqs = settings.max_num_seqs
        self.block_size = block_size
        self.enable_caching = enable_prefix_caching
        make = RunTables if enable_prefix_caching else IdTables
        tables = make(
            num_gpu_blocks,
            block_size,
            unhashed_first=settings.dialect.reuses_unhashed_first(
                caching=enable_prefix_caching, windowed=False
            ),
        )
        self.tables: FastTables = tables
        self._ids = tables if isinstance(tables, IdTables) else None
        most_tokens = min(settings.max_model_len, tables.num_usable_blocks * block_size)
        self.most_unquestioned_tokens = (
            most_tokens if settings.enable_chunked_prefill else 0
        )
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        self.clock = DecodeClock(block_size)
        self.partial: Request | None = None
        self.prompts: list[tuple[Request, int, int]] = []
        self.completing: list[Request] = []
        self.preemptions: list[Preemption] = []
        self.num_recomputed_tokens = 0
        self.prefix_cache_stats = PrefixCacheStats()
        self.step = 0
        self.num_chunk_tokens = 0
        self.head_is_blocked = False

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
        most = self.most_unquestioned_tokens
        if request.num_prompt_tokens < most and request.max_num_tokens <= most:
            return None
        return admission_error(
            request, self.settings, self.tables.num_usable_blocks, self.block_size
        )

    def add_request(self, request: Request) -> None:
        """Put an arrived request into the waiting queue."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Withdraw an unfinished request and free what it holds."""
        if request in self.running:
            del self.running[request]
            if request is self.partial:
                self.partial = None
                self.num_chunk_tokens -= request.num_computed_tokens
            else:
                self.clock.settle(request, self.step)
                self.clock.leave(request)
        else:
            self.waiting.remove(request)
        self.tables.free(request)  # or what a look-up has kept of it
        request.move_to(RequestStatus.FINISHED_ABORTED)
        self.look_again()

    def begin_decoding(self, requests: Sequence[Request]) -> None:
        """Put those of `completing` that go on onto the clock, in batch order."""
        join, step = self.clock.join, self.step
        for request in requests:
            join(request, step)
        self.completing = []
        partial = self.partial
        self.num_chunk_tokens = 0 if partial is None else partial.num_computed_tokens

    def update(self, finished: Sequence[Request]) -> None:
        """Release finished requests, in batch order."""
        if not finished:
            return
        running, clock, free = self.running, self.clock, self.tables.free
        last_step = self.step - 1
        for request in finished:
            del running[request]
            if request.joined_step != last_step:
                clock.leave(request)
            free(request)
        if self.head_is_blocked:
            self.look_again()

    def look_again(self) -> None:
        """Let the next call look at the head of the queue: something has changed."""
        if self.head_is_blocked:
            self.head_is_blocked = False
            self.tables.watch(None, 0, NOTHING_FOUND)

    # -- moves ----------------------------------------------------------------

    def _preempt(self, victim: Request, for_request: Request, step: int) -> None:
        """Take all blocks from `victim`, which runs no more, and queue it again."""
        tables = self.tables
        usage_before = self._usage()
        if victim is self.partial:
            self.partial = None
            self.num_chunk_tokens -= victim.num_computed_tokens
        else:
            self.clock.settle(victim, step)
            self.clock.leave(victim)
        num_blocks_freed = tables.free(victim)
        num_tokens_lost = victim.preempt()
        self.waiting.appendleft(victim)
        self.look_again()
        self.preemptions.append(
            Preemption(
                request=victim,
                for_request=for_request,
                reason="no free block for a running request",
                mode=PreemptionMode.RECOMPUTE,
                num_tokens_lost=num_tokens_lost,
                num_blocks_freed=num_blocks_freed,
                num_blocks_moved=0,
                kv_cache_usage_before=usage_before,
                kv_cache_usage_after=self._usage(),
            )
        )

    def _admit(self, request: Request, num_hits: int, now_s: float) -> None:
        """Move a request that got its blocks to the running ones."""
        resumed = request.status is _PREEMPTED  # or it waits: both may run now
        request.status = _RUNNING
        request.num_computed_tokens = num_hits
        if not resumed:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = num_hits
        if self.enable_caching:
            self.num_chunk_tokens += num_hits
            self.prefix_cache_stats.record(
                request.num_tokens, num_hits, preempted=resumed
            )
        self.running[request] = None

    def _recompute(self, request: Request, before: int, after: int) -> None:
        """Count the tokens of a chunk that a preemption threw away."""
        num_again = min(after, request.num_recompute_tokens) - before
        request.num_recomputed_tokens += num_again
        self.num_recomputed_tokens += num_again

    # -- proof ----------------------------------------------------------------

    def _usage(self) -> float:
        tables = self.tables
        num_used = tables.num_usable_blocks - tables.num_free_blocks
        return num_used / tables.num_usable_blocks

    def cache_usage(self) -> CacheUsage:
        """Return what the cache holds. O(1)."""
        return CacheUsage(*self.usage_facts())

    def usage_facts(self) -> tuple[int, int, int, int, float, float]:
        """Return the fields of `cache_usage`."""
        tables = self.tables
        num_logical_blocks = tables.num_logical_blocks
        num_physical_blocks = tables.num_usable_blocks - tables.num_free_blocks
        clock = self.clock
        num_logical_tokens = clock.num_base_tokens + clock.num_decodes * (self.step - 1)
        num_logical_tokens += self.num_chunk_tokens
        # Only full blocks are ever shared: each extra entry is a block of tokens.
        num_shared_tokens = (num_logical_blocks - num_physical_blocks) * self.block_size
        return (
            num_physical_blocks,
            num_logical_blocks,
            num_logical_tokens - num_shared_tokens,
            num_logical_tokens,
            num_physical_blocks / tables.num_usable_blocks,
            0.0,
        )

    def summary(self) -> dict[str, Any]:
        """Return prefix-cache counters; see `V1Scheduler.summary`."""
        return self.prefix_cache_stats.summary(self.tables.num_evictions)

    def check(self) -> None:
        """Prove queues, blocks and the clock in O(n).

        Raises
        ------
        InvariantError
            With the rule and who breaks it.
        """
        self.tables.check(self.running)
        require(not self.completing, "a step is in progress; check between two")
        decodes = [request for request in self.running if request is not self.partial]
        require(
            list(self.running) == decodes + ([self.partial] if self.partial else []),
            "the prompt in mid-way does not run last",
        )
        self.clock.check(decodes)
        require(
            self.clock.num_decodes == len(decodes)
            and self.num_chunk_tokens
            == (self.partial.num_computed_tokens if self.partial else 0),
            "a running request is neither on the clock nor in mid-way",
        )
        for request in self.running:
            num_tokens = (
                request.num_computed_tokens
                if request is self.partial
                else request.base_tokens + self.step - 1
            )
            num_blocks = len(self.tables.block_ids(request))
            require(
                num_blocks == -(-num_tokens // self.block_size),
                f"request {request.request_id}: {num_tokens} tokens computed, "
                f"{num_blocks} blocks held",
            )
        check_queues(self.running, self.waiting, self.max_num_seqs)
