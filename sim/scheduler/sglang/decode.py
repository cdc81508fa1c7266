"""The scheduler of SGLang's engines that decode what others have prefilled."""

from __future__ import annotations

from dataclasses import replace
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
        arrived         waits for a *prebuilt* batch, which computes nothing
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

    Notes
    -----
    Source: SGLang 0.5.9, ``disaggregation/decode.py``.
    """

    stepwise_reason = APART

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
        self._num_loaded = self._num_copied = 0  # pages, in the latest call

    # -- queues ---------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._num_of(self.preallocating, self.transferring, self.arrived)

    @property
    def num_swapped(self) -> int:
        return self._num_of(self.retracted)

    def _num_of(self, *queues: list[Entry]) -> int:
        """Return how many are the engine's: what was withdrawn may be retracted."""
        if not self._ending:
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

    def abort(self, request: Request) -> None:
        entry = self._entries[request]
        for queue in (
            self.preallocating,
            self.transferring,
            self.arrived,
            self.retracted,
        ):
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
            self._process_queues(now_s)
            if self.arrived or self.retracted:
                return False
            if self._last is None and not self.running_batch.entries:
                return True
            self._last, self.running_batch = None, ScheduleBatch()
            self.ratio.reset()

    def schedule(self, now_s: float) -> SglangOutput:
        self._num_loaded = self._num_copied = 0
        was_idle = self._last is None
        self._process_queues(now_s)
        output = super().schedule(now_s)
        if was_idle and output.mode is None:
            output.stuck = True
            self._refuse_longest(output)
        output.shape = output.shape._replace(
            num_swapped_in_blocks=self._num_loaded,
            num_swapped_out_blocks=self._num_copied,
        )
        return output

    def _process_queues(self, now_s: float) -> None:
        """Let requests on: those that were retracted before all others."""
        self._resume()
        if self.retracted:
            return
        self._preallocate(now_s)
        arrived = [e for e in self.transferring if room_of(e.request).has_arrived]
        if arrived:
            self.transferring = [e for e in self.transferring if e not in arrived]
            self.arrived += arrived
            for entry in arrived:
                entry.num_received_outputs = 1
                entry.request.move_to(_WAITING)
                self.joined.append(entry.request)

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
        return num_free - sum(each.num_tokens + self._reserve for each in others)

    def _resume(self) -> None:
        """Bring retracted requests back, in order, while there is room."""
        if not self.retracted:
            return
        num_free, back = self._num_allocatable(0, ()), 0
        for entry in self.retracted:
            num_needed = entry.num_tokens + self._reserve
            if not self.holdings.request_slots.num_free or num_needed > num_free:
                break
            num_free -= num_needed
            self._allocate(entry, entry.num_tokens - 1)
            size = self.settings.page_size
            self._num_loaded += -(-entry.table.num_stored_tokens // size)
            entry.is_retracted = False
            back += 1
        self.arrived += self.retracted[:back]
        del self.retracted[:back]

    def _preallocate(self, now_s: float) -> None:
        """Give slots to prompts, in order, while there is room."""
        if not self.preallocating:
            return
        running = self.running_batch.entries
        num_retractable = sum(each.num_tokens for each in running)
        longest = max((self._most_tokens(e) for e in running), default=None)
        num_free = self._num_allocatable(
            0 if longest is None else longest - num_retractable, self.retracted
        )
        still: list[Entry] = []
        for place, entry in enumerate(self.preallocating):
            room, request = room_of(entry.request), entry.request
            if room.met_s > now_s:
                still.append(entry)
                continue
            num_needed = entry.num_prompt_tokens + self._reserve
            if (
                not self.holdings.request_slots.num_free
                or len(self.transferring) >= self._num_buffers
                or max(num_needed, self._most_tokens(entry) - num_retractable)
                > num_free
            ):
                still += self.preallocating[place:]
                break
            num_free -= num_needed
            self._allocate(entry, entry.num_prompt_tokens)
            room.is_allocated = True
            request.move_to(_LOADING)
            self.transferring.append(entry)
            self.allocated.append(request)
        self.preallocating = still

    @staticmethod
    def _most_tokens(entry: Entry) -> int:
        """Return the tokens that a request stores at its end, by its limit."""
        most = min(entry.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        return entry.num_prompt_tokens + most

    def _allocate(self, entry: Entry, num_tokens: int) -> None:
        entry.num_prefix_tokens, entry.num_extend_tokens = 0, num_tokens
        self.holdings.extend([entry])
        entry.num_extend_tokens = 0

    def _refuse_longest(self, output: SglangOutput) -> None:
        """Let a retracted request go that has outgrown the pool.

        The release waits for room for it for ever, and lets nothing else in.
        """
        most = self.settings.max_total_num_tokens
        if self.transferring or self.arrived or not self.retracted:
            return
        entry = self.retracted[0]
        if entry.num_tokens + self._reserve > most:
            del self.retracted[0]
            reason = "retracted, and longer by now than what the decoder lets in"
            self._turn_away(entry, reason, output)

    # -- batches --------------------------------------------------------------

    def _prefill_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        """Return those that have arrived, as many as may run: a prebuilt batch."""
        del output
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
        loading = [e.request.status is _LOADING for e in self.transferring]
        require(all(loading), "a prompt is awaited that does not wait for it")
        require(
            all(each.slot < 0 for each in (*self.preallocating, *self.retracted)),
            "a request holds slots before it was given any",
        )
        require(
            all(each.slot >= 0 for each in (*self.transferring, *self.arrived)),
            "a prompt comes that nothing is held for",
        )
