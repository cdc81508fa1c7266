"""Block tables of several KV cache groups, with every decode looked at by itself.

Rules are those of `cache.v1.groups`, which logs of the real engine hold to its
decisions (`tests/conformance`). Left out is what takes decodes together, and pools that
do not count references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.v1.block_pool import BlockPool
from cache.v1.block_tables import BlockTables
from cache.v1.plain_pool import PlainBlockPool

if TYPE_CHECKING:
    from cache.v1.policies.base import CachePolicy


class StepwiseTables(BlockTables):
    """Tables that count references, and take nothing together."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.decodes = None

    def _make_pool(
        self, *, unhashed_first: bool, policy: CachePolicy | None
    ) -> BlockPool:
        pool = super()._make_pool(unhashed_first=unhashed_first, policy=policy)
        if isinstance(pool, PlainBlockPool):
            return BlockPool(
                pool.num_gpu_blocks, enable_caching=False, unhashed_first=unhashed_first
            )
        return pool
