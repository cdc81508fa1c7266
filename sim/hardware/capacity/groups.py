"""Groups of layers as plain data: what a block of each holds, and how many it takes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from cache.v1.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    kind_in_words,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cache.v1.planning import KVCachePlan
    from cache.v1.specs import KVCacheGroup, KVCacheSpec

KIB = 2**10


def shares_of(plan: KVCachePlan) -> tuple[Mapping[str, Any], ...]:
    """Return the groups of a plan, alike ones together, in the order of service.

    Each has `kind`, `num_groups`, `num_layers` of each group, `block_size` in tokens,
    `blocks_per_request` of the longest request, and `pages`: for layers alike their
    number, the bytes of one block of one layer, and what it consists of. A plan is
    plain, and has none, where all layers are alike and keep all blocks of a request.
    """
    groups = plan.layout.groups
    plain = isinstance(groups[0].spec, FullAttentionSpec | MLAAttentionSpec)
    if plain and len(set(plan.layers.values())) == 1:
        return ()
    alike = Counter(
        (group.spec, len(group.layer_names), most, _pages(plan, group))
        for group, most in zip(groups, plan.blocks_per_request, strict=True)
    )
    return tuple(
        {
            "kind": kind_in_words(spec),
            "num_groups": times,
            "num_layers": layers,
            "block_size": spec.block_size,
            "blocks_per_request": most,
            "pages": pages,
        }
        for (spec, layers, most, pages), times in alike.items()
    )


def _pages(plan: KVCachePlan, group: KVCacheGroup) -> tuple[tuple[int, int, str], ...]:
    """Return layers alike, bytes and words; a page of a group's block, once grown."""
    specs = Counter(plan.layers[name] for name in group.layer_names)
    grown = len(specs) == 1
    return tuple(
        (
            layers,
            group.spec.page_size_bytes if grown else spec.page_size_bytes,
            page_in_words(spec) + _kept_in_words(spec, group.spec),
        )
        for spec, layers in specs.items()
    )


def _kept_in_words(spec: KVCacheSpec, held_as: KVCacheSpec) -> str:
    """Return that blocks beyond what a layer reads are kept, where they are."""
    is_local = isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
    if not (is_local and isinstance(held_as, FullAttentionSpec)):
        return ""
    return f", {kind_in_words(spec)}, whose blocks are kept"


def page_in_words(spec: KVCacheSpec) -> str:
    """Return the parts of a page of one layer, in words."""
    if isinstance(spec, MambaSpec):
        shapes = " + ".join(" x ".join(map(str, shape)) for shape in spec.shapes)
        padding = spec.page_size_bytes - spec.state_bytes
        return f"{shapes} in {' and '.join(spec.dtypes)}, {padding / KIB:g} KiB unused"
    assert isinstance(spec, AttentionSpec)
    vectors = "" if isinstance(spec, MLAAttentionSpec) else "keys and values of "
    heads = f"{spec.num_kv_heads} head{'s' * (spec.num_kv_heads > 1)}"
    return f"{vectors}{heads} x {spec.head_size} in {spec.dtype}"
