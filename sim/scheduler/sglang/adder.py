"""The budgets of a prefill batch, and what may still join it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from sim.scheduler.sglang.settings import CLIP_MAX_NEW_TOKENS
from sim.scheduler.sglang.windows import WindowBudget
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.sglang.tables import KVCache
    from sim.scheduler.sglang.requests import Entry
    from sim.scheduler.sglang.settings import Settings


class Added(Enum):
    """The outcome for a request that was tried."""

    CONTINUE = "continue"
    """It was taken, and another may be."""
    NO_TOKEN = "no token"
    """Memory is short; it may have been taken."""
    OTHER = "other"
    """Another budget is; it may have been taken."""


class PrefillAdder:
    """Takes requests into a prefill batch while the budgets hold.

    ::

        total   available and evictable tokens, less what running and taken requests
                are expected to need yet: the share `ratio` of what they may write
        cur     the same, less what this batch stores
        input   max_prefill_tokens, less those taken
        chunk   chunked_prefill_size, less those taken
        window  see `WindowBudget`

    Parameters
    ----------
    settings, cache
        Of the scheduler.
    running
        The requests that run.
    ratio
        Share of their limits that they are expected to write.
    num_mixed
        How many of them decode in this batch, too.

    Attributes
    ----------
    taken
        Requests of the batch, in order.
    chunked
        The one of which the batch computes a chunk only, newly so; or None.

    Notes
    -----
    Source: SGLang 0.5.9, ``managers/schedule_policy.py`` (`PrefillAdder`).
    """

    def __init__(
        self,
        settings: Settings,
        cache: KVCache,
        running: Sequence[Entry],
        *,
        ratio: float,
        num_mixed: int,
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._running = running
        self._ratio = ratio
        self._page_size = settings.page_size
        # a page more is reserved for each request from 0.5.10 on, and asked for first
        # from 0.5.11 on
        self._page_extra = settings.page_size if settings.patch >= 10 else 0
        self._page_asked = settings.page_size if settings.patch >= 11 else 0
        self._input = settings.max_prefill_tokens - num_mixed
        chunk = settings.chunk
        self._chunk = None if chunk is None else chunk - num_mixed
        self._offset: float = num_mixed + added(self._all_expected(running))
        self._current = num_mixed
        self._window = None if settings.swa is None else WindowBudget(settings, cache)
        self._states: list[tuple[float, int]] | None = None
        self.taken: list[Entry] = []
        self.chunked: Entry | None = None

    # -- what is left ---------------------------------------------------------

    def expected(self, entry: Entry) -> float:
        """Return the tokens that a running request is expected to write yet."""
        left = entry.max_new_tokens - entry.num_outputs
        is_sure = entry.ignore_eos and self._settings.patch >= 22
        return min(left, CLIP_MAX_NEW_TOKENS) * (1.0 if is_sure else self._ratio)

    def _all_expected(self, running: Sequence[Entry]) -> list[float]:
        """Return `expected` of each: many are asked for at once, for each batch."""
        if self._settings.makes_plans:
            return [self.expected(each) for each in running]
        most, ratio = CLIP_MAX_NEW_TOKENS, self._ratio
        all_left = [
            each.max_new_tokens
            - each.request.num_tokens
            + each.request.num_prompt_tokens
            for each in running
        ]
        return [(left if left < most else most) * ratio for left in all_left]

    @property
    def _num_free_tokens(self) -> int:
        cache = self._cache
        return cache.allocator.num_available_tokens + cache.num_evictable_tokens

    @property
    def total(self) -> float:
        """Tokens that may still be promised."""
        return self._num_free_tokens - self._offset

    def need(self, entry: Entry) -> float:
        """Return the tokens that a request lacks, by its latest look-up.

        The release goes by that, which may be none, so that what is freed for it may be
        too little.
        """
        reserve = min(entry.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        num_extend = entry.num_extend_tokens
        if self._settings.makes_plans:
            num_extend = entry.num_filled - entry.num_prefix_tokens
        return num_extend + reserve - self.total

    def release(self, entry: Entry) -> None:
        """Take note that a running request is preempted."""
        self._offset -= self.expected(entry)

    def _ceil(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size) * self._page_size

    def state(self) -> Added:
        """Return whether another request may be taken."""
        if self.total <= 0 or self._num_free_tokens - self._current <= 0:
            return Added.NO_TOKEN
        if self._window is not None and self._window.remaining <= 0:
            return Added.NO_TOKEN
        if self._input <= 0 or (self._chunk is not None and self._chunk <= 0):
            return Added.OTHER
        return Added.CONTINUE

    # -- taking ---------------------------------------------------------------

    def continue_chunk(self, entry: Entry) -> bool:
        """Take the next chunk of a prompt, whatever is left; return if more follow.

        With a window it waits where nothing is left.
        """
        assert self._chunk is not None
        limit = min(self._chunk, int(self.total))
        if self._window is not None:
            limit = min(limit, self._window.remaining - self._page_size)
            if limit <= 0:
                return True
        if limit <= 0:
            limit = self._chunk
        is_cut = entry.num_extend_tokens > limit
        reserve = 0 if is_cut else min(entry.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        self._take(entry, min(entry.num_extend_tokens, limit), reserve)
        return is_cut

    def add(self, entry: Entry) -> Added:
        """Take a request that was looked up just now, if the budgets let it."""
        settings = self._settings
        most = settings.prefill_max_requests
        if most is not None and len(self.taken) >= most:
            return Added.OTHER
        if entry.ignore_eos and settings.disable_radix_cache:
            return self._add_ignoring_eos(entry)
        refused = None if settings.makes_plans else self._refused(entry)
        if refused:
            return refused
        # what it holds cannot be evicted any more
        self._cache.lock(entry.table)
        chunk = self._chunk
        if settings.makes_plans:
            refused = self._refused(entry)
        if self._window is not None and refused is not Added.NO_TOKEN:
            fits, chunk = self._window.chunk_for(
                self._ceil(entry.num_extend_tokens), self._num_new(entry), chunk
            )
            if not fits:
                refused = Added.NO_TOKEN
        num_taken = self._num_taken(entry, chunk)
        if refused:
            pass
        elif self._num_needed(entry) >= self.total:
            refused = Added.NO_TOKEN
        elif num_taken <= 0:
            refused = Added.OTHER
        if refused:
            self._cache.unlock(entry.table)
            return refused
        is_cut = num_taken < entry.num_extend_tokens
        reserve = 0 if is_cut else min(entry.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        self._take(entry, num_taken, reserve)
        if is_cut:
            self.chunked = entry
        return self.state()

    def _refused(self, entry: Entry) -> Added | None:
        """Return why a request cannot join, as long as its prefix is not locked."""
        if self._num_needed(entry) >= self.total:
            return Added.NO_TOKEN
        is_cut = self._settings.makes_plans and self._chunk is not None
        num_input = self._ceil(entry.num_extend_tokens)
        if num_input >= self._input and self.taken and not is_cut:
            return Added.OTHER
        return None

    def _num_needed(self, entry: Entry) -> int:
        """Return the tokens that all of its prompt and its outputs need."""
        return entry.num_extend_tokens + self._num_new(entry) + self._page_asked

    @staticmethod
    def _num_new(entry: Entry) -> int:
        """Return the outputs that room is asked for."""
        return min(max(entry.num_left, 0), CLIP_MAX_NEW_TOKENS)

    def _num_taken(self, entry: Entry, chunk: int | None) -> int:
        """Return the prompt tokens that a chunk lets in: whole pages, or all."""
        num_extend = entry.num_extend_tokens
        if chunk is None or self._ceil(num_extend) <= chunk:
            return num_extend
        return chunk // self._page_size * self._page_size

    def _take(self, entry: Entry, num_extend: int, reserve: int) -> None:
        entry.num_extend_tokens = num_extend
        self.taken.append(entry)
        num_input = self._ceil(num_extend)
        if self._window is not None:
            self._window.take(num_input, reserve, self._chunk)
        self._offset += num_input + reserve + self._page_extra
        self._current += num_input + self._page_extra
        self._input -= num_input
        if self._chunk is not None:
            self._chunk -= num_input

    # -- requests that write all that they may --------------------------------

    def _add_ignoring_eos(self, entry: Entry) -> Added:
        """Take a request if all come to their ends, one after another.

        Source: `add_one_req_ignore_eos`; only without a radix cache.
        """
        num_extend = entry.num_extend_tokens
        num_input = self._ceil(num_extend)
        if self._settings.patch >= 21:
            num_input += self._page_size
        num_current = self._num_free_tokens - self._current
        if num_input > min(num_current, self.total):
            return Added.NO_TOKEN
        if self._window is not None:
            needed = self._window.needed(num_extend, self._num_new(entry), self._chunk)
            if needed > self._window.remaining:
                return Added.NO_TOKEN
        elif not self._all_end(entry, num_current - num_input):
            return Added.NO_TOKEN
        reserve = min(entry.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        if self._chunk is None or num_extend <= self._chunk:
            self._take(entry, num_extend, reserve)
        elif self._chunk <= 0:
            return Added.OTHER
        else:
            self._take(entry, self._chunk, 0)
            self.chunked = entry
        return self.state()

    def _all_end(self, entry: Entry, num_left: int) -> bool:
        """Whether all come to their ends with so many tokens, and one more request."""
        if self._states is None:
            found = map(self._ending, (entry, *self._running, *self.taken))
            states = [state for state in found if state[0] > 0]
            states.sort(key=lambda state: state[0])
            self._states = states
        else:
            self._insert(self._ending(entry))
        num_freed = 0
        for index, (left, held) in enumerate(self._states):
            num_others = len(self._states) - index
            if num_left + num_freed - left * num_others <= num_others:
                return False
            num_freed += held
        return True

    def _ending(self, entry: Entry) -> tuple[float, int]:
        """Return the tokens that it writes yet, and those that it frees then."""
        share = 1.0 if entry.ignore_eos else self._ratio
        return entry.max_new_tokens * share - entry.num_outputs, entry.num_tokens

    def _insert(self, state: tuple[float, int]) -> None:
        states = self._states
        assert states is not None
        if state[0] > 0:
            behind = (i for i, (left, _) in enumerate(states) if left >= state[0])
            # the release's search ends at the last state, not behind it
            states.insert(next(behind, max(len(states) - 1, 0)), state)
