"""Eviction order, and what an evictor refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import CacheError, InvariantError
from cache.v0.evictor import (
    EVICTORS,
    CachedBlock,
    KeyedEvictor,
    LRUEvictor,
    make_evictor,
)


def drain(evictor: KeyedEvictor) -> list[int]:
    return [evictor.evict()[0] for _ in range(evictor.num_blocks)]


def test_oldest_goes_first_then_the_deepest_then_the_smallest_id():
    evictor = LRUEvictor()
    evictor.add(1, 11, 16, 5.0)
    evictor.add(2, 12, 32, 5.0)
    evictor.add(4, 14, 32, 5.0)
    evictor.add(3, 13, 16, 4.0)
    evictor.add(5, 15, 16, -1.0)
    assert drain(evictor) == [5, 3, 2, 4, 1]


def test_evict_returns_the_key_with_the_block():
    evictor = LRUEvictor()
    evictor.add(7, 70, 16, 0.0)
    assert 7 in evictor
    assert evictor.evict() == (7, 70)
    assert 7 not in evictor


def test_an_update_moves_a_block_back():
    evictor = LRUEvictor()
    evictor.add(1, 11, 16, 1.0)
    evictor.add(2, 12, 16, 2.0)
    evictor.update(1, 3.0)
    evictor.check()
    assert drain(evictor) == [2, 1]


def test_misuse_is_refused_with_the_block():
    evictor = LRUEvictor()
    with pytest.raises(CacheError, match="no block to evict"):
        evictor.evict()
    with pytest.raises(CacheError, match="block 3 is not in the evictor"):
        evictor.remove(3)
    with pytest.raises(CacheError, match="block 3 is not in the evictor"):
        evictor.update(3, 1.0)
    evictor.add(3, 33, 16, 0.0)
    with pytest.raises(CacheError, match="block 3 is in the evictor already"):
        evictor.add(3, 34, 16, 1.0)
    assert evictor.evict() == (3, 33)


def test_names_are_those_of_the_table():
    assert {"lru": LRUEvictor} == EVICTORS
    assert isinstance(make_evictor("lru"), LRUEvictor)
    with pytest.raises(ValueError, match="no evictor is named 'fifo'; there are: lru"):
        make_evictor("fifo")


def test_check_finds_a_block_that_cannot_be_evicted():
    evictor = LRUEvictor()
    evictor.add(1, 11, 16, 1.0)
    evictor._heap.clear()
    with pytest.raises(InvariantError):
        evictor.check()


class DeepestFirst(KeyedEvictor):
    """A policy of a user: one key."""

    def key(self, block: CachedBlock) -> tuple[float, ...]:
        return -block.num_hashed_tokens, block.block_id


def test_a_policy_is_one_key():
    evictor = DeepestFirst()
    evictor.add(1, 11, 16, 0.0)
    evictor.add(2, 12, 48, 9.0)
    assert drain(evictor) == [2, 1]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "update", "evict"]),
            st.integers(0, 5),
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        max_size=300,
    )
)
def test_the_lazy_heap_equals_a_sorted_list(actions):
    evictor = LRUEvictor()
    model: dict[int, tuple[int, int]] = {}
    for action, block_id, depth, now in actions:
        if action == "add" and block_id not in model:
            evictor.add(block_id, block_id + 100, depth, now)
            model[block_id] = (now, -depth)
        elif action == "remove" and block_id in model:
            evictor.remove(block_id)
            del model[block_id]
        elif action == "update" and block_id in model:
            evictor.update(block_id, now)
            model[block_id] = (now, model[block_id][1])
        elif action == "evict" and model:
            first = min(model, key=lambda held: (*model[held], held))
            assert evictor.evict() == (first, first + 100)
            del model[first]
        evictor.check()
        assert evictor.num_blocks == len(model)
        assert len(evictor._heap) <= 2 * len(model) + 66
