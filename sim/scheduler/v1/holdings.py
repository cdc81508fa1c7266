"""Requests of the V1 scheduler in their queues, their blocks, and counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cache.errors import require
from cache.stats import BlockTier, PrefixCacheStats
from cache.v1.block_tables import BlockTables
from cache.v1.groups.kinds import EngineLimits
from cache.v1.id_tables import IdTables
from cache.v1.runs.group_tables import GroupRunTables
from cache.v1.runs.tables import RunTables
from sim.scheduler.admission import Conservative
from sim.scheduler.base import (
    CacheUsage,
    Preemption,
    PreemptionMode,
    check_queues,
    stored_tokens,
)
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.clock import DecodeClock, DecodeColumns
from sim.scheduler.v1.decode_blocks import DecodeBlocks, GroupDecodeBlocks
from sim.scheduler.v1.gate import Gate
from sim.scheduler.v1.limits import admission_error
from sim.scheduler.v1.policies import AdmissionDesk
from sim.scheduler.v1.queues import REQUEST_QUEUES
from sim.scheduler.views import RunningColumns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cache.v1.tables import QuickTables, Tables
    from sim.scheduler.admission import AdmissionRule
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.settings import Settings
    from sim.scheduler.victims import VictimChoice

# Looked up once: members of an enum are found by a call.
_RUNNING, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED


class Holdings:
    """Requests, where they stand and what they hold; when they move is decided above.

    Parameters
    ----------
    settings, cache
        See `sim.scheduler.v1.scheduler.Scheduler`.

    Attributes
    ----------
    step
        Index of the step that is formed next, or, while a step is in progress, of the
        one behind it.
    waiting
        Requests that hold no blocks, new and preempted ones.
    running
        Requests that hold blocks, in running order.
    clock
        The decodes among them.
    prefilling
        The others, in running order: prompts in mid-way, and prompts whose last chunk
        is in the step in progress.
    completing
        Those whose last chunk it is.
    preemptions, num_recomputed_tokens
        Of the latest batch; these tokens had been computed before.
    prompts
        What `prefilling` computes in it, in order: request, and tokens computed before
        and after.
    num_admitted
        Requests admitted so far, again after each preemption.
    gate
        Keeps the head of `waiting` out.
    layout, has_layout
        Groups of layers that share the pool, and whether they were given as such.
    tables, groups
        The blocks; `groups` are `tables` where these go block by block, or None.
    num_chunk_tokens
        Computed tokens of `prefilling`.
    num_unquestioned_tokens
        A request whose prompt is shorter than this, and which ends there at the latest,
        has no `admission_error`, whatever the settings say.
    prefix_cache_stats
        Queries and hits of admissions.
    """

    # A class shares the keys of its instances up to thirty attributes; a scheduler that
    # derives from this one has more, and would look each of them up by name.
    __slots__ = (
        "_choice",
        "_columns",
        "_columns_step",
        "_decodes",
        "_desk",
        "_extend",
        "_free",
        "_gives_up_blocks",
        "_is_admitting",
        "_most_slots",
        "block_size",
        "clock",
        "completing",
        "enable_caching",
        "gate",
        "groups",
        "has_layout",
        "layout",
        "max_model_len",
        "max_num_seqs",
        "num_admitted",
        "num_chunk_tokens",
        "num_recomputed_tokens",
        "num_unquestioned_tokens",
        "preemptions",
        "prefilling",
        "prefix_cache_stats",
        "prompts",
        "running",
        "settings",
        "step",
        "tables",
        "waiting",
    )

    keeps_decode_clock: ClassVar[bool] = True
    """Whether decodes stand on `clock`, and are not looked at one by one."""
    _clock: ClassVar[type[DecodeClock]] = DecodeClock

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        self.settings = settings
        self.max_num_seqs = settings.max_num_seqs
        self.max_model_len = settings.max_model_len
        self.block_size = block_size = cache.block_size
        self.enable_caching = cache.enable_prefix_caching
        self.layout, self.has_layout = cache.groups, cache.layout is not None
        self.tables = tables = _tables_for(
            settings, cache, on_clock=self.keeps_decode_clock
        )
        self.groups = (
            tables if isinstance(tables, BlockTables | GroupRunTables) else None
        )
        self._extend: Callable[[Request, int, int], bool] = tables.extend
        self._free: Callable[[Request], int] = tables.free
        self.waiting = REQUEST_QUEUES[settings.scheduling_policy]()
        self.running: dict[Request, None] = {}
        self.prefilling: dict[Request, None] = {}
        self.clock = self._clock(
            block_size if self.groups is None else self.groups.period
        )
        self.completing: list[Request] = []
        self.preemptions: list[Preemption] = []
        self.prompts: list[tuple[Request, int, int]] = []
        self.num_recomputed_tokens = 0
        self.prefix_cache_stats = PrefixCacheStats()
        self.step = 0
        self.num_chunk_tokens = 0
        self._choice: VictimChoice | None = None
        self.num_admitted = 0
        self._is_admitting = False
        self._columns_step = -1
        self._gives_up_blocks = not self.layout.keeps_all_blocks
        self._decodes = self._decode_blocks()
        columns = self._columns_for(settings.admission)
        self._desk = AdmissionDesk.for_rule(settings.admission, self, cache, columns)
        self.gate = Gate(
            *(settings, cache, tables, self.groups),
            running=self.running,
            desk=self._desk,
        )
        self.num_unquestioned_tokens = (
            min(settings.max_model_len, self._num_surely_held_tokens())
            if settings.enable_chunked_prefill
            else 0
        )
        self._most_slots = settings.most_slots(block_size)

    def _decode_blocks(self) -> DecodeBlocks:
        if self.groups is None:
            tables: QuickTables = self.tables  # type: ignore[assignment]
            registers = self.enable_caching
            rounds = tables.append_rounds
            return DecodeBlocks(self.clock, tables, rounds, registers=registers)
        return GroupDecodeBlocks(
            *(self.clock, self.groups, self.running, self.prefilling, self._extend),
            keeps_all_blocks=self.layout.keeps_all_blocks,
        )

    def _columns_for(self, rule: AdmissionRule | None) -> Holdings | None:
        """Keep decodes in columns if a rule looks at them so, and return what has them.

        Blocks are then known from tokens, as none is given up.
        """
        if not isinstance(rule, Conservative) or self._gives_up_blocks:
            return None
        self.clock.columns = DecodeColumns()
        return self

    def _num_surely_held_tokens(self) -> int:
        """Return how many tokens the pool holds if no group gives up a block."""
        num_blocks = self.tables.num_usable_blocks // len(self.layout.groups)
        return num_blocks * self.layout.block_size

    # -- queues ---------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_swapped(self) -> int:
        return 0  # this generation preempts by recomputation only

    def admission_error(self, request: Request) -> str | None:
        num_usable_blocks = self.tables.num_usable_blocks
        return admission_error(request, self.settings, num_usable_blocks, self.layout)

    @property
    def add_request(self) -> Callable[[Request], None]:
        """The queue's own method, which costs no call of Python."""
        return self.waiting.add_request

    def abort(self, request: Request) -> None:
        if request in self.running:
            self._stop(request)
        else:
            self.waiting.remove(request)
        self._free(request)  # or what a look-up has kept of it
        request.move_to(RequestStatus.FINISHED_ABORTED)
        self.gate.look_again()
        if self._choice is not None:
            self._choice.forget(request)

    def begin_decoding(self, requests: Sequence[Request]) -> None:
        """Put those of `completing` that go on onto the clock, in batch order."""
        if len(requests) == len(self.prefilling):
            self.prefilling.clear()
            self.num_chunk_tokens = 0
        else:
            for request in requests:
                self._end_prefill(request)
        self.clock.join_all(requests, self.step)
        if self._gives_up_blocks:
            self._decodes.unseen += requests
        self.completing = []

    def _end_prefill(self, request: Request) -> None:
        del self.prefilling[request]
        self.num_chunk_tokens -= request.num_computed_tokens

    def update(self, finished: Sequence[Request]) -> None:
        if self.completing:
            self.begin_decoding([r for r in self.completing if r.status is _RUNNING])
        if not finished:
            return
        running, prefilling, clock = self.running, self.prefilling, self.clock
        free = self._free
        for request in finished:
            if request in prefilling:
                self._end_prefill(request)
            else:
                clock.leave(request)
            del running[request]
            free(request)
        if self.gate.head is not None:
            self.gate.note_freed()
        if self._choice is not None:
            for request in finished:
                self._choice.forget(request)
        if self._desk is not None:
            self._desk.finished(finished)

    # -- moves ----------------------------------------------------------------

    def _admit(self, request: Request, num_hits: int, now_s: float) -> None:
        """Move a request that got its blocks to the running ones."""
        resumed = request.status is _PREEMPTED  # or it waits: both may run now
        request.status = _RUNNING
        request.num_computed_tokens = num_hits
        request.order = self.num_admitted
        self.num_admitted += 1
        if not resumed:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = num_hits
        if self.enable_caching:
            self.num_chunk_tokens += num_hits
            self.prefix_cache_stats.record(
                request.num_tokens, num_hits, preempted=resumed
            )
        self.running[request] = self.prefilling[request] = None

    def compute(self, request: Request, num_new_tokens: int) -> None:
        """Put tokens of `request`, whose slots are there, into the batch."""
        before = request.num_computed_tokens
        after = request.num_computed_tokens = before + num_new_tokens
        self.num_chunk_tokens += num_new_tokens
        if before < request.num_recompute_tokens:
            self.note_recomputed(request, before, after)
        self.prompts.append((request, before, after))
        if after == request.num_tokens:
            self.completing.append(request)

    def note_recomputed(self, request: Request, before: int, after: int) -> None:
        """Count tokens from `before` up to `after` that were computed once before."""
        num_again = min(after, request.num_recompute_tokens) - before
        request.num_recomputed_tokens += num_again
        self.num_recomputed_tokens += num_again

    def _preempt(self, victim: Request, for_request: Request, reason: str) -> None:
        """Take all blocks from `victim`, which runs no more, and queue it again."""
        usage_before = self._usage()
        self._stop(victim)
        num_blocks_freed = self._free(victim)
        num_tokens_lost = victim.preempt()
        self.waiting.prepend_request(victim)
        self.gate.look_again()
        self.preemptions.append(
            Preemption(
                request=victim,
                for_request=for_request,
                reason=reason,
                mode=PreemptionMode.RECOMPUTE,
                num_tokens_lost=num_tokens_lost,
                num_blocks_freed=num_blocks_freed,
                num_blocks_moved=0,
                kv_cache_usage_before=usage_before,
                kv_cache_usage_after=self._usage(),
            )
        )

    def _stop(self, request: Request) -> None:
        """Take an unfinished request from those that run, its tokens written down."""
        del self.running[request]
        if request in self.prefilling:
            self._end_prefill(request)
        else:
            self.clock.settle(request, self.step)
            self.clock.leave(request)

    # -- what policies see of running requests (`sim.scheduler.views.Holdings`) -

    def num_output_tokens(self, request: Request) -> int:
        if request in self.prefilling:
            return request.num_output_tokens
        num_tokens = request.base_tokens + self.step - self._is_admitting
        return num_tokens - request.num_prompt_tokens

    def num_computed_tokens(self, request: Request) -> int:
        if request in self.prefilling:
            return request.num_computed_tokens
        return request.base_tokens + self.step - 1

    def num_blocks(self, request: Request) -> int:
        counts = getattr(self.tables, "counts_only", False)
        return (self._num_needed_blocks if counts else self.tables.num_blocks)(request)

    def num_shared_tokens(self, request: Request) -> int:
        return self.tables.num_shared_blocks(request) * self.block_size

    def columns(self) -> RunningColumns:
        """Return the decodes while requests are admitted; without a sliding window."""
        if self._columns_step != self.step:
            import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

            assert self.clock.columns is not None
            num_tokens, num_outputs, most = self.clock.columns.rows(self.step - 1)
            blocks = -(-np.minimum(num_tokens, self._most_slots) // self.block_size)
            self._columns = RunningColumns(num_tokens, num_outputs, most, blocks)
            self._columns_step = self.step
        return self._columns

    # -- counts and proof -----------------------------------------------------

    def _usage(self) -> float:
        tables = self.tables
        num_used = tables.num_usable_blocks - tables.num_free_blocks
        return num_used / tables.num_usable_blocks

    def cache_usage(self) -> CacheUsage:
        num_physical, num_logical, num_tokens = self.usage_facts()
        num_stored = stored_tokens(
            num_tokens, num_physical, num_logical, self.block_size
        )
        return CacheUsage(
            num_physical, num_logical, num_stored, num_tokens, self._usage(), 0.0
        )

    def usage_facts(self) -> tuple[int, int, int]:
        """Return blocks and logical tokens of `cache_usage`. O(1)."""
        tables, clock = self.tables, self.clock
        num_tokens = (
            clock.num_base_tokens
            + clock.num_decodes * (self.step - 1)
            + self.num_chunk_tokens
        )
        if self.groups is not None:
            num_tokens = self.groups.num_stored_tokens(num_tokens)
        return (
            tables.num_usable_blocks - tables.num_free_blocks,
            tables.num_logical_blocks,
            num_tokens,
        )

    def tiers(self) -> list[BlockTier]:
        num_blocks = self.tables.num_usable_blocks
        return [BlockTier("gpu", self.tables, num_blocks, num_blocks + 1)]

    def summary(self) -> dict[str, Any]:
        return self.prefix_cache_stats.summary(self.tables.num_evictions)

    def _holders(self) -> Iterable[Request]:
        """Return the requests that hold blocks and do not run."""
        return ()

    def _fresh(self) -> Iterable[Request]:
        """Return the waiting requests that hold no blocks."""
        return self.waiting

    def check(self) -> None:
        self.tables.check([*self.running, *self._holders()])
        self.gate.check()
        check_queues(self.running, self._fresh(), self.max_num_seqs)
        decodes = [each for each in self.running if each not in self.prefilling]
        self.clock.check(decodes)
        orders = [request.order for request in self.running]
        require(orders == sorted(orders), "requests do not stand in running order")
        num_chunk_tokens = sum(each.num_computed_tokens for each in self.prefilling)
        require(
            self.clock.num_decodes == len(decodes)
            and self.prefilling.keys() <= self.running.keys()
            and self.num_chunk_tokens == num_chunk_tokens,
            "a running request is neither on the clock nor in mid-way",
        )
        if isinstance(self.tables, IdTables) and self.tables.counts_only:
            self.tables.check_count(sum(map(self._num_needed_blocks, self.running)))
            return
        for request in self.running:
            self._check_blocks(request)

    def _check_blocks(self, request: Request) -> None:
        num_blocks = len(self.tables.block_ids(request))
        require(
            num_blocks == self._num_needed_blocks(request),
            f"request {request.request_id}: {self.num_computed_tokens(request)} tokens "
            f"computed, {num_blocks} blocks held",
        )

    def _num_needed_blocks(self, request: Request) -> int:
        num_tokens = min(self.num_computed_tokens(request), self._most_slots)
        if self.groups is not None:
            return self.groups.num_entries(num_tokens)
        return -(-num_tokens // self.block_size)


def _tables_for(settings: Settings, cache: CacheConfig, *, on_clock: bool) -> Tables:
    """Return block tables that do as little as the cache's rules allow."""
    layout, caches = cache.groups, cache.enable_prefix_caching
    drafts = settings.speculative_config
    is_alone = on_clock and drafts is None
    is_plain = layout.keeps_all_blocks and is_alone
    size = cache.num_gpu_blocks, cache.block_size
    unhashed_first = settings.dialect.reuses_unhashed_first(
        caching=caches, windowed=not layout.keeps_all_blocks
    )
    policy = cache.evictor() if cache.evictor is not None and caches else None
    is_own_order = policy is None or vars(type(policy)).get("exact_on_fast_path", False)
    if is_plain and not caches:
        return IdTables(*size, unhashed_first=unhashed_first)
    if is_plain and is_own_order and caches:
        return RunTables(*size, unhashed_first=unhashed_first)
    if cache.layout is not None:
        settings.dialect.check_layout(layout, caching=caches)
    limits = EngineLimits(
        max_model_len=settings.max_model_len,
        max_in_flight_tokens=settings.max_in_flight_tokens,
        most_chunk_tokens=min(
            settings.token_budget,
            settings.long_prefill_token_threshold or settings.token_budget,
        ),
        **settings.draft_limits(enable_prefix_caching=caches),
    )
    interval = cache.retention_interval
    if caches and policy is None and is_alone and GroupRunTables.serves(layout):
        return GroupRunTables(layout, limits, retention_interval=interval)
    return BlockTables(
        layout,
        limits,
        enable_caching=caches,
        retention_interval=interval,
        unhashed_first=unhashed_first,
        policy=policy,
    )
