"""Sliding windows: literals worked out by hand, and a model without cleverness."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.block import KVCacheBlock
from cache.errors import CacheError, InvariantError
from tests.cache.test_manager_v1 import Stub, admit, stub
from tests.oracles.v1_manager import KVCacheManager
from tests.oracles.windows import BlockWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

NULL = KVCacheBlock(0)


def grow(manager: KVCacheManager, request: Stub, num_new_tokens: int) -> None:
    """Compute tokens that are known, or sampled just now."""
    request.num_tokens = max(
        request.num_tokens, request.num_computed_tokens + num_new_tokens
    )
    assert manager.allocate_slots(request, num_new_tokens)
    request.num_computed_tokens += num_new_tokens
    manager.check([request])


def free_ids(manager: KVCacheManager) -> list[int]:
    return [block.block_id for block in manager.block_pool.free_block_queue]


@pytest.mark.parametrize(
    ("num_computed_tokens", "num_skipped_blocks"),
    # Window 5, blocks of 4: with 7 tokens computed, 3 is the first position read.
    [(0, 0), (4, 0), (7, 0), (8, 1), (11, 1), (12, 2), (100, 24)],
)
def test_blocks_wholly_outside(
    num_computed_tokens: int, num_skipped_blocks: int
) -> None:
    window = BlockWindow(5, 4)
    assert window.num_skipped_blocks(num_computed_tokens) == num_skipped_blocks
    most = window.num_tokens_before_next_skip(num_computed_tokens)
    assert window.num_skipped_blocks(most) == num_skipped_blocks
    assert window.num_skipped_blocks(most + 1) == num_skipped_blocks + 1


@pytest.mark.parametrize(
    ("window", "num_blocks"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)]
)
def test_blocks_that_a_hit_needs(window: int, num_blocks: int) -> None:
    assert BlockWindow(window, 4).num_blocks_for_hit == num_blocks


def test_most_blocks_held_at_a_time() -> None:
    # 5 tokens behind, 8 new: 13 tokens in 4 blocks, and one that begins before them.
    assert BlockWindow(6, 4).most_held_blocks(8, 1000) == 5
    assert BlockWindow(6, 4).most_held_blocks(8, 10) == 4


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(CacheError, match="sliding_window must be at least 1, got 0"):
        BlockWindow(0, 4)


def test_a_table_gives_up_what_nobody_reads() -> None:
    manager = KVCacheManager(12, 4, enable_caching=False, sliding_window=5)
    request = stub(0, (2, 18))
    assert admit(manager, request, 10)
    assert manager.get_block_ids(request) == [1, 2, 3]
    # 10 computed: 6 is the first position read, so block 0 goes. Then 8 more tokens.
    grow(manager, request, 8)
    assert manager.get_block_ids(request) == [0, 2, 3, 4, 5]
    # 18 computed: from 14 on. Blocks 1 and 2 go, the higher one first.
    grow(manager, request, 1)
    assert manager.get_block_ids(request) == [0, 0, 0, 4, 5]
    assert free_ids(manager) == [6, 7, 8, 9, 10, 11, 1, 3, 2]
    assert (manager.num_logical_blocks, manager.num_skipped_blocks) == (2, 3)
    assert manager.usage == pytest.approx(2 / 11)
    assert manager.free(request) == 2
    assert free_ids(manager)[-2:] == [5, 4]
    manager.check([])
    assert (manager.num_logical_blocks, manager.num_skipped_blocks) == (0, 0)


def test_unhashed_blocks_behind_the_window_are_reused_first_from_0_24_on() -> None:
    manager = KVCacheManager(
        12, 4, enable_caching=False, sliding_window=5, unhashed_first=True
    )
    request = stub(0, (2, 18))
    assert admit(manager, request, 10)
    grow(manager, request, 8)
    grow(manager, request, 1)
    assert (
        free_ids(manager) == [3, 2, 6, 7, 8, 9, 10, 11, 1][:2] + free_ids(manager)[2:]
    )
    # Block 1 was given up before 4 and 5 were taken, so it is block 0's successor.
    assert manager.get_block_ids(request) == [0, 0, 0, 1, 4]


def test_what_is_given_up_may_be_hit() -> None:
    manager = KVCacheManager(12, 4, enable_caching=True, sliding_window=5)
    request = stub(0, (2, 18))
    assert admit(manager, request)
    grow(manager, request, 1)
    assert manager.get_block_ids(request) == [0, 0, 0, 4, 5]
    # 18 tokens of 4 full blocks: one hit suffices for a window of 5, and it is held.
    twin = stub(1, (2, 18))
    hits = manager.get_computed_blocks(twin)
    assert [block.block_id for block in hits] == [0, 0, 0, 4]
    assert admit(manager, twin)
    assert manager.get_block_ids(twin) == [0, 0, 0, 4, 6]
    manager.check([request, twin])
    # 9 tokens: block 1 is free, but still cached, and revived.
    short = stub(2, (2, 9))
    assert [b.block_id for b in manager.get_computed_blocks(short)] == [0, 2]
    assert admit(manager, short)
    assert 2 not in free_ids(manager)
    manager.check([request, twin, short])


def test_the_null_block_costs_nothing_on_admission() -> None:
    manager = KVCacheManager(6, 4, enable_caching=True, sliding_window=5)
    request = stub(0, (2, 16))
    assert admit(manager, request)
    manager.free(request)
    # Of 4 blocks 3 may be hit; 2 null blocks, 1 revived, and 3 of 4 free ones are new.
    assert admit(manager, stub(1, (2, 12), (4, 11)))
    assert manager.block_pool.num_free_blocks == 1


def blocks_of(cached: Sequence[bool]) -> list[KVCacheBlock | None]:
    return [KVCacheBlock(i + 1) if yes else None for i, yes in enumerate(cached)]


def naive_hit(cached: Sequence[KVCacheBlock | None], needed: int) -> list[int]:
    """The longest prefix of which all that a window needs is cached, as ids."""
    for length in range(len(cached), 0, -1):
        first = max(length - max(needed, 1), 0)
        if all(cached[first:length]):
            return [0] * first + [b.block_id for b in cached[first:length] if b]
    return []


@pytest.mark.parametrize(
    ("cached", "hit"),
    [
        # Two in a row are needed.
        ([1, 1, 0, 1, 1, 0, 1], [0, 0, 0, 4, 5]),
        ([1, 1, 0, 1, 0, 1], [1, 2]),
        ([1, 0, 1, 0, 1], [1]),
        ([0, 1, 0, 1], []),
        ([], []),
    ],
)
def test_hits_from_the_right(cached: list[bool], hit: list[int]) -> None:
    table = blocks_of(cached)
    found = BlockWindow(6, 4).longest_hit(
        range(len(table)), len(table), table.__getitem__, NULL
    )
    assert [block.block_id for block in found] == hit


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 20), st.integers(1, 5))
def test_hits_equal_the_naive_search(
    cached: list[bool], window: int, block_size: int
) -> None:
    table = blocks_of(cached)
    reach = BlockWindow(window, block_size)
    found = reach.longest_hit(range(len(table)), len(table), table.__getitem__, NULL)
    assert [b.block_id for b in found] == naive_hit(table, reach.num_blocks_for_hit)


@given(
    window=st.integers(1, 14),
    block_size=st.integers(1, 5),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    caching=st.booleans(),
)
def test_the_table_keeps_exactly_what_is_read(
    window: int, block_size: int, chunks: list[int], caching: bool
) -> None:
    manager = KVCacheManager(
        200, block_size, enable_caching=caching, sliding_window=window
    )
    request = stub(0, (2, 1))
    for chunk in chunks:
        computed = request.num_computed_tokens
        # By definition: the next token, at `computed`, reads from here on.
        first_read = max(computed - window + 1, 0)
        if chunk > 1 or computed + 1 > request.num_quiet_tokens:
            grow(manager, request, chunk)
        else:  # a quiet table is as good as one that was looked at
            request.num_tokens = max(request.num_tokens, computed + 1)
            request.num_computed_tokens += 1
        kept = [index for index, i in enumerate(manager.get_block_ids(request)) if i]
        last = (computed + chunk - 1) // block_size
        assert kept == list(range(first_read // block_size, last + 1))
        most = BlockWindow(window, block_size).most_held_blocks(chunk, 10**6)
        assert len(kept) <= most


def test_check_finds_a_hole_in_a_table() -> None:
    manager = KVCacheManager(12, 4, enable_caching=False, sliding_window=5)
    request = stub(0, (2, 18))
    assert admit(manager, request, 10)
    request.block_table[1] = manager.block_pool.null_block
    with pytest.raises(InvariantError, match="null blocks, of which at most 1"):
        manager.check([request])
