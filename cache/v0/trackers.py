"""What block manager v2 remembers of sequences when prefixes are cached.

Source: vLLM 0.7.3, ``vllm/core/block/prefix_caching_block.py``
(`ComputedBlocksTracker`, `LastAccessBlocksTracker`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.sequences import Device
from cache.v0.prefix_caching_block import hash_block_tokens

if TYPE_CHECKING:
    from cache.sequences import PagedSequence
    from cache.v0.interfaces import DeviceAwareBlockAllocator


class ComputedBlocksTracker:
    """How many tokens of each sequence were cached when it was first looked at."""

    def __init__(self, allocator: DeviceAwareBlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._num_cached_tokens: dict[int, int] = {}

    def get_num_cached_tokens(self, seq: PagedSequence) -> int:
        """Return the tokens in leading blocks that are cached and computed.

        The answer of the first call stands until `remove_seq`, although blocks may be
        evicted or added meanwhile: budgets and batches are made of the same number.
        """
        known = self._num_cached_tokens.get(seq.seq_id)
        if known is None:
            hashes = self._block_hashes(seq)
            found = self._allocator.find_cached_blocks_prefix(hashes, Device.GPU)
            known = len(found) * self._block_size
            self._num_cached_tokens[seq.seq_id] = known
        return known

    def remove_seq(self, seq_id: int) -> None:
        """Forget a sequence, which need not be known."""
        self._num_cached_tokens.pop(seq_id, None)

    def _block_hashes(self, seq: PagedSequence) -> list[int]:
        token_ids, size = seq.get_token_ids(), self._block_size
        hashes: list[int] = []
        parent: int | None = None
        for start in range(0, seq.get_len() - size + 1, size):
            parent = hash_block_tokens(
                parent is None, parent, token_ids[start : start + size]
            )
            hashes.append(parent)
        return hashes


class LastAccessBlocksTracker:
    """When each sequence was last scheduled; its blocks learn it when it is freed."""

    def __init__(self) -> None:
        self._last_access: dict[int, float] = {}

    def update_last_access(self, seq_id: int, now: float) -> None:
        """Note that the sequence is scheduled at `now` (seconds)."""
        self._last_access[seq_id] = now

    def pop(self, seq_id: int) -> float | None:
        """Forget the sequence and return when it was last scheduled, in seconds."""
        return self._last_access.pop(seq_id, None)
