"""The prefix-caching allocator by literals, and what it refuses."""

from __future__ import annotations

import pytest

from cache.errors import CacheError, ImmutableBlockError, InvariantError
from cache.tokens import TokenRuns
from cache.v0.interfaces import BlockAllocator
from cache.v0.prefix_caching import PrefixCachingBlockAllocator, hash_block_tokens

A, B, C = [1, 2], [3, 4], [5, 6]


def make(num_blocks: int = 4) -> PrefixCachingBlockAllocator:
    return PrefixCachingBlockAllocator(num_blocks, block_size=2)


def ids(blocks):
    return [block.block_id for block in blocks]


def free_all(allocator, blocks, now=None):
    if now is not None:
        allocator.mark_blocks_as_accessed(ids(blocks), now)
    for block in blocks:
        allocator.free(block)


def chain_keys(*contents):
    keys: list[int] = []
    for content in contents:
        keys.append(hash_block_tokens(not keys, keys[-1] if keys else None, content))
    return keys


def test_keys_depend_on_everything_before():
    assert chain_keys(A, B)[1] != chain_keys(B, B)[1]
    assert chain_keys(A)[0] != chain_keys(A, A)[1]
    assert hash_block_tokens(True, None, A) != hash_block_tokens(True, None, A, 5)
    assert hash_block_tokens(True, None, A) != hash_block_tokens(False, None, A)


def test_equal_prefixes_share_blocks():
    allocator = make()
    first = allocator.allocate_chain(A + B + [9])
    second = allocator.allocate_chain(A + C)
    assert ids(first) == [0, 1, 2]
    assert ids(second) == [0, 3]
    assert allocator.get_num_free_blocks() == 0
    assert allocator.get_prefix_cache_hit_rate() == 1 / 4
    allocator.check({0: 2, 1: 1, 2: 1, 3: 1})


def test_extra_hash_tells_equal_tokens_apart():
    allocator = make()
    plain = allocator.allocate_immutable_block(None, A)
    adapted = allocator.allocate_immutable_block(None, A, extra_hash=1)
    again = allocator.allocate_immutable_block(None, A, extra_hash=1)
    assert ids([plain, adapted, again]) == [0, 1, 1]


def test_hashless_ids_are_used_before_anything_is_evicted():
    allocator = make(3)
    (cached,) = allocator.allocate_chain(A)
    allocator.free(cached)
    assert allocator.get_num_free_blocks() == 3
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(3)] == [
        1,
        2,
        0,
    ]
    assert allocator.num_cached_blocks == 0
    with pytest.raises(BlockAllocator.NoFreeBlocksError, match="none of 3 blocks"):
        allocator.allocate_mutable_block(None)


def test_a_hit_on_an_evictable_block_revives_it():
    allocator = make()
    blocks = allocator.allocate_chain(A + B)
    free_all(allocator, blocks)
    allocator.check({})
    again = allocator.allocate_chain(A + B + C)
    assert ids(again) == [0, 1, 2]
    assert [block.computed for block in again] == [True, True, False]
    allocator.check({0: 1, 1: 1, 2: 1})


def test_eviction_is_oldest_first_and_deepest_first():
    allocator = make(4)
    free_all(allocator, allocator.allocate_chain(A + B), now=5.0)
    free_all(allocator, allocator.allocate_chain(C + C), now=4.0)
    assert ids(allocator.allocate_chain([7] * 7)) == [3, 2, 1, 0]


def test_a_block_freed_without_an_access_is_oldest():
    allocator = make(4)
    free_all(allocator, allocator.allocate_chain(A + B), now=5.0)
    free_all(allocator, allocator.allocate_chain(A))  # revived, not accessed since
    assert ids(allocator.allocate_chain([7] * 7)) == [2, 3, 0, 1]


def test_a_block_filled_by_decode_is_replaced_by_the_known_one():
    allocator = make()
    allocator.allocate_chain(A)
    block = allocator.allocate_mutable_block(None)
    block.append_token_ids([1])
    assert block.block_id == 1
    block.append_token_ids([2])
    assert block.block_id == 0
    allocator.check({0: 2})
    assert allocator.allocate_mutable_block(None).block_id == 1


def test_promotion_of_a_block_that_nobody_else_has():
    allocator = make()
    block = allocator.allocate_mutable_block(None)
    with pytest.raises(CacheError, match=r"block_id=0.*cannot be promoted"):
        allocator.promote_to_immutable_block(block)
    block.append_token_ids(A)
    assert allocator.is_block_cached(block)
    assert allocator.promote_to_immutable_block(block) == 0  # done already
    with pytest.raises(ImmutableBlockError, match="block 0 holds 2 tokens"):
        block.append_token_ids([9])
    allocator.check({0: 1})


def test_blocks_answer_look_ups_once_computed():
    allocator = make()
    keys = chain_keys(A, B)
    blocks = allocator.allocate_chain(A + B)
    assert allocator.find_cached_blocks_prefix(keys) == []
    assert allocator.get_computed_block_ids([], ids(blocks)) == []
    allocator.mark_blocks_as_computed([])
    assert allocator.find_cached_blocks_prefix([*keys, 99]) == keys
    assert allocator.get_computed_block_ids([], ids(blocks)) == [0, 1]
    assert allocator.get_computed_block_ids([0], ids(blocks)) == [0, 1]
    free_all(allocator, blocks)
    assert allocator.find_cached_blocks_prefix(keys) == keys


def test_blocks_in_the_evictor_count_as_computed():
    allocator = make()
    blocks = allocator.allocate_chain(A)
    free_all(allocator, blocks)
    assert allocator.find_cached_blocks_prefix(chain_keys(A)) == chain_keys(A)


def test_a_block_taken_anew_is_not_computed():
    allocator = make(1)
    (block,) = allocator.allocate_chain(A)
    allocator.mark_blocks_as_computed([])
    allocator.free(block)
    (block,) = allocator.allocate_chain(B)
    assert not block.computed
    assert allocator.find_cached_blocks_prefix(chain_keys(B)) == []


def test_wart_a_mark_reaches_a_block_evicted_and_taken_anew_in_the_same_call():
    """vLLM 0.7.3: the ids that were filled are marked, whatever they hold by now."""
    allocator = make(1)
    (block,) = allocator.allocate_chain(A)
    allocator.free(block)
    block = allocator.allocate_mutable_block(None)
    allocator.mark_blocks_as_computed([])
    assert not block.computed  # it has no content to be found by
    block.append_token_ids(B)
    assert block.computed


def test_full_blocks_touched_by_a_swap():
    here, there = make(), PrefixCachingBlockAllocator(4, 2, range(4, 8))
    blocks = here.allocate_chain(A + B + [9])
    assert there.get_num_full_blocks_touched(blocks) == 2
    assert there.get_num_blocks_for_swap_in(blocks) == 3
    known = there.allocate_chain(A)
    assert there.get_num_full_blocks_touched(blocks) == 1
    free_all(there, known)
    assert there.get_num_full_blocks_touched(blocks) == 2


def test_reset_forgets_unused_blocks_only():
    allocator = make()
    blocks = allocator.allocate_chain(A + B)
    assert not allocator.reset_prefix_cache()
    assert allocator.num_cached_blocks == 2
    free_all(allocator, blocks)
    assert allocator.reset_prefix_cache()
    assert allocator.num_cached_blocks == 0
    assert allocator.get_num_free_blocks() == 4
    assert allocator.get_prefix_cache_hit_rate() == 0
    allocator.check({})


def test_an_exact_fit_through_hits_is_given():
    allocator = make(2)
    allocator.allocate_chain(A + B)
    assert ids(allocator.allocate_chain(A + B)) == [0, 1]
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        allocator.allocate_chain(A + C)
    allocator.check({0: 2, 1: 2})


def test_a_free_block_is_not_accessed():
    allocator = make()
    (block,) = allocator.allocate_chain(A)
    with pytest.raises(CacheError, match="block 3 is free"):
        allocator.mark_blocks_as_accessed([0, 3], 7.0)
    assert block.last_accessed == -1
    allocator.mark_blocks_as_accessed([0], 7.0)
    assert block.last_accessed == 7.0
    allocator.free(block)
    allocator.mark_blocks_as_accessed([0], 8.0)  # in the evictor


def test_check_finds_a_key_that_is_not_cached():
    allocator = make()
    allocator.allocate_chain(A)
    allocator._cached.clear()
    with pytest.raises(InvariantError, match="block 0 has a key"):
        allocator.check({0: 1})


def test_plain_ids_and_runs_share_alike():
    def run(first, second):
        allocator = make(8)
        return [
            ids(allocator.allocate_chain(tokens)) for tokens in (first, second, first)
        ]

    plain = run([1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9])
    runs = run(
        TokenRuns([(1, 0, 5)]),
        TokenRuns([(1, 0, 3), (2, 0, 3)]),
    )
    assert plain == runs == [[0, 1, 2], [0, 3, 4], [0, 1, 5]]


@pytest.mark.parametrize(
    ("tables", "common"),
    [
        ([[1, 2, 3]], [1, 2, 3]),
        ([[1, 2, 3], [1, 2]], [1, 2]),
        ([[1, 2, 3], [1, 4, 3]], [1]),
        ([[1, 2], [], [1, 2, 5]], [1, 2]),
        ([[1], [2]], []),
        ([[], []], []),
        ([], []),
    ],
)
def test_common_computed_blocks(tables, common):
    assert make().get_common_computed_block_ids(tables) == common
