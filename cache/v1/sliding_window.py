"""Which blocks a sliding window of attention still reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Attention that looks back `window` tokens, the token itself included.

    Computing the token at position ``p`` reads positions ``p - window + 1`` to ``p``,
    so with ``c`` tokens computed none below ``c - window + 1`` is read any more::

        window 5, block size 4, 10 tokens computed: position 6 is the first one read

        | 0 1 2 3 | 4 5 6 7 | 8 9 . . |
          skipped    block 1 on is kept

    Parameters
    ----------
    window
        Tokens, at least 1.
    block_size
        Tokens a block.

    Notes
    -----
    Source: vLLM 0.11.2, ``vllm/v1/core/single_type_kv_cache_manager.py``
    (`SlidingWindowManager`).
    """

    window: int
    block_size: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise CacheError(f"sliding_window must be at least 1, got {self.window}")

    @property
    def num_blocks_for_hit(self) -> int:
        """Blocks in a row that hold all that the first new token reads."""
        return -(-(self.window - 1) // self.block_size)


class WindowTails:
    """Which full blocks of a window can ever be part of a hit.

    ::

        window 5, blocks of 4, hits end every 16 tokens: the last block of 4

        | 0 .. 3 | 4 .. 7 | 8 .. 11 | 12 .. 15 | 16 .. 19 | ...
                                        kept

    Parameters
    ----------
    window
        The window, in blocks.
    alignment
        Tokens after which a hit may end: whole blocks.
    interval
        Tokens after which a window is kept: None for every `alignment`, 0 for those at
        boundaries only.
    num_behind
        Blocks behind a hit that it loses, of a drafter.

    Attributes
    ----------
    num_kept
        Blocks before a boundary that are kept, and those behind.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/single_type_kv_cache_manager.py``
    (`SlidingWindowManager.reachable_block_mask`).
    """

    def __init__(
        self,
        window: SlidingWindow,
        *,
        alignment: int,
        interval: int | None,
        num_behind: int = 0,
    ) -> None:
        self._block_size = window.block_size
        self._alignment = alignment
        self._is_dense = interval is None
        self._num_behind = num_behind
        self.num_kept = max(window.num_blocks_for_hit + num_behind, 1)
        segment = alignment if interval is None else interval
        self._num_per_segment = segment // window.block_size
        self._keeps_all = 0 < self._num_per_segment <= self.num_kept

    def kept(
        self, first: int, stop: int, boundaries: Sequence[int], last: int = 0
    ) -> Sequence[int]:
        """Return which of the full blocks from `first` to `stop` are kept.

        Parameters
        ----------
        first, stop
            Indices of blocks.
        boundaries
            Tokens up to which a later request may hit; they count with an interval.
        last
            Index behind the last block of a request that ends, or ends its prompt,
            inside a segment, or 0; it counts without an interval.
        """
        if self._keeps_all:
            return range(first, stop)
        kept: set[int] = set()
        num_kept, num_per_segment = self.num_kept, self._num_per_segment
        shift = self._num_behind
        if num_per_segment:
            least = num_per_segment - num_kept
            kept.update(
                i
                for i in range(max(first, shift), stop)
                if (i - shift) % num_per_segment >= least
            )
            if self._is_dense and last % num_per_segment:
                begin = max(last - last % num_per_segment, last - num_kept)
                kept.update(range(max(first, begin), min(stop, last)))
        if not self._is_dense:
            for boundary in boundaries:
                end = boundary // self._alignment * self._alignment
                end = end // self._block_size + shift
                kept.update(range(max(first, end - num_kept), min(stop, end)))
        return sorted(kept)
