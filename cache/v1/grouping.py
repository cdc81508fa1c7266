"""From the layers of a model to groups with equal pages.

Layers with one kind of cache form groups, each with a block table of its own, and a
block id means as many bytes in all of them, so that they can draw from one pool.

Source: vLLM 0.33, ``vllm/v1/core/kv_cache_planning.py`` (`get_kv_cache_groups`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from cache.errors import CacheConfigError
from cache.v1.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Layers = Mapping[str, KVCacheSpec]
"""The cache of each layer by its name, in order of depth."""

PADDING_LIMIT = 1.5
"""Buckets of layers that differ by less become one group each."""

_Attention = TypeVar("_Attention", bound=AttentionSpec)


def group_layers(
    layers: Layers,
    *,
    disable_hybrid_kv_cache_manager: bool = False,
    padding_limit: float = PADDING_LIMIT,
) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model's layers, in the order in which they are served.

    Parameters
    ----------
    layers
        One layer at least.
    disable_hybrid_kv_cache_manager
        Whether windows and chunks keep all their blocks, as full attention does.
    padding_limit
        Below this ratio of the largest bucket of like layers to the smallest, groups
        are as large as the largest, and short ones are padded.

    Raises
    ------
    CacheConfigError
        When the pages of unlike layers cannot be made equal.
    """
    if disable_hybrid_kv_cache_manager:
        layers = _all_full(layers)
    if whole := _one_group(layers):
        return (whole,)
    unified = _with_equal_pages(layers)
    if unified is None:
        whole = _one_group(_all_full(layers))
        assert whole is not None
        return (whole,)
    buckets = _buckets(unified)
    fewest, most = min(map(len, buckets)), max(map(len, buckets))
    size = most if most < padding_limit * fewest else fewest
    groups = []
    for names in buckets:
        spec = _merged([unified[name] for name in names])
        assert spec is not None
        num_groups = _ceil(len(names), size)
        for index in range(num_groups):
            dealt = tuple(names[index::num_groups])
            num_bytes = len(dealt) * spec.page_size_bytes
            drafts = any(unified[name].is_draft for name in dealt)
            groups.append(KVCacheGroup(dealt, spec, num_bytes, is_eagle_group=drafts))
    return tuple(groups)


def _one_group(layers: Layers) -> KVCacheGroup | None:
    """Return all layers as one group, if each of a request's tokens needs them all."""
    specs = list(layers.values())
    spec = _merged(specs) or (specs[0] if _is_one_type(specs) else None)
    if spec is None:
        return None
    pages = sum(layer.page_size_bytes for layer in specs)
    drafts = any(layer.is_draft for layer in specs)
    return KVCacheGroup(tuple(layers), spec, pages, is_eagle_group=drafts)


def _merged(specs: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
    """Return one spec for equal ones; full attention may remark a window."""
    first = specs[0]
    if not isinstance(first, FullAttentionSpec):
        return first if all(spec == first for spec in specs) else None
    windows, chunks = set(), set()
    for spec in specs:
        if not isinstance(spec, FullAttentionSpec) or _plain(spec) != _plain(first):
            return None
        windows |= {spec.sliding_window} - {None}
        chunks |= {spec.attention_chunk_size} - {None}
    if len(windows) + len(chunks) > 1:
        return None
    return replace(
        first,
        sliding_window=next(iter(windows), None),
        attention_chunk_size=next(iter(chunks), None),
    )


def _plain(spec: FullAttentionSpec) -> FullAttentionSpec:
    return replace(spec, sliding_window=None, attention_chunk_size=None)


def _is_one_type(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether the layers always need the same blocks, though of unequal size."""
    first = specs[0]
    if len({spec.block_size for spec in specs}) > 1:
        return False
    if isinstance(first, SlidingWindowSpec):
        windows = {getattr(spec, "sliding_window", None) for spec in specs}
        return windows == {first.sliding_window} and _are(specs, SlidingWindowSpec)
    if isinstance(first, ChunkedLocalAttentionSpec):
        chunks = {getattr(spec, "attention_chunk_size", None) for spec in specs}
        return len(chunks) == 1 and _are(specs, ChunkedLocalAttentionSpec)
    if isinstance(first, MambaSpec):
        kinds = {
            (
                s.num_checkpoint_blocks,
                s.num_speculative_blocks,
                s.checkpoint_alignment,
                s.page_size_bytes,
            )
            for s in specs
            if isinstance(s, MambaSpec)
        }
        return len(kinds) == 1 and _are(specs, MambaSpec)
    return _are(specs, FullAttentionSpec, MLAAttentionSpec)


def _are(specs: Sequence[KVCacheSpec], *kinds: type[KVCacheSpec]) -> bool:
    return all(isinstance(spec, kinds) for spec in specs)


def _with_equal_pages(layers: Layers) -> Layers | None:
    """Return the layers with pages of one size, or None where full blocks must do.

    A smaller page gets a larger block; where the sizes do not divide, and for states,
    it is padded. Latent attention cannot be padded: beside windows it makes them keep
    all their blocks.
    """
    largest = max(spec.page_size_bytes for spec in layers.values())
    unified = dict(layers)
    for name, spec in layers.items():
        ratio, rest = divmod(largest, spec.page_size_bytes)
        if ratio == 1 and not rest:
            continue
        if isinstance(spec, AttentionSpec) and not rest:
            unified[name] = resized(spec, spec.block_size * ratio)
        elif not isinstance(spec, MLAAttentionSpec):
            unified[name] = replace(spec, page_size_bytes=largest)
        elif _may_keep_all_blocks(layers):
            return None
        else:
            raise CacheConfigError(
                f"pages of latent attention must divide the largest page; {name} has"
                f" {spec.page_size_bytes} bytes, the largest {largest}: no release"
                " plans such a model"
            )
    return unified


def _may_keep_all_blocks(layers: Layers) -> bool:
    specs = layers.values()
    chunks = any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in specs)
    return not chunks and any(isinstance(spec, SlidingWindowSpec) for spec in specs)


def _all_full(layers: Layers) -> Layers:
    """Return the layers with windows and chunks as remarks of full attention."""
    if _one_group(layers) is not None:
        return layers
    local = SlidingWindowSpec | ChunkedLocalAttentionSpec
    full = [
        spec
        for spec in layers.values()
        if isinstance(spec, FullAttentionSpec | MLAAttentionSpec)
    ]
    sizes = {spec.block_size for spec in full}
    promoted = {
        name: _promoted(spec, sizes) if full and isinstance(spec, local) else spec
        for name, spec in layers.items()
    }
    _refuse_unlike_windows(list(promoted.values()))
    if _one_group(promoted) is None:
        raise CacheConfigError(
            "the hybrid manager can be off only where all layers are attention, and"
            " some of them full; leave disable_hybrid_kv_cache_manager out for this"
            " model"
        )
    return promoted


def _refuse_unlike_windows(specs: Sequence[KVCacheSpec]) -> None:
    """Raise in the release's words, where full attention has remarks that differ."""
    if not all(isinstance(spec, FullAttentionSpec) for spec in specs):
        return
    for name in ("sliding_window", "attention_chunk_size"):
        if len({getattr(spec, name) for spec in specs} - {None}) > 1:
            raise CacheConfigError(
                "All attention layers in the same KV cache group must have the same"
                " window size"
            )


def _promoted(
    spec: SlidingWindowSpec | ChunkedLocalAttentionSpec, full_sizes: set[int]
) -> FullAttentionSpec:
    if len(full_sizes) == 1:
        spec = resized(spec, next(iter(full_sizes)))
    return FullAttentionSpec(
        block_size=spec.block_size,
        page_size_bytes=spec.page_size_bytes,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        is_draft=spec.is_draft,
        sliding_window=getattr(spec, "sliding_window", None),
        attention_chunk_size=getattr(spec, "attention_chunk_size", None),
    )


def _buckets(layers: Layers) -> list[list[str]]:
    """Return the names of layers that can share a group, in order of first layer."""
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        kinds.setdefault(spec, []).append(name)
    buckets: list[tuple[list[KVCacheSpec], list[str]]] = []
    for spec, names in kinds.items():
        for specs, bucket in buckets:
            if _merged([*specs, spec]) is not None:
                specs.append(spec)
                bucket.extend(names)
                break
        else:
            buckets.append(([spec], list(names)))
    return [names for _, names in buckets]


def resized(spec: _Attention, block_size: int) -> _Attention:
    """Return the spec with larger blocks; its padding, if any, grows with them."""
    page = spec.page_size_bytes * block_size // spec.block_size
    return replace(spec, block_size=block_size, page_size_bytes=page)


def _ceil(amount: int, parts: int) -> int:
    return -(-amount // parts)
