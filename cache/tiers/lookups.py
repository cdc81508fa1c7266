"""Look-ups of chunks in a tier, which change nothing."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from cache.tiers.extents import ExtentIndex

if TYPE_CHECKING:
    from cache.tiers.places import Keys


class LookupResult(Enum):
    """Whether a chunk of KV blocks can be loaded from the tier."""

    MISS = "miss"
    """It is not there."""
    HIT_PENDING = "hit_pending"
    """It is being written: to be asked again."""
    HIT = "hit"
    """It can be loaded."""
    RETRY = "retry"
    """It is not known yet, of a tier behind the host: to be asked again."""


class ChunkLookups:
    """The chunks of a tier, as look-ups find them."""

    def __init__(self) -> None:
        self._index = ExtentIndex()

    def lookup(self, run: int, index: int = 0) -> LookupResult:
        """Say whether a chunk of a run is there. Changes nothing."""
        found = self._index.find(run, index)
        if found is None:
            return LookupResult.MISS
        is_written = found[0].is_written
        return LookupResult.HIT_PENDING if is_written else LookupResult.HIT

    def longest_prefix(
        self, keys: Keys, first: int = 0, stop: int | None = None
    ) -> tuple[int, bool]:
        """Return how many leading chunks are there, and whether none is being written.

        Parameters
        ----------
        keys, first, stop
            A prompt, from which position on, and before which; it counts as no use of
            the chunks.
        """
        found, is_ready = first, True
        piece = keys.piece_of(first)
        if self._index.find(keys.runs[piece], first - keys.starts[piece]) is None:
            return 0, True  # mostly
        for part in self._index.parts(keys, first, end_of(keys, stop)):
            if part.position > found:
                break
            found += part.stop - part.first
            is_ready &= not part.extent.is_written
        return found - first, is_ready

    def last_window(
        self, keys: Keys, first: int, stop: int, num_chunks: int, num_at_end: int
    ) -> tuple[int, bool]:
        """Return where the last window ends that is there, from `first` on.

        Like `longest_prefix` it counts as no use of the chunks.

        Parameters
        ----------
        keys, first, stop
            A prompt, from which position on, and before which.
        num_chunks, num_at_end
            Chunks in a row that a window needs, and one that ends before `stop`.

        Returns
        -------
        (int, bool)
            The chunks behind `first` up to the end of the window; those that are there
            from `first` on, where no window is; and whether none of it is being
            written.
        """
        needed, at = num_at_end, stop
        num_found, is_ready = 0, True
        for part in reversed(self._index.parts(keys, first, stop)):
            position, end = part.span
            if end < at:
                needed, num_found, is_ready = num_chunks, 0, True
            is_ready &= not part.extent.is_written
            num_missing = needed - num_found
            if end - position >= num_missing:
                return end - num_missing + needed - first, is_ready
            num_found += end - position
            at = position
        return (0, True) if at > first else (num_found, is_ready)


def end_of(keys: Keys, stop: int | None) -> int:
    """Return the position behind the last chunk that is meant; None: of all."""
    return keys.stop if stop is None else stop
