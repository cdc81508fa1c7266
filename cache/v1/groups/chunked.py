"""Groups of layers that look back to the beginning of a chunk: chunked attention."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from cache.v1.groups.base import Get, GroupManager

if TYPE_CHECKING:
    from cache.v1.block_pool import BlockPool
    from cache.v1.groups.base import GroupTerms
    from cache.v1.specs import ChunkedLocalAttentionSpec


class ChunkedLocalAttentionManager(GroupManager):
    """Blocks before the chunk of the next token are given up; a hit needs the others.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/single_type_kv_cache_manager.py``
    (`ChunkedLocalAttentionManager`).
    """

    gives_up_blocks = True

    def __init__(
        self, spec: ChunkedLocalAttentionSpec, pool: BlockPool, terms: GroupTerms
    ) -> None:
        super().__init__(spec, pool, terms)
        self._chunk_size = spec.attention_chunk_size

    def num_passed_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - num_computed_tokens % self._chunk_size

    def giving_phases(self) -> set[int]:
        return set(range(0, self.block_size, gcd(self._chunk_size, self.block_size)))

    def longest_hit(
        self, hashes: list[int], limit: int, get: Get, salt: int, *, drops: bool = False
    ) -> tuple[list[Any], int]:
        """See `GroupManager.longest_hit`; what is before the chunk counts unseen."""
        assert not drops, "see `cache.v1.groups.kinds.check_drafts`"
        block_size, keys = self.block_size, self.keys(hashes)
        first = self.num_passed_tokens(limit) // block_size
        found: list[Any] = [None] * first
        for key in keys[first : limit // block_size]:
            blocks = get(key ^ salt)
            if blocks is None:
                break
            found.append(blocks)
        return found, len(found) * block_size
