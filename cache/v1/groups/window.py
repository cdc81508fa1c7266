"""Groups of layers that look back a number of tokens: sliding windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.v1.groups.base import Get, GroupManager
from cache.v1.sliding_window import SlidingWindow, WindowTails

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.v1.block_pool import BlockPool
    from cache.v1.groups.base import GroupTerms
    from cache.v1.specs import SlidingWindowSpec


class SlidingWindowManager(GroupManager):
    """Blocks behind the window are given up; a hit needs those inside it.

    ::

        window 5, blocks of 4: a hit of 12 tokens needs the block before token 12

        | 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12
          null      null      needed

    Few of the blocks can ever be part of a hit: which are registered is said by
    `GroupTerms.retention_interval`.

    Attributes
    ----------
    reach
        Tokens before the next one that it reads.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/single_type_kv_cache_manager.py``
    (`SlidingWindowManager`).
    """

    gives_up_blocks = True

    def __init__(
        self, spec: SlidingWindowSpec, pool: BlockPool, terms: GroupTerms
    ) -> None:
        super().__init__(spec, pool, terms)
        self.window = SlidingWindow(spec.sliding_window, spec.block_size)
        self.reach = spec.sliding_window - 1
        # At least one: without look-back every single block is a hit.
        self._num_needed = max(self.window.num_blocks_for_hit, 1)
        self._tails = WindowTails(
            self.window,
            alignment=terms.hit_alignment,
            interval=terms.retention_interval,
            num_behind=int(terms.drops_eagle_block),
        )

    def num_passed_tokens(self, num_computed_tokens: int) -> int:
        num_tokens = num_computed_tokens - self.reach
        return num_tokens if num_tokens > 0 else 0

    def giving_phases(self) -> set[int]:
        return {self.reach % self.block_size}

    def kept(self, first: int, stop: int, boundaries: Sequence[int]) -> Sequence[int]:
        return self._tails.kept(first, stop, boundaries)

    def longest_hit(
        self, hashes: list[int], limit: int, get: Get, salt: int, *, drops: bool = False
    ) -> tuple[list[Any], int]:
        """See `GroupManager.longest_hit`.

        What is before the window need not be cached: the search goes from the right
        and ends at the first run that fills a window. A shorter run will do where it
        begins with the sequence.
        """
        block_size, keys = self.block_size, self.keys(hashes)
        num_per_hit = self.hit_alignment // block_size
        num_needed = self._tails.num_kept if drops else self._num_needed
        run: list[Any] = []  # right to left
        for index in range(limit // block_size - 1, -1, -1):
            blocks = get(keys[index] ^ salt)
            if blocks is None:
                run.clear()
                continue
            if not run and (index + (not drops)) % num_per_hit:
                continue
            run.append(blocks)
            if len(run) >= num_needed:
                num_blocks = index + len(run) - drops
                found = [None] * index + run[::-1]
                return found[:num_blocks], num_blocks * block_size
        num_blocks = len(run) - len(run) % num_per_hit
        if drops and num_blocks:  # a whole unit of hits, as its last block goes
            num_blocks -= num_per_hit
        return run[::-1][:num_blocks], num_blocks * block_size
