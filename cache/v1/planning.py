"""From the layers of a model to groups, pages and blocks: arithmetic over specs.

A release plans its pool once, at the start: layers with one kind of cache form groups,
each with a block table of its own, and a block id means the same number of bytes in all
of them, so that they can draw from one pool.

Source: vLLM 0.33, ``vllm/v1/core/kv_cache_planning.py``, ``kv_cache_utils.py`` and
``vllm/platforms/interface.py`` (`_align_hybrid_block_size`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import TYPE_CHECKING

from cache.errors import CacheConfigError, KVCacheTooSmallError
from cache.v1.grouping import PADDING_LIMIT, group_layers, resized
from cache.v1.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheLayout,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.v1.grouping import Layers

LEAST_BLOCK_SIZE = 16
"""The smallest block of an attention kernel, in tokens."""
LEAST_MLA_BLOCK_SIZE = 128
"""The same for latent attention in a model with states."""


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The KV cache of a model as a release plans it: groups, pool and longest request.

    Parameters
    ----------
    layers
        With the block sizes of the start, before pages are made equal.
    layout
        Groups and pool.
    max_model_len
        Tokens of the longest request, fitted to the memory where that was asked.
    max_in_flight_tokens
        Tokens that steps in flight may hold.
    """

    layers: Layers
    layout: KVCacheLayout
    max_model_len: int
    max_in_flight_tokens: int

    @property
    def block_size(self) -> int:
        """Tokens of the smallest block."""
        return min(group.spec.block_size for group in self.layout.groups)

    @property
    def blocks_per_request(self) -> tuple[int, ...]:
        """Blocks of a request of `max_model_len`, group by group."""
        return self.blocks_for(self.max_model_len)

    def of_size(self, num_blocks: int) -> KVCachePlan:
        """Return the plan of a pool of so many blocks, the null block included."""
        return replace(self, layout=replace(self.layout, num_blocks=num_blocks))

    def blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        """Return the most blocks that a request of so many tokens holds, by group."""
        return tuple(
            blocks_per_request(group.spec, num_tokens, self.max_in_flight_tokens)
            for group in self.layout.groups
        )

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` that the pool holds at once."""
        return self.layout.num_blocks / sum(self.blocks_per_request)

    @property
    def kv_cache_size_tokens(self) -> int:
        """The release's figure for the pool: the tokens of those requests."""
        return int(self.max_concurrency * self.max_model_len)

    @property
    def printed(self) -> str:
        """The line that the release prints."""
        return (
            f"GPU KV cache size: {self.kv_cache_size_tokens:,} tokens, Maximum"
            f" concurrency for {self.max_model_len:,} tokens per request:"
            f" {self.max_concurrency:.2f}x"
        )


def plan_kv_cache(
    layers: Layers,
    *,
    block_size: int,
    available_bytes: int,
    max_model_len: int,
    max_in_flight_tokens: int,
    fit_max_model_len: bool = False,
    num_gpu_blocks_override: int | None = None,
    enable_prefix_caching: bool = True,
    prefix_match_unit: int | None = None,
    disable_hybrid_kv_cache_manager: bool = False,
) -> KVCachePlan:
    """Plan groups, pages and blocks as a release does at its start.

    Parameters
    ----------
    layers
        One layer at least; attention with blocks of `block_size`, states unpadded.
    block_size
        The argument of the engine, in tokens.
    available_bytes
        Memory for the cache on one rank.
    max_model_len
        Tokens of the longest request.
    max_in_flight_tokens
        ``max_num_batched_tokens`` times the steps in flight.
    fit_max_model_len
        Whether a longer request than fits lowers `max_model_len` (its argument is -1).
    num_gpu_blocks_override
        Blocks, whatever the memory.
    enable_prefix_caching, prefix_match_unit, disable_hybrid_kv_cache_manager
        As the engine has them.

    Raises
    ------
    KVCacheTooSmallError
        When one request of `max_model_len` does not fit.
    CacheConfigError
        When pages cannot be made equal, or `prefix_match_unit` divides no block.
    """
    plan = _grouped(
        layers,
        block_size=block_size,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        prefix_match_unit=prefix_match_unit if enable_prefix_caching else None,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
    )
    bytes_per_block = plan.layout.bytes_per_block
    if num_gpu_blocks_override:
        available_bytes = num_gpu_blocks_override * bytes_per_block
    plan = plan.of_size(available_bytes // bytes_per_block)
    plan = _checked(plan, available_bytes - bytes_per_block, fit=fit_max_model_len)
    return _with_hashes(plan, enable_prefix_caching, prefix_match_unit)


def plan_groups(
    layers: Layers,
    *,
    block_size: int,
    max_model_len: int,
    max_in_flight_tokens: int,
    enable_prefix_caching: bool = True,
    prefix_match_unit: int | None = None,
    disable_hybrid_kv_cache_manager: bool = False,
    padding_limit: float = PADDING_LIMIT,
) -> KVCachePlan:
    """Plan groups and pages alone, as for a pool without blocks.

    Parameters
    ----------
    layers, block_size, max_model_len, max_in_flight_tokens
        As `plan_kv_cache` takes them.
    enable_prefix_caching, prefix_match_unit, disable_hybrid_kv_cache_manager
        As `plan_kv_cache` takes them.
    padding_limit
        As `group_layers` takes it: releases differ.
    """
    plan = _grouped(
        layers,
        block_size=block_size,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        prefix_match_unit=prefix_match_unit if enable_prefix_caching else None,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        padding_limit=padding_limit,
    )
    return _with_hashes(plan, enable_prefix_caching, prefix_match_unit)


def _grouped(
    layers: Layers,
    *,
    block_size: int,
    max_model_len: int,
    max_in_flight_tokens: int,
    prefix_match_unit: int | None,
    disable_hybrid_kv_cache_manager: bool,
    padding_limit: float = PADDING_LIMIT,
) -> KVCachePlan:
    """Return a plan without blocks, and without finer sizes for hashes."""
    layers = align_states(
        layers,
        block_size=block_size,
        max_model_len=max_model_len,
        prefix_match_unit=prefix_match_unit,
    )
    groups = group_layers(
        layers,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        padding_limit=padding_limit,
    )
    coarse = lcm(*(group.spec.block_size for group in groups))
    layout = KVCacheLayout(
        groups=groups,
        num_blocks=0,
        bytes_per_block=max(group.bytes_per_block for group in groups),
        hash_block_size=coarse,
        scheduler_block_size=coarse,
        cache_hit_alignment=coarse,
    )
    return KVCachePlan(layers, layout, max_model_len, max_in_flight_tokens)


def _with_hashes(
    plan: KVCachePlan, enable_prefix_caching: bool, prefix_match_unit: int | None
) -> KVCachePlan:
    """Return the plan with the sizes of hashes and hits."""
    _, hash_block_size, alignment = resolve_block_sizes(
        plan.layout.groups,
        enable_prefix_caching=enable_prefix_caching,
        prefix_match_unit=prefix_match_unit,
    )
    layout = replace(
        plan.layout, hash_block_size=hash_block_size, cache_hit_alignment=alignment
    )
    return replace(plan, layout=layout)


def _checked(plan: KVCachePlan, available_bytes: int, *, fit: bool) -> KVCachePlan:
    """Return the plan with a length that fits, or refuse it; the null block is kept."""
    bytes_per_block = plan.layout.bytes_per_block
    needed = sum(plan.blocks_per_request) * bytes_per_block
    if needed <= available_bytes:
        return plan
    fitting = longest_request(plan, available_bytes // bytes_per_block)
    if fit and fitting:
        return replace(plan, max_model_len=fitting)
    if fit:
        raise CacheConfigError(
            "Cannot auto-fit max_model_len: not enough GPU memory available to serve"
            " even a single token"
        )
    raise KVCacheTooSmallError(plan.max_model_len, needed, available_bytes, fitting)


def longest_request(plan: KVCachePlan, num_blocks: int) -> int:
    """Return the most tokens of one request that so many blocks hold, or 0."""
    longest, left, right = 0, 1, plan.max_model_len
    while left <= right:
        middle = (left + right) // 2
        if sum(plan.blocks_for(middle)) <= num_blocks:
            longest, left = middle, middle + 1
        else:
            right = middle - 1
    return longest


def blocks_per_request(
    spec: KVCacheSpec, max_model_len: int, max_in_flight_tokens: int
) -> int:
    """Return the most blocks that a request holds at once in a group of `spec`.

    A window need not begin at a block's edge, which takes one block more.
    """
    if isinstance(spec, SlidingWindowSpec):
        kept = min(spec.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return _ceil(kept, spec.block_size) + 1
    if isinstance(spec, ChunkedLocalAttentionSpec):
        kept = min(spec.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return _ceil(kept, spec.block_size)
    if isinstance(spec, MambaSpec):
        is_aligned = spec.mamba_cache_mode is MambaCacheMode.ALIGN
        own = 2 + spec.num_checkpoint_blocks if is_aligned else 1
        return own + spec.num_speculative_blocks
    return _ceil(max_model_len, spec.block_size)


def resolve_block_sizes(
    groups: Sequence[KVCacheGroup],
    *,
    enable_prefix_caching: bool,
    prefix_match_unit: int | None = None,
) -> tuple[int, int, int]:
    """Return the scheduler's block size, that of hashes, and the alignment of hits."""
    sizes = [group.spec.block_size for group in groups]
    scheduler_block_size = lcm(*sizes)
    coarse = (scheduler_block_size,) * 3
    states = [g.spec for g in groups if isinstance(g.spec, MambaSpec)]
    is_aligned = all(s.mamba_cache_mode is MambaCacheMode.ALIGN for s in states)
    if not enable_prefix_caching or (len(groups) > 1 and not is_aligned):
        return coarse
    unit = prefix_match_unit or gcd(*sizes)
    if any(size % unit for size in sizes) or (len(groups) == 1 and unit != sizes[0]):
        several = "divide the block sizes of all groups" if len(groups) > 1 else "be"
        raise CacheConfigError(
            f"prefix_match_unit must {several} {', '.join(map(str, sizes))}; got"
            f" {unit}; leave it out for {gcd(*sizes)}"
        )
    fine = any(state.block_size > unit for state in states) and all(
        isinstance(group.spec, MambaSpec | FullAttentionSpec | MLAAttentionSpec)
        or group.spec.block_size == unit
        for group in groups
    )
    is_fine = len(groups) > 1 and fine
    return scheduler_block_size, unit, unit if is_fine else scheduler_block_size


# -- states beside attention ---------------------------------------------------------


def align_states(
    layers: Layers,
    *,
    block_size: int,
    max_model_len: int,
    prefix_match_unit: int | None = None,
) -> Layers:
    """Return the layers with attention blocks that cover a state, states padded.

    A state has a size whatever the number of tokens. Where a model has states, its
    attention blocks grow to the least multiple of the kernel's block, and of the
    tokens after which a prefill can write a state, whose page covers one.
    """
    states = [spec for spec in layers.values() if isinstance(spec, MambaSpec)]
    attention = [spec for spec in layers.values() if isinstance(spec, AttentionSpec)]
    if not states:
        return layers
    if not attention:
        page_size_bytes = max(state.state_bytes for state in states)
    else:
        first = attention[0]
        token_bytes = first.page_size_bytes // first.block_size
        least = (
            LEAST_MLA_BLOCK_SIZE
            if isinstance(first, MLAAttentionSpec)
            else LEAST_BLOCK_SIZE
        )
        unit = max(least, block_size)
        for state in states:
            if state.mamba_cache_mode is MambaCacheMode.ALIGN:
                unit = lcm(unit, state.checkpoint_alignment or 1)
        most = max(state.state_bytes for state in states)
        block_size = max(block_size, unit * _ceil(most, unit * token_bytes))
        page_size_bytes = block_size * token_bytes

    def aligned(spec: KVCacheSpec) -> KVCacheSpec:
        if isinstance(spec, AttentionSpec):
            return resized(spec, block_size)
        assert isinstance(spec, MambaSpec)
        is_aligned = spec.mamba_cache_mode is MambaCacheMode.ALIGN
        grid = spec.checkpoint_alignment
        if grid is not None and grid > 1:
            grid = lcm(prefix_match_unit, grid) if prefix_match_unit else block_size
        return replace(
            spec,
            block_size=block_size if is_aligned else max_model_len,
            page_size_bytes=page_size_bytes,
            checkpoint_alignment=grid,
        )

    return {name: aligned(spec) for name, spec in layers.items()}


def _ceil(amount: int, parts: int) -> int:
    return -(-amount // parts)
