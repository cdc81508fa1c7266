"""The block pool: references, hits on free blocks, eviction by reuse."""

from __future__ import annotations

import pytest

from cache.errors import (
    CacheError,
    DoubleFreeError,
    InvariantError,
    NoFreeBlocksError,
)
from cache.v1.block_pool import BlockPool
from tests.cache.run_twins import Calls


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(4, enable_caching=False)
    assert [b.block_id for b in pool.get_new_blocks(3)] == [1, 2, 3]
    assert pool.usage == 1.0
    with pytest.raises(NoFreeBlocksError, match="0 of 3 are free"):
        pool.get_new_blocks(1)


def test_a_pool_of_one_block_is_refused() -> None:
    with pytest.raises(CacheError, match="at least 2 blocks"):
        BlockPool(1, enable_caching=True)


def test_freed_blocks_are_reused_in_the_order_given() -> None:
    pool = BlockPool(5, enable_caching=False)
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(blocks[::-1])
    assert [b.block_id for b in pool.get_new_blocks(4)] == [4, 3, 2, 1]


def test_a_hit_revives_a_free_block_from_the_middle() -> None:
    pool = BlockPool(5, enable_caching=True)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [11, 12, 13])
    pool.free_blocks(blocks)
    hit = pool.get_cached_block(12)
    assert hit is blocks[1]
    pool.touch([hit])
    assert hit.ref_cnt == 1
    assert [b.block_id for b in pool.free_block_queue] == [4, 1, 3]
    pool.check()


def test_reuse_evicts_and_only_reuse_does() -> None:
    pool = BlockPool(3, enable_caching=True)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [11, 12])
    pool.free_blocks(blocks)
    assert len(pool.cached_blocks) == 2
    pool.get_new_blocks(1)
    assert pool.get_cached_block(11) is None
    assert pool.get_cached_block(12) is blocks[1]
    assert pool.num_evictions == 1
    pool.check()


def test_of_duplicates_the_first_cached_answers_until_it_is_evicted() -> None:
    pool = BlockPool(4, enable_caching=True)
    a, b, c = pool.get_new_blocks(3)
    for block in (b, a, c):
        pool.cache_full_blocks([block], [7])
    assert pool.get_cached_block(7) is b
    assert len(pool.cached_blocks) == 1
    pool.free_blocks([b])
    assert pool.get_new_blocks(1) == [b]
    assert pool.get_cached_block(7) is a
    pool.check()


def test_double_free_names_the_block_and_changes_nothing() -> None:
    pool = BlockPool(4, enable_caching=False)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks[:1])
    with pytest.raises(DoubleFreeError, match="block 1 is free already"):
        pool.free_blocks([blocks[1], blocks[0]])
    assert blocks[1].ref_cnt == 1
    pool.check()


def test_caching_a_block_twice_is_refused() -> None:
    pool = BlockPool(3, enable_caching=True)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [5])
    with pytest.raises(CacheError, match="block 1 is cached already"):
        pool.cache_full_blocks([block], [6])
    assert block.block_hash == 5


def test_check_finds_a_lost_reference() -> None:
    pool = BlockPool(3, enable_caching=False)
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt = 0
    with pytest.raises(InvariantError, match="block 1 has 0 references"):
        pool.check()


def test_check_finds_a_block_that_the_index_does_not_know() -> None:
    pool = BlockPool(3, enable_caching=True)
    (block,) = pool.get_new_blocks(1)
    block.block_hash = 9
    with pytest.raises(InvariantError, match="blocks carry 1 hashes, 0 are indexed"):
        pool.check()


def test_the_index_refuses_to_drop_a_stranger() -> None:
    pool = BlockPool(3, enable_caching=True)
    (block,) = pool.get_new_blocks(1)
    with pytest.raises(CacheError, match="not in the prefix cache"):
        pool.cached_blocks.remove(3, block)


def test_unhashed_blocks_go_to_the_front_as_a_whole() -> None:
    pool = BlockPool(8, enable_caching=True, unhashed_first=True)
    table = pool.get_new_blocks(5)
    pool.cache_full_blocks(table[:3], [11, 12, 13])
    pool.free_blocks(table[::-1])
    # 5 and 4 have no hash and go first, the last of the table ahead; 3, 2, 1 go last.
    queue = pool.free_block_queue
    assert [block.block_id for block in queue] == [5, 4, 6, 7, 3, 2, 1]
    pool.check()


def test_a_block_given_twice_to_be_freed_is_refused() -> None:
    pool = BlockPool(6, enable_caching=False)
    blocks = pool.get_new_blocks(2)
    with pytest.raises(DoubleFreeError, match=f"block {blocks[0].block_id} is to be"):
        pool.free_blocks([blocks[1], blocks[0], blocks[0]])
    assert [block.ref_cnt for block in blocks] == [1, 1]
    assert pool.num_free_blocks == 3
    pool.check()


def test_without_caching_all_that_is_freed_goes_to_the_front() -> None:
    pool = BlockPool(6, enable_caching=False, unhashed_first=True)
    pool.free_blocks(pool.get_new_blocks(3)[::-1])
    assert [block.block_id for block in pool.free_block_queue] == [3, 2, 1, 4, 5]


def test_an_observer_is_told_what_moves() -> None:
    pool = BlockPool(4, enable_caching=True)
    pool.observer = calls = Calls()
    table = pool.get_new_blocks(3)
    pool.cache_full_blocks(table, [11, 12, 13])
    pool.free_blocks(table[::-1])
    assert calls.told == {
        (kind, i): 1 for kind in ("taken", "released") for i in (1, 2, 3)
    }
    calls.told.clear()
    pool.touch(table[:1])
    pool.touch(table[:1])
    pool.free_blocks(table[:1])  # one of two references
    pool.get_new_blocks(1)
    assert calls.told == {("revived", 1): 1, ("evicted", 3): 1, ("taken", 3): 1}


def test_a_block_that_another_request_holds_is_kept_when_one_drops_it() -> None:
    pool = BlockPool(4, enable_caching=True)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [11])
    pool.touch([block])
    assert pool.drop_block(block)
    assert (block.ref_cnt, pool.num_free_blocks) == (1, 2)
    assert not pool.drop_block(block)
    assert (block.ref_cnt, pool.num_free_blocks) == (0, 3)
    pool.check()
