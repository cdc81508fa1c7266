"""The scheduler of SGLang 0.5.9: prefill first."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import inf, isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from cache.errors import NoFreeBlocksError, require
from cache.sglang.allocator import RequestSlots, SlotAllocator
from cache.sglang.radix_cache import RadixCache
from cache.sglang.tables import ChunkCache, TreeCache
from cache.stats import PrefixCacheStats
from sim.errors import SchedulerError
from sim.scheduler.base import (
    CacheUsage,
    Preemption,
    PreemptionMode,
    SchedulerOutput,
)
from sim.scheduler.batch import Batch
from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.sglang.adder import Added, PrefillAdder
from sim.scheduler.sglang.policy import SchedulePolicy
from sim.scheduler.sglang.requests import (
    Entry,
    Mode,
    ScheduleBatch,
    SglangOutput,
    TokenNumbers,
)
from sim.scheduler.sglang.settings import CLIP_MAX_NEW_TOKENS, RETRACT_DECODE_STEPS
from sim.scheduler.v1.in_flight import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.sglang.allocator import Slots
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.sglang.settings import Settings


class OutOfMemoryError(SchedulerError):
    """The release's engine dies: it found no slots where its estimates saw some."""


class SglangScheduler:
    """Prefill first; the running requests decode where there is nothing to prefill.

    1. A prompt of which a chunk was computed goes into the tree as far as it is.
    2. The batch that was prefilled joins those that run.
    3. The queue is sorted, and requests are taken from its head while the budgets of
       `PrefillAdder` hold. Once memory was found short nothing is admitted until a
       request leaves (`is_full`).
    4. Nothing taken: all that run decode. If the next tokens do not fit even when
       unlocked nodes are evicted, requests with few outputs are *retracted*: they lose
       their slots, wait at the end of the queue and are prefilled again.

    Parameters
    ----------
    settings
        Arguments, under SGLang's names.
    cache
        The pool, in pages; None for what `settings` say.

    Attributes
    ----------
    waiting, running
        The queue, and the requests that run.
    chunked
        The request whose prefill goes on in a later step.
    new_token_ratio
        Share of their limits that running requests are expected to write; it falls with
        each decode, and rises with a retraction.
    ended
        Requests that the latest result ended, withdrawn ones among them.
    num_lost_requests
        Pushed out for a request that then did not fit: the release forgets them.

    Notes
    -----
    Source: SGLang 0.5.9, ``managers/scheduler.py`` (`get_next_batch_to_run`),
    ``managers/schedule_batch.py``, ``managers/scheduler_output_processor_mixin.py``.
    """

    generation = "sglang"

    def __init__(self, settings: Settings, cache: CacheConfig | None = None) -> None:
        if cache is not None:
            settings = replace(
                settings,
                max_total_num_tokens=cache.num_gpu_blocks * cache.block_size,
                page_size=cache.block_size,
                disable_radix_cache=not cache.enable_prefix_caching,
            )
        self.settings = settings
        self.max_concurrent_batches = 2 if settings.overlap else 1
        self.allocator = SlotAllocator(
            settings.max_total_num_tokens,
            settings.page_size,
            need_sort=settings.need_sort,
        )
        self.tree: RadixCache | None = None
        if not settings.disable_radix_cache:
            self.tree = RadixCache(
                self.allocator,
                settings.radix_eviction_policy,
                counts_hits=settings.is_0_5_10,
            )
        self.cache: ChunkCache | TreeCache = (
            ChunkCache(self.allocator)
            if self.tree is None
            else TreeCache(self.allocator, self.tree)
        )
        self.request_slots = RequestSlots(settings.max_running_requests)
        self.waiting: list[Entry] = []
        self.running = ScheduleBatch()
        self.chunked: Entry | None = None
        first_ratio, self._least_ratio, self._ratio_decay = settings.ratios
        self._first_ratio = self.new_token_ratio = first_ratio
        self._rejected: list[Request] = []
        self._dropped: list[Request] = []
        self._rested_s = inf  # since when nothing is left to do
        self._was_idle = False
        self.ended: list[Request] = []
        self.num_lost_requests = 0
        self.num_wasted_tokens = 0
        self.prefix_cache_stats = PrefixCacheStats()
        self._last: ScheduleBatch | None = None
        self._entries: dict[Request, Entry] = {}  # unfinished, as the engine sees it
        self._ending: list[Entry] = []  # withdrawn, and in a batch yet
        self._numbers = TokenNumbers()
        self._numbered = count(1)
        self._policy = SchedulePolicy(settings, self.tree, self._all_tokens)
        self._processing: tuple[SglangOutput, list[Entry]] | None = None
        self._now_s = 0.0
        self._num_evictions = 0  # pages

    # -- queues ---------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._entries) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        # what was withdrawn and then retracted stands in the queue once more
        return len(self.waiting) - sum(entry.slot < 0 for entry in self._ending)

    @property
    def num_swapped(self) -> int:
        return 0

    @property
    def unfinished(self) -> Iterable[Request]:
        """Requests that wait or run."""
        return self._entries

    @property
    def max_servable_tokens(self) -> int:
        """Longest sequence that comes to its end, if two tokens early."""
        return min(self.settings.context_len, self.settings.max_total_num_tokens - 1)

    def admission_error(self, request: Request) -> str | None:
        longest = self.settings.longest_prompt
        if request.num_prompt_tokens > longest:
            return (
                f"a prompt of {request.num_prompt_tokens} tokens is longer than "
                f"{longest}, what context_len {self.settings.context_len} and "
                f"max_total_num_tokens {self.settings.max_total_num_tokens} let it be"
            )
        return None

    def add_request(self, request: Request) -> None:
        if not self._entries and request.arrival_s > self._rested_s:
            self._rest()
        prompt = self._numbers.prompt(request)
        longest = self.settings.longest_request
        request.max_num_tokens = min(request.max_num_tokens, longest)
        max_new_tokens = request.max_num_tokens - request.num_prompt_tokens
        if len(prompt) > self.settings.longest_prompt:
            prompt = np.zeros(1, np.int64)
            request.max_num_tokens = request.num_prompt_tokens + 1
        entry = Entry(
            request,
            prompt,
            max_new_tokens,
            ignore_eos=request.ignore_eos,
        )
        self._entries[request] = entry
        self._enter(entry)

    def _enter(self, entry: Entry) -> None:
        """Put a request at the end of the queue, if its limit lets it."""
        most = self.settings.max_queued_requests
        entry.entered = next(self._numbered)
        if most is None or len(self.waiting) < most:
            self.waiting.append(entry)
            return
        turned_away = entry
        if self.settings.enable_priority_scheduling and self.waiting:
            least = max(self.waiting, key=self._policy.urgency)
            if self._policy.less_urgent(least, entry) > 0:
                turned_away = least
                self.waiting.remove(least)
                self.waiting.append(entry)
        self._rejected.append(turned_away.request)

    def abort(self, request: Request) -> None:
        # In a batch it goes on until the next token of it is processed.
        request.move_to(RequestStatus.FINISHED_ABORTED)
        entry = self._entries.pop(request)
        self._rested_s = self._now_s
        if entry in self.waiting:
            self.waiting.remove(entry)
            self._dropped.append(request)
        else:
            entry.is_ended = True
            self._ending.append(entry)

    # -- a call ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SglangOutput:
        self._now_s = now_s
        output = SglangOutput()
        if self.tree is not None:
            for _, removed in self.tree.evictions:
                num_tokens = sum(length for length, _ in removed)
                self._num_evictions += num_tokens // self.settings.page_size
            self.tree.evictions.clear()
        batch = self._next_batch(output)
        self._last = batch
        self._fill(output, batch)
        self._refuse_rejected(output)
        return output

    def _next_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        """Return the batch of the step: prompts, else all that run."""
        chunked, last, running = self.chunked, self._last, self.running
        if chunked is not None:
            self._share(chunked, is_chunk=True)
        if last is not None and last.mode is not Mode.DECODE:
            if last.filter((chunked, last.chunked)):
                running.is_full = False
            if last.entries and not running.entries:
                self.running = ScheduleBatch(last.entries)
            elif last.entries:
                running.entries = running.entries + last.entries
        batch = self._prefill_batch(output)
        if batch is not None or not self.running.entries:
            return batch
        return self._decode_batch(output)

    def _share(self, entry: Entry, *, is_chunk: bool = False) -> None:
        """Put what is prefilled of a request into the tree."""
        tokens = entry.tokens(self._numbers, entry.num_fill_tokens)
        self.cache.unfinished(
            entry.table, tokens, entry.request.priority, is_chunk=is_chunk
        )

    def _all_tokens(self, entry: Entry) -> Slots:
        return entry.tokens(self._numbers, entry.num_tokens)

    # -- prefill --------------------------------------------------------------

    def _prefill_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        settings, running = self.settings, self.running
        if settings.enable_priority_scheduling:
            running.is_full = False
        if self.chunked is None and (running.is_full or not self.waiting):
            return None
        is_mixed = settings.enable_mixed_chunk
        num_running = len(running.entries)
        self._policy.sort(self.waiting)
        adder = PrefillAdder(
            settings,
            self.cache,
            running.entries,
            ratio=self.new_token_ratio,
            num_mixed=num_running if is_mixed else 0,
            tree=self.tree,
        )
        if self.chunked is not None:
            self._look_behind(self.chunked)
            if not adder.continue_chunk(self.chunked):
                self.chunked = None
        preempted: list[Entry] = []
        self._take_waiting(adder, num_running, preempted, output)
        if not adder.taken:
            self._lose(preempted, output)
            return None
        taken = set(adder.taken)
        self.waiting = [each for each in self.waiting if each not in taken]
        for entry in preempted:
            self._enter(entry)
        if adder.chunked is not None:
            self.chunked = adder.chunked
        if self.chunked is not None:
            self.chunked.num_chunks += 1
        batch = ScheduleBatch(adder.taken, mode=Mode.EXTEND, chunked=self.chunked)
        self._extend(batch)
        if is_mixed and running.entries:
            running.filter()
            if running.entries:
                self._grow(running.entries)
                batch.entries = batch.entries + running.entries
                batch.num_decoding = len(running.entries)
                batch.mode = Mode.MIXED
            self.running = ScheduleBatch(is_full=running.is_full)
        return batch

    def _take_waiting(
        self,
        adder: PrefillAdder,
        num_running: int,
        preempted: list[Entry],
        output: SglangOutput,
    ) -> None:
        """Take requests from the head of the queue until one does not fit."""
        running = self.running
        most = self.settings.max_running_requests - num_running
        for entry in self.waiting:
            if len(adder.taken) >= most:
                running.is_full = True
            if running.is_full and not (
                self.settings.enable_priority_scheduling
                and self._preempt_for(entry, adder, preempted, output)
            ):
                break
            self._look_up(entry)
            added = adder.add(entry)
            if adder.taken[-1:] != [entry]:
                entry.table.clear()
            if added is not Added.CONTINUE:
                if added is Added.NO_TOKEN:
                    running.is_full = True
                break

    def _look_up(self, entry: Entry) -> None:
        """Find the cached prefix of a waiting request, all but its last token."""
        num_tokens = entry.num_tokens
        tokens = entry.tokens(self._numbers, max(num_tokens - 1, 0))
        slots = self.cache.match(entry.table, tokens)
        entry.table.begin(slots)
        entry.table.num_protected_tokens = entry.num_prefix_tokens = len(slots)
        entry.num_extend_tokens = num_tokens - len(slots)

    @staticmethod
    def _look_behind(entry: Entry) -> None:
        """Let a prompt go on behind its latest chunk."""
        entry.num_prefix_tokens = entry.table.num_stored_tokens
        entry.num_extend_tokens = entry.num_tokens - entry.num_prefix_tokens

    def _extend(self, batch: ScheduleBatch) -> None:
        """Give the batch request slots and token slots."""
        entries = batch.entries
        for entry in entries:
            if entry.slot < 0:
                entry.slot = self.request_slots.take()
            self._admit(entry)
        num_tokens = sum(entry.num_extend_tokens for entry in entries)
        size = self.settings.page_size
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
            raise OutOfMemoryError(
                "Prefill out of memory. Try to lower your batch size."
            ) from error
        for entry, slots in zip(entries, found, strict=True):
            entry.table.append(slots)
            entry.num_fill_tokens = len(entry.table)

    def _admit(self, entry: Entry) -> None:
        """Count a request's look-up if it comes from the queue."""
        entry.is_retracted = False
        request = entry.request
        if request.status is RequestStatus.RUNNING:
            return
        num_hits, is_first = entry.num_prefix_tokens, isnan(request.first_scheduled_s)
        if not request.status.is_finished:
            request.move_to(RequestStatus.RUNNING)
        if self.tree is not None:
            self.prefix_cache_stats.record(
                entry.num_tokens, num_hits, preempted=not is_first
            )
        if is_first:
            request.num_cached_tokens = num_hits
            request.first_scheduled_s = self._now_s

    # -- decode ---------------------------------------------------------------

    def _decode_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        """Let all that run decode; retract some where memory is short."""
        running = self.running
        shrank = running.filter()
        if not running.entries:
            running.is_full = False
            return None
        if self._has_room(running.entries):
            self.new_token_ratio = max(
                self.new_token_ratio - self._ratio_decay, self._least_ratio
            )
        else:
            shrank = True
            self._retract(output)
        if shrank:
            running.is_full = False
        self._grow(running.entries)
        running.mode = Mode.DECODE
        running.chunked, running.num_decoding = None, 0
        return running

    def _has_room(self, entries: Sequence[Entry]) -> bool:
        """Whether a token of each fits, if needed behind an eviction."""
        size = self.settings.page_size
        num_opening = sum(not len(entry.table) % size for entry in entries)
        return self.cache.make_room(num_opening * size)

    def _grow(self, entries: Sequence[Entry]) -> None:
        """Take a slot for each of the requests that decode."""
        size = self.settings.page_size
        self.cache.make_room(len(entries) * size)
        tables = [entry.table for entry in entries]
        try:
            slots = self.allocator.decode(
                np.array([table.last for table in tables]),
                np.array([len(table) for table in tables]),
            )
        except NoFreeBlocksError as error:
            raise OutOfMemoryError(
                "Decode out of memory. Try to lower your batch size."
            ) from error
        for table, slot in zip(tables, slots.tolist(), strict=True):
            table.append_one(slot)

    def _retract(self, output: SglangOutput) -> None:
        """Take slots from requests with few outputs until the others may decode."""
        entries = sorted(
            self.running.entries,
            key=lambda each: (each.num_outputs, -each.num_prompt_tokens),
            reverse=True,
        )
        retracted: list[Entry] = []
        while not retracted or not self._has_room(entries):
            if len(entries) == 1:
                break
            entry = entries.pop()
            retracted.append(entry)
            self._release(entry, len(entries), entries[0], "no slot to decode", output)
            output.retracted.append(entry.request)
        if len(entries) == 1 and not self._has_room(entries):
            raise OutOfMemoryError(
                "Failed to retract any request. No space left for only one request."
            )
        self.running.entries = entries
        num_outputs = sum(entry.num_outputs for entry in entries)
        most = sum(entry.max_new_tokens for entry in entries)
        num_expected = num_outputs + RETRACT_DECODE_STEPS * len(entries)
        self.new_token_ratio = min(1.0, num_expected / (most + 1))
        for entry in retracted:
            self._enter(entry)

    def _release(
        self,
        entry: Entry,
        num_left: int,
        for_entry: Entry,
        reason: str,
        output: SglangOutput,
    ) -> None:
        """Take the slots of a running request, which is computed again later."""
        before = self._num_used_tokens()
        self.cache.release(entry.table)
        self.request_slots.free(entry.slot)
        self.cache.make_room(num_left * RETRACT_DECODE_STEPS)
        after = self._num_used_tokens()
        entry.slot = -1
        entry.is_retracted = True
        entry.num_extend_tokens = entry.num_prefix_tokens = entry.num_fill_tokens = 0
        request = entry.request
        if request.status.is_finished:
            return
        size, num_tokens = self.settings.page_size, self.settings.max_total_num_tokens
        output.preemptions.append(
            Preemption(
                request=request,
                for_request=for_entry.request,
                reason=reason,
                mode=PreemptionMode.RECOMPUTE,
                num_tokens_lost=request.preempt(),
                num_blocks_freed=(before - after) // size,
                num_blocks_moved=0,
                kv_cache_usage_before=before / num_tokens,
                kv_cache_usage_after=after / num_tokens,
            )
        )

    # -- priorities -----------------------------------------------------------

    def _preempt_for(
        self,
        entry: Entry,
        adder: PrefillAdder,
        preempted: list[Entry],
        output: SglangOutput,
    ) -> bool:
        """Push less urgent requests out for one that waits, if that seems to do.

        The release goes by the extend length of its latest look-up, which may be none,
        so that what is freed may be too little.
        """
        running = self.running
        need = (
            entry.num_extend_tokens
            + min(entry.max_new_tokens, CLIP_MAX_NEW_TOKENS)
            - adder.total
        )
        threshold = self.settings.priority_scheduling_preemption_threshold
        out: list[Entry] = []
        for each in sorted(running.entries, key=self._policy.urgency, reverse=True):
            if each.is_finished or each in preempted:
                continue
            if self._policy.less_urgent(each, entry) <= threshold:
                break
            out.append(each)
            need -= adder.expected(each)
            if need <= 0:
                break
        if not out or need > 0:
            return False
        kept: list[Entry] = []
        num_running, num_released = len(running.entries), 0
        for each in running.entries:
            if each not in out:
                kept.append(each)
                continue
            adder.release(each)
            num_released += 1
            reason = "a more urgent request waits"
            self._release(each, num_running - num_released, entry, reason, output)
            output.preempted.append(each.request)
        preempted += out  # in the order of the search, the least urgent first
        running.entries = kept
        return True

    def _lose(self, preempted: Sequence[Entry], output: SglangOutput) -> None:
        """Forget requests that were pushed out for one that did not fit.

        So does the release; the engine is told that they will not be served.
        """
        self.num_lost_requests += len(preempted)
        for entry in preempted:
            self._turn_away(
                entry,
                "pushed out for a more urgent request that then did not fit: SGLang "
                "forgets it",
                output,
            )

    def _turn_away(self, entry: Entry, reason: str, output: SglangOutput) -> None:
        request = entry.request
        if request.status.is_finished:
            return
        request.reason = reason
        request.move_to(RequestStatus.FINISHED_REJECTED)
        del self._entries[request]
        output.ignored.append(request)

    def _refuse_rejected(self, output: SglangOutput) -> None:
        """Tell the engine of requests that the queue's limit turned away."""
        output.dropped, self._dropped = self._dropped, []
        output.rejected, self._rejected = self._rejected, []
        for request in output.rejected:
            if (entry := self._entries.get(request)) is not None:
                most = self.settings.max_queued_requests
                self._turn_away(entry, f"{most} requests waited already", output)

    # -- results --------------------------------------------------------------

    def deliver(self, output: SchedulerOutput) -> Delivery:
        """Take the oldest batch out of flight; return whose tokens count."""
        if not isinstance(output, SglangOutput):  # none was in flight
            output = SglangOutput()
        requests: list[Request] = []
        stale: list[Request] = []
        wasted: list[Request] = []
        entries: list[Entry] = []
        for entry, _, _ in output.entries:
            request = entry.request
            if entry.is_finished:
                wasted.append(request)
            elif entry.is_retracted:
                stale.append(request)
            elif entry.num_chunks and output.mode is not Mode.DECODE:
                entry.num_chunks -= 1
            else:
                entries.append(entry)
                if not request.status.is_finished:
                    requests.append(request)
        self.num_wasted_tokens += len(wasted)
        self._processing = output, entries
        return Delivery(requests, stale, wasted)

    def update(self, finished: Sequence[Request]) -> None:
        """Share or free what the requests of the delivered batch hold."""
        if finished:
            self._rested_s = finished[-1].finish_s
        assert self._processing is not None
        (output, entries), self._processing = self._processing, None
        decoding = (
            {entry for entry, _, _ in output.entries[-output.num_decoding :]}
            if output.num_decoding
            else set()
        )
        is_decode = output.mode is Mode.DECODE
        self.ended = []
        if is_decode:
            self.allocator.begin_group()
        for entry in entries:
            if entry.request.status.is_finished:
                self._end(entry)
            elif not (is_decode or entry in decoding):
                self._share(entry)
        if is_decode:
            self.allocator.end_group()
        if self._is_idle(output):
            self.new_token_ratio = self._first_ratio

    def _is_idle(self, output: SglangOutput) -> bool:
        """Whether the release's loop had nothing to run, nor a result to process."""
        was_idle, self._was_idle = self._was_idle, self._last is None
        if not self.settings.overlap:
            return self._last is None
        return self._last is None and was_idle and output.mode is None

    def _end(self, entry: Entry) -> None:
        """Let a request go whose last output has been processed."""
        entry.is_finished = True
        table = entry.table
        tokens = entry.tokens(self._numbers, len(table))
        self.cache.finished(table, tokens, entry.request.priority)
        self.request_slots.free(entry.slot)
        entry.slot = -1
        self.ended.append(entry.request)
        if entry.is_ended:
            self._ending.remove(entry)
        else:
            del self._entries[entry.request]

    def _rest(self) -> None:
        """Do what the release's loop does while there is nothing to do."""
        self.running = ScheduleBatch()
        self._last = None
        self.new_token_ratio = self._first_ratio

    # -- into the engine's terms ----------------------------------------------

    def _fill(self, output: SglangOutput, batch: ScheduleBatch | None) -> None:
        """Say what the batch is, in the engine's terms."""
        if batch is None:
            return
        output.mode, output.num_decoding = batch.mode, batch.num_decoding
        counts = Batch(0)
        num_extending = len(batch.entries) - batch.num_decoding
        if batch.mode is Mode.DECODE:
            num_extending = 0
        for index, entry in enumerate(batch.entries):
            after = len(entry.table)
            num_new = entry.num_extend_tokens if index < num_extending else 1
            output.entries.append((entry, after - num_new, num_new))
            counts.add(num_new, after)
            request = entry.request
            if request.status.is_finished:
                continue
            request.num_computed_tokens = after
            output.scheduled.append(request)
            output.num_scheduled_tokens.append(num_new)
            if after - num_new < request.num_recompute_tokens:
                num_again = min(after, request.num_recompute_tokens) - (after - num_new)
                request.num_recomputed_tokens += num_again
                counts.num_recomputed_tokens += num_again
        output.shape = counts.shape()
        output.num_recomputed_tokens = counts.num_recomputed_tokens

    def _num_used_tokens(self) -> int:
        """Return tokens of slots that requests hold."""
        return (
            self.settings.max_total_num_tokens
            - self.allocator.num_available_tokens
            - self.cache.num_evictable_tokens
        )

    def cache_usage(self) -> CacheUsage:
        size = self.settings.page_size
        num_used = self._num_used_tokens()
        num_stored = num_pages = num_shared = 0
        for entry in self._holders():
            length = len(entry.table)
            num_stored += length
            num_pages += -(-length // size)
            num_shared += entry.table.num_protected_tokens
        return CacheUsage(
            num_used // size,
            num_pages,
            num_stored - num_shared + self.cache.num_protected_tokens,
            num_stored,
            num_used / self.settings.max_total_num_tokens,
            0.0,
        )

    def _holders(self) -> list[Entry]:
        """Return the requests that hold slots."""
        found = [each for each in self._entries.values() if each.slot >= 0]
        return found + [each for each in self._ending if each.slot >= 0]

    def summary(self) -> dict[str, Any]:
        found = self.prefix_cache_stats.summary(self._num_evictions)
        if self.num_lost_requests:
            found["num_lost_requests"] = self.num_lost_requests
        return found

    def check(self) -> None:
        holders = self._holders()
        self.cache.check([entry.table for entry in holders])
        self.request_slots.check([entry.slot for entry in holders])
        waiting = {entry.request for entry in self.waiting}
        require(
            len(waiting) == len(self.waiting), "a request stands twice in the queue"
        )
        for entry in self.waiting:
            require(
                entry.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
                and entry.slot < 0,
                f"request {entry.request.request_id} waits as "
                f"{entry.request.status.value}, with request slot {entry.slot}",
            )
        require(waiting <= self._entries.keys(), "a request waits that the engine lost")
