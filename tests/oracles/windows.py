"""A sliding window block by block: what the oracle gives up, holds and finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.v1.sliding_window import SlidingWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache.block import KVCacheBlock


class BlockWindow(SlidingWindow):
    """A window whose blocks are looked at one by one."""

    __slots__ = ()

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that lie wholly outside of the window."""
        return max(num_computed_tokens - self.window + 1, 0) // self.block_size

    def num_tokens_before_next_skip(self, num_computed_tokens: int) -> int:
        """Most computed tokens with which no further block is skipped."""
        num_blocks = self.num_skipped_blocks(num_computed_tokens)
        return (num_blocks + 1) * self.block_size + self.window - 2

    def most_held_blocks(self, num_new_tokens: int, max_model_len: int) -> int:
        """Most blocks that a table holds while `num_new_tokens` are computed.

        The window need not begin with a block, hence the one block more.
        Source: vLLM 0.31, ``vllm/v1/kv_cache_interface.py``
        (`SlidingWindowSpec.max_admission_blocks_per_request`).
        """
        num_tokens = min(self.window - 1 + num_new_tokens, max_model_len)
        return -(-num_tokens // self.block_size) + 1

    def longest_hit(
        self,
        block_hashes: Sequence[int],
        num_blocks: int,
        get_cached_block: Callable[[int], KVCacheBlock | None],
        null_block: KVCacheBlock,
    ) -> list[KVCacheBlock]:
        """Return the longest usable prefix, with the null block for what is not read.

        What is before the window need not be cached: the search goes from the right
        and ends at the first run that fills a window. A shorter run will do where it
        begins with the sequence.

        Parameters
        ----------
        block_hashes
            Keys of at least `num_blocks` leading blocks.
        num_blocks
            Most blocks that may be hit.
        get_cached_block
            From key to block, or None.
        null_block
            The pool's placeholder.
        """
        run: list[KVCacheBlock] = []  # right to left
        for index in range(num_blocks - 1, -1, -1):
            block = get_cached_block(block_hashes[index])
            if block is None:
                run.clear()
                continue
            run.append(block)
            if len(run) >= self.num_blocks_for_hit:
                return [null_block] * index + run[::-1]
        return run[::-1]
