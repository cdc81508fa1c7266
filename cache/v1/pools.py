"""The pool that does as little as the rules of a cache allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import CacheConfigError
from cache.v1.block_pool import BlockPool
from cache.v1.fine_pool import FineBlockPool
from cache.v1.plain_pool import PlainBlockPool
from cache.v1.policy_pool import PolicyBlockPool

if TYPE_CHECKING:
    from cache.v1.policies.base import CachePolicy
    from cache.v1.specs import KVCacheLayout


def make_pool(
    layout: KVCacheLayout,
    policy: CachePolicy | None,
    *,
    enable_caching: bool,
    unhashed_first: bool,
) -> BlockPool:
    """Return a pool of blocks for groups; see `BlockTables` for the parameters.

    Raises
    ------
    CacheConfigError
        If a policy is given for several groups.
    """
    if policy is not None and len(layout.groups) > 1:
        raise CacheConfigError(
            f"eviction policies know one KV cache group, the model has "
            f"{len(layout.groups)}; leave evictor out"
        )
    if policy is not None and enable_caching:
        return PolicyBlockPool(layout.num_blocks, policy, unhashed_first=unhashed_first)
    if not enable_caching and unhashed_first:
        return PlainBlockPool(layout.num_blocks)
    is_fine = any(
        group.spec.block_size > layout.hash_block_size for group in layout.groups
    )
    kind = FineBlockPool if is_fine and enable_caching else BlockPool
    return kind(
        layout.num_blocks, enable_caching=enable_caching, unhashed_first=unhashed_first
    )
