"""Requests that did not fit, so that not every call looks them up again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.v1.block_pool import BlockPool
    from cache.v1.block_table import Known
    from cache.v1.groups.base import GroupManager
    from cache.v1.specs import KVCacheLayout
    from cache.v1.tables import TableRequest


class Refusals:
    """Requests that were looked up and did not fit, and whether they still cannot.

    Parameters
    ----------
    layout, managers, pool
        Of the tables.
    full
        The manager of full attention, where it bounds every hit; None for no bound:
        then nothing is known.
    known
        By request id, of requests that were looked up.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        managers: Sequence[GroupManager],
        full: GroupManager | None,
        pool: BlockPool,
        known: dict[int, Known],
    ) -> None:
        self._managers = managers
        self._full = full
        self._pool = pool
        self._known = known
        self._block_size = layout.block_size
        self._hash_block_size = layout.hash_block_size
        self._sizes = [group.spec.block_size for group in layout.groups]

    def refused(self, request: TableRequest, num_tokens: int) -> None:
        """Note the blocks needed by a request that was just looked up, and did not fit.

        No hit is longer than that of full attention, which grows block by block.

        Parameters
        ----------
        request
            Was looked up last.
        num_tokens
            All of its tokens; they must fit before any of them is computed.
        """
        known, full = self._known.get(request.request_id), self._full
        if known is None or full is None:
            return
        longest = known.longest
        end = longest + full.block_size
        if end < request.num_tokens:
            known.next_key = known.hashes[end // self._hash_block_size - 1] ^ full.salt
        else:
            known.next_key = None
        hits = [self._pool.null_block] * (longest // self._block_size)
        known.least_blocks = sum(
            manager.num_new_blocks_of_head(
                request,
                hits[: longest // size],
                longest,
                num_tokens,
                num_tokens,
                is_whole=True,
            )
            for manager, size in zip(self._managers, self._sizes, strict=True)
        )

    def lacks(self, request: TableRequest) -> bool:
        """Whether a request that did not fit cannot fit now: spares looking it up."""
        known = self._known.get(request.request_id)
        if known is None or known.least_blocks <= self._pool.num_free_blocks:
            return False
        key = known.next_key
        return key is None or self._pool.get_cached_block(key) is None
