"""Extents, their queue, the index of runs and the pool: what their checks find."""

from __future__ import annotations

from collections import Counter

import pytest

from cache.errors import InvariantError
from cache.v1.runs.extents import Extent, ExtentQueue, chain
from cache.v1.runs.index import RunIndex
from cache.v1.runs.pool import RunPool

KEY = 7


def queue_of(*extents: Extent) -> ExtentQueue:
    queue = ExtentQueue()
    for extent in extents:
        queue.append(extent)
    return queue


def free(*ids: int) -> Extent:
    return Extent(KEY, 0, list(ids), 0)


def test_the_queue_keeps_order_as_extents_leave_and_come() -> None:
    first, second, third, fourth = (free(i) for i in range(4))
    queue = queue_of(first, second, third)
    queue.remove(second)
    queue.insert_before(fourth, third)
    queue.check()
    assert [extent.ids for extent in queue] == [[0], [3], [2]]


def test_the_queue_s_check_finds_what_is_wrong() -> None:
    with pytest.raises(InvariantError, match="holds no block"):
        queue_of(free()).check()
    with pytest.raises(InvariantError, match="is held"):
        queue_of(Extent(KEY, 0, [1], 1)).check()
    first, second = free(1), free(2)
    queue = queue_of(first, second)
    second.prev = second
    with pytest.raises(InvariantError, match="does not link back"):
        queue.check()
    queue = queue_of(first, second)
    queue.end.prev = first
    with pytest.raises(InvariantError, match="its end does not link to"):
        queue.check()


def test_extents_are_cut_and_joined() -> None:
    index = RunIndex()
    whole = index.append(KEY, None, [1, 2, 3])
    last = index.append(KEY, whole, [4])
    rest = index.split(whole, 1)
    assert [extent.ids for extent in chain(whole, 4)] == [[1], [2, 3], [4]]
    assert [extent.start for extent in chain(whole, 4)] == [0, 1, 3]
    assert index.last(KEY) is last
    index.check()
    index.merge(whole, rest)
    assert [extent.ids for extent in chain(whole, 4)] == [[1, 2, 3], [4]]
    index.check()


def test_the_oldest_copy_follows_an_evicted_block_in_its_place() -> None:
    index = RunIndex()
    whole = index.append(KEY, None, [1, 2, 3])
    copies = [index.add_copy(KEY, at, i) for at, i in ((2, 10), (1, 11), (1, 12))]
    index.check()
    assert {id(extent) for extent in index.extents()} == {
        id(extent) for extent in [whole, *copies]
    }
    index.evict(whole, 2)
    del whole.ids[1:]
    index.check()
    assert [extent.ids for extent in chain(whole, 3)] == [[1], [11], [10]]
    assert index.copies == {(KEY, 1): [copies[2]]}
    index.evict(copies[0], 1)
    index.evict(copies[1], 1)
    assert [extent.ids for extent in chain(whole, 2)] == [[1], [12]]
    assert not index.copies
    index.evict(copies[2], 1)
    index.evict(whole, 1)
    assert not index.first


def test_a_first_block_is_followed_by_its_copy_as_the_first() -> None:
    index = RunIndex()
    first = index.append(KEY, None, [1])
    copy = index.add_copy(KEY, 0, 9)
    index.evict(first, 1)
    assert index.first == {KEY: copy}
    assert copy.before is None
    index.check()


def test_the_index_s_check_finds_what_is_wrong() -> None:
    index = RunIndex()
    first = index.append(KEY, None, [1, 2])
    second = index.append(KEY, first, [3])
    second.start = 1
    with pytest.raises(InvariantError, match="does not go on at block 2"):
        index.check()
    second.start, second.before = 2, None
    with pytest.raises(InvariantError, match="does not link back"):
        index.check()
    second.before, second.is_copy = first, True
    with pytest.raises(InvariantError, match="is empty or a copy"):
        index.check()
    second.is_copy = False
    copy = index.add_copy(KEY, 3, 9)
    with pytest.raises(InvariantError, match="block 3 of run 7 has copies"):
        index.check()
    index.evict(copy, 1)
    copy = index.add_copy(KEY, 2, 9)
    copy.is_copy = False
    with pytest.raises(InvariantError, match="is among the copies of block 2"):
        index.check()
    copy.is_copy = True
    copy.ids.append(10)
    with pytest.raises(InvariantError, match="is not one block"):
        index.check()


def test_the_next_ids_come_from_the_front_one_by_one() -> None:
    pool = RunPool(8, unhashed_first=True)
    table = pool.index.append(KEY, None, pool.take(5))
    assert pool.release([table], [0], 5) == 5
    assert pool.free_block_ids() == [6, 7, 5, 4, 3, 2, 1]
    ids = pool.ids_to_pop(1)
    assert ids.pop() == 6
    ids = pool.ids_to_pop(3)  # the last loose one, and two of the extent
    assert [ids.pop() for _ in range(3)] == [7, 5, 4]
    assert pool.num_evictions == 2
    ids = pool.ids_to_pop(2)
    assert ids is table.ids
    assert [ids.pop() for _ in range(2)] == [3, 2]
    assert pool.num_evictions == 4
    pool.check(Counter(), [2, 3, 4, 5, 6, 7])


def test_the_pool_s_check_finds_what_is_wrong() -> None:
    pool = RunPool(4, unhashed_first=True)
    extent = pool.index.append(KEY, None, pool.take(2))
    pool.check(Counter([extent]), [])
    with pytest.raises(InvariantError, match="2 tables hold"):
        pool.check(Counter({extent: 2}), [])
    with pytest.raises(InvariantError, match="a block is lost"):
        pool.check(Counter([extent]), [1])
    stranger = Extent(KEY + 1, 0, [3], 1)
    pool.take(1)
    with pytest.raises(InvariantError, match="has a key and is not indexed"):
        pool.check(Counter([extent, stranger]), [])
