"""Blocks, tables and the CPU pool of transformers' continuous batching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from cache.errors import (
    BlockTableError,
    CacheConfigError,
    CacheError,
    DoubleFreeError,
    InvariantError,
    NoFreeBlocksError,
)
from cache.hf_fifo.blocks import BlockManager, CpuPool
from cache.hf_fifo.manager import PagedAttentionCache, num_blocks_held
from cache.tokens import ListTokens

if TYPE_CHECKING:
    from cache.tokens import TokenIds


@dataclass
class Paged:
    """A request as the cache reads it."""

    request_id: int
    num_tokens: int
    tokens: TokenIds
    num_computed_tokens: int = 0
    block_hashes: list[int] = field(default_factory=list)


def paged(request_id: int, token_ids: list[int]) -> Paged:
    return Paged(request_id, len(token_ids), ListTokens(token_ids))


class Moves(list[tuple[str, tuple[int, ...]]]):
    """A `BlockObserver` that keeps its calls."""

    def __getattr__(self, kind: str) -> object:
        return lambda ids: self.append((kind, tuple(ids)))


# -- the block manager ----------------------------------------------------------


def test_blocks_without_content_are_used_first_freed_first() -> None:
    manager = BlockManager(4)
    assert manager.take(3) == [0, 1, 2]
    assert manager.release([1, 0]) == 2
    assert manager.take(3) == [3, 1, 0]


def test_content_is_given_up_last_freed_first_and_only_when_needed() -> None:
    manager = BlockManager(5)
    blocks = manager.take(4)
    for key, block_id in enumerate(blocks, start=100):
        assert manager.complete(block_id, key) == block_id
    manager.release(blocks)
    assert manager.num_free_blocks == 5
    assert [manager.find(100 + i) for i in range(4)] == blocks
    # One block is free without content; two more lose theirs, the last freed first.
    assert manager.take(3) == [4, 3, 2]
    assert [manager.find(100 + i) for i in range(4)] == [0, 1, None, None]
    assert manager.num_evictions == 2
    manager.hold(1)
    with pytest.raises(NoFreeBlocksError, match="cannot take 2 blocks: 1 are free"):
        manager.take(2)
    assert manager.num_cached_blocks == 2


def test_equal_content_is_kept_once() -> None:
    manager = BlockManager(3)
    first, second = manager.take(2)
    assert manager.complete(first, 7) == first
    assert manager.complete(second, 7) == first
    assert manager.num_free_blocks == 2
    manager.check({first: 2})
    assert manager.release([first, first]) == 1
    assert manager.take(3) == [2, second, first]


def test_an_observer_is_told_which_blocks_move() -> None:
    manager = BlockManager(2)
    moves = Moves()
    manager.observer = moves  # type: ignore[assignment]
    manager.take(2)
    manager.complete(0, 5)
    manager.release([0])
    manager.hold(0)
    manager.release([0, 1])
    manager.take(2)
    assert moves == [
        ("taken", (0, 1)),
        ("released", (0,)),
        ("revived", (0,)),
        ("released", (0, 1)),
        ("evicted", (0,)),
        ("taken", (1, 0)),
    ]


def test_misuse_of_blocks_is_refused() -> None:
    manager = BlockManager(2)
    manager.take(1)
    with pytest.raises(CacheError, match="block 0 is not complete"):
        manager.hold(0)
    manager.complete(0, 1)
    with pytest.raises(CacheError, match="block 0 must be incomplete"):
        manager.complete(0, 2)
    manager.release([0])
    with pytest.raises(DoubleFreeError, match="block 0 is free already"):
        manager.release([0])


def test_lost_blocks_are_found() -> None:
    manager = BlockManager(3)
    manager.take(2)
    manager.check({0: 1, 1: 1})
    with pytest.raises(InvariantError, match="block 1 counts 1 references, 0 tables"):
        manager.check({0: 1})


# -- tables ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (2, 1), (3, 2), (4, 2), (6, 2), (7, 3)]
)
def test_a_block_is_taken_ahead_where_the_end_of_a_block_is_near(
    num_tokens: int, num_blocks: int
) -> None:
    assert num_blocks_held(num_tokens, 4) == num_blocks
    cache = PagedAttentionCache(10, 4)
    request = paged(0, [1] * num_tokens)
    assert cache.num_missing_blocks(request, num_tokens) == num_blocks


def test_nothing_is_taken_while_tokens_fit() -> None:
    cache = PagedAttentionCache(10, 4)
    request = paged(0, [1] * 9)
    assert cache.allocate_blocks(request, cache.num_missing_blocks(request, 5))
    request.num_computed_tokens = 5
    assert cache.table(request) == [0, 1]
    assert cache.num_missing_blocks(request, 3) == 0
    assert cache.num_missing_blocks(request, 4) == 1


def test_an_allocation_that_fails_leaves_no_trace() -> None:
    cache = PagedAttentionCache(2, 4)
    request = paged(0, [1] * 20)
    assert not cache.allocate_blocks(request, 3)
    assert cache.table(request) == ()
    assert cache.num_free_blocks == 2
    cache.check([])


def test_blocks_smaller_than_four_tokens_are_refused() -> None:
    with pytest.raises(CacheConfigError, match="block_size must be at least 4"):
        PagedAttentionCache(10, 3)


# -- sharing --------------------------------------------------------------------


def computed(cache: PagedAttentionCache, request: Paged, num_tokens: int) -> None:
    """Let the next `num_tokens` tokens be computed."""
    assert cache.allocate_blocks(request, cache.num_missing_blocks(request, num_tokens))
    request.num_computed_tokens += num_tokens
    cache.mark_shareable_blocks_as_complete(request)


def test_a_prefix_is_found_once_it_is_computed() -> None:
    cache = PagedAttentionCache(10, 4)
    first, second = paged(0, list(range(10))), paged(1, [*range(8), 77, 78])
    assert cache.search_prefix_match(second) == 0
    computed(cache, first, 10)
    assert cache.search_prefix_match(second) == 8
    assert cache.table(second) == [0, 1]
    assert cache.num_logical_blocks - cache.num_used_blocks == 2
    with pytest.raises(BlockTableError, match="request 1 has blocks"):
        cache.search_prefix_match(second)
    cache.check([first, second])


def test_who_computes_the_same_side_by_side_shares_it_afterwards() -> None:
    cache = PagedAttentionCache(10, 4)
    first, second = paged(0, list(range(8))), paged(1, list(range(8)))
    for request in (first, second):
        assert cache.allocate_blocks(request, 3)
        request.num_computed_tokens = 8
    cache.mark_shareable_blocks_as_complete(first)
    cache.mark_shareable_blocks_as_complete(second)
    assert cache.table(first) == [0, 1, 2]
    assert cache.table(second) == [0, 1, 5]
    cache.check([first, second])
    assert cache.free_blocks(first) == 1
    assert cache.free_blocks(second) == 3


def test_without_caching_nothing_is_shared() -> None:
    cache = PagedAttentionCache(10, 4, enable_caching=False)
    first = paged(0, list(range(8)))
    computed(cache, first, 8)
    assert cache.block_manager.num_cached_blocks == 0


# -- the CPU pool ---------------------------------------------------------------


def test_the_pool_takes_whoever_fits_in_order() -> None:
    cache = PagedAttentionCache(10, 4, num_cpu_blocks=4)
    requests = [paged(i, [10 * i + j for j in range(12)]) for i in range(3)]
    for request, num_tokens in zip(requests, (8, 8, 1), strict=True):
        computed(cache, request, num_tokens)
    first = requests[0]
    moved = cache.offload(requests)
    # The second one does not fit, a smaller one behind it does.
    assert moved == {0: [(0, 0), (1, 1), (2, 2)], 2: [(6, 3)]}
    for request in requests:
        cache.free_blocks(request)
    assert cache.num_missing_blocks(first, 1) == 3  # for all nine tokens
    assert cache.allocate_blocks(first, 3)
    assert cache.restore(first) == list(zip([0, 1, 2], cache.table(first), strict=True))
    assert cache.cpu_pool.num_free_blocks == 3
    cache.check([first])


def test_the_smallest_cpu_blocks_are_used_first() -> None:
    pool = CpuPool(5)
    moves = Moves()
    pool.observer = moves  # type: ignore[assignment]
    assert pool.put(0, 2) == [0, 1]
    assert pool.put(1, 2) == [2, 3]
    assert pool.pop(0) == [0, 1]
    assert pool.put(2, 3) == [0, 1, 4]
    assert 0 not in pool
    assert 2 in pool
    with pytest.raises(NoFreeBlocksError, match="cannot take 1 CPU blocks: 0 are free"):
        pool.put(3, 1)
    with pytest.raises(BlockTableError, match="request 2 is on the CPU already"):
        pool.put(2, 0)
    pool.check()
    assert moves[-1] == ("taken", (0, 1, 4))
    assert moves[-2] == ("released", (0, 1))


def test_blocks_of_nobody_are_found() -> None:
    cache = PagedAttentionCache(4, 4)
    request = paged(0, [1, 2, 3])
    computed(cache, request, 3)
    cache.check([request])
    with pytest.raises(InvariantError, match=r"requests \[0\] hold blocks"):
        cache.check([])
    request.num_computed_tokens = 9
    with pytest.raises(InvariantError, match="9 computed tokens in 8 slots"):
        cache.check([request])
