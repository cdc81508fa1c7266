"""The budget of layers with a window, as a prefill batch is formed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.sglang.tables import KVCache
    from sim.scheduler.sglang.settings import Settings


class WindowBudget:
    """Slots of layers with a window: available and evictable ones, less those taken.

    A request takes what its chunk holds before its window, and a window, or its whole
    length if that is less, and a page.

    Parameters
    ----------
    settings, cache
        Of a scheduler with such layers.

    Notes
    -----
    Source: SGLang 0.5.23, ``mem_cache/prefill_budget.py`` (`SWAPrefillBudget`).
    """

    def __init__(self, settings: Settings, cache: KVCache) -> None:
        assert settings.swa is not None
        self._window_tokens = settings.swa.sliding_window_size
        self._num_tokens = settings.swa.max_total_num_tokens
        self._page_size = settings.page_size
        self._cache = cache
        self._num_taken = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be promised."""
        cache = self._cache
        num_free = cache.allocator.num_available_peers
        return num_free + cache.num_evictable_window_tokens - self._num_taken

    def needed(self, num_extend: int, num_new: int, chunk: int | None) -> int:
        """Return the tokens that a request takes at most.

        Parameters
        ----------
        num_extend, num_new
            Tokens of its prompt that are to be computed, and outputs.
        chunk
            Prompt tokens that the batch may take at once, or None.
        """
        window = self._window_tokens
        allocated = num_extend if chunk is None else min(num_extend, chunk)
        tail = max(allocated - window, 0)
        return tail + min(num_extend + num_new, window) + self._page_size

    def chunk_for(
        self, num_extend: int, num_new: int, chunk: int | None
    ) -> tuple[bool, int | None]:
        """Return whether a request may join, and the chunk that it may take.

        That is smaller only where the request would never fit as it is: others wait.
        """
        needed = self.needed(num_extend, num_new, chunk)
        if needed < self.remaining:
            return True, chunk
        most = 0
        if needed >= self._num_tokens:
            size = self._page_size
            left = self.remaining - self.needed(0, num_new, None)
            most = max(0, left // size * size)
        if chunk is None or most <= 0:
            return False, None
        return True, min(chunk, most)

    def take(self, num_extend: int, num_new: int, chunk: int | None) -> None:
        """Promise what a request takes."""
        self._num_taken += self.needed(num_extend, num_new, chunk)
