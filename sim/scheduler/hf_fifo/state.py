"""What the `hf_fifo` scheduler holds: queues, both tiers, and moves between them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.hf_fifo.manager import PagedAttentionCache, num_blocks_held
from cache.stats import PrefixCacheStats
from sim.scheduler.base import CacheUsage
from sim.scheduler.hf_fifo.policies import HfFifoHoldings
from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.victims import VictimChoice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.scheduler.hf_fifo.settings import Settings
    from sim.scheduler.settings import CacheConfig


class HfFifoState:
    """Requests in their queues, with their blocks; who moves when is decided above."""

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
        # Whether nobody is admitted, because somebody was evicted and none has finished
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
        # What passes is served at last: as the only active request it is never evicted,
        # and it gets its blocks at whatever length it may have to be computed again.
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
        # As in the release, nobody is admitted for that: where evictions have blocked
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
        """Walk decodes, then prompts in mid-way, then who waits, as far as asked.

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
            yield from _in_turns(self.swapped, self.waiting)

    def _leave_queues(self, taken: set[Request]) -> None:
        """Drop from the queues who has become active."""
        if taken:
            self.waiting = _without(self.waiting, taken)
            self.swapped = _without(self.swapped, taken)

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


def _in_turns(first: deque[Request], second: deque[Request]) -> Iterator[Request]:
    """Walk two queues by turns, the first one first, and then the longer one's rest."""
    queues = [iter(first), iter(second)]
    while queues:
        for queue in queues.copy():
            request = next(queue, None)
            if request is None:
                queues.remove(queue)
            else:
                yield request


def _without(queue: deque[Request], taken: set[Request]) -> deque[Request]:
    """Return a queue without some requests, which mostly stand at its head."""
    num_left = len(taken)
    while queue and num_left and queue[0] in taken:
        queue.popleft()
        num_left -= 1
    if not num_left:
        return queue
    return deque(request for request in queue if request not in taken)
