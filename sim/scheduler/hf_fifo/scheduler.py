"""The FIFO scheduler of transformers' continuous batching, release 5.17."""

from __future__ import annotations

from collections import deque
from math import isnan
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.hf_fifo.manager import PagedAttentionCache, num_blocks_held
from cache.stats import BlockTier, PrefixCacheStats
from sim.scheduler.base import CacheUsage, Preemption, PreemptionMode
from sim.scheduler.batch import Batch
from sim.scheduler.hf_fifo.batch import (
    HfFifoHoldings,
    HfFifoOutput,
    Pass,
    in_turns,
    without,
)
from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.victims import VictimChoice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cache.hf_fifo.manager import BlockPairs
    from sim.scheduler.hf_fifo.settings import Settings
    from sim.scheduler.settings import CacheConfig


class FIFOScheduler:
    """Decodes first, then prompts in mid-way, then the queues, under three budgets.

    1. Candidates are walked in that order, those on the CPU in turns with the other
       waiting ones. A request without a block is passed over; while few blocks are free
       (`safety_margin`), prompt tokens are taken of the batch's first request only.
    2. Active requests that found too few blocks are *starved*. The last of them are
       evicted until the others will find theirs in the next step: copied to the CPU as
       far as the pool there has room, the oldest first, else to be computed again.
       No request is admitted from then on until one finishes.
    3. If the batch is empty, that is done at once and the walk begun again.
    4. Requests from the CPU get their blocks copied before the step.

    Source: transformers 5.17, ``generation/continuous_batching/scheduler.py``
    (`FIFOScheduler`) and ``offloading_manager.py``, without asynchronous batching.
    """

    generation = "hf_fifo"

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        self.settings = settings
        self.cache = PagedAttentionCache(
            cache.num_gpu_blocks,
            cache.block_size,
            num_cpu_blocks=0 if settings.preemption_mode else cache.num_cpu_blocks,
            enable_caching=cache.enable_prefix_caching,
        )
        # Active requests, in the order in which they became active. Most hold blocks
        # and compute; those that found no block wait here as well.
        self.running: dict[Request, None] = {}
        # Requests without blocks: new ones, and those to be computed again.
        self.waiting: deque[Request] = deque()
        # Requests whose blocks are in the CPU pool.
        self.swapped: deque[Request] = deque()
        # Whether no request is admitted, because one was evicted and none has finished
        # since.
        self.block_new_requests = False
        self.prefix_cache_stats = PrefixCacheStats()
        self._prefilling: dict[Request, None] = {}
        self._never_scheduled: set[Request] = set()
        self._batch: list[Request] = []
        self._num_logical_tokens = 0
        policy = settings.preemption_victim
        self._choice = (
            None if policy is None else VictimChoice(policy, HfFifoHoldings(self.cache))
        )
        self._margin_blocks = settings.safety_margin * cache.num_gpu_blocks
        budget = settings.max_num_batched_tokens
        self._most_requests = min(
            settings.max_num_seqs,
            budget,
            budget if cache.enable_prefix_caching else cache.num_gpu_blocks,
        )
        self._num_short_tokens = settings.max_blocks_per_request * cache.block_size

    # -- queues ---------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_swapped(self) -> int:
        return len(self.swapped)

    @property
    def max_servable_tokens(self) -> int:
        """Longest sequence that comes to its end whatever it meets."""
        return self.cache.num_blocks * self.cache.block_size - 1

    def admission_error(self, request: Request) -> str | None:
        # A request that passes is served at last: as the only active one it is never
        # evicted, and it gets its blocks at whatever length it is computed again.
        num_tokens, longest = request.num_prompt_tokens, self.settings.max_model_len
        if num_tokens >= longest:
            return (
                f"a prompt of {num_tokens} tokens leaves no room for output within "
                f"max_model_len {longest}"
            )
        for what, length in (
            ("a prompt", num_tokens + 1),
            ("a prompt and its longest output", request.max_num_tokens),
        ):
            # The last token is never computed.
            num_blocks = num_blocks_held(length - 1, self.cache.block_size)
            if num_blocks > self.cache.num_blocks:
                return (
                    f"{what} of {num_tokens if what == 'a prompt' else length} tokens "
                    f"may need {num_blocks} blocks; the cache has "
                    f"{self.cache.num_blocks}"
                )
        return None

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        # As in the release, none is admitted for that: where evictions have blocked
        # new requests, only a finished one lets them in again.
        was_swapped = request.status is RequestStatus.SWAPPED
        request.move_to(RequestStatus.FINISHED_ABORTED)
        if request in self.running:
            self._release(request)
        elif was_swapped:
            self.swapped.remove(request)
            self.cache.cpu_pool.pop(request.request_id)
        else:
            self.waiting.remove(request)
        if self._choice is not None:
            self._choice.forget(request)

    def update(self, finished: Sequence[Request]) -> None:
        # The last blocks of a request that ends are never shared: the release forgets
        # to mark them.
        ended = set(finished)
        for request in self._batch:
            if request in ended:
                self._release(request)
                self.block_new_requests = False
            else:
                self.cache.mark_shareable_blocks_as_complete(request)
        self._batch = []
        if self._choice is not None:
            for request in finished:
                self._choice.forget(request)

    def _release(self, request: Request) -> int:
        """Take `request` out of the active ones; return how many blocks came free."""
        del self.running[request]
        self._prefilling.pop(request, None)
        self._never_scheduled.discard(request)
        self._num_logical_tokens -= request.num_computed_tokens
        return self.cache.free_blocks(request)

    def _is_decoding(self, request: Request) -> bool:
        """Whether `request` is active and its prompt has been scheduled to the end."""
        return request in self.running and request not in self._prefilling

    def _candidates(self) -> Iterator[Request]:
        """Walk decodes, then prompts in mid-way, then the queues, as far as asked.

        Swapped requests, which are cheaper to go on with, take turns with the others.
        """
        active, in_midway = list(self.running), list(self._prefilling)
        if in_midway:
            behind = set(in_midway)
            yield from (request for request in active if request not in behind)
            yield from in_midway
        else:
            yield from active
        if not self.block_new_requests:
            yield from in_turns(self.swapped, self.waiting)

    def _leave_queues(self, taken: set[Request]) -> None:
        """Drop requests that have become active from the queues."""
        if taken:
            self.waiting = without(self.waiting, taken)
            self.swapped = without(self.swapped, taken)

    # -- a step ---------------------------------------------------------------

    def schedule(self, now_s: float) -> HfFifoOutput:
        # Where the only active request finds no block the release gives all up with an
        # error; here the queue is stuck. Admission checks keep such requests out.
        output = HfFifoOutput()
        walk = self._walk()
        while not walk.scheduled and walk.allocation_failed:
            if not self._evict_starved(walk, output):
                output.stuck = output.gives_up = True
                return output
            walk = self._walk()
        if walk.scheduled and walk.starved:
            self._evict_starved(walk, output)
        self._admit(walk, output, now_s)
        self._fill(output, walk)
        return output

    def _fill(self, output: HfFifoOutput, walk: Pass) -> None:
        """Advance the batch, and say what it is in the engine's terms."""
        for request, num_new_tokens in walk.scheduled:
            self._advance(request, num_new_tokens, output, walk.batch)
        if len(walk.scheduled) < len(self.running):
            in_batch = set(output.scheduled)
            for request in self.running:
                if request not in in_batch:
                    request.end_streak()
        output.num_recomputed_tokens = walk.batch.num_recomputed_tokens
        output.shape = walk.batch.shape()._replace(
            num_swapped_in_blocks=len(output.blocks_to_swap_in),
            num_swapped_out_blocks=len(output.blocks_to_swap_out),
        )
        output.stuck = not output.scheduled

    def _walk(self) -> Pass:
        """Try the candidates in order, and give blocks to those that are scheduled."""
        settings = self.settings
        walk = Pass(
            token_budget=settings.max_num_batched_tokens,
            request_budget=self._most_requests,
            cache_budget=self.cache.num_blocks * self.cache.block_size,
            is_decode_only=settings.max_blocks_per_request > 0,
            batch=Batch(0),
        )
        for request in self._candidates():
            if not self._try(request, walk):
                break
        self._leave_queues(walk.taken)
        return walk

    def _try(self, request: Request, walk: Pass) -> bool:
        """Schedule `request` if everything suffices; False to end the walk."""
        num_free_blocks = self.cache.num_free_blocks
        if (
            walk.scheduled
            and num_free_blocks < self._margin_blocks
            and not self._is_decoding(request)
        ):
            return False
        if self.cache.enable_caching and self._can_match(request):
            self._match_prefix(request, walk)
        num_computed = request.num_computed_tokens
        num_new_tokens = min(request.num_tokens - num_computed, walk.token_budget)
        is_short = num_new_tokens == 1 and num_computed < self._num_short_tokens
        is_decode_only = walk.is_decode_only and is_short
        if not is_decode_only and walk.cache_budget < num_computed:
            return True
        num_blocks = self.cache.num_missing_blocks(request, num_new_tokens)
        if not self.cache.allocate_blocks(request, num_blocks):
            self._note_shortage(request, num_blocks, walk)
            return num_free_blocks > 0 or self._is_scheduled_before(request)
        walk.is_decode_only = is_decode_only
        walk.cache_budget -= num_computed
        self._take(request, num_new_tokens, walk)
        return not walk.is_spent

    def _can_match(self, request: Request) -> bool:
        """Whether `request` waits without blocks in either tier."""
        return (
            request not in self.running and request.status is not RequestStatus.SWAPPED
        )

    def _match_prefix(self, request: Request, walk: Pass) -> None:
        """Let a waiting request become active with the blocks that begin like it.

        A wart of the release: it is active from now on, even if nothing else suffices
        for it, and may then be evicted without having computed anything.
        """
        num_hits = self.cache.search_prefix_match(request)
        if num_hits:
            # One token at least is computed, for the next one to be sampled.
            request.num_computed_tokens = min(num_hits, request.num_tokens - 1)
            self._activate(request, walk)
            self._prefilling[request] = None
            self._never_scheduled.add(request)

    def _activate(self, request: Request, walk: Pass) -> None:
        """Move `request` from its queue to the active ones."""
        if request.status is RequestStatus.SWAPPED:
            walk.restored.append(request)
        request.move_to(RequestStatus.RUNNING)
        self.running[request] = None
        self._num_logical_tokens += request.num_computed_tokens
        walk.taken.add(request)

    def _is_scheduled_before(self, request: Request) -> bool:
        """Whether `request` is active and was in a batch since it waited."""
        return request in self.running and request not in self._never_scheduled

    def _note_shortage(self, request: Request, num_blocks: int, walk: Pass) -> None:
        walk.allocation_failed = True
        if request in self.running:
            walk.starved.append((request, num_blocks))

    def _take(self, request: Request, num_new_tokens: int, walk: Pass) -> None:
        """Put `request`, whose blocks are there, into the batch."""
        if not self._is_scheduled_before(request):
            walk.admitted.append(request)
        if request not in self.running:
            self._activate(request, walk)
        self._never_scheduled.discard(request)
        if request.num_computed_tokens + num_new_tokens < request.num_tokens:
            self._prefilling[request] = None
        else:
            self._prefilling.pop(request, None)
        walk.token_budget -= num_new_tokens
        walk.request_budget -= 1
        walk.scheduled.append((request, num_new_tokens))

    # -- eviction -------------------------------------------------------------

    def _evict_starved(self, walk: Pass, output: HfFifoOutput) -> int:
        """Evict starved requests until the others' demand is free; return how many.

        The last active request stays whatever happens.
        """
        starved = walk.starved
        order = {request: index for index, (request, _) in enumerate(starved)}
        num_free_blocks = self.cache.num_free_blocks
        demand = sum(num_blocks for _, num_blocks in starved)
        victims: list[Request] = []
        while (
            demand > num_free_blocks
            and starved
            and len(self.running) - len(victims) > 1
        ):
            victim, num_blocks = starved.pop(self._victim_index(starved))
            victims.append(victim)
            demand -= num_blocks
            # Shared blocks do not come free: the release counts them all the same.
            num_free_blocks += len(self.cache.table(victim))
        victims.sort(key=order.__getitem__)
        moved = self.cache.offload(victims)
        for victim in victims:
            for_request = starved[0][0] if starved else victim
            pairs = moved.get(victim.request_id)
            output.preemptions.append(self._evict(victim, for_request, pairs))
            output.blocks_to_swap_out += pairs or []
            self.block_new_requests = True
        return len(victims)

    def _victim_index(self, starved: list[tuple[Request, int]]) -> int:
        """Return which of the starved requests goes: the last, or a policy's choice."""
        if self._choice is None:
            return -1
        requests = [request for request, _ in starved]
        return requests.index(self._choice.victim(requests, requests[0]))

    def _evict(
        self, victim: Request, for_request: Request, pairs: BlockPairs | None
    ) -> Preemption:
        """Take the GPU blocks of `victim`, whose copies are `pairs`, and queue it."""
        usage_before = self.cache.usage
        reason = "no free block for a running request; the newest such goes"
        if self._choice is not None:
            self._choice.note(victim)
            reason = self._choice.reason
        num_blocks_freed = self._release(victim)
        num_tokens_lost = 0
        if pairs is None:
            num_tokens_lost = victim.preempt()
            self.waiting.append(victim)
        else:
            victim.move_to(RequestStatus.SWAPPED)
            victim.num_preemptions += 1
            victim.end_streak()
            self.swapped.append(victim)
        return Preemption(
            request=victim,
            for_request=for_request,
            reason=reason,
            mode=PreemptionMode.RECOMPUTE if pairs is None else PreemptionMode.SWAP,
            num_tokens_lost=num_tokens_lost,
            num_blocks_freed=num_blocks_freed,
            num_blocks_moved=len(pairs or ()),
            kv_cache_usage_before=usage_before,
            kv_cache_usage_after=self.cache.usage,
        )

    # -- into the engine's terms ----------------------------------------------

    def _admit(self, walk: Pass, output: HfFifoOutput, now_s: float) -> None:
        """Restore requests from the CPU; count what the others found in the cache."""
        for request in walk.restored:
            output.blocks_to_swap_in += self.cache.restore(request)
        restored = set(walk.restored)
        for request in walk.admitted:
            is_first = isnan(request.first_scheduled_s)
            if request not in restored:
                self._count_hits(request, is_first=is_first)
            if is_first:
                request.first_scheduled_s = now_s
        output.admitted, output.restored = walk.admitted, walk.restored

    def _count_hits(self, request: Request, *, is_first: bool) -> None:
        """Count one look-up: of a request that waits, its tokens computed are hits."""
        num_hits = request.num_computed_tokens
        if self.cache.enable_caching:
            self.prefix_cache_stats.record(
                request.num_tokens, num_hits, preempted=not is_first
            )
        if is_first:
            request.num_cached_tokens = num_hits

    def _advance(
        self, request: Request, num_new_tokens: int, output: HfFifoOutput, batch: Batch
    ) -> None:
        """Count the tokens of a scheduled request as computed."""
        before = request.num_computed_tokens
        after = before + num_new_tokens
        request.num_computed_tokens = after
        self._num_logical_tokens += num_new_tokens
        output.scheduled.append(request)
        output.num_scheduled_tokens.append(num_new_tokens)
        if before < request.num_recompute_tokens:
            num_again = min(after, request.num_recompute_tokens) - before
            request.num_recomputed_tokens += num_again
            batch.num_recomputed_tokens += num_again
        batch.add(num_new_tokens, after)
        self._batch.append(request)

    # -- proof ----------------------------------------------------------------

    def cache_usage(self) -> CacheUsage:
        cache = self.cache
        num_physical_blocks = cache.num_used_blocks
        num_shared_blocks = cache.num_logical_blocks - num_physical_blocks
        cpu_pool = cache.cpu_pool
        num_cpu_blocks = cpu_pool.num_blocks
        return CacheUsage(
            num_physical_blocks,
            cache.num_logical_blocks,
            # Only full blocks are shared, so each extra entry is a block of tokens.
            self._num_logical_tokens - num_shared_blocks * cache.block_size,
            self._num_logical_tokens,
            cache.usage,
            (num_cpu_blocks - cpu_pool.num_free_blocks) / num_cpu_blocks
            if num_cpu_blocks
            else 0.0,
        )

    def tiers(self) -> list[BlockTier]:
        pool, cpu = self.cache.block_manager, self.cache.cpu_pool
        return [
            BlockTier("gpu", pool, self.cache.num_blocks, self.cache.num_blocks),
            BlockTier("cpu", cpu, cpu.num_blocks, cpu.num_blocks),
        ]

    def summary(self) -> dict[str, Any]:
        num_evictions = self.cache.block_manager.num_evictions
        return self.prefix_cache_stats.summary(num_evictions)

    def check(self) -> None:
        self.cache.check(self.running)
        for name, queue, statuses in (
            ("running", self.running, (RequestStatus.RUNNING,)),
            ("waiting", self.waiting, (RequestStatus.WAITING, RequestStatus.PREEMPTED)),
            ("swapped", self.swapped, (RequestStatus.SWAPPED,)),
        ):
            for request in queue:
                require(
                    request.status in statuses,
                    f"request {request.request_id} is among the {name} as "
                    f"{request.status.value}",
                )
                require(
                    (request.request_id in self.cache.cpu_pool) == (name == "swapped"),
                    f"request {request.request_id}, {name}, has blocks in the wrong "
                    f"tier",
                )
        ids = [
            each.request_id for each in (*self.running, *self.waiting, *self.swapped)
        ]
        require(len(set(ids)) == len(ids), "a request stands twice in the queues")
        for names in (self._prefilling, self._never_scheduled):
            require(set(names) <= self.running.keys(), "a note of nobody active")
        num_tokens = sum(request.num_computed_tokens for request in self.running)
        require(
            num_tokens == self._num_logical_tokens,
            f"{num_tokens} computed tokens held, {self._num_logical_tokens} counted",
        )
