"""Two tiers behind one range of ids, and swaps between them."""

from __future__ import annotations

import pytest

from cache.errors import CacheError, DoubleFreeError, ImmutableBlockError
from cache.sequences import Device
from cache.v0.allocator import NaiveBlockAllocator
from cache.v0.tiered import CpuGpuBlockAllocator

GPU, CPU = Device.GPU, Device.CPU
NAIVE, CACHING = "naive", "prefix_caching"


def make(kind: str = NAIVE, num_gpu: int = 4, num_cpu: int = 3) -> CpuGpuBlockAllocator:
    return CpuGpuBlockAllocator.create(kind, num_gpu, num_cpu, 2)


def ids(blocks):
    return [block.block_id for block in blocks]


@pytest.mark.parametrize("kind", [NAIVE, CACHING])
def test_cpu_ids_follow_gpu_ids(kind):
    allocator = make(kind)
    assert ids(allocator.allocate_chain([1, 2, 3], GPU)) == [0, 1]
    assert ids(allocator.allocate_chain([1, 2, 3], CPU)) == [4, 5]
    assert allocator.allocate_mutable(None, CPU).block_id == 6
    assert allocator.allocate_immutable(None, [7, 8], GPU).block_id == 2
    assert allocator.get_physical_block_id(CPU, 6) == 2
    assert allocator.get_physical_block_id(GPU, 2) == 2
    assert allocator.all_block_ids == set(range(7))
    assert [allocator.get_num_total_blocks(tier) for tier in (GPU, CPU)] == [4, 3]
    assert [allocator.get_num_free_blocks(tier) for tier in (GPU, CPU)] == [1, 0]
    allocator.check(dict.fromkeys([0, 1, 2, 4, 5, 6], 1))


def test_swap_out_and_back():
    allocator = make()
    blocks = allocator.allocate_chain([1, 2, 3, 4, 5], GPU)
    assert allocator.swap(blocks, GPU, CPU) == {0: 4, 1: 5, 2: 6}
    assert ids(blocks) == [4, 5, 6]
    assert [list(block.token_ids) for block in blocks] == [[1, 2], [3, 4], [5]]
    assert allocator.get_and_reset_swaps() == [(0, 4), (1, 5), (2, 6)]
    assert allocator.get_and_reset_swaps() == []
    # Freed front to back, the last one is used first.
    assert allocator.swap(blocks, CPU, GPU) == {4: 2, 5: 1, 6: 0}
    blocks[2].append_token_ids([6])
    assert ids(blocks) == [2, 1, 0]
    allocator.check({0: 1, 1: 1, 2: 1})


def test_caching_finds_blocks_again_after_a_swap():
    allocator = make(CACHING)
    blocks = allocator.allocate_chain([1, 2, 3], GPU)
    kept = allocator.fork(blocks[-1])
    assert allocator.swap(blocks, GPU, CPU) == {0: 4, 1: 5}
    assert allocator.swap(blocks, CPU, GPU) == {4: 0, 5: 2}
    assert ids(kept) == [0, 1]
    allocator.check({0: 2, 1: 1, 2: 1})


def test_swap_without_room_changes_nothing():
    allocator = make(num_cpu=2)
    blocks = allocator.allocate_chain([1, 2, 3, 4, 5], GPU)
    with pytest.raises(
        allocator.NoFreeBlocksError, match=r"swap without room: 3 blocks .* cpu, 2 are"
    ):
        allocator.swap(blocks, GPU, CPU)
    assert ids(blocks) == [0, 1, 2]
    allocator.check({0: 1, 1: 1, 2: 1})


def test_swap_from_the_wrong_tier_is_refused():
    allocator = make()
    blocks = allocator.allocate_chain([1, 2, 3], GPU)
    with pytest.raises(CacheError, match=r"block_id=0.*is not on the cpu"):
        allocator.swap(blocks, CPU, GPU)
    allocator.check({0: 1, 1: 1})


def test_the_null_block_is_one_and_stays():
    allocator = make()
    assert not allocator.has_null_block
    allocator.check({})
    null = allocator.allocate_or_get_null_block()
    assert allocator.allocate_or_get_null_block() is null
    assert allocator.has_null_block
    assert null.block_id == 0
    allocator.free(null)
    assert allocator.get_num_free_blocks(GPU) == 3
    with pytest.raises(ImmutableBlockError, match="block 0 is the null block"):
        null.append_token_ids([1])
    with pytest.raises(CacheError, match="block 0 is the null block"):
        allocator.fork(null)
    allocator.check({})


def test_null_blocks_are_not_swapped():
    allocator = make()
    null = allocator.allocate_or_get_null_block()
    blocks = allocator.allocate_chain([1, 2, 3, 4], GPU)
    assert allocator.get_num_full_blocks_touched([null, *blocks], CPU) == 2
    assert allocator.get_num_blocks_for_swap_in([null, *blocks], CPU) == 2
    assert allocator.swap([null, *blocks], GPU, CPU) == {1: 4, 2: 5}
    assert null.block_id == 0
    allocator.check({4: 1, 5: 1})


def test_copies_and_marks_are_of_the_gpu():
    allocator = make(CACHING)
    blocks = allocator.allocate_chain([1, 2, 3], GPU)
    forked = allocator.fork(blocks[-1])
    forked[1].append_token_ids([9])
    assert allocator.clear_copy_on_writes() == [(1, 2)]
    allocator.mark_blocks_as_computed([])
    allocator.mark_blocks_as_accessed([0], 3.0)
    assert forked[0].last_accessed == 3.0
    keys = [block.content_hash for block in forked]
    assert allocator.find_cached_blocks_prefix(keys) == keys
    assert allocator.find_cached_blocks_prefix(keys, CPU) == []
    assert allocator.get_common_computed_block_ids([[0, 2], [0, 1]]) == [0]
    assert allocator.get_prefix_cache_hit_rate(GPU) == 0
    assert not allocator.reset_prefix_cache()
    assert allocator.reset_prefix_cache(CPU)


def test_misuse_is_refused():
    allocator = make()
    block = allocator.allocate_mutable_block(None, GPU)
    allocator.free(block)
    with pytest.raises(DoubleFreeError, match="freed before"):
        allocator.free(block)
    with pytest.raises(CacheError, match="no tier has a block 7"):
        allocator.is_shared(7)
    with pytest.raises(ValueError, match="no allocator type is named 'radix'"):
        make("radix")
    with pytest.raises(ValueError, match="block 1 is in both tiers"):
        CpuGpuBlockAllocator(
            NaiveBlockAllocator(block_ids=[1, 2]), NaiveBlockAllocator(block_ids=[0, 1])
        )
    with pytest.raises(ValueError, match="no evictor is named 'mru'"):
        CpuGpuBlockAllocator.create(CACHING, 4, 4, 2, eviction_policy="mru")
