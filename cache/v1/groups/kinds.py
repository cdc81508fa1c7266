"""Which manager serves which kind of group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache.errors import CacheConfigError
from cache.hashing import group_salt
from cache.v1.groups.base import GroupManager, GroupTerms
from cache.v1.groups.chunked import ChunkedLocalAttentionManager
from cache.v1.groups.full import FullAttentionManager
from cache.v1.groups.mamba import MambaManager, OneStateManager
from cache.v1.groups.window import SlidingWindowManager
from cache.v1.planning import blocks_per_request
from cache.v1.specs import (
    ChunkedLocalAttentionSpec,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from cache.v1.block_pool import BlockPool
    from cache.v1.specs import KVCacheLayout, KVCacheSpec


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that an engine's arguments set for the tables of requests.

    Parameters
    ----------
    max_model_len
        Tokens of the longest sequence.
    max_in_flight_tokens
        Tokens that steps in flight may hold.
    most_chunk_tokens
        Most tokens of one request in a step.
    num_speculative_tokens
        Draft tokens of one request in a step; tokens are then known only in part.
    num_lookahead_tokens
        Slots behind the tokens of a step, which a drafter writes to.
    num_hash_lookahead_tokens
        Tokens behind a block that its key covers, too.
    drops_eagle_block
        Whether the last block of a hit is computed again.
    """

    max_model_len: int
    max_in_flight_tokens: int
    most_chunk_tokens: int
    num_speculative_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_hash_lookahead_tokens: int = 0
    drops_eagle_block: bool = False


def check_layout(
    layout: KVCacheLayout, retention_interval: int | None, *, enable_caching: bool
) -> None:
    """Refuse blocks without tokens, and settings no release looks prefixes up with.

    Those are an interval at whose ends no block ends, and chunks beside longer blocks.

    Raises
    ------
    CacheConfigError
        With the rule and the value.
    """
    if layout.block_size < 1:
        raise CacheConfigError(
            f"block_size must be at least 1, got {layout.block_size}"
        )
    unit = layout.scheduler_block_size
    if retention_interval is not None and (
        retention_interval < 0 or retention_interval % unit
    ):
        raise CacheConfigError(
            f"prefix_cache_retention_interval must be 0 or a multiple of {unit}, the "
            f"tokens after which blocks of all groups end, got {retention_interval}"
        )
    for group in layout.groups if enable_caching else ():
        size, chunked = group.spec.block_size, ChunkedLocalAttentionSpec
        if isinstance(group.spec, chunked) and size != layout.cache_hit_alignment:
            raise CacheConfigError(
                f"prefixes of chunked local attention are looked up in blocks of "
                f"{layout.cache_hit_alignment} tokens, where hits end, got blocks of "
                f"{size}; set enable_prefix_caching to false for this model"
            )


def check_drafts(
    layout: KVCacheLayout,
    limits: EngineLimits,
    *,
    enable_caching: bool,
    has_policy: bool,
) -> None:
    """Refuse drafts where their handling is not known.

    Raises
    ------
    CacheConfigError
        With the rule and the remedy.
    """
    if has_policy and limits.num_speculative_tokens:
        raise CacheConfigError(
            "eviction policies know no draft tokens; leave evictor or "
            "speculative_config out"
        )
    if not (limits.drops_eagle_block and enable_caching):
        return
    drops = drops_of(layout, limits)
    for group, drops_block in zip(layout.groups, drops, strict=True):
        is_chunked = isinstance(group.spec, ChunkedLocalAttentionSpec)
        if isinstance(group.spec, MambaSpec) or (is_chunked and drops_block):
            raise CacheConfigError(
                "hits that lose their last block are known of full attention and "
                "windows, not of states, and of chunks without layers of the drafter; "
                "leave disable_lookahead_block_hashes out, or set "
                "disable_eagle_block_drop"
            )


def drops_of(layout: KVCacheLayout, limits: EngineLimits) -> list[bool]:
    """Return which groups lose the last block of a hit.

    Those of a drafter's layers, or all where none is known to have some; groups with
    equal layers are looked up together.
    """
    eagle = {group.spec for group in layout.groups if group.is_eagle_group}
    return [
        limits.drops_eagle_block and (not eagle or group.spec in eagle)
        for group in layout.groups
    ]


def make_managers(
    layout: KVCacheLayout,
    limits: EngineLimits,
    pool: BlockPool,
    retention_interval: int | None,
) -> list[GroupManager]:
    """Return a manager for each group of a layout."""
    managers = []
    drops = drops_of(layout, limits)
    # The keys of the first full attention, which are the most, are bare hashes.
    is_full = [_kind_of(group.spec) is FullAttentionManager for group in layout.groups]
    bare = is_full.index(True) if True in is_full else 0
    for number, group in enumerate(layout.groups):
        spec = group.spec
        kind = _kind_of(spec)
        terms = GroupTerms(
            salt=group_salt((number - bare) % len(is_full)),
            hash_block_size=layout.hash_block_size,
            hit_alignment=layout.cache_hit_alignment,
            retention_interval=retention_interval,
            most_admitted_blocks=(
                blocks_per_request(
                    spec, limits.max_model_len, limits.max_in_flight_tokens
                )
                if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
                else None
            ),
            drops_eagle_block=drops[number],
            proof_tokens=layout.scheduler_block_size * any(drops),
        )
        managers.append(kind(spec, pool, terms))
    return managers


def _kind_of(spec: KVCacheSpec) -> Any:
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowManager
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ChunkedLocalAttentionManager
    if isinstance(spec, MambaSpec):
        is_aligned = spec.mamba_cache_mode is MambaCacheMode.ALIGN
        return MambaManager if is_aligned else OneStateManager
    return FullAttentionManager
