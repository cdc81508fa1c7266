"""The scheduler of SGLang's engines that decode what others have prefilled."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from cache.errors import require
from sim.scheduler.request import RequestStatus
from sim.scheduler.sglang.prefill import APART, apart
from sim.scheduler.sglang.requests import Mode, ScheduleBatch, SglangOutput
from sim.scheduler.sglang.rooms import room_of
from sim.scheduler.sglang.scheduler import SglangScheduler
from sim.scheduler.sglang.settings import CLIP_MAX_NEW_TOKENS
from sim.scheduler.v1.in_flight import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.sglang.requests import Entry
    from sim.scheduler.sglang.settings import Settings

_WAITING, _LOADING = RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS


class DecodeScheduler(SglangScheduler):
    """`SglangScheduler` to which prompts come computed, with their first token.

    ::

        preallocating   no slots yet: first come, first served, as far as reserves hold
        transferring    has slots for its prompt, which is on its way
        arrived         waits for a *prebuilt* batch, which computes nothing: a step of
                        its own, or from 0.5.19 on what comes first in a step
        running         decodes; the tree is off
        retracted       copied to the host; nothing is allocated or joins before it is
                        back, which takes as much room as if it came

    Of what is free each request that runs, comes or waits keeps
    `num_reserved_decode_tokens`, or what the longest of those that run may need alone,
    if that is more.

    Attributes
    ----------
    preallocating, transferring, arrived, retracted
        See above, in order.
    allocated, joined
        Those that were given slots, and those of which was seen that they have arrived;
        the part that reports them empties these.
    gives_up
        Whether a retracted request that has outgrown the pool is turned away: the
        release waits for room for it for ever, and lets nothing else in.

    Notes
    -----
    Source: SGLang 0.5.9 and 0.5.23, ``disaggregation/decode.py``.
    """

    stepwise_reason = APART
    gives_up = True

    def __init__(self, settings: Settings, cache: CacheConfig | None = None) -> None:
        if cache is not None:
            cache = replace(cache, enable_prefix_caching=False)
        settings = replace(apart(settings), disable_radix_cache=True)
        super().__init__(settings, cache)
        assert settings.kv_transfer is not None
        self._reserve = settings.kv_transfer.num_reserved_decode_tokens
        self.preallocating: list[Entry] = []
        self.transferring: list[Entry] = []
        self.arrived: list[Entry] = []
        self.retracted: list[Entry] = []
        self.allocated: list[Request] = []
        self.joined: list[Request] = []
        self._num_buffers = 2 * self.settings.max_running_requests
        # that of a prebuilt batch is told at once, and written behind the one in flight
        self.max_awaited_outputs = self.max_concurrent_batches - 1
        if self.settings.makes_plans and self.settings.overlap:
            self.max_awaited_outputs += 1
        self._num_loaded = self._num_copied = 0  # pages, in the latest call
        self._failed: list[Entry] = []  # withdrawn, and in one of the first two queues
        self._numbers = count(1)

    # -- queues ---------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._num_of(self.preallocating, self.transferring, self.arrived)

    @property
    def num_swapped(self) -> int:
        return self._num_of(self.retracted)

    def _num_of(self, *queues: list[Entry]) -> int:
        """Return how many are the engine's: what was withdrawn may be retracted."""
        if not (self._ending or self._failed):
            return sum(map(len, queues))
        return sum(each.request in self._entries for some in queues for each in some)

    @property
    def num_running(self) -> int:
        return len(self._entries) - self.num_waiting - self.num_swapped

    def admission_error(self, request: Request) -> str | None:
        error = super().admission_error(request)
        num_prompt, most = request.num_prompt_tokens, self.settings.max_total_num_tokens
        if error is None and num_prompt + self._reserve > most:
            return (
                f"a prompt of {num_prompt} tokens never fits the decoder: with "
                f"{self._reserve} to be kept free it is more than max_total_num_tokens "
                f"{most}"
            )
        return error

    def _enter(self, entry: Entry) -> None:
        queue = self.retracted if entry.is_retracted else self.preallocating
        queue.append(entry)
        if entry.is_retracted and self.settings.patch >= 22:
            entry.entered = next(self._numbers)

    def abort(self, request: Request) -> None:
        entry = self._entries[request]
        if entry in self.preallocating or entry in self.transferring:
            # which is seen when the queues are looked at next
            request.move_to(RequestStatus.FINISHED_ABORTED)
            del self._entries[request]
            self._rested_s = self._now_s
            self._failed.append(entry)
            return
        for queue in (self.arrived, self.retracted):
            if entry in queue:
                queue.remove(entry)
                if entry.slot >= 0:
                    self.holdings.release(entry)
                self.queue.enter(entry)  # out of which it is withdrawn
        super().abort(request)

    def _rest(self) -> None:
        super()._rest()
        self.arrived = [each for each in self.arrived if not each.is_finished]

    # -- a call ---------------------------------------------------------------

    def rests(self, now_s: float) -> bool:
        """Go round the release's loop while it finds no batch; return if it does not.

        Without a batch it takes no time worth a step.
        """
        last, running = self._last, self.running_batch.entries
        if not all(each.is_finished for each in running) or (
            last is not None and not all(each.is_finished for each in last.entries)
        ):
            return False
        while True:
            frees = bool(self._failed)  # slots that the next round may give away
            self._process_queues(now_s)
            if self.arrived or self.retracted:
                return False
            if frees:
                continue
            if self._last is None and not self.running_batch.entries:
                return True
            self._last, self.running_batch = None, ScheduleBatch()
            self.ratio.reset()

    def schedule(self, now_s: float) -> SglangOutput:
        self._num_loaded = self._num_copied = 0
        was_idle = self._last is None
        if not self._joins_in():
            self._process_queues(now_s)
        output = super().schedule(now_s)
        output.is_known = self._joins_in()
        if was_idle and output.mode is None:
            output.stuck = True
            self._refuse_longest(output)
        output.shape = output.shape._replace(
            num_swapped_in_blocks=self._num_loaded,
            num_swapped_out_blocks=self._num_copied,
        )
        return output

    def _joins_in(self) -> bool:
        """Whether the step goes on in which requests have joined just now."""
        last = self._last
        return (
            self.settings.makes_plans
            and last is not None
            and last.mode is Mode.PREBUILT
        )

    def _process_queues(self, now_s: float) -> None:
        """Let requests on: those that were retracted before all others."""
        self._resume()
        if self.retracted:
            return
        failed, self._failed = self._failed, []
        if failed:
            self.preallocating = [e for e in self.preallocating if e not in failed]
        self._preallocate(now_s)
        for entry in [e for e in self.transferring if e in failed]:
            self.transferring.remove(entry)
            self.holdings.release(entry)
        arrived = [e for e in self.transferring if room_of(e.request).has_arrived]
        if arrived:
            self.transferring = [e for e in self.transferring if e not in arrived]
            self.arrived += arrived
            for entry in arrived:
                entry.num_received_outputs = 1
                entry.entered = next(self._numbers)
                entry.request.move_to(_WAITING)
                self.joined.append(entry.request)

    def _num_needed(self, entry: Entry) -> int:
        """Return the tokens that a request needs to come, or to come back."""
        num_tokens = entry.num_tokens
        if self.settings.makes_plans:  # what it stores, in whole pages
            num_tokens -= entry.num_outputs > 0
            if entry.num_outputs or self.settings.patch >= 22:
                size = self.settings.page_size
                num_tokens = -(-num_tokens // size) * size
        return num_tokens + self._reserve

    def _num_allocatable(self, num_for_longest: int, others: Iterable[Entry]) -> int:
        """Return the free tokens, less what is kept.

        Parameters
        ----------
        num_for_longest
            What a request that runs may need, when all others are retracted.
        others
            Retracted requests that come first.
        """
        running, last = self.running_batch.entries, self._last
        num = len(running) + len(self.transferring) + len(self.arrived)
        num_free: int = self.holdings.allocator.num_available_tokens
        num_free -= max(self._reserve * num, num_for_longest)
        if last is not None and last.mode is Mode.PREBUILT:
            num_free -= self._reserve * len(last.entries)  # not among those that run
        return num_free - sum(map(self._num_needed, others))

    def _resume(self) -> None:
        """Bring retracted requests back, in order, while there is room."""
        if not self.retracted:
            return
        num_free = self._num_allocatable(0, ())
        while self.retracted:
            entry = self.retracted[0]
            num_needed = self._num_needed(entry)
            if not self.holdings.request_slots.num_free or num_needed > num_free:
                break
            self._allocate(entry, entry.num_tokens - 1)
            size = self.settings.page_size
            self._num_loaded += -(-entry.table.num_stored_tokens // size)
            entry.is_retracted = False
            self.arrived.append(self.retracted.pop(0))
            num_free -= num_needed

    def _preallocate(self, now_s: float) -> None:
        """Give slots to prompts, in order, while there is room."""
        if not self.preallocating:
            return
        settings, running = self.settings, self.running_batch.entries
        # what was withdrawn ended with a token that its client did not get
        num_lost = sum(each.is_ended and each.is_finished for each in running)
        num_retractable = num_lost + sum(each.num_tokens for each in running)
        longest = max((self._most_tokens(e) for e in running), default=None)
        num_for_longest = 0 if longest is None else longest - num_retractable
        num_free = self._num_allocatable(num_for_longest, self.retracted)
        if settings.makes_plans and settings.enable_priority_scheduling:
            sign = 1 if settings.schedule_low_priority_values_first else -1
            self.preallocating.sort(key=lambda each: each.request.priority * sign)
        still: list[Entry] = []
        for place, entry in enumerate(self.preallocating):
            room, request = room_of(entry.request), entry.request
            if room.met_s > now_s:
                still.append(entry)
                continue
            num_needed = self._num_needed(entry)
            if (
                not self.holdings.request_slots.num_free
                or len(self.transferring) >= self._num_buffers
                or max(num_needed, self._most_tokens(entry) - num_retractable)
                > num_free
            ):
                still += self.preallocating[place:]
                break
            self._allocate(entry, entry.num_prompt_tokens)
            room.is_allocated = True
            request.move_to(_LOADING)
            self.transferring.append(entry)
            self.allocated.append(request)
            num_free -= num_needed
            if settings.makes_plans:
                num_free = self._num_allocatable(num_for_longest, self.retracted)
        self.preallocating = still

    @staticmethod
    def _most_tokens(entry: Entry) -> int:
        """Return the tokens that a request stores at its end, by its limit."""
        num_new_tokens = entry.max_new_tokens + (entry.is_ended and entry.is_finished)
        return entry.num_prompt_tokens + min(num_new_tokens, CLIP_MAX_NEW_TOKENS)

    def _allocate(self, entry: Entry, num_tokens: int) -> None:
        entry.num_prefix_tokens, entry.num_extend_tokens = 0, num_tokens
        self.holdings.extend([entry])
        entry.num_extend_tokens = 0

    def _refuse_longest(self, output: SglangOutput) -> None:
        """Let a retracted request go that has outgrown the pool."""
        most = self.settings.max_total_num_tokens
        is_awaited = self.transferring or self.arrived or not self.retracted
        if is_awaited or not self.gives_up:
            return
        entry = self.retracted[0]
        if self._num_needed(entry) > most:
            del self.retracted[0]
            reason = "retracted, and longer by now than what the decoder lets in"
            self._turn_away(entry, reason, output)

    # -- batches --------------------------------------------------------------

    def _next_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        if not self.settings.makes_plans:
            return super()._next_batch(output)
        if not self._joins_in():
            prebuilt = self._prefill_batch(output)
            if prebuilt is not None:
                return prebuilt
        elif self._last is not None:
            self._last.filter()
            self._merge(self._last)
        running = self.running_batch
        return self._decode_batch(output) if running.entries else None

    def _num_admissible(self, num_running: int, num_held: int = 0) -> int:
        del num_held
        return max(self.settings.max_running_requests - num_running, 0)

    def _finishing(self, entries: Iterable[Entry]) -> set[Entry]:
        del entries
        return set()  # only engines that do both look ahead so

    def _in_group(self, output: SglangOutput) -> bool:
        return output.mode is Mode.DECODE

    def _is_idle(self, output: SglangOutput) -> bool:
        is_part = self.settings.makes_plans and output.mode is Mode.PREBUILT
        return not is_part and super()._is_idle(output)

    def _has_something(self) -> bool:
        return bool(
            super()._has_something()
            or self.preallocating
            or self.transferring
            or self.arrived
            or self.retracted
        )

    def _prefill_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        """Return those that have arrived, as many as may run: a prebuilt batch."""
        del output
        if self.settings.makes_plans and self.settings.enable_priority_scheduling:
            self._policy.sort(self.arrived)
        most = self._num_admissible(len(self.running_batch.entries))
        taken, self.arrived = self.arrived[:most], self.arrived[most:]
        if not taken:
            return None
        for entry in taken:
            request = entry.request
            self.holdings.admit(entry, self._now_s)
            request.num_cached_tokens = room_of(request).num_cached_tokens
        return ScheduleBatch(taken, mode=Mode.PREBUILT)

    def deliver(self, output: SchedulerOutput) -> Delivery:
        if not isinstance(output, SglangOutput) or output.mode is not Mode.PREBUILT:
            return super().deliver(output)
        # a first token counts, also of those that were retracted since
        self._processing = output, [entry for entry, _, _ in output.entries]
        first = [each for each in output.scheduled if not each.status.is_finished]
        return Delivery(first, [], [])

    def _end(self, entry: Entry) -> None:
        if entry.slot < 0:  # retracted, with its first and last token under way
            self.retracted.remove(entry)
        super()._end(entry)

    def _retract(self, output: SglangOutput) -> None:
        super()._retract(output)
        self._num_copied += sum(each.num_blocks_moved for each in output.preemptions)

    def check(self) -> None:
        super().check()
        awaited = [each for each in self.transferring if each not in self._failed]
        loading = [each.request.status is _LOADING for each in awaited]
        require(all(loading), "a prompt is awaited that does not wait for it")
        require(
            all(each.slot < 0 for each in (*self.preallocating, *self.retracted)),
            "a request holds slots before it was given any",
        )
        require(
            all(each.slot >= 0 for each in (*self.transferring, *self.arrived)),
            "a prompt comes that nothing is held for",
        )
