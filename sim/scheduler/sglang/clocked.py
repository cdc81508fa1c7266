"""The scheduler of SGLang with its running decodes on a clock."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from cache.sglang.allocator import SlotAllocator, SlotCounts
from sim.scheduler.sglang.clock import DecodeClock
from sim.scheduler.sglang.holdings import OutOfMemoryError
from sim.scheduler.sglang.requests import Mode, SglangOutput
from sim.scheduler.sglang.scheduler import SglangScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Sized

    from sim.scheduler.base import CacheUsage, Preemption
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.sglang.holdings import Holdings
    from sim.scheduler.sglang.requests import Entry, ScheduleBatch
    from sim.scheduler.sglang.settings import Settings

Shape = tuple[int, int, int, int, int, int]
_EMPTY = (0, 0, 0, 0, 0, 0)


class _Awaited(NamedTuple):
    """A batch whose outputs are to be processed."""

    mode: Mode | None
    step: int
    entries: Sequence[Entry] = ()
    """Of a batch of prompts."""
    chunked: Entry | None = None


class _Pages:
    """The pool in pages, as the log of steps reads it."""

    observer = None

    def __init__(self, holdings: Holdings, page_size: int) -> None:
        self._holdings = holdings
        self._page_size = page_size

    @property
    def num_usable_blocks(self) -> int:
        return self._holdings.allocator.num_tokens // self._page_size

    @property
    def num_free_blocks(self) -> int:
        """Pages that no request holds; the tree may keep prefixes in them."""
        holdings = self._holdings
        num_used = holdings.num_used_tokens // self._page_size
        return self.num_usable_blocks - num_used

    @property
    def num_logical_blocks(self) -> int:
        return self._holdings.num_pages


class _Counted:
    """As many requests as a function says."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count()


class ClockedSglangScheduler(SglangScheduler):
    """`SglangScheduler` that does not look at each decode in each batch.

    It decides by the same methods. What differs is where the tokens of decodes stand
    (`DecodeClock`), which are written down before anything looks at them; that slots
    are counted, as no decision depends on which they are; and when outputs are
    processed: with the end of a request, or else before the next call, which is the
    same to all that decide.

    Attributes
    ----------
    running, waiting
        Counts of requests.
    passed_over
        Decodes that pause in the latest batch: all or none.
    completing
        Requests of the latest batch whose prompt ends there.
    set_aside
        Always empty.
    """

    decodes_pause = True
    moves_blocks = False
    foresees_usage = False
    _slots: type[SlotAllocator] = SlotCounts

    def __init__(self, settings: Settings, cache: CacheConfig | None = None) -> None:
        super().__init__(settings, cache)
        settings = self.settings
        self._is_ahead = settings.overlap
        self.clock = DecodeClock(settings.page_size, is_ahead=self._is_ahead)
        self.tables = _Pages(self.holdings, settings.page_size)
        self.block_size = settings.page_size
        self.num_unquestioned_tokens = settings.longest_prompt + 1
        self.running = _Counted(lambda: self.num_running)
        self._waiting = _Counted(lambda: self.num_waiting)
        self.num_blocks_by_group: list[int] = []
        self.completing: list[Request] = []
        self.passed_over: Sequence[Request] = ()
        self.set_aside: list[Request] = []
        self.preemptions: list[Preemption] = []
        self.num_recomputed_tokens = 0
        self._awaited: list[_Awaited] = []
        self._has_ended = False  # a request that stands in the running batch
        self._limits: list[tuple[int, int, Entry, int]] = []  # see `_join`
        self._left: set[Entry] = set()  # off the clock, their last output awaited
        self._next_order = 0
        self._reordered: list[Entry] = []  # as soon as outputs of before are processed
        self._output = SglangOutput()

    @staticmethod
    def reason_not_to(settings: Settings, cache: CacheConfig) -> str:
        """Return why decodes are looked at one by one, empty if they are not."""
        del cache
        for reason, is_known in (
            ("with enable_mixed_chunk", not settings.is_mixed),
            ("with priorities", not settings.enable_priority_scheduling),
            ("with max_queued_requests", settings.max_queued_requests is None),
            ("with layers that have a window", settings.swa is None),
        ):
            if not is_known:
                return reason
        return ""

    @property
    def step(self) -> int:
        """Batches formed; one that takes another's place goes on from its number."""
        return self.clock.step

    @step.setter
    def step(self, step: int) -> None:
        self.clock.step = step

    # -- queues ---------------------------------------------------------------

    @property
    def waiting(self) -> Sized:
        """The queue, as it is counted."""
        return self._waiting

    def abort(self, request: Request) -> None:
        self._process_due()
        if request in self.clock.entries:
            self.clock.write((self.clock.entries[request],))
        super().abort(request)

    def _rest(self) -> None:
        while self._awaited:
            self._process(self._awaited.pop(0))
        super()._rest()

    # -- a call ---------------------------------------------------------------

    def form(self, now_s: float) -> Shape:
        """Form the next batch; return six fields of its shape."""
        self._process_due()
        self._now_s = now_s
        clock, step = self.clock, self.clock.step
        output = self._output = SglangOutput()
        self.holdings.count_evictions()
        batch = self._last = self._next_batch(output)
        self.completing, self.passed_over = [], ()
        self.preemptions = output.preemptions
        self.num_recomputed_tokens = 0
        shape: Shape = _EMPTY
        if batch is None:
            self.passed_over = list(clock.entries)
            self._awaited.append(_Awaited(None, step))
        elif batch.mode is Mode.DECODE:
            output.mode = Mode.DECODE
            shape = (clock.num_decodes, clock.num_context_tokens, 0, 0, 0, 0)
            self._awaited.append(_Awaited(Mode.DECODE, step))
        else:
            output.take(batch)
            shape = output.shape[:6]
            self.num_recomputed_tokens = output.num_recomputed_tokens
            self._note_prompts(batch, step)
        clock.note_batch(decoded=batch is not None and batch.mode is Mode.DECODE)
        self._tell_of_tree()
        return shape

    def _note_prompts(self, batch: ScheduleBatch, step: int) -> None:
        """Take note of a batch of prompts, and of the decodes that pause."""
        clock = self.clock
        self.passed_over = list(clock.entries)
        self._awaited.append(
            _Awaited(batch.mode, step, tuple(batch.entries), batch.chunked)
        )
        for entry in batch.entries:
            if entry is batch.chunked:
                continue
            request = entry.request
            self._put_last(request)
            if not entry.is_ended:
                self.completing.append(request)
            elif self._is_ahead:  # in the next batch, too
                self._join(entry)

    def _put_last(self, request: Request) -> None:
        """Let a request stand behind all others in the order of the batch."""
        request.order = self._next_order
        self._next_order += 1

    def _take_order(self) -> None:
        """Let requests stand as a retraction has sorted them."""
        for entry in self._reordered:
            self._put_last(entry.request)
        self._reordered = []

    def _join(self, entry: Entry) -> None:
        """Put a request onto the clock.

        A heap has the tick in which it decodes no more if its limit ends it: the output
        of the one before is its last.
        """
        self.clock.join(entry)
        if self._is_ahead and self.settings.patch >= 22:
            request = entry.request
            base_tokens = request.base_tokens
            num_most = entry.num_prompt_tokens + entry.max_new_tokens
            heappush(
                self._limits,
                (num_most - 1 - base_tokens, request.order, entry, base_tokens),
            )

    def schedule(self, now_s: float) -> SglangOutput:
        return self.output(self.form(now_s))

    def output(self, shape: Sequence[int]) -> SglangOutput:
        """Return the decisions of the latest `form` as an object."""
        del shape
        output, batch = self._output, self._last
        if batch is not None and batch.mode is Mode.DECODE and not output.entries:
            for entry in batch.entries:
                self.clock.fill(entry)
            output.take(batch)
        return output

    # -- prompts --------------------------------------------------------------

    def _prefill_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        if self.chunked is None and (
            self.running_batch.is_full or not self.queue.entries
        ):
            return None
        self.clock.write(self.clock.entries.values())
        return super()._prefill_batch(output)

    # -- decodes --------------------------------------------------------------

    def quiet_steps(self, most: int) -> int:
        """Return how many next batches only let the same requests decode.

        Changes nothing.
        """
        num_decodes, last = len(self.clock.entries), self._last
        if (
            not num_decodes
            or last is None
            or last.mode is not Mode.DECODE
            or self._has_ended
            or self._ending
            or (self.queue.entries and not last.is_full)
            or self.queue.dropped
            or self.chunked is not None
            or any(each.mode is not Mode.DECODE for each in self._awaited)
            or (self.note_tree and self._told_of_tree != self.holdings.tree_counts)
        ):
            return 0
        # batches that no eviction is needed for, even if all open pages at once
        size = self.settings.page_size
        num_rounds: int = self.holdings.allocator.num_available_tokens // (
            num_decodes * size
        )
        num_steps = num_rounds if size == 1 else (num_rounds - 1) * size
        if self._limits:
            num_steps = min(num_steps, self._limits[0][0] - self.clock.tick)
        return min(max(num_steps, 0), most)

    def advance(self, num_steps: int) -> list[int]:
        """Take quiet steps; return how many pages tables took in each."""
        clock, num_decodes = self.clock, len(self.clock.entries)
        if self.settings.page_size == 1:
            opened = [num_decodes] * num_steps
        else:
            first = clock.tick
            opened = [clock.num_opening(first + at) for at in range(num_steps)]
        self._take_pages(sum(opened))
        clock.decode(num_steps)
        self.holdings.num_stored_tokens += num_steps * num_decodes
        self.ratio.decay(num_steps)
        before = clock.step
        clock.note_batch(decoded=True, num_steps=num_steps)
        first_awaited = clock.step - (2 if self._is_ahead else 1)
        self._awaited = [
            _Awaited(Mode.DECODE, step)
            for step in range(max(first_awaited, before - 1), clock.step)
        ]
        return opened

    def _take_pages(self, num_pages: int) -> None:
        slots = self.holdings.allocator
        assert isinstance(slots, SlotCounts)
        slots.take_pages(num_pages)
        self.holdings.num_pages += num_pages

    def _finishing(self, entries: Iterable[Entry]) -> set[Entry]:
        """Return those whose awaited output is their last, and take them off the clock.

        Those that have ended, or were retracted, are not on it, or not as they were.
        """
        del entries  # all on the clock
        clock, limits, found = self.clock, self._limits, set()
        while limits and limits[0][0] <= clock.tick:
            _, _, entry, base_tokens = heappop(limits)
            request = entry.request
            if request in clock.entries and request.base_tokens == base_tokens:
                found.add(entry)
                clock.write((entry,))
                clock.leave(request)
        self._left |= found
        return found

    def _decode_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        self._has_ended = False
        return super()._decode_batch(output)

    def _has_room(self, entries: Sequence[Entry]) -> bool:
        del entries  # all on the clock
        num_opening = self.clock.num_opening(self.clock.tick)
        return self.holdings.cache.make_room(num_opening * self.settings.page_size)

    def _grow(self, entries: Sequence[Entry]) -> None:
        clock, holdings = self.clock, self.holdings
        num_opening = clock.num_opening(clock.tick)
        size = self.settings.page_size
        holdings.cache.make_room(len(entries) * size)
        if holdings.allocator.num_available_tokens < num_opening * size:
            raise OutOfMemoryError.of("Decode", size)
        self._take_pages(num_opening)
        clock.decode(1)
        holdings.num_stored_tokens += len(entries)

    def _retract(self, output: SglangOutput) -> None:
        clock = self.clock
        clock.write(clock.entries.values())
        for entry in clock.entries.values():
            clock.fill(entry)
        before = {entry.request: entry for entry in self.running_batch.entries}
        super()._retract(output)
        self._reordered = self.running_batch.entries
        if not self._awaited:
            self._take_order()
        for request in before.keys() - {e.request for e in self.running_batch.entries}:
            clock.forget(before[request])

    # -- results --------------------------------------------------------------

    def begin_decoding(self, requests: Sequence[Request]) -> None:
        """Put those of `completing` that go on onto the clock, in batch order."""
        for request in requests:
            self._join(self._entries[request])
        self.completing = []

    def note_known(self, requests: Sequence[Request]) -> None:
        """Take note of outputs of requests off the clock: there are none."""

    def update(self, finished: Sequence[Request]) -> None:
        self._process(self._awaited.pop(0), finished)

    def _process_due(self) -> None:
        """Process outputs that are there, unless `update` did."""
        while len(self._awaited) > self._is_ahead:
            self._process(self._awaited.pop(0))

    def _process(self, batch: _Awaited, finished: Sequence[Request] = ()) -> None:
        """Process the outputs of a batch, some of which end requests."""
        output = SglangOutput(mode=batch.mode)
        entries: list[Entry] = []
        if batch.mode is Mode.DECODE:
            entries = [self._entries[request] for request in finished]
            if self._ending:
                decoded, left = self.clock.entries, self._left
                entries += [
                    entry
                    for entry in self._ending
                    if (entry.request in decoded or entry in left)
                    and entry.request.joined_step < batch.step
                ]
                entries.sort(key=lambda entry: entry.request.order)
        for entry in batch.entries:
            is_left = entry.is_finished or entry.is_retracted
            if entry is not batch.chunked and not is_left:
                entries.append(entry)
        self._processing = output, entries
        super().update(finished)
        self._take_order()

    def _end(self, entry: Entry) -> None:
        if entry.request in self.clock.entries:
            self.clock.leave(entry.request)
            self._has_ended = True
            later = self._awaited
            self.num_wasted_tokens += bool(later and later[-1].mode is Mode.DECODE)
        self._left.discard(entry)
        super()._end(entry)

    # -- into the engine's terms ----------------------------------------------

    def usage_facts(self) -> tuple[int, int, int]:
        """Return pages in use and of all tables, and logical tokens."""
        holdings = self.holdings
        return (
            holdings.num_used_tokens // self.block_size,
            holdings.num_pages,
            holdings.num_stored_tokens,
        )

    def cache_usage(self) -> CacheUsage:
        return self.holdings.usage()

    def check(self) -> None:
        # Processes no output: a step may be under way, whose end takes the oldest.
        self.clock.check()
        for entry in self.clock.entries.values():
            self.clock.fill(entry)
        super().check()
