"""The naive allocator by literals, and what it refuses."""

from __future__ import annotations

import pytest

from cache.errors import CacheError, DoubleFreeError, ImmutableBlockError
from cache.tokens import TokenRuns
from cache.v0.allocator import NaiveBlock, NaiveBlockAllocator, join_tokens
from cache.v0.interfaces import BlockAllocator


def make(num_blocks: int = 4, block_size: int = 4) -> NaiveBlockAllocator:
    return NaiveBlockAllocator(NaiveBlock, num_blocks, block_size)


def ids(blocks):
    return [block.block_id for block in blocks]


def test_ids_ascend_then_the_last_freed_is_next():
    allocator = make()
    blocks = [allocator.allocate_mutable_block(None) for _ in range(4)]
    assert ids(blocks) == [0, 1, 2, 3]
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    assert allocator.allocate_mutable_block(None).block_id == 3
    assert allocator.allocate_mutable_block(None).block_id == 1


def test_a_chain_is_full_blocks_and_a_partial_one():
    allocator = make()
    blocks = allocator.allocate_chain(list(range(10)))
    assert ids(blocks) == [0, 1, 2]
    assert [list(block.token_ids) for block in blocks] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert [block.num_tokens_total for block in blocks] == [4, 8, 10]
    assert [block.is_full for block in blocks] == [True, True, False]
    assert blocks[2].prev_block is blocks[1]
    assert blocks[2].num_empty_slots == 2
    assert allocator.get_num_free_blocks() == 1


def test_a_block_grows_by_appends():
    block = make().allocate_mutable_block(None)
    block.append_token_ids([1])
    block.append_token_ids([])
    block.append_token_ids([2, 3])
    assert list(block.token_ids) == [1, 2, 3]
    assert (block.computed, block.content_hash, block.last_accessed) == (
        False,
        None,
        -1.0,
    )


def test_a_block_grows_by_token_runs():
    block = make().allocate_mutable_block(None)
    block.append_token_ids(TokenRuns([(5, 0, 2)]))
    block.append_token_ids(TokenRuns([(5, 2, 1)]))
    assert block.token_ids == TokenRuns([(5, 0, 3)])
    with pytest.raises(TypeError, match="do not mix"):
        join_tokens(block.token_ids, [1])


def test_a_shared_block_is_copied_on_write():
    allocator = make()
    (block,) = allocator.allocate_chain([1, 2])
    (forked,) = allocator.fork(block)
    assert forked.block_id == 0
    assert allocator.is_shared(0)
    forked.append_token_ids([3])
    assert ids([block, forked]) == [0, 1]
    assert list(forked.token_ids) == [1, 2, 3]
    block.append_token_ids([4])
    assert block.block_id == 0
    assert allocator.clear_copy_on_writes() == [(0, 1)]
    assert allocator.clear_copy_on_writes() == []
    allocator.check({0: 1, 1: 1})


def test_copy_on_write_without_room_changes_nothing():
    allocator = make(num_blocks=1)
    (block,) = allocator.allocate_chain([1, 2])
    (forked,) = allocator.fork(block)
    with pytest.raises(
        BlockAllocator.NoFreeBlocksError, match=r"block 0 is shared, .* none of 1"
    ):
        forked.append_token_ids([3])
    assert list(forked.token_ids) == [1, 2]
    assert forked.block_id == 0
    assert allocator.clear_copy_on_writes() == []
    allocator.check({0: 2})


def test_an_append_to_an_immutable_block_is_refused():
    allocator = make()
    block = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    with pytest.raises(ImmutableBlockError, match="block 0 holds 4 tokens in 4 slots"):
        block.append_token_ids([5])
    assert list(block.token_ids) == [1, 2, 3, 4]
    with pytest.raises(ImmutableBlockError, match="5 more cannot be appended"):
        allocator.allocate_mutable_block(None).append_token_ids([1] * 5)


def test_out_of_memory_takes_nothing():
    allocator = make()
    with pytest.raises(ValueError, match="5 blocks are needed, 4 of 4 are free"):
        allocator.allocate_chain(list(range(17)))
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        allocator.allocate_immutable_blocks(None, [[1, 2, 3, 4]] * 5)
    assert allocator.get_num_free_blocks() == 4
    assert allocator.allocate_mutable_block(None).block_id == 0


def test_double_free_is_refused_with_the_block():
    allocator = make()
    (block,) = allocator.allocate_chain([1, 2])
    twin = NaiveBlock(None, [1, 2], 4, allocator, block.block_id)
    allocator.free(block)
    assert block.block_id is None
    with pytest.raises(DoubleFreeError, match=r"index=0.*freed before"):
        allocator.free(block)
    with pytest.raises(DoubleFreeError, match="block 0 of the KV block pool is free"):
        allocator.free(twin)
    with pytest.raises(DoubleFreeError, match="cannot be swapped out"):
        allocator.swap_out([block])
    allocator.check({})


def test_a_freed_block_is_not_forked_written_or_promoted():
    allocator = make()
    (block,) = allocator.allocate_chain([1, 2])
    twin = NaiveBlock(None, [1, 2], 4, allocator, block.block_id)
    allocator.free(block)
    for misuse in (
        allocator.fork,
        allocator.cow_block_if_not_appendable,
        allocator.promote_to_immutable_block,
    ):
        with pytest.raises(CacheError, match="was freed"):
            misuse(block)
    with pytest.raises(CacheError, match="block 0 is free: it cannot be forked"):
        allocator.fork(twin)
    allocator.check({})


def test_blocks_are_given_up_once_and_where_they_belong():
    allocator, other = make(), make()
    block, stranger = (a.allocate_mutable_block(None) for a in (allocator, other))
    with pytest.raises(CacheError, match=r"block_id=0, .* is another allocator's"):
        allocator.free(stranger)
    with pytest.raises(DoubleFreeError, match=r"block_id=0, .* swapped out twice"):
        allocator.swap_out([block, block])
    with pytest.raises(CacheError, match=r"block_id=0, .* is placed already"):
        allocator.swap_in([block])
    with pytest.raises(CacheError, match=r"block_id=0, .* is not full"):
        allocator.promote_to_immutable_block(block)
    allocator.check({0: 1})
    other.check({0: 1})
    allocator.free(block)
    with pytest.raises(DoubleFreeError, match="block_id=None, was 0"):
        allocator.free(block)


def test_ids_of_a_tier_start_anywhere():
    allocator = NaiveBlockAllocator(num_blocks=3, block_size=2, block_ids=[7, 8, 9])
    assert allocator.all_block_ids == {7, 8, 9}
    assert allocator.get_physical_block_id(9) == 2
    assert allocator.allocate_mutable_block(None).block_id == 7
    with pytest.raises(CacheError, match="no block 3"):
        allocator.get_physical_block_id(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give num_blocks or block_ids"),
        ({"num_blocks": 3, "block_ids": [1, 1, 2]}, "num_blocks is 3"),
        ({"num_blocks": 3, "block_size": 0}, "block_size must be at least 1"),
    ],
)
def test_impossible_pools_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        NaiveBlockAllocator(**arguments)


def test_wrong_sizes_are_refused():
    allocator = make()
    with pytest.raises(ValueError, match="holds 4 tokens, got 3"):
        allocator.allocate_immutable_block(None, [1, 2, 3])
    with pytest.raises(ImmutableBlockError, match="5 tokens do not fit its 4 slots"):
        NaiveBlock(None, [1] * 5, 4, allocator)
    assert allocator.get_num_free_blocks() == 4


def test_names_before_0_6_are_kept():
    allocator = make()
    first = allocator.allocate_immutable(None, [1, 2, 3, 4])
    second = allocator.allocate_mutable(first)
    assert ids([first, second]) == [0, 1]
    assert second.prev_block is first


def test_nothing_is_cached():
    allocator = make()
    blocks = allocator.allocate_chain(list(range(9)))
    allocator.mark_blocks_as_computed([0])
    allocator.mark_blocks_as_accessed([0], 1.0)
    assert allocator.find_cached_blocks_prefix([1, 2]) == []
    assert allocator.get_prefix_cache_hit_rate() == -1
    assert allocator.reset_prefix_cache()
    assert allocator.get_num_full_blocks_touched(blocks) == 2
    assert allocator.get_num_blocks_for_swap_in(blocks) == 3


def test_without_a_cache_nothing_is_computed_in_advance():
    assert make().get_common_computed_block_ids([[1, 2, 3], [1, 2]]) == []
