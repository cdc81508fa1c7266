"""What the V0 manager knows of cached prefixes.

Source: vLLM 0.7.3, ``vllm/core/block_manager.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from cache.v0.trackers import ComputedBlocksTracker, LastAccessBlocksTracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.sequences import Device, PagedSequence, PagedSequenceGroup
    from cache.v0.tiered import CpuGpuBlockAllocator


class PrefixCacheSide(ABC):
    """The prefix cache's side of a block manager."""

    def __init__(
        self,
        block_size: int,
        block_allocator: CpuGpuBlockAllocator,
        enable_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.block_allocator = block_allocator
        self.enable_caching = enable_caching
        self._computed = ComputedBlocksTracker(block_allocator, block_size)
        self._last_access = LastAccessBlocksTracker()

    @abstractmethod
    def get_block_table(self, seq: PagedSequence) -> list[int]:
        """Return the ids of a sequence's blocks, in order."""

    def get_num_cached_tokens(self, seq: PagedSequence) -> int:
        """Return the tokens of `seq` found cached and computed when first asked.

        The answer stands until the sequence is freed. 0 without prefix caching.
        """
        return self._computed.get_num_cached_tokens(seq) if self.enable_caching else 0

    def remove_seq_from_computed_blocks_tracker(self, seq: PagedSequence) -> None:
        """Let `get_num_cached_tokens` look up a sequence anew."""
        self._computed.remove_seq(seq.seq_id)

    def access_all_blocks_in_seq(self, seq: PagedSequence, now: float) -> None:
        """Note that the sequence is scheduled at `now` (seconds)."""
        if self.enable_caching:
            self._last_access.update_last_access(seq.seq_id, now)

    def mark_blocks_as_computed(
        self, seq_group: PagedSequenceGroup, token_chunk_size: int
    ) -> None:
        """Note at the end of a scheduler call that its blocks are computed.

        All blocks filled since the last call, whoever holds them, as in the reference.
        """
        if self.enable_caching:
            self.block_allocator.mark_blocks_as_computed([])

    def get_common_computed_block_ids(self, seqs: Sequence[PagedSequence]) -> list[int]:
        """Return the leading blocks that need not be computed for any of `seqs`."""
        if not self.enable_caching:
            return []
        return self.block_allocator.get_common_computed_block_ids(
            [
                self.get_block_table(seq)[
                    : self.get_num_cached_tokens(seq) // self.block_size
                ]
                for seq in seqs
            ]
        )

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Return hits over look-ups of full blocks; -1 without prefix caching."""
        return self.block_allocator.get_prefix_cache_hit_rate(device)

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget all cached blocks of a tier, or of both; False if some are in use."""
        return self.block_allocator.reset_prefix_cache(device)
