"""Block tables by literals, and what they refuse."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import BlockTableError, InvariantError, NoFreeBlocksError
from cache.sequences import Device
from cache.tokens import TokenRuns
from cache.v0.block_table import BlockTable
from cache.v0.lazy_table import LazyBlockTable
from cache.v0.tiered import CpuGpuBlockAllocator

SIZE = 4


def make_allocator(num_gpu: int = 10, kind: str = "naive") -> CpuGpuBlockAllocator:
    return CpuGpuBlockAllocator.create(kind, num_gpu, 4, SIZE)


def make(num_tokens: int, num_gpu: int = 10, window: int | None = None) -> BlockTable:
    table = BlockTable(SIZE, make_allocator(num_gpu), max_block_sliding_window=window)
    table.allocate(list(range(num_tokens)))
    return table


def contents(table: BlockTable) -> list[list[int]]:
    return [list(block.token_ids) for block in table.blocks]


def num_free(table: BlockTable) -> int:
    return table._allocator.get_num_free_blocks(Device.GPU)


@pytest.mark.parametrize(
    ("num_tokens", "num_lookahead_slots", "num_blocks"),
    [(0, 0, 0), (1, 0, 1), (4, 0, 1), (5, 0, 2), (4, 1, 2), (0, 9, 3)],
)
def test_required_blocks(num_tokens, num_lookahead_slots, num_blocks):
    tokens = [0] * num_tokens
    assert (
        BlockTable.get_num_required_blocks(tokens, SIZE, num_lookahead_slots)
        == num_blocks
    )


def test_allocate_fills_blocks_in_order():
    table = make(10)
    assert table.physical_block_ids == [0, 1, 2]
    assert contents(table) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert table.num_full_slots == 10
    assert table.get_unseen_token_ids(list(range(12))) == [10, 11]


def test_appends_fill_the_last_block_and_take_new_ones():
    table = make(6)
    table.append_token_ids([6])
    assert table.physical_block_ids == [0, 1]
    table.append_token_ids([7, 8, 9, 10, 11, 12])
    assert table.physical_block_ids == [0, 1, 2, 3]
    assert contents(table)[1:] == [[4, 5, 6, 7], [8, 9, 10, 11], [12]]
    table.append_token_ids([])
    assert table.num_full_slots == 13
    table.check()


def test_lookahead_slots_take_blocks_ahead_of_need():
    table = make(4)
    table.append_token_ids([4], num_lookahead_slots=4)
    assert table.physical_block_ids == [0, 1, 2]
    assert contents(table) == [[0, 1, 2, 3], [4], []]
    table.append_token_ids([5, 6, 7, 8])
    assert table.physical_block_ids == [0, 1, 2]
    table.ensure_num_empty_slots(4)
    assert table.physical_block_ids == [0, 1, 2, 3]
    table.ensure_num_empty_slots(4)
    assert table.num_held_blocks == 4
    table.check()


def test_a_fork_shares_blocks_until_it_writes():
    table = make(6)
    fork = table.fork()
    assert fork.physical_block_ids == [0, 1]
    fork.append_token_ids([60])
    table.append_token_ids([61])
    assert (table.physical_block_ids, fork.physical_block_ids) == ([0, 1], [0, 2])
    assert contents(fork)[1] == [4, 5, 60]
    assert table._allocator.clear_copy_on_writes() == [(1, 2)]
    table.free()
    fork.free()
    assert num_free(table) == 10


def test_forked_lookahead_blocks_are_copied_when_written():
    table = make(4)
    table.ensure_num_empty_slots(4)
    fork = table.fork()
    fork.append_token_ids([9])
    assert (table.physical_block_ids, fork.physical_block_ids) == ([0, 1], [0, 2])


def test_freed_front_to_back():
    table = make(12)
    table.free()
    assert not table.is_allocated
    table.allocate(list(range(12)))
    assert table.physical_block_ids == [2, 1, 0]


def test_a_window_drops_blocks_for_the_null_block():
    table = make(16, window=2)
    table.append_token_ids([16], num_computed_slots=11)
    assert table.physical_block_ids == [0, 1, 2, 3, 5]  # 4 is the null block
    table.append_token_ids([17], num_computed_slots=16)
    assert table.physical_block_ids == [4, 4, 2, 3, 5]
    assert (table.num_dropped_blocks, table.num_held_blocks) == (2, 3)
    assert num_free(table) == 6
    table.check()
    fork = table.fork()
    assert fork.physical_block_ids == [4, 4, 2, 3, 5]
    fork.append_token_ids([18], num_computed_slots=20)
    fork.check()
    assert fork.physical_block_ids == [4, 4, 4, 3, 1]
    table.free()
    fork.free()
    assert num_free(table) == 9
    with pytest.raises(ValueError, match="needs num_computed_slots"):
        make(1, window=2).append_token_ids([1])


@given(
    num_tokens=st.integers(1, 20),
    num_new=st.integers(0, 12),
    num_lookahead_slots=st.integers(0, 9),
)
def test_touched_blocks_bound_what_an_append_takes(
    num_tokens, num_new, num_lookahead_slots
):
    table = make(num_tokens, num_gpu=20)
    new = list(range(num_new))
    touched = table.get_num_blocks_touched_by_append_slots(new, num_lookahead_slots)
    room = SIZE - num_tokens % SIZE
    assert touched == 1 + ceil((num_new + num_lookahead_slots - room) / SIZE)
    before = num_free(table)
    keep = table.fork()  # the worst case: what is written to is copied
    table.append_token_ids(new, num_lookahead_slots)
    assert before - num_free(table) <= touched
    table.check()
    keep.check()


def test_appends_without_room_change_nothing():
    table = make(6, num_gpu=3)
    fork = table.fork()
    for append in (
        lambda: table.append_token_ids([6, 7, 8, 9, 10]),
        lambda: table.append_token_ids([6, 7, 8]),  # a copy and a new block
        lambda: table.append_unseen(list(range(9))),
        lambda: table.ensure_num_empty_slots(7),
    ):
        with pytest.raises(NoFreeBlocksError, match="6 tokens needs 2 more GPU blocks"):
            append()
        assert table.physical_block_ids == fork.physical_block_ids == [0, 1]
        assert table.num_full_slots == 6
        assert num_free(table) == 1
        table.check()


def test_misuse_is_refused():
    table = make(6)
    with pytest.raises(BlockTableError, match=r"holds blocks \[0, 1\] already"):
        table.allocate([1])
    assert table.num_full_slots == 6
    table.free()
    for misuse, verb in [
        (table.free, "freed"),
        (table.fork, "forked"),
        (lambda: table.append_token_ids([1]), "appended to"),
        (lambda: table.append_unseen([1]), "appended to"),
        (lambda: table.ensure_num_empty_slots(1), "extended"),
    ]:
        with pytest.raises(BlockTableError, match=f"cannot be {verb}"):
            misuse()
    with pytest.raises(BlockTableError, match="no tokens"):
        table.allocate([])
    assert num_free(table) == 10


def test_a_sequence_that_lost_tokens_is_refused():
    table = make(6)
    with pytest.raises(BlockTableError, match="has 5 tokens, its table 6"):
        table.append_unseen(list(range(5)))
    table.check()


def test_check_finds_a_wrong_count():
    table = make(6)
    table.num_full_slots = 5
    with pytest.raises(InvariantError, match="should hold 1"):
        table.check()


@pytest.mark.parametrize("kind", ["naive", "prefix_caching"])
@given(
    chunks=st.lists(st.integers(0, 9), min_size=1, max_size=6), first=st.integers(1, 9)
)
def test_plain_ids_runs_and_views_give_the_same_blocks(kind, chunks, first):
    """Chunks copied, or the sequence's own list looked at: the blocks are the same."""
    plain = list(range(first + sum(chunks)))
    runs = TokenRuns([(3, 0, len(plain))])
    results = []
    for tokens in (plain, runs):
        for by_view in (False, True):
            allocator = make_allocator(64, kind)
            tables = []
            for _ in range(2):
                table = BlockTable(SIZE, allocator)
                table.allocate(tokens[:first])
                for chunk in chunks:
                    end = table.num_full_slots + chunk
                    if by_view:
                        table.append_unseen(tokens[:end])
                    else:
                        table.append_token_ids(tokens[table.num_full_slots : end])
                table.check()
                tables.append(table)
            results.append([table.physical_block_ids for table in tables])
    assert all(result == results[0] for result in results)


@given(
    first=st.integers(1, 9),
    appends=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=8),
)
def test_a_lazy_table_appends_as_a_plain_one(first, appends):
    plain = BlockTable(SIZE, make_allocator())
    lazy = LazyBlockTable(SIZE, make_allocator())
    tokens = list(range(first))
    for table in (plain, lazy):
        table.allocate(tokens)
    for num_new, num_lookahead_slots in appends:
        grown = list(range(len(tokens) + num_new))
        refusals = []
        for table in (plain, lazy):
            try:
                table.append_unseen(grown, num_lookahead_slots)
            except NoFreeBlocksError as error:
                refusals.append(str(error))
        assert len(set(refusals)) == len(refusals) / 2
        tokens = tokens if refusals else grown
        assert lazy._physical is not None  # no block was made
        assert lazy.physical_block_ids == plain.physical_block_ids
        assert lazy.num_full_slots == plain.num_full_slots == len(tokens)
        assert num_free(lazy) == num_free(plain)
    if len(tokens) > 1:
        with pytest.raises(BlockTableError, match="before tokens are taken back"):
            lazy.append_unseen(tokens[:-1])
    assert contents(lazy) == contents(plain)
    lazy.check()
    for table in (plain, lazy):
        table.free()
    assert lazy._allocator.allocate_mutable_block(None, Device.GPU).block_id == (
        plain._allocator.allocate_mutable_block(None, Device.GPU).block_id
    )
