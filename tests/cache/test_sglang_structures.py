"""SGLang's slots and radix tree against what a dictionary of prefixes says."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from cache.errors import CacheConfigError, InvariantError, NoFreeBlocksError
from cache.sglang.allocator import RequestSlots, SlotAllocator
from cache.sglang.nodes import RANKS, TreeNode
from cache.sglang.radix_cache import RadixCache
from cache.sglang.slot_table import SlotTable
from cache.sglang.tables import ChunkCache, TreeCache

NUM_TOKENS = 48


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def test_single_slots_come_from_the_front_and_go_to_the_end() -> None:
    slots = SlotAllocator(6)
    assert slots.allocate(4).tolist() == [1, 2, 3, 4]
    slots.free(ids(3, 1))
    assert slots.num_available_tokens == 4
    assert slots.allocate(4).tolist() == [5, 6, 3, 1]
    with pytest.raises(NoFreeBlocksError, match="1 pages of 1 tokens are needed, 0"):
        slots.allocate(1)


def test_pages_are_sorted_and_go_to_the_front() -> None:
    slots = SlotAllocator(16, 4)
    (first,) = slots.extend([(0, 6, -1)], 6)
    assert first.tolist() == [4, 5, 6, 7, 8, 9]
    # the last page is filled first
    (more,) = slots.extend([(6, 9, 9)], 3)
    assert more.tolist() == [10, 11, 12]
    slots.free(np.concatenate((more[2:], first)))
    assert slots.num_available_tokens == 16
    grown = slots.decode(ids(7, 13), ids(4, 2))
    assert grown.tolist() == [4, 14]


def test_freed_ids_may_wait_to_be_sorted() -> None:
    slots = SlotAllocator(4, need_sort=True)
    slots.allocate(3)
    slots.free(ids(3))
    slots.free(ids(1))
    assert slots.num_available_tokens == 3
    assert slots.allocate(1).tolist() == [4]
    assert slots.allocate(2).tolist() == [1, 3]


def test_a_group_is_freed_in_one_call() -> None:
    slots = SlotAllocator(16, 4)
    found = slots.extend([(0, 8, -1), (0, 8, -1)], 16)
    slots.begin_group()
    slots.free(found[1])
    slots.free(found[0])
    assert slots.num_available_tokens == 0
    slots.end_group()
    (again,) = slots.extend([(0, 4, -1)], 4)
    assert again.tolist() == [4, 5, 6, 7]


def test_pools_must_be_whole_pages() -> None:
    with pytest.raises(CacheConfigError, match="multiple of page_size 16"):
        SlotAllocator(40, 16)


def test_request_slots_go_round() -> None:
    slots = RequestSlots(2)
    assert (slots.take(), slots.take()) == (0, 1)
    with pytest.raises(NoFreeBlocksError, match="all 2 request slots"):
        slots.take()
    slots.free(1)
    slots.check([0])
    with pytest.raises(InvariantError):
        slots.check([0, 1])
    later = RequestSlots(3, first=1, from_end=True)  # a batch's in order
    assert later.take_all(2) == [2, 3]
    later.free(2)
    assert later.take_all(2) == [1, 2]
    later.check([1, 2, 3])


def test_a_look_splits_a_node_that_it_matches_in_part() -> None:
    tree = RadixCache(SlotAllocator(8))
    assert tree.insert(ids(5, 6, 7), ids(1, 2, 3)) == 0
    slots, node = tree.match(ids(5, 6, 9))
    assert slots.tolist() == [1, 2]
    assert (node.key.tolist(), tree.num_nodes) == ([5, 6], 2)
    assert tree.insert(ids(5, 6, 9), ids(4, 5, 6)) == 2
    assert tree.match(ids(5, 6, 9))[0].tolist() == [1, 2, 6]
    tree.check()


def test_what_a_lock_holds_is_not_evicted() -> None:
    slots = SlotAllocator(8)
    tree = RadixCache(slots)
    tree.insert(ids(5, 6), slots.allocate(2))
    tree.insert(ids(7), slots.allocate(1))
    node = tree.match(ids(5))[1]
    tree.lock(node)
    tree.evict(8)
    # the tail goes, and the other leaf: what is below a lock may
    assert tree.evictions == [(8, [(1, 3), (1, 2)])]
    assert (tree.num_protected_tokens, slots.num_available_tokens) == (1, 7)
    tree.unlock(node)
    tree.evict(1)
    assert slots.num_available_tokens == 8


@pytest.mark.parametrize(
    ("policy", "gone"),
    [("lru", 2), ("lfu", 2), ("fifo", 1), ("mru", 1), ("filo", 3), ("priority", 2)],
)
def test_which_leaf_goes_first(policy: str, gone: int) -> None:
    slots = SlotAllocator(4)
    tree = RadixCache(slots, policy)
    for token, priority in ((1, 5), (2, 0), (3, 0)):
        tree.insert(ids(token), slots.allocate(1), priority)
    tree.match(ids(1))
    tree.evict(1)
    assert tree.evictions == [(1, [(1, gone)])]


def test_hits_count_from_0_5_10_on() -> None:
    slots = SlotAllocator(4)
    tree = RadixCache(slots, "lfu", counts_hits=True)
    for token in (1, 2, 3):
        tree.insert(ids(token), slots.allocate(1))
    tree.insert(ids(1), ids(9))
    tree.insert(ids(2), ids(9), counts=False)
    tree.evict(2)
    assert tree.evictions == [(2, [(1, 3), (1, 2)])]


def test_pages_of_an_eviction_are_freed_in_order_before_0_5_20() -> None:
    for sorts, expected in ((True, [4, 5]), (False, [8, 9])):
        slots = SlotAllocator(12, 2, in_order=True)
        slots.extend([(0, 8, -1)], 8)
        tree = RadixCache(slots, unified=True, sorts_pages=sorts)
        tree.insert(ids(1, 2, 3, 4), ids(8, 9, 4, 5))
        tree.evict(4)
        (new,) = slots.extend([(0, 2, -1)], 2)
        assert new.tolist() == expected


TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=9)


class TreeMachine(RuleBasedStateMachine):
    """Requests store, share, retract and end, with pages of one or two tokens."""

    tables: Bundle[Any] = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    @rule(
        target=tables,
        size=st.sampled_from([1, 2]),
        policy=st.sampled_from(sorted(RANKS)),
        unified=st.booleans(),
    )
    def begin(self, size: int, policy: str, unified: bool) -> Any:
        if not hasattr(self, "cache"):
            slots = SlotAllocator(NUM_TOKENS, size, in_order=unified)
            tree = RadixCache(slots, policy, counts_hits=unified, unified=unified)
            self.cache = TreeCache(slots, tree)
        return self.store([1, 2])

    def store(self, tokens: list[int]) -> Any:
        """Look up all but the last token, then store the rest if it fits."""
        key = np.array(tokens, np.int64)
        table = SlotTable()
        cache = self.cache
        slots = cache.match(table, key[:-1])
        expected = self.longest(tokens[:-1])
        assert len(slots) == expected, (tokens, expected)
        assert table.node is not None
        cache.tree.lock(table.node)
        table.begin(slots)
        table.num_protected_tokens = len(slots)
        size = cache.tree.page_size
        num_new = len(tokens) - len(slots)
        if not cache.make_room(num_new + 2 * size):
            cache.tree.unlock(table.node)
            return None
        (new,) = cache.allocator.extend(
            [(len(slots), len(tokens), table.last)], num_new
        )
        table.append(new)
        self.held.append((table, key))
        return table, key

    def longest(self, tokens: list[int]) -> int:
        """Return the longest prefix, by brute force over all paths of the tree."""
        size = self.cache.tree.page_size
        best = 0
        todo: list[Any] = [(self.cache.tree.root, [])]
        while todo:
            node, before = todo.pop()
            path = [*before, *node.key.tolist()]
            common = 0
            for mine, other in zip(tokens, path, strict=False):
                if mine != other:
                    break
                common += 1
            best = max(best, common // size * size)
            todo += [(child, path) for child in node.children.values()]
        return best

    @rule(target=tables, tokens=TOKENS)
    def more(self, tokens: list[int]) -> Any:
        return self.store(tokens) if hasattr(self, "cache") else None

    @rule(entry=tables, priority=st.integers(0, 2), num_prompt=st.integers(0, 9))
    def prefilled(self, entry: Any, priority: int, num_prompt: int) -> None:
        if entry is not None and any(entry[0] is each[0] for each in self.held):
            table, key = entry
            self.cache.unfinished(
                table, key, priority, num_prompt_tokens=num_prompt, is_chunk=False
            )
            assert self.longest(key.tolist()) == table.num_protected_tokens

    @rule(entry=consumes(tables), retracts=st.booleans())
    def leave(self, entry: Any, retracts: bool) -> None:
        if entry is None or not any(entry[0] is each[0] for each in self.held):
            return
        table, key = entry
        self.held = [each for each in self.held if each[0] is not table]
        if retracts:
            self.cache.release(table)
        else:
            self.cache.finished(table, key, 0)
            size = self.cache.tree.page_size
            assert self.longest(key.tolist()) == len(key) // size * size

    @rule(num_tokens=st.integers(1, NUM_TOKENS))
    def evict(self, num_tokens: int) -> None:
        if hasattr(self, "cache"):
            tree = self.cache.tree
            before = tree.num_evictable_tokens
            tree.evict(num_tokens)
            assert before - tree.num_evictable_tokens >= min(num_tokens, before)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check([table for table, _ in self.held])
        own = sum(len(table) - table.num_protected_tokens for table, _ in self.held)
        size = cache.tree.page_size
        pages = sum(
            -(-(len(table) - table.num_protected_tokens) // size) * size
            for table, _ in self.held
        )
        total = cache.allocator.num_available_tokens
        total += cache.num_evictable_tokens + cache.num_protected_tokens
        assert total + pages == NUM_TOKENS >= total + own


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_without_a_tree_a_table_is_freed_at_once() -> None:
    slots = SlotAllocator(8)
    cache, table = ChunkCache(slots), SlotTable()
    assert not len(cache.match(table, ids(1, 2)))
    table.append(slots.allocate(3))
    cache.unfinished(table, ids(1, 2, 3), 0, is_chunk=False)
    cache.check([table])
    assert not cache.make_room(6)
    cache.finished(table, ids(1, 2, 3), 0)
    assert slots.num_available_tokens == 8
    cache.check([])


def test_the_unified_tree_has_a_node_that_ends_as_the_prompt_does() -> None:
    slots = SlotAllocator(8)
    tree = RadixCache(slots, counts_hits=True, unified=True)
    cache, table = TreeCache(slots, tree), SlotTable()
    cache.match(table, ids(1, 2))
    table.append(slots.allocate(5))
    cache.finished(table, ids(1, 2, 3, 4, 5), 3, num_prompt_tokens=3)
    (prompt,) = tree.root.children.values()
    (output,) = prompt.children.values()
    assert (prompt.key.tolist(), output.key.tolist()) == ([1, 2, 3], [4, 5])
    assert (prompt.priority, output.priority) == (4, 3)
    assert (prompt.hit_count, output.hit_count) == (1, 1)
    assert prompt.born == output.born
    # only what is missing is evicted: three are free, and two more are asked for
    assert cache.make_room(5)
    assert tree.evictions == [(2, [(2, 4)])]


def test_a_look_at_the_unified_tree_makes_parents_older_than_children() -> None:
    tree = RadixCache(SlotAllocator(8), unified=True)
    tree.insert(ids(1, 2, 3, 4), ids(1, 2, 3, 4))
    tree.match(ids(1, 2, 9))
    (upper,) = tree.root.children.values()
    (lower,) = upper.children.values()
    assert lower.access < upper.access  # touched by the split, not by the look
    tree.match(ids(1, 2, 3, 4))
    assert upper.access < lower.access < upper.access + 1


def test_pages_are_put_in_front_in_the_order_of_tokens() -> None:
    for in_order, expected in ((False, [1, 3, 5]), (True, [5, 1, 3])):
        slots = SlotAllocator(10, 2, in_order=in_order)
        slots.allocate(5)
        slots.begin_group()
        slots.free(ids(10, 11))
        slots.free(ids(2, 3, 6))
        slots.end_group()
        assert slots.num_available_tokens == 6
        assert slots.allocate(3).tolist() == expected


def num_nodes_in_memory() -> int:
    return sum(type(each) is TreeNode for each in gc.get_objects())


def test_a_tree_that_is_cleared_leaves_no_circle_behind() -> None:
    gc.collect()
    before = num_nodes_in_memory()
    gc.disable()  # as in a run
    try:
        tree = RadixCache(SlotAllocator(64))
        for end in (4, 8):
            tree.insert(ids(1, 2, 3, end, end + 1), ids(1, 2, 3, end, end + 1))
        assert num_nodes_in_memory() == before + 4  # the root, too
        tree.clear()
        del tree
        assert num_nodes_in_memory() == before
    finally:
        gc.enable()
