"""`RunTables`: small literals, misuse, and what `check` finds."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from cache.errors import CacheError, InvariantError, NoFreeBlocksError
from cache.tokens import ListTokens, SegmentTokens
from cache.v1.runs.extents import Extent, chain
from cache.v1.runs.tables import RunTables
from cache.v1.tables import NOTHING_FOUND
from tests.cache.run_twins import Calls, Twin

if TYPE_CHECKING:
    from cache.tokens import Segment
    from cache.v1.tables import Found, Tables


def request(request_id: int, *prompt: Segment, output: int | None = None) -> Twin:
    num_tokens = sum(length for _, length in prompt)
    segment = 1000 + request_id if output is None else output
    return Twin(request_id, num_tokens, SegmentTokens(prompt, segment))


def tables(num_gpu_blocks: int = 10, *, unhashed_first: bool = True) -> RunTables:
    return RunTables(num_gpu_blocks, 16, unhashed_first=unhashed_first)


def admit(manager: Tables, wanted: Twin) -> Found:
    found = manager.find(wanted, wanted.num_tokens)
    manager.begin(wanted, wanted.num_tokens, found)
    return found


def test_blocks_are_handed_out_from_1_and_come_back_last_first() -> None:
    manager = tables(6)
    first = request(0, (2, 48))
    assert admit(manager, first) == NOTHING_FOUND
    assert manager.block_ids(first) == [1, 2, 3]
    assert (manager.num_free_blocks, manager.num_logical_blocks) == (2, 3)
    assert manager.num_registered_blocks(first) == 3
    assert manager.free(first) == 3
    assert manager.free_block_ids() == [4, 5, 3, 2, 1]
    assert (manager.num_free_blocks, manager.num_logical_blocks) == (5, 0)


@pytest.mark.parametrize(
    ("unhashed_first", "free"), [(True, [3, 4, 5, 2, 1]), (False, [4, 5, 3, 2, 1])]
)
def test_a_block_that_is_not_full_goes_where_the_release_puts_it(
    unhashed_first: bool, free: list[int]
) -> None:
    manager = tables(6, unhashed_first=unhashed_first)
    first = request(0, (2, 40))
    admit(manager, first)
    assert manager.num_registered_blocks(first) == 2
    manager.free(first)
    assert manager.free_block_ids() == free


@pytest.mark.parametrize(
    ("unhashed_first", "free"),
    [(True, [4, 3, 2, 5, 1]), (False, [5, 4, 3, 2, 1])],
)
def test_of_blocks_that_are_not_full_the_last_is_reused_first(
    unhashed_first: bool, free: list[int]
) -> None:
    manager = tables(6, unhashed_first=unhashed_first)
    first = request(0, (2, 20))
    admit(manager, first)
    manager.append_blocks([first.table])
    manager.append_blocks([first.table])
    manager.free(first)
    assert manager.free_block_ids() == free


def test_a_run_is_shared_as_far_as_two_prompts_agree() -> None:
    manager = tables()
    long, short = request(0, (2, 96)), request(1, (2, 40), (4, 20))
    admit(manager, long)
    found = admit(manager, short)
    assert (found.num_blocks, found.num_revived) == (2, 0)
    assert manager.block_ids(short) == [1, 2, 7, 8]
    assert manager.free(long) == 4
    assert manager.free_block_ids() == [9, 6, 5, 4, 3]
    assert manager.free(short) == 4
    assert manager.free_block_ids() == [8, 9, 6, 5, 4, 3, 7, 2, 1]
    manager.check([])


def test_a_hit_in_the_middle_of_the_queue_leaves_the_rest_in_place() -> None:
    manager = tables(8)
    for each in (request(0, (2, 64)), request(1, (4, 32))):
        admit(manager, each)
        manager.free(each)
    assert manager.free_block_ids() == [7, 4, 3, 2, 1, 6, 5]
    found = admit(manager, request(2, (2, 33), (6, 15)))
    assert (found.num_blocks, found.num_revived) == (2, 2)
    assert manager.free_block_ids() == [4, 3, 6, 5]


def test_the_front_of_the_queue_is_evicted_from_the_tail_of_a_run() -> None:
    manager = tables(6)
    first = request(0, (2, 80))
    admit(manager, first)
    manager.free(first)
    second = request(1, (4, 32))
    admit(manager, second)
    assert manager.block_ids(second) == [5, 4]
    assert manager.num_evictions == 2
    assert manager.find(first, 80).num_blocks == 3


def found_ids(manager: RunTables, wanted: Twin) -> list[int]:
    """The blocks that a look-up finds, all of one run."""
    found = manager.find(wanted, wanted.num_tokens)
    return [i for each in chain(found.parts[0], found.num_blocks) for i in each.ids]


def test_of_a_full_hit_the_last_block_is_computed_again_and_kept() -> None:
    manager = tables(8)
    first, second, third = (request(i, (2, 32)) for i in range(3))
    for each, ids in ((first, [1, 2]), (second, [1, 3]), (third, [1, 4])):
        admit(manager, each)
        assert manager.block_ids(each) == ids
    longer = request(3, (2, 33))
    assert found_ids(manager, longer) == [1, 2]
    manager.free(first)
    assert found_ids(manager, longer) == [1, 2]
    fillers = [request(4, (4, 64)), request(5, (6, 16))]
    admit(manager, fillers[0])  # takes block 2: of the copies the older one follows
    assert found_ids(manager, longer) == [1, 3]
    manager.check([second, third, fillers[0]])
    manager.free(second)
    admit(manager, fillers[1])
    assert found_ids(manager, longer) == [1, 4]
    manager.check([third, *fillers])


def test_a_copy_that_is_evicted_first_is_forgotten() -> None:
    manager = tables(4)
    first, second = request(0, (2, 32)), request(1, (2, 32))
    admit(manager, first)
    admit(manager, second)
    manager.free(second)
    admit(manager, request(2, (4, 16)))
    assert manager.num_evictions == 1
    assert found_ids(manager, request(3, (2, 33))) == [1, 2]


def test_a_decode_that_evicts_a_block_leaves_its_copy_findable() -> None:
    manager = tables(8)
    first, second = request(0, (2, 64)), request(1, (2, 64))
    manager.begin(first, 16, manager.find(first, 64))
    admit(manager, second)
    assert manager.extend(first, 64, 0)
    assert manager.block_ids(second) == [1, 2, 3, 4]
    manager.free(second)
    manager.append_blocks([first.table])
    assert manager.block_ids(first) == [1, 5, 6, 7, 4]
    assert found_ids(manager, request(2, (2, 65))) == [1, 2, 3, 7]
    manager.check([first])


def test_a_decode_takes_a_block_and_registers_it_when_it_is_full() -> None:
    manager = tables()
    first, second = request(0, (2, 32)), request(1, (4, 32))
    for each in (first, second):
        admit(manager, each)
    for num_registered in (2, 3):
        manager.append_blocks([second.table, first.table])
        assert manager.num_registered_blocks(second) == num_registered
        manager.register_blocks([second.table, first.table])
        assert manager.num_registered_blocks(second) == num_registered + 1
    assert manager.block_ids(second) == [3, 4, 5, 7]
    assert manager.block_ids(first) == [1, 2, 6, 8]
    follow_up = request(2, (2, 32), (1000, 32), (6, 10))
    assert manager.find(follow_up, 74).num_blocks == 4


def test_what_is_generated_after_a_hit_begins_an_extent_of_its_own() -> None:
    manager = tables()
    writer = request(0, (2, 16))
    admit(manager, writer)
    manager.append_blocks([writer.table])
    manager.register_blocks([writer.table])
    reader = request(1, (2, 16), (1000, 17))
    assert admit(manager, reader).num_blocks == 2
    manager.append_blocks([writer.table])
    manager.register_blocks([writer.table])
    assert manager.block_ids(writer) == [1, 2, 4]
    assert manager.block_ids(reader) == [1, 2, 3]
    manager.check([writer, reader])
    assert manager.free(writer) == 1


def test_an_answer_goes_on_behind_where_a_reader_cut_it() -> None:
    manager = tables()
    writer = request(0, (2, 16))
    admit(manager, writer)
    for _ in range(3):
        manager.append_blocks([writer.table])
        manager.register_blocks([writer.table])
    reader = request(1, (2, 16), (1000, 33))
    assert admit(manager, reader).num_blocks == 3
    manager.free(reader)
    manager.append_blocks([writer.table])
    manager.register_blocks([writer.table])
    assert manager.block_ids(writer) == [1, 2, 3, 4, 5]
    assert manager.find(request(2, (2, 16), (1000, 65)), 81).num_blocks == 5
    manager.check([writer])


def test_a_prompt_in_chunks_is_registered_as_far_as_it_is_computed() -> None:
    manager = tables()
    first = request(0, (2, 100))
    manager.begin(first, 40, manager.find(first, 100))
    assert (manager.num_registered_blocks(first), manager.num_free_blocks) == (2, 6)
    assert manager.extend(first, 41, 0)
    assert (manager.num_registered_blocks(first), manager.num_free_blocks) == (2, 6)
    assert manager.extend(first, 100, 0)
    assert (manager.num_registered_blocks(first), manager.num_free_blocks) == (6, 2)
    assert manager.block_ids(first) == [1, 2, 3, 4, 5, 6, 7]


def test_plain_token_ids_are_found_again_block_by_block() -> None:
    manager = tables()
    first = Twin(0, 48, ListTokens([1] * 32 + [2] * 16))
    second = Twin(1, 48, ListTokens([1] * 32 + [3] * 16))
    admit(manager, first)
    assert admit(manager, second).num_blocks == 2
    assert manager.block_ids(second) == [1, 2, 4]
    manager.free(first)
    manager.check([second])


def test_a_request_that_leaves_the_queue_is_forgotten() -> None:
    manager = tables()
    aborted = request(0, (2, 32))
    admit(manager, request(1, (4, 40)))
    manager.find(aborted, 32)
    assert manager.free(aborted) == 0
    heir = request(0, (4, 40))  # of its id
    assert manager.find(heir, 40).num_blocks == 2


def test_a_watch_waits_for_the_block_behind_the_hits() -> None:
    manager = tables()
    writer, head = request(0, (2, 16)), request(1, (2, 16), (1000, 33), (6, 50))
    admit(manager, writer)
    manager.watch(head, head.num_tokens, manager.find(head, head.num_tokens))
    admit(manager, request(2, (8, 16)))
    assert not manager.watch_hit
    manager.append_blocks([writer.table])
    assert not manager.watch_hit
    manager.register_blocks([writer.table])
    assert manager.watch_hit
    manager.watch(head, head.num_tokens, manager.find(head, head.num_tokens))
    assert not manager.watch_hit
    manager.append_blocks([writer.table])
    manager.register_blocks([writer.table])
    assert manager.watch_hit
    manager.watch(None, 0, NOTHING_FOUND)
    manager.append_blocks([writer.table])
    manager.register_blocks([writer.table])
    assert not manager.watch_hit


def test_who_may_write_what_is_waited_for_is_known_before() -> None:
    manager = tables()
    writer, other = request(0, (2, 16)), request(1, (4, 16))
    head = request(2, (2, 16), (1000, 33))
    admit(manager, writer)
    admit(manager, other)
    assert not manager.will_fill_watched([writer])  # nobody waits
    manager.watch(head, 49, manager.find(head, 49))
    assert manager.will_fill_watched([other, writer])
    assert not manager.will_fill_watched([other])
    quoting = request(4, (4, 16), (6, 33))  # a prompt of which `other` has its share
    manager.watch(quoting, 49, manager.find(quoting, 49))
    assert not manager.will_fill_watched([other])
    plain = Twin(3, 16, ListTokens([1] * 64))
    admit(manager, plain)
    assert manager.will_fill_watched([plain])  # not known before it is hashed


def test_a_watch_ends_with_what_a_look_up_asks_for() -> None:
    manager = tables()
    writer, head = request(0, (2, 16)), request(1, (2, 16), (1000, 16))
    admit(manager, writer)
    # Of two full blocks the last is computed again, whoever has it.
    manager.watch(head, 32, manager.find(head, 32))
    manager.append_blocks([writer.table])
    manager.register_blocks([writer.table])
    assert not manager.watch_hit


def test_an_observer_is_told_what_moves() -> None:
    manager = tables(4)
    calls = Calls()
    manager.observer = calls
    assert manager.observer is calls
    first = request(0, (2, 48))
    admit(manager, first)
    manager.free(first)
    assert calls.told == {
        (kind, i): 1 for kind in ("taken", "released") for i in (1, 2, 3)
    }
    calls.told.clear()
    admit(manager, request(1, (2, 16), (4, 16)))
    assert calls.told == {("revived", 1): 1, ("evicted", 3): 1, ("taken", 3): 1}


def test_what_is_evicted_is_gone_without_a_garbage_collection() -> None:
    # Links of evicted extents must neither form cycles nor hang on one that is held.
    manager = tables(40)
    for each in (request(0, (2, 32)), request(1, (4, 32))):
        admit(manager, each)
        manager.free(each)
    admit(manager, request(2, (2, 33)))  # from in front of another, for good
    gc.collect()
    gc.disable()
    try:
        for i in range(3, 200):
            passing = request(i, (2, 32), (10 + 2 * i, 32), (11 + 2 * i, 48))
            admit(manager, passing)
            manager.append_blocks([passing.table])
            manager.free(passing)
        num_extents = sum(type(each) is Extent for each in gc.get_objects())
    finally:
        gc.enable()
    assert manager.num_evictions > 500
    assert num_extents < 60


def test_more_blocks_than_are_free_are_refused_and_nothing_changes() -> None:
    manager = tables(4)
    first, second = request(0, (2, 32)), request(1, (4, 32))
    admit(manager, first)
    with pytest.raises(NoFreeBlocksError, match="cannot take 2 blocks: 1 of 3"):
        admit(manager, second)
    assert not manager.extend(first, 64, 32)
    with pytest.raises(NoFreeBlocksError, match="cannot take 2 blocks"):
        manager.append_blocks([first.table, first.table])
    manager.check([first])
    assert manager.free_block_ids() == [3]
    assert manager.free(second) == 0
    assert manager.block_ids(second) == []
    assert manager.num_registered_blocks(second) == 0


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(CacheError, match="block_size must be at least 1, got 0"):
        RunTables(4, 0, unhashed_first=True)
    with pytest.raises(CacheError, match="at least 2 blocks"):
        RunTables(1, 16, unhashed_first=True)


def test_check_finds_a_table_too_many_or_too_few() -> None:
    manager = tables()
    first, second = request(0, (2, 40)), request(1, (2, 40))
    admit(manager, first)
    admit(manager, second)
    manager.check([first, second])
    with pytest.raises(InvariantError, match="a block is lost"):
        manager.check([first])
    with pytest.raises(InvariantError, match="stands twice"):
        manager.check([first, second, second])


def test_check_finds_a_broken_count() -> None:
    manager = tables()
    manager.num_free_blocks -= 1
    with pytest.raises(InvariantError, match="9 blocks are free and 0 entries"):
        manager.check([])


def test_check_finds_an_extent_that_is_not_the_table_s() -> None:
    manager = tables()
    first = request(0, (2, 40))
    admit(manager, first)
    first.table.parts[0].start = 1
    with pytest.raises(InvariantError, match="stands for block 0 of run"):
        manager.check([first])
    first.table.parts[0].start = 0
    first.table.parts[0].num_refs = 2
    with pytest.raises(InvariantError, match="1 tables hold"):
        manager.check([first])
