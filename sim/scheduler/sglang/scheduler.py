"""The scheduler of SGLang 0.5.9: prefill first."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.sglang.allocator import SlotAllocator
from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.sglang.adder import Added, PrefillAdder
from sim.scheduler.sglang.holdings import Holdings, OutOfMemoryError
from sim.scheduler.sglang.policy import SchedulePolicy
from sim.scheduler.sglang.queue import WaitingQueue
from sim.scheduler.sglang.ratio import NewTokenRatio
from sim.scheduler.sglang.requests import Entry, Mode, ScheduleBatch, SglangOutput
from sim.scheduler.v1.in_flight import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Sized

    from sim.scheduler.base import CacheUsage, SchedulerOutput
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.sglang.settings import Settings

    NoteTree = Callable[[float, tuple[int, int, int], float], None]


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
    num_lost_requests
        Pushed out for a request that then did not fit: the release forgets them.

    Notes
    -----
    Source: SGLang 0.5.9, ``managers/scheduler.py`` (`get_next_batch_to_run`),
    ``managers/schedule_batch.py``, ``managers/scheduler_output_processor_mixin.py``.
    """

    generation = "sglang"
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
        self._policy = SchedulePolicy(settings, self.tree, self.holdings.all_tokens)
        self.queue = WaitingQueue(settings, self._policy)
        self._processing: tuple[SglangOutput, list[Entry]] | None = None
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
        """Longest sequence that comes to its end, if two tokens early."""
        return min(self.settings.context_len, self.settings.max_total_num_tokens - 1)

    def admission_error(self, request: Request) -> str | None:
        return self.settings.admission_error(request.num_prompt_tokens)

    def add_request(self, request: Request) -> None:
        if not self._entries and request.arrival_s > self._rested_s:
            self._rest()
        prompt = self.holdings.numbers.prompt(request)
        entry = Entry.of(request, prompt, self.settings)
        self._entries[request] = entry
        self._enter(entry)

    def _enter(self, entry: Entry) -> None:
        """Put a request that has come, or comes back, into a queue."""
        self.queue.enter(entry)

    def abort(self, request: Request) -> None:
        # In a batch it goes on until the next token of it is processed.
        request.move_to(RequestStatus.FINISHED_ABORTED)
        entry = self._entries.pop(request)
        self._rested_s = self._now_s
        if not self.queue.withdraw(entry):
            entry.is_ended = True
            self._ending.append(entry)

    # -- a call ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SglangOutput:
        self._now_s = now_s
        output = SglangOutput()
        self.holdings.count_evictions()
        batch = self._next_batch(output)
        self._last = batch
        if batch is not None:
            output.take(batch)
        self._refuse_rejected(output)
        self._tell_of_tree()
        return output

    def _tell_of_tree(self) -> None:
        if self.note_tree is not None:
            counts = self._told_of_tree = self.holdings.tree_counts
            self.note_tree(self._now_s, counts, self.ratio.value)

    def _next_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        """Return the batch of the step: prompts, else all that run."""
        chunked, last, running = self.chunked, self._last, self.running_batch
        if chunked is not None:
            self.holdings.share(chunked, is_chunk=True)
        if last is not None and last.mode is not Mode.DECODE:
            if last.filter((chunked, last.chunked)):
                running.is_full = False
            decoding = [] if last.is_prefill_only else last.entries
            if decoding and not running.entries:
                self.running_batch = ScheduleBatch(decoding)
            elif decoding:
                running.entries = running.entries + decoding
        batch = self._prefill_batch(output)
        if batch is not None or not self.running_batch.entries:
            return batch
        return self._decode_batch(output)

    # -- prefill --------------------------------------------------------------

    def _prefill_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        settings, running = self.settings, self.running_batch
        if settings.enable_priority_scheduling:
            running.is_full = False
        if self.chunked is None and (running.is_full or not self.queue.entries):
            return None
        is_mixed = settings.is_mixed
        num_running = len(running.entries)
        self._policy.sort(self.queue.entries)
        adder = PrefillAdder(
            settings,
            self.cache,
            running.entries,
            ratio=self.ratio.value,
            num_mixed=num_running if is_mixed else 0,
            tree=self.tree,
        )
        if self.chunked is not None:
            self.chunked.go_on()
            if not adder.continue_chunk(self.chunked):
                self.chunked = None
        preempted: list[Entry] = []
        self._take_waiting(adder, num_running, preempted, output)
        if not adder.taken:
            self._lose(preempted, output)
            return None
        self.queue.leave(adder.taken)
        for entry in preempted:
            self.queue.enter(entry)
        if adder.chunked is not None:
            self.chunked = adder.chunked
        batch = ScheduleBatch(adder.taken, mode=Mode.EXTEND, chunked=self.chunked)
        batch.is_prefill_only = all(each.max_new_tokens == 0 for each in batch.entries)
        for entry in batch.entries:
            self.holdings.admit(entry, self._now_s)
        self.holdings.extend(batch.entries)
        if is_mixed and running.entries:
            running.filter()
            if running.entries:
                self.holdings.grow(running.entries)
                batch.entries = batch.entries + running.entries
                batch.num_decoding = len(running.entries)
                batch.mode, batch.is_prefill_only = Mode.MIXED, False
            self.running_batch = ScheduleBatch(is_full=running.is_full)
        return batch

    def _take_waiting(
        self,
        adder: PrefillAdder,
        num_running: int,
        preempted: list[Entry],
        output: SglangOutput,
    ) -> None:
        """Take requests from the head of the queue until one does not fit."""
        running = self.running_batch
        most = self._num_admissible(num_running)
        for entry in self.queue.entries:
            if len(adder.taken) >= most:
                running.is_full = True
            if running.is_full and not (
                self.settings.enable_priority_scheduling
                and self._preempt_for(entry, adder, preempted, output)
            ):
                break
            self.holdings.look_up(entry)
            added = adder.add(entry)
            if adder.taken[-1:] != [entry]:
                entry.table.clear()
            if added is not Added.CONTINUE:
                if added is Added.NO_TOKEN:
                    running.is_full = True
                break

    def _num_admissible(self, num_running: int) -> int:
        return self.settings.max_running_requests - num_running

    # -- decode ---------------------------------------------------------------

    def _decode_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        """Let all that run decode; retract some where memory is short."""
        running = self.running_batch
        shrank = running.filter()
        if not running.entries:
            running.is_full = False
            return None
        if self._has_room(running.entries):
            self.ratio.decay()
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
        return self.holdings.has_room(entries)

    def _grow(self, entries: Sequence[Entry]) -> None:
        self.holdings.grow(entries)

    def _retract(self, output: SglangOutput) -> None:
        """Take slots from requests with few outputs until the others may decode."""
        entries = sorted(
            self.running_batch.entries,
            key=lambda each: (each.num_outputs, -each.num_prompt_tokens),
            reverse=True,
        )
        retracted: list[Entry] = []
        while not retracted or not self.holdings.has_room(entries):
            if len(entries) == 1:
                break
            entry = entries.pop()
            retracted.append(entry)
            found = self.holdings.retract(
                entry, len(entries), entries[0], "no slot to decode"
            )
            output.preemptions += found
            output.retracted.append(entry.request)
        if len(entries) == 1 and not self.holdings.has_room(entries):
            raise OutOfMemoryError(
                "Failed to retract any request. No space left for only one request."
            )
        self.running_batch.entries = entries
        self.ratio.retracted(entries)
        for entry in retracted:
            self._enter(entry)

    # -- priorities -----------------------------------------------------------

    def _preempt_for(
        self,
        entry: Entry,
        adder: PrefillAdder,
        preempted: list[Entry],
        output: SglangOutput,
    ) -> bool:
        """Push less urgent requests out for one that waits, if that seems to do."""
        running = self.running_batch
        movable = [
            each
            for each in running.entries
            if not (each.is_finished or each in preempted)
        ]
        need = adder.need(entry)
        out = self._policy.victims(entry, movable, need, adder.expected)
        leaving = [each for each in running.entries if each in out]
        for num_released, each in enumerate(leaving, start=1):
            adder.release(each)
            num_left = len(running.entries) - num_released
            output.preemptions += self.holdings.retract(
                each, num_left, entry, "a more urgent request waits"
            )
            output.preempted.append(each.request)
        preempted += out  # in the order of the search, the least urgent first
        running.entries = [each for each in running.entries if each not in out]
        return bool(out)

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
        rejected, output.dropped = self.queue.take_left()
        output.rejected = [entry.request for entry in rejected]
        most = self.settings.max_queued_requests
        for entry in rejected:
            self._turn_away(entry, f"{most} requests waited already", output)
            if entry.is_ended:
                self._ending.remove(entry)

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
            elif entry is not output.chunked:
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
        num_prompts = len(output.entries) - output.num_decoding
        decoding = {entry for entry, _, _ in output.entries[num_prompts:]}
        is_decode = output.mode is Mode.DECODE
        self.ended = []
        if is_decode:
            self.holdings.allocator.begin_group()
        for entry in entries:
            if entry.request.status.is_finished:
                self._end(entry)
            elif not (is_decode or entry in decoding):
                self.holdings.share(entry)
        if is_decode:
            self.holdings.allocator.end_group()
        if self._is_idle(output):
            self.ratio.reset()

    def _is_idle(self, output: SglangOutput) -> bool:
        """Whether the release's loop had nothing to run, nor a result to process."""
        was_idle, self._was_idle = self._was_idle, self._last is None
        if not self.settings.overlap:
            return self._last is None
        return self._last is None and was_idle and output.mode is None

    def _end(self, entry: Entry) -> None:
        """Let a request go: its last output has been processed."""
        entry.is_finished = True
        if entry.slot >= 0:
            self.holdings.end(entry)
        self.ended.append(entry.request)
        if entry.is_ended:
            self._ending.remove(entry)
            entry.max_new_tokens -= 1  # for the token that it ended with, which is lost
        else:
            del self._entries[entry.request]

    def _rest(self) -> None:
        """Do what the release's loop does while there is nothing to do.

        Requests that were withdrawn while they ran end with their next token.
        """
        for entry in [each for each in self._ending if each.slot >= 0]:
            self._end(entry)
        self.chunked = None
        self.running_batch = ScheduleBatch()
        self._last = None
        self.ratio.reset()

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
