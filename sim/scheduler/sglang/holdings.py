"""Slots that requests hold: of tokens and of requests, their own and shared ones."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

import numpy as np

from cache.errors import NoFreeBlocksError, require
from cache.sglang.allocator import NO_SLOTS, RequestSlots, SlotAllocator
from cache.sglang.radix_cache import RadixCache
from cache.sglang.tables import ChunkCache, TreeCache
from cache.sglang.windows import TreeWindow, WindowedSlots
from cache.stats import PrefixCacheStats
from sim.errors import EngineDiedError
from sim.scheduler.base import CacheUsage, Preemption, PreemptionMode
from sim.scheduler.request import RequestStatus
from sim.scheduler.sglang.requests import TokenNumbers
from sim.scheduler.sglang.settings import RETRACT_DECODE_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.sglang.allocator import Slots
    from sim.scheduler.sglang.requests import Entry
    from sim.scheduler.sglang.settings import Settings


class OutOfMemoryError(EngineDiedError):
    """The release's engine dies: it found no slots where its estimates saw some."""

    @classmethod
    def of(cls, kind: str, page_size: int) -> OutOfMemoryError:
        """Return it in the release's words, which name the kind of a batch for pages.

        Source: SGLang 0.5.9, ``mem_cache/common.py``.
        """
        said = "Out of memory" if page_size == 1 else f"{kind} out of memory"
        return cls(f"{said}. Try to lower your batch size.")


class Holdings:
    """The slots of all requests that are in a batch, or run.

    Parameters
    ----------
    settings
        Of the scheduler.
    slots
        What hands out slots.

    Attributes
    ----------
    allocator, tree, cache
        The slots, the prefixes (None without a radix cache), and both together.
    holders
        Requests that hold slots.
    num_stored_tokens, num_pages, num_shared_tokens
        Of all their tables; of these, those of the tree, counted for each.
    num_evictions
        Pages of the tree that were taken for new tokens, as of `count_evictions`.
    """

    def __init__(
        self, settings: Settings, slots: type[SlotAllocator] = SlotAllocator
    ) -> None:
        self.allocator, window = _slots_of(settings, slots)
        self.tree: RadixCache | None = None
        if not settings.disable_radix_cache:
            self.tree = RadixCache(
                self.allocator,
                settings.radix_eviction_policy,
                counts_hits=settings.patch >= 10,
                unified=settings.makes_plans,
                sorts_pages=settings.makes_plans and settings.patch < 20,
                window=window,
            )
        self.cache: ChunkCache | TreeCache = (
            ChunkCache(self.allocator, 0 if window is None else window.num_tokens)
            if self.tree is None
            else TreeCache(
                self.allocator,
                self.tree,
                checks_in=settings.patch >= 22,
                marks_prompts=settings.patch >= 20,
            )
        )
        self.request_slots = RequestSlots(
            settings.num_request_slots,
            first=int(settings.patch >= 11),
            from_end=settings.makes_plans and not settings.only_decodes,
        )
        self.holders: dict[Entry, None] = {}
        self.num_stored_tokens = self.num_pages = self.num_shared_tokens = 0
        self.num_evictions = 0
        self.numbers = TokenNumbers()
        self.prefix_cache_stats = PrefixCacheStats()
        self._page_size = settings.page_size
        self._num_tokens = settings.max_total_num_tokens
        self._copies = settings.only_decodes
        self._swa, self._chunk = settings.swa, settings.chunked_prefill_size
        self._is_ahead = settings.overlap

    def all_tokens(self, entry: Entry) -> Slots:
        """Return prompt and outputs of a request."""
        return entry.tokens(self.numbers, entry.num_tokens)

    def _tokens(self, entry: Entry, num_tokens: int) -> Slots:
        """Return its first tokens; none without a tree, to which alone they matter."""
        return NO_SLOTS if self.tree is None else entry.tokens(self.numbers, num_tokens)

    # -- prompts --------------------------------------------------------------

    def look_up(self, entry: Entry) -> None:
        """Find the cached prefix of a waiting request, all but its last token."""
        num_tokens = entry.num_filled = entry.num_tokens
        tokens = self._tokens(entry, max(num_tokens - 1, 0))
        slots = self.cache.match(entry.table, tokens)
        entry.table.begin(slots)
        entry.table.num_protected_tokens = entry.num_prefix_tokens = len(slots)
        entry.num_extend_tokens = num_tokens - len(slots)

    def extend(self, entries: Sequence[Entry]) -> None:
        """Give requests slots for the tokens of a prefill batch."""
        self._slide_prompts(entries)
        size, num_free = self._page_size, self.request_slots.num_free
        newcomers = [entry for entry in entries if entry.slot < 0]
        if len(newcomers) > num_free:
            # beside one that may write nothing: it runs no more, and holds its row
            raise OutOfMemoryError(
                "alloc_req_slots runs out of memory. Please set a smaller number for "
                "`--max-running-requests`. req_to_token_pool.available_size()="
                f"{num_free}, num_reqs={len(entries)}, "
            )
        rows = self.request_slots.take_all(len(newcomers))
        for entry, row in zip(newcomers, rows, strict=True):
            entry.slot = row
            self._count(entry, 1)
        num_tokens = sum(entry.num_extend_tokens for entry in entries)
        self.cache.make_room(num_tokens + (0 if size == 1 else len(entries) * size))
        grown = [
            (
                entry.num_prefix_tokens,
                entry.num_prefix_tokens + entry.num_extend_tokens,
                entry.table.last,
            )
            for entry in entries
        ]
        try:
            found = self.allocator.extend(grown, num_tokens)
        except NoFreeBlocksError as error:
            raise OutOfMemoryError.of("Prefill", size) from error
        self.num_stored_tokens += num_tokens
        self.num_pages += sum(
            -(-after // size) - -(-before // size) for before, after, _ in grown
        )
        for entry, slots in zip(entries, found, strict=True):
            entry.table.append(slots)
            entry.num_fill_tokens = len(entry.table)
            entry.num_prefill_batches += 1

    def _slide_prompts(self, entries: Sequence[Entry]) -> None:
        """Free what chunks have left behind their window where nothing is shared.

        With a batch in flight that is what the one before has left. With a tree it is
        freed as chunks go into that.
        """
        if self._swa is None or self.tree is not None:
            return
        self.allocator.begin_group()
        for entry in entries:
            num_tokens = entry.num_prefix_tokens
            if self._is_ahead:
                num_tokens -= max(self._chunk, 0)
                if entry.num_prefill_batches < 2:
                    continue
            self.cache.slide(entry.table, num_tokens)
        self.allocator.end_group()

    def share(self, entry: Entry, *, is_chunk: bool = False) -> None:
        """Put what is prefilled of a request into the tree."""
        table = entry.table
        before = table.num_protected_tokens
        tokens = self._tokens(entry, entry.num_fill_tokens)
        self.cache.unfinished(
            table,
            tokens,
            entry.request.priority,
            num_prompt_tokens=entry.num_prompt_tokens,
            is_chunk=is_chunk,
        )
        self.num_shared_tokens += table.num_protected_tokens - before

    # -- decodes --------------------------------------------------------------

    def has_room(self, entries: Sequence[Entry]) -> bool:
        """Whether a token of each fits, if needed behind an eviction."""
        size = self._page_size
        num_opening = len(entries)
        if size > 1:
            num_opening = sum(
                not entry.table.num_stored_tokens % size for entry in entries
            )
        return self.cache.make_room(num_opening * size)

    def grow(self, entries: Sequence[Entry]) -> None:
        """Take a slot for each of the requests that decode."""
        size, allocator = self._page_size, self.allocator
        self._slide(entries)
        self.cache.make_room(len(entries) * size)
        tables = [entry.table for entry in entries]
        num_before = allocator.num_available_tokens
        try:
            if size == 1:
                slots = allocator.allocate(len(tables))
            else:
                slots = allocator.decode(
                    np.array([table.last for table in tables]),
                    np.array([len(table) for table in tables]),
                )
        except NoFreeBlocksError as error:
            raise OutOfMemoryError.of("Decode", size) from error
        for table, slot in zip(tables, slots.tolist(), strict=True):
            table.append_one(slot)
        self.num_stored_tokens += len(tables)
        self.num_pages += (num_before - allocator.num_available_tokens) // size

    def _slide(self, entries: Sequence[Entry]) -> None:
        """Free what decodes have left behind their window, some tokens at a time.

        Source: SGLang 0.5.23, ``managers/schedule_batch.py`` (`maybe_evict_swa`).
        """
        if self._swa is None:
            return
        self.allocator.begin_group()
        for entry in entries:
            if len(entry.table) > entry.num_fill_tokens:  # it has decoded before
                self.cache.slide(
                    entry.table, entry.num_tokens - 1, self._swa.eviction_interval
                )
        self.allocator.end_group()

    # -- coming from the queue, and back to it ---------------------------------

    def admit(self, entry: Entry, now_s: float) -> None:
        """Count the look-up of a request that comes from the queue."""
        entry.is_retracted = False
        request = entry.request
        if request.status is RequestStatus.RUNNING:
            return
        num_hits, is_first = entry.num_prefix_tokens, isnan(request.first_scheduled_s)
        if not entry.is_ended:
            request.move_to(RequestStatus.RUNNING)
        if self.tree is not None:
            self.prefix_cache_stats.record(
                entry.num_tokens, num_hits, preempted=not is_first
            )
        if is_first:
            request.num_cached_tokens = num_hits
            request.first_scheduled_s = now_s

    def retract(
        self, entry: Entry, num_left: int, for_entry: Entry, reason: str
    ) -> list[Preemption]:
        """Take the slots of a running request, which is computed again later.

        Where prompts are computed elsewhere it is copied to the host instead. Room for
        some steps of those that are left is made at once.

        Returns
        -------
        list of Preemption
            One, or none for a request that was withdrawn.
        """
        before, num_moved = self.num_used_tokens, 0
        if self._copies:
            num_moved = -(-(entry.num_tokens - 1) // self._page_size)
        self.release(entry)
        self.cache.make_room(num_left * RETRACT_DECODE_STEPS)
        after = self.num_used_tokens
        entry.retract()
        if entry.is_ended:
            return []
        request, num_lost = entry.request, 0
        if self._copies:
            request.move_to(RequestStatus.SWAPPED)
            request.num_preemptions += 1
            request.end_streak()
        else:
            num_lost = request.preempt()
        return [
            Preemption(
                request=request,
                for_request=for_entry.request,
                reason=reason,
                mode=(
                    PreemptionMode.SWAP if self._copies else PreemptionMode.RECOMPUTE
                ),
                num_tokens_lost=num_lost,
                num_blocks_freed=(before - after) // self._page_size,
                num_blocks_moved=num_moved,
                kv_cache_usage_before=before / self._num_tokens,
                kv_cache_usage_after=after / self._num_tokens,
            )
        ]

    # -- letting go -----------------------------------------------------------

    def release(self, entry: Entry) -> None:
        """Free the slots of a request that will be computed again."""
        self._count(entry, -1)
        self.cache.release(entry.table)
        self._free_slot(entry)

    def end(self, entry: Entry) -> None:
        """Share what a request that ends has stored, and free the rest."""
        self._count(entry, -1)
        table = entry.table
        tokens = self._tokens(entry, len(table))
        self.cache.finished(
            table,
            tokens,
            entry.request.priority,
            num_prompt_tokens=entry.num_prompt_tokens,
        )
        self._free_slot(entry)

    def _free_slot(self, entry: Entry) -> None:
        self.request_slots.free(entry.slot)
        entry.slot = -1

    def _count(self, entry: Entry, sign: int) -> None:
        """Count a request that begins to hold slots, or ceases to."""
        table = entry.table
        self.num_stored_tokens += sign * table.num_stored_tokens
        self.num_pages += sign * -(-table.num_stored_tokens // self._page_size)
        self.num_shared_tokens += sign * table.num_protected_tokens
        if sign > 0:
            self.holders[entry] = None
        else:
            del self.holders[entry]

    # -- numbers --------------------------------------------------------------

    @property
    def num_used_tokens(self) -> int:
        """Tokens of slots that requests hold."""
        return (
            self._num_tokens
            - self.allocator.num_available_tokens
            - self.cache.num_evictable_tokens
        )

    def num_used_blocks_by_group(self) -> list[int]:
        """Return the pages that requests hold of full layers, and of the others."""
        assert self._swa is not None
        num_peers = (
            self._swa.max_total_num_tokens
            - self.allocator.num_available_peers
            - self.cache.num_evictable_window_tokens
        )
        size = self._page_size
        return [self.num_used_tokens // size, num_peers // size]

    def count_evictions(self) -> None:
        """Count the tokens that the tree has lost since the latest call."""
        if self.tree is None or not self.tree.evictions:
            return
        for _, removed in self.tree.evictions:
            num_tokens = sum(length for length, _ in removed)
            self.num_evictions += num_tokens // self._page_size
        self.tree.evictions.clear()
        if self.tree.window is not None:
            self.tree.window.evictions.clear()

    @property
    def tree_counts(self) -> tuple[int, int, int]:
        """Evictable and protected tokens of the tree, and its nodes."""
        tree = self.tree
        if tree is None:
            return 0, 0, 0
        return tree.num_evictable_tokens, tree.num_protected_tokens, tree.num_nodes

    def usage(self) -> CacheUsage:
        """Return the numbers of pages that the cache holds, as blocks."""
        num_used, num_stored = self.num_used_tokens, self.num_stored_tokens
        return CacheUsage(
            num_used // self._page_size,
            self.num_pages,
            num_stored - self.num_shared_tokens + self.cache.num_protected_tokens,
            num_stored,
            num_used / self._num_tokens,
            0.0,
        )

    def check(self) -> None:
        """Prove slots, tree, locks and counts in O(n)."""
        tables = [entry.table for entry in self.holders]
        self.cache.check(tables)
        self.request_slots.check([entry.slot for entry in self.holders])
        size = self._page_size
        for name, found, counted in (
            ("stored tokens", sum(map(len, tables)), self.num_stored_tokens),
            ("pages", sum(-(-len(each) // size) for each in tables), self.num_pages),
            (
                "shared tokens",
                sum(each.num_protected_tokens for each in tables),
                self.num_shared_tokens,
            ),
        ):
            require(found == counted, f"{found} {name}, {counted} counted")


def _slots_of(
    settings: Settings, slots: type[SlotAllocator]
) -> tuple[SlotAllocator, TreeWindow | None]:
    """Return the slots of all layers, and what keeps those with a window in a tree."""
    swa, size = settings.swa, settings.page_size
    if swa is None:
        return slots(
            settings.max_total_num_tokens,
            size,
            need_sort=settings.need_sort,
            in_order=settings.makes_plans,
        ), None
    pairs = WindowedSlots(
        settings.max_total_num_tokens,
        swa.max_total_num_tokens,
        size,
        need_sort=settings.need_sort,
    )
    return pairs, TreeWindow(swa.sliding_window_size, pairs)
