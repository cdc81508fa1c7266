"""Slots and nodes of layers with a window, against what lists of tokens say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from cache.errors import CacheConfigError, NoFreeBlocksError
from cache.sglang.nodes import RANKS
from cache.sglang.radix_cache import RadixCache
from cache.sglang.slot_table import SlotTable
from cache.sglang.tables import ChunkCache, TreeCache
from cache.sglang.windows import TreeWindow, WindowedSlots


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def made(
    num_tokens: int = 32, num_peers: int = 16, size: int = 1, window: int = 3
) -> tuple[WindowedSlots, TreeWindow, TreeCache]:
    slots = WindowedSlots(num_tokens, num_peers, size)
    kept = TreeWindow(window, slots)
    tree = RadixCache(slots, counts_hits=True, unified=True, window=kept)
    return slots, kept, TreeCache(slots, tree, checks_in=True)


def stored(cache: TreeCache, tokens: Any) -> SlotTable:
    """Look a request up, and store what is not there."""
    table = SlotTable()
    found = cache.match(table, tokens[:-1])
    cache.lock(table)
    table.begin(found)
    table.num_protected_tokens = len(found)
    num_new = len(tokens) - len(found)
    assert cache.make_room(num_new + 2 * cache.allocator.page_size)
    (new,) = cache.allocator.extend([(len(found), len(tokens), table.last)], num_new)
    table.append(new)
    return table


# -- slots ------------------------------------------------------------------------


def test_each_slot_has_a_peer_until_that_is_given_back() -> None:
    slots = WindowedSlots(6, 4)
    own = slots.allocate(3)
    assert (own.tolist(), slots.peers(own).tolist()) == ([1, 2, 3], [1, 2, 3])
    slots.free_peers(own[:2])
    assert slots.peers(own).tolist() == [0, 0, 3]
    assert (slots.num_available_tokens, slots.num_available_peers) == (3, 3)
    slots.free_full(own[:2])
    slots.free(own[2:])
    assert (slots.num_available_tokens, slots.num_available_peers) == (6, 4)
    slots.check([])
    with pytest.raises(NoFreeBlocksError, match="for layers with a window, 4 are free"):
        slots.allocate(5)
    assert slots.num_available_tokens == 6


def test_a_page_goes_on_beside_its_peer() -> None:
    slots = WindowedSlots(16, 16, 4)
    other, own = slots.extend([(0, 4, -1), (0, 5, -1)], 9)
    slots.free_peers(other)
    slots.free_full(other)
    (more,) = slots.extend([(5, 10, int(own[-1]))], 5)
    assert more.tolist() == [13, 14, 15, 4, 5]
    assert slots.peers(more).tolist() == [13, 14, 15, 4, 5]
    (next_one,) = slots.decode(more[-1:], ids(10))
    assert slots.peers(ids(next_one)).tolist() == [6]
    slots.check([np.concatenate((own, more, ids(next_one)))])
    with pytest.raises(NoFreeBlocksError, match="2 pages of 4 tokens are needed"):
        slots.extend([(0, 8, -1)], 8)


def test_a_window_has_a_token_at_least() -> None:
    with pytest.raises(CacheConfigError, match="a window must have a token, got 0"):
        TreeWindow(0, WindowedSlots(4, 4))


# -- nodes ------------------------------------------------------------------------


def test_what_is_out_of_the_window_goes_while_its_node_stays() -> None:
    slots, kept, cache = made()
    table = stored(cache, ids(1, 2, 3, 4, 5, 6, 7))
    cache.finished(table, ids(1, 2, 3, 4, 5, 6, 7), 0)
    # cut a window before its end: the older part goes first, and alone
    assert kept.num_evictable_tokens == 7
    cache.tree.evict(0, 1)
    assert (cache.tree.evictions, kept.evictions) == ([(0, [])], [(1, [(4, 1)])])
    assert (slots.num_available_tokens, slots.num_available_peers) == (25, 13)
    assert cache.tree.match(ids(1, 2, 3, 4, 5, 6, 7, 8))[0].tolist() == [*range(1, 8)]
    # a part of a window is no use: found, but not reusable
    assert not len(cache.tree.match(ids(1, 2, 3, 4, 5, 6))[0])
    assert cache.tree.num_found_tokens == 6
    cache.check([])


def test_a_lock_holds_a_window_and_no_more() -> None:
    _, kept, cache = made()
    table = stored(cache, ids(1, 2, 3, 4, 5, 6, 7))
    cache.finished(table, ids(1, 2, 3, 4, 5, 6, 7), 0)
    table = SlotTable()
    cache.match(table, ids(1, 2, 3, 4, 5, 6, 7))
    cache.lock(table)
    assert (kept.num_protected_tokens, kept.num_evictable_tokens) == (3, 4)
    assert cache.num_protected_tokens == 7
    cache.tree.evict(8, 8)
    assert (kept.num_protected_tokens, kept.num_evictable_tokens) == (3, 0)
    # a split within what is held moves the end of the lock up
    cache.match(SlotTable(), ids(1, 2, 3, 4, 5))
    assert kept.num_protected_tokens == 3
    cache.unlock(table)
    assert (kept.num_protected_tokens, kept.num_evictable_tokens) == (0, 3)
    cache.tree.check()


def test_the_upper_part_of_a_node_goes_just_before_the_lower_one() -> None:
    _, kept, cache = made()
    for tokens in (ids(1, 2, 3), ids(4, 5, 6)):
        cache.finished(stored(cache, tokens), tokens, 0)
    older = cache.tree.root.children[ids(1).tobytes()]
    upper = cache.tree.split(older, 1)
    assert [each.key.tolist() for each in kept.oldest_first()] == [
        [1],
        [2, 3],
        [4, 5, 6],
    ]
    assert older.parent is upper
    cache.match(SlotTable(), ids(1, 2, 3))
    keys = [each.key.tolist() for each in kept.oldest_first()]
    assert keys == [[4, 5, 6], [1], [2, 3]]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_request_fills_up_what_a_window_has_dropped(is_held: bool) -> None:
    slots, kept, cache = made()
    first = stored(cache, ids(1, 2, 3, 4, 5, 6, 7))
    cache.finished(first, ids(1, 2, 3, 4, 5, 6, 7), 0)
    holder = SlotTable()
    cache.match(holder, ids(1, 2, 3, 4, 5, 6, 7))
    cache.lock(holder)
    cache.tree.evict(0, 1)  # of the older part: 1, 2, 3, 4
    if not is_held:
        cache.unlock(holder)
    table = stored(cache, ids(1, 2, 3, 4, 9))
    assert table.slots.tolist() == [8, 9, 10, 11, 12]
    cache.finished(table, ids(1, 2, 3, 4, 9), 0)
    again = cache.tree.match(ids(1, 2, 3, 4, 9))[0].tolist()
    # slots that are held stay, with the request's peers; others are the request's
    assert again == ([1, 2, 3, 4] if is_held else [8, 9, 10, 11])
    assert slots.num_available_tokens == 32 - 7
    if is_held:
        cache.unlock(holder)
    assert kept.num_evictable_tokens == 7
    cache.check([])


def test_a_prompt_goes_in_up_to_what_was_found_in_vain() -> None:
    _, kept, cache = made()
    first = stored(cache, ids(1, 2, 3, 4, 5, 6, 7))
    cache.finished(first, ids(1, 2, 3, 4, 5, 6, 7), 0)
    cache.tree.evict(0, 1)  # of the older part
    tokens = ids(1, 2, 3, 4, 5, 9, 9, 9, 9, 9, 9)
    table = stored(cache, tokens)
    assert table.num_branch_tokens == 5
    cache.unfinished(table, tokens, 0, is_chunk=False)
    assert (table.num_protected_tokens, table.num_branch_tokens) == (5, 0)
    # of its own tokens a window is left, before the last one
    assert table.num_slid_tokens == 7
    # of nodes that a window reaches, its own 2 to 4 and 5; 6 and 7 are as they were
    assert (kept.num_protected_tokens, kept.num_evictable_tokens) == (4, 2)
    cache.check([table])


def test_tokens_slide_out_of_the_window_in_whole_pages() -> None:
    slots = WindowedSlots(32, 32, 4)
    for cache, expected in (
        (made(32, 32, 4, 5)[2], 8),  # a whole window in whole pages stays
        (ChunkCache(slots, 5), 12),
    ):
        table = SlotTable()
        cache.match(table, ids())
        (new,) = cache.allocator.extend([(0, 18, -1)], 18)
        table.append(new)
        cache.slide(table, 17, 13)
        assert table.num_slid_tokens == 0  # 12 are behind, 13 were asked for
        cache.slide(table, 17)
        assert table.num_slid_tokens == expected
        assert cache.allocator.num_available_peers == 12 + expected
        cache.check([table])
        cache.release(table)
        cache.check([])


# -- a state machine --------------------------------------------------------------

NUM_TOKENS, NUM_PEERS = 48, 24
TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=12)


class WindowMachine(RuleBasedStateMachine):
    """Requests store, decode, slide, share, retract and end, in pages of 1 or 2."""

    tables: Bundle[Any] = Bundle("tables")

    @initialize(
        size=st.sampled_from([1, 2]),
        window=st.integers(1, 6),
        policy=st.sampled_from(sorted(RANKS)),
    )
    def begin(self, size: int, window: int, policy: str) -> None:
        slots = WindowedSlots(NUM_TOKENS, NUM_PEERS, size)
        self.window = TreeWindow(window, slots)
        tree = RadixCache(
            slots, policy, counts_hits=True, unified=True, window=self.window
        )
        self.cache = TreeCache(slots, tree, checks_in=True)
        self.held: list[Any] = []

    def is_held(self, entry: Any) -> bool:
        return entry is not None and any(entry is each for each in self.held)

    @rule(target=tables, tokens=TOKENS)
    def store(self, tokens: list[int]) -> Any:
        """Look up all but the last token, then store the rest if it fits."""
        cache, key, table = self.cache, np.array(tokens, np.int64), SlotTable()
        slots = cache.match(table, key[:-1])
        assert len(slots) == self.reusable(tokens[:-1])
        cache.lock(table)
        table.begin(slots)
        table.num_protected_tokens = len(slots)
        size, num_new = cache.tree.page_size, len(tokens) - len(slots)
        if not cache.make_room(num_new + 2 * size):
            cache.unlock(table)
            return None
        (new,) = cache.allocator.extend(
            [(len(slots), len(tokens), table.last)], num_new
        )
        table.append(new)
        entry = [table, tokens, "stored"]
        self.held.append(entry)
        return entry

    def reusable(self, tokens: list[int]) -> int:
        """Return the longest reusable prefix, by brute force over the path's tokens."""
        size, node, at = self.cache.tree.page_size, self.cache.tree.root, 0
        kept: list[bool] = []
        best = 0
        tokens = tokens[: len(tokens) // size * size]
        while True:
            page = np.array(tokens[at : at + size], np.int64).tobytes()
            child = node.children.get(page) if at < len(tokens) else None
            if child is None:
                return best
            key = child.key.tolist()
            common = 0
            while (
                common < min(len(key), len(tokens) - at)
                and key[common : common + size]
                == tokens[at + common : at + common + size]
            ):
                common += size
            kept += [self.window.of(child).is_kept] * common
            at += common
            in_row = next((i for i, one in enumerate(reversed(kept)) if not one), None)
            if in_row is None or in_row >= self.window.num_tokens:
                best = at
            if common < len(key):
                return best
            node = child

    @rule(entry=tables, token=st.integers(1, 2), interval=st.integers(1, 4))
    def decode(self, entry: Any, token: int, interval: int) -> None:
        """Store one more token, and free what has slid out of the window."""
        if not self.is_held(entry) or entry[2] == "stored":
            return
        table, tokens, _ = entry
        cache, size = self.cache, self.cache.tree.page_size
        before = table.num_slid_tokens
        cache.slide(table, len(tokens), interval)
        assert before <= table.num_slid_tokens <= max(before, len(tokens))
        if table.num_slid_tokens > max(before, table.num_protected_tokens):
            assert len(tokens) - table.num_slid_tokens >= self.window.num_tokens
        if cache.make_room(size):
            table.append(cache.allocator.decode(ids(table.last), ids(len(table))))
            tokens.append(token)
            entry[2] = "decodes"

    @rule(entry=tables, priority=st.integers(0, 2), num_prompt=st.integers(0, 9))
    def prefilled(self, entry: Any, priority: int, num_prompt: int) -> None:
        if not self.is_held(entry) or entry[2] == "decodes":
            return
        table, tokens, _ = entry
        entry[2] = "prefilled"
        before = table.num_protected_tokens
        self.cache.unfinished(
            table,
            np.array(tokens, np.int64),
            priority,
            num_prompt_tokens=num_prompt,
            is_chunk=False,
        )
        assert table.num_protected_tokens >= before
        # so it can be reused at once, as far as it went in
        assert self.reusable(tokens[: table.num_protected_tokens]) == (
            table.num_protected_tokens
        )

    @rule(entry=consumes(tables), retracts=st.booleans())
    def leave(self, entry: Any, retracts: bool) -> None:
        if not self.is_held(entry):
            return
        table, tokens, _ = entry
        self.held = [each for each in self.held if each is not entry]
        if retracts:
            self.cache.release(table)
        else:
            self.cache.finished(table, np.array(tokens, np.int64), 0)

    @rule(num_tokens=st.integers(0, NUM_TOKENS), num_peers=st.integers(0, NUM_PEERS))
    def evict(self, num_tokens: int, num_peers: int) -> None:
        tree, window = self.cache.tree, self.window
        before = tree.num_evictable_tokens, window.num_evictable_tokens
        tree.evict(num_tokens, num_peers)
        gone = before[0] - tree.num_evictable_tokens
        dropped = before[1] - window.num_evictable_tokens
        assert gone >= min(num_tokens, before[0])
        assert dropped >= min(num_peers, before[1])

    @invariant()
    def holds(self) -> None:
        cache, tables = self.cache, [table for table, _, _ in self.held]
        cache.check(tables)
        size = cache.tree.page_size

        def in_pages(num_tokens: int) -> int:
            return -(-num_tokens // size) * size

        own = [in_pages(len(t) - t.num_protected_tokens) for t in tables]
        peers = [
            in_pages(len(t) - max(t.num_protected_tokens, t.num_slid_tokens))
            for t in tables
        ]
        slots, tree, window = cache.allocator, cache.tree, self.window
        assert (
            slots.num_available_tokens
            + tree.num_evictable_tokens
            + tree.num_protected_tokens
            + sum(own)
        ) == NUM_TOKENS
        assert (
            slots.num_available_peers
            + window.num_evictable_tokens
            + window.num_protected_tokens
            + sum(peers)
        ) == NUM_PEERS


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
