"""Look-ups of requests in the groups of a layout, and their hashes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.v1.block_table import Known
from cache.v1.groups.lookup import Lookup
from cache.v1.groups.mamba import OneStateManager
from cache.v1.tables import NOTHING_FOUND, Found

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.block import KVCacheBlock
    from cache.v1.block_pool import BlockPool
    from cache.v1.groups.base import GroupManager
    from cache.v1.specs import KVCacheLayout
    from cache.v1.tables import TableRequest


class Finder:
    """Looks requests up, and keeps what it has learned of them.

    Parameters
    ----------
    layout, managers, pool
        Of the tables.
    known
        By request id, of requests that were looked up and have not begun.
    enable_caching
        Whether anything is found.
    num_lookahead_tokens
        Tokens behind a block that its key covers, too.

    Attributes
    ----------
    first
        The groups that are looked up first.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        managers: Sequence[GroupManager],
        pool: BlockPool,
        known: dict[int, Known],
        *,
        enable_caching: bool,
        num_lookahead_tokens: int,
    ) -> None:
        self._lookup = Lookup(layout, managers, pool)
        self.first = self._lookup.buckets[0]
        self._managers = managers
        self._known = known
        self._enable_caching = enable_caching
        self._hit_alignment = layout.cache_hit_alignment
        self._hash_block_size = layout.hash_block_size
        self._num_lookahead_tokens = num_lookahead_tokens
        self._may_load_states = self.first.is_full and any(
            isinstance(manager, OneStateManager) for manager in managers
        )

    def find(self, request: TableRequest, num_tokens: int) -> Found:
        """See `cache.v1.tables.Tables.find`."""
        if not self._enable_caching:
            return NOTHING_FOUND
        known = self._known.setdefault(request.request_id, Known())
        # A block that ends with the request may prove a hit below it.
        self.hash(request, known.hashes, num_tokens)
        hit = self._lookup.longest_hit(known.hashes, num_tokens - 1)
        known.junction, known.longest = hit.junction, hit.longest
        return self._found(hit.blocks, hit.num_tokens)

    def find_to_load(
        self, request: TableRequest, num_tokens: int
    ) -> tuple[Found, bool]:
        """Return the hit behind which a request may load, and whether it must.

        Beside full attention a state need not reach as far: the one at the end of what
        is loaded comes with that. It must not reach farther. Without a load the hit of
        such a request is what `find` returns.
        """
        if not (self._enable_caching and self._may_load_states):
            return self.find(request, num_tokens), False
        known = self._known.setdefault(request.request_id, Known())
        limit = num_tokens - 1
        self.hash(request, known.hashes, limit)
        found = self._lookup.hit_of_full(known.hashes, limit)
        if found is None:
            return self.find(request, num_tokens), False
        hit, must_load = found
        known.junction, known.longest = hit.junction, hit.longest
        return self._found(hit.blocks, hit.num_tokens), must_load

    def without_tail(self, found: Found, num_tokens: int) -> Found:
        """Return the first `num_tokens` of a hit, where blocks of all groups end."""
        blocks = [
            own[: num_tokens // manager.block_size]
            for manager, own in zip(self._managers, found.parts, strict=True)
        ]
        return self._found(blocks, num_tokens)

    def _found(self, blocks: list[list[KVCacheBlock]], num_tokens: int) -> Found:
        num_revived = 0
        for manager, own in zip(self._managers, blocks, strict=True):
            num_revived += manager.num_revived(own, num_tokens)
        return Found(num_tokens // self._hit_alignment, num_revived, blocks, [])

    def hash(self, request: TableRequest, hashes: list[int], num_tokens: int) -> None:
        """Extend keys to what fills a hash block of `num_tokens` tokens."""
        num_lookahead_tokens = self._num_lookahead_tokens
        if num_lookahead_tokens:
            num_tokens = min(num_tokens, request.num_tokens - num_lookahead_tokens)
        num_blocks = num_tokens // self._hash_block_size
        if num_blocks > len(hashes):
            request.tokens.extend_block_hashes(
                hashes, num_blocks, self._hash_block_size, num_lookahead_tokens
            )
