"""State of the SGLang scheduler: queues, batches, slots, and the engine's view."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.sglang.allocator import SlotAllocator
from sim.scheduler.sglang.holdings import Holdings
from sim.scheduler.sglang.policy import SchedulePolicy
from sim.scheduler.sglang.queue import WaitingQueue
from sim.scheduler.sglang.ratio import NewTokenRatio
from sim.scheduler.sglang.requests import Entry, ScheduleBatch, SglangOutput
from sim.scheduler.sglang.windows import WindowBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sized

    from sim.scheduler.base import CacheUsage
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.sglang.settings import Settings

    NoteTree = Callable[[float, tuple[int, int, int], float], None]


class SglangState:
    """Queue, running batch, slots and counts.

    Parameters
    ----------
    settings
        Arguments, under SGLang's names.
    cache
        The pool, in pages; None for what `settings` say.

    Attributes
    ----------
    queue, running_batch
        Requests that wait, and those that run.
    chunked
        The request whose prefill goes on in a later step.
    ratio
        Share of their limits that running requests are expected to write.
    ended
        Requests that the latest result ended, withdrawn ones among them.
    note_tree
        Takes, after each call, the time, evictable tokens, protected ones and nodes of
        the tree, and the ratio; None if nothing does.
    groups
        What counts the pages of both pools; None where there is one.
    num_lost_requests
        Pushed out for a request that then did not fit: the release forgets them.
    """

    _slots: type[SlotAllocator] = SlotAllocator

    def __init__(self, settings: Settings, cache: CacheConfig | None = None) -> None:
        if cache is not None:
            settings = replace(
                settings,
                max_total_num_tokens=cache.num_gpu_blocks * cache.block_size,
                page_size=cache.block_size,
                disable_radix_cache=not cache.enable_prefix_caching,
            )
        self.settings = settings
        self.max_concurrent_batches = settings.max_concurrent_batches
        self.holdings = Holdings(settings, self._slots)
        self.tree, self.cache = self.holdings.tree, self.holdings.cache
        self.running_batch = ScheduleBatch()
        self.chunked: Entry | None = None
        self.ratio = NewTokenRatio(*settings.ratios)
        self.note_tree: NoteTree | None = None
        self._told_of_tree = (0, 0, 0)
        self._rested_s = inf  # since when nothing is left to do
        self._was_idle = False
        self.ended: list[Request] = []
        self.num_lost_requests = 0
        self.num_wasted_tokens = 0
        self._last: ScheduleBatch | None = None
        self._entries: dict[Request, Entry] = {}  # unfinished, as the engine sees it
        self._ending: list[Entry] = []  # withdrawn, and in a batch yet
        self._ended_at_rest: list[Entry] = []  # before their last batch is delivered
        self.groups = None if settings.swa is None else self.holdings
        self._policy = SchedulePolicy(settings, self.tree, self.holdings.all_tokens)
        self.queue = WaitingQueue(settings, self._policy)
        self._processing: tuple[SglangOutput, list[Entry]] | None = None
        self._queued_output: SglangOutput | None = None  # whose result is to come first
        self._dropping: Entry | None = None  # a withdrawn chunk, until the next step
        self._now_s = 0.0

    # -- queues ---------------------------------------------------------------

    @property
    def waiting(self) -> Sized:
        """The queue."""
        return self.queue.entries

    @property
    def num_running(self) -> int:
        return len(self._entries) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        # what was withdrawn and then retracted stands in the queue once more
        return len(self.queue.entries) - sum(entry.slot < 0 for entry in self._ending)

    @property
    def num_swapped(self) -> int:
        return 0

    @property
    def new_token_ratio(self) -> float:
        """The value of `ratio`."""
        return self.ratio.value

    @property
    def unfinished(self) -> Iterable[Request]:
        """Requests that wait or run."""
        return self._entries

    @property
    def max_servable_tokens(self) -> int:
        """Longest context; a request is stopped two tokens before it."""
        return min(self.settings.context_len, self.settings.max_total_num_tokens)

    def admission_error(self, request: Request) -> str | None:
        settings, num_tokens = self.settings, request.num_prompt_tokens
        error = settings.admission_error(num_tokens)
        swa = settings.swa
        if error or swa is None or settings.chunk is not None:
            return error
        needed = WindowBudget(settings, self.cache).needed(num_tokens, 0, None)
        if needed < swa.max_total_num_tokens:
            return None
        return (
            f"a prompt of {num_tokens} tokens is never let in whole: layers with a "
            f"window have slots for {swa.max_total_num_tokens} tokens; let it be cut"
        )

    # -- into the engine's terms ----------------------------------------------

    def cache_usage(self) -> CacheUsage:
        return self.holdings.usage()

    def summary(self) -> dict[str, Any]:
        holdings = self.holdings
        holdings.count_evictions()
        found = holdings.prefix_cache_stats.summary(holdings.num_evictions)
        if self.num_lost_requests:
            found["num_lost_requests"] = self.num_lost_requests
        return found

    def check(self) -> None:
        self.holdings.check()
        self.queue.check()
        waiting = {entry.request for entry in self.queue.entries}
        require(waiting <= self._entries.keys(), "a request waits that the engine lost")
