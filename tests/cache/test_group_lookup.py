"""Groups of layers look prompts up in units of blocks, and find common prefixes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from cache.errors import CacheConfigError
from cache.v1.block_pool import BlockPool
from cache.v1.block_table import BlockTable, Known
from cache.v1.groups.base import GroupTerms
from cache.v1.groups.full import FullAttentionManager
from cache.v1.groups.kinds import EngineLimits, make_managers
from cache.v1.groups.lookup import Lookup
from cache.v1.planning import resolve_block_sizes
from cache.v1.specs import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheLayout,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(
    block_size=16, page_size_bytes=1024, num_kv_heads=1, head_size=16, dtype="bfloat16"
)
STATE = MambaSpec(
    block_size=64,
    page_size_bytes=1024,
    shapes=((16, 16),),
    dtypes=("float32",),
    mamba_cache_mode=MambaCacheMode.NONE,
)


def group(spec: KVCacheSpec) -> KVCacheGroup:
    return KVCacheGroup(layer_names=("0",), spec=spec, bytes_per_block=1024)


@pytest.mark.parametrize(
    ("num_found", "num_tokens"), [(0, 0), (3, 32), (4, 64), (5, 64)]
)
def test_a_hit_is_cut_to_what_all_groups_can_end_at(
    num_found: int, num_tokens: int
) -> None:
    """Blocks of 16 beside a group whose hits end at multiples of 32."""
    terms = GroupTerms(
        salt=0,
        hash_block_size=16,
        hit_alignment=32,
        retention_interval=None,
        most_admitted_blocks=None,
    )
    manager = FullAttentionManager(FULL, BlockPool(8, enable_caching=True), terms)
    cached = {100 + i: f"block {i}" for i in range(num_found)}
    found = manager.longest_hit([*range(100, 110)], 160, cached.get, 0)
    assert found == ([*cached.values()][: num_tokens // 16], num_tokens)


def test_states_alone_match_in_blocks_of_their_own() -> None:
    only = [group(STATE)]
    assert resolve_block_sizes(only, enable_prefix_caching=True) == (64, 64, 64)
    with pytest.raises(CacheConfigError, match="prefix_match_unit must be 64; got 32"):
        resolve_block_sizes(only, enable_prefix_caching=True, prefix_match_unit=32)


def test_states_that_are_not_aligned_are_matched_coarsely_beside_others() -> None:
    both = [group(FULL), group(STATE)]
    found = resolve_block_sizes(both, enable_prefix_caching=True, prefix_match_unit=5)
    assert found == (64, 64, 64)


def test_nothing_of_a_new_table_was_looked_at() -> None:
    """With blocks of one token the first is full at once."""
    assert BlockTable(2, Known()).num_registered_tokens == 0


@pytest.mark.parametrize("drafter", [(), (0,), (1,), (0, 1)])
def test_a_hit_that_loses_its_last_block_has_a_block_behind(
    drafter: tuple[int, ...],
) -> None:
    """Blocks are cached at random; each length is tried, from the longest on."""
    reach, size, num_hashes = 40, FULL.block_size, 8
    window = SlidingWindowSpec(
        block_size=size,
        page_size_bytes=1024,
        num_kv_heads=1,
        head_size=16,
        dtype="bfloat16",
        sliding_window=reach + 1,
    )
    groups = tuple(
        replace(group(spec), is_eagle_group=number in drafter)
        for number, spec in enumerate((FULL, window))
    )
    layout = KVCacheLayout(groups, 40, 2048, size, size, size)
    limits = EngineLimits(256, 256, 256, drops_eagle_block=True)
    drops = [not drafter or number in drafter for number in range(2)]
    draw, hashes = Random(f"drops {drafter}"), [*range(100, 100 + num_hashes)]
    found_lengths = set()
    for _ in range(150):
        pool = BlockPool(40, enable_caching=True)
        managers = make_managers(layout, limits, pool, None)
        cached = [
            {index for index in range(num_hashes) if draw.random() < 0.85}
            for _ in drops
        ]
        for manager, indices in zip(managers, cached, strict=True):
            for index in indices:
                key = hashes[index] ^ manager.salt
                pool.cache_full_blocks(pool.get_new_blocks(1), [key], index)
        limit = draw.choice((num_hashes * size - 1, num_hashes * size - size // 2, 70))

        def is_hit(end: int, cached: list[set[int]] = cached) -> bool:
            firsts = 0, max(end * size - reach, 0) // size
            return all(
                set(range(first, end + own_drops)) <= own
                for first, own_drops, own in zip(firsts, drops, cached, strict=True)
            )

        expected = next(
            end for end in range(limit // size, -1, -1) if not end or is_hit(end)
        )
        hit = Lookup(layout, managers, pool).longest_hit(hashes, limit)
        assert hit.num_tokens == expected * size
        assert {len(blocks) for blocks in hit.blocks} == {expected}
        found_lengths.add(expected)
    assert len(found_lengths) > 3
