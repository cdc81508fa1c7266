"""Groups of layers that read all tokens: full attention, and MLA."""

from __future__ import annotations

from functools import partial
from itertools import islice, takewhile
from operator import is_not
from typing import TYPE_CHECKING, Any

from cache.v1.groups.base import Get, GroupManager

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.v1.groups.table import GroupTable
    from cache.v1.tables import TableRequest


_is_found = partial(is_not, None)


class FullAttentionManager(GroupManager):
    """Every block is kept, registered, and needed by a hit.

    Where hits may end inside a block, the block that the prompt ends in is found by
    the hash inside it, too.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/single_type_kv_cache_manager.py``
    (`FullAttentionManager`).
    """

    def longest_hit(
        self, hashes: list[int], limit: int, get: Get, salt: int, *, drops: bool = False
    ) -> tuple[list[Any], int]:
        block_size, alignment = self.block_size, self.hit_alignment
        keys: Iterable[int] = islice(self.keys(hashes), limit // block_size)
        if salt:
            keys = (key ^ salt for key in keys)
        found = list(takewhile(_is_found, map(get, keys)))
        num_tokens = len(found) * block_size
        if alignment < block_size:
            most = min(num_tokens + block_size - alignment, limit) // alignment
            for index in range(most - 1, num_tokens // alignment - 1, -1):
                blocks = get(hashes[index] ^ salt)
                if blocks is not None:
                    found.append(blocks)
                    return found, (index + 1) * alignment
        if drops and found:
            num_tokens -= block_size
        num_tokens -= num_tokens % alignment
        del found[-(-num_tokens // block_size) :]
        return found, num_tokens

    def register(
        self,
        own: GroupTable,
        request: TableRequest,
        hashes: list[int],
        num_tokens: int,
        junction: int,
    ) -> None:
        super().register(own, request, hashes, num_tokens, junction)
        if self.fine_pool is None:
            return
        unit, block_size = self.hash_block_size, self.block_size
        # Where hits lose their last block the whole prompt is looked up.
        limit = request.num_prompt_tokens - (not self.drops_eagle_block)
        end = min(limit // unit, len(hashes)) * unit
        if end > num_tokens or end % block_size == 0:
            return
        index = end // block_size
        self.fine_pool.cache_partial_block(
            own.blocks[index],
            hashes[end // unit - 1] ^ self.salt,
            end,
            (index + 1) * block_size,
        )
