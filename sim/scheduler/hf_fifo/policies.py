"""What policies of one's own see of the `hf_fifo` scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.hf_fifo.manager import PagedAttentionCache
    from sim.scheduler.request import Request


class HfFifoHoldings:
    """What the cache knows of an active request; see `Holdings`."""

    def __init__(self, cache: PagedAttentionCache) -> None:
        self._cache = cache

    def num_output_tokens(self, request: Request) -> int:
        return request.num_output_tokens

    def num_computed_tokens(self, request: Request) -> int:
        return request.num_computed_tokens

    def num_blocks(self, request: Request) -> int:
        return len(self._cache.table(request))

    def num_shared_tokens(self, request: Request) -> int:
        num_shared = 0
        for block_id in self._cache.table(request):
            if not self._cache.block_manager.is_shared(block_id):
                break
            num_shared += 1
        return num_shared * self._cache.block_size
