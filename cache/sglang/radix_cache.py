"""The radix tree: prefixes that requests share, by their tokens."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from cache.errors import CacheConfigError, require
from cache.sglang.allocator import NO_SLOTS
from cache.sglang.nodes import RANKS, NodeWindow, Rank, TreeNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cache.sglang.allocator import SlotAllocator, Slots
    from cache.sglang.windows import TreeWindow


_STEP: Final = 0.00001  # by which the unified tree makes a parent older than its child


class Insertion(Protocol):
    """Frees, or hands over, slots of a request that inserts its prefix."""

    def passed(self, node: TreeNode, first: int, end: int) -> None:
        """Take note that a node has the tokens from one to another already."""
        ...

    def added(self, node: TreeNode, first: int) -> None:
        """Take note of a node that is new, from a token on."""
        ...


class RadixCache:
    """Prefixes of requests, in whole pages, shared by all that begin alike.

    Nodes that no request holds are evictable, leaf by leaf.

    Parameters
    ----------
    allocator
        Takes back the slots of evicted nodes.
    eviction_policy
        Of `RANKS`.
    counts_hits
        Whether insertions are counted, as from 0.5.10 on; ``lfu`` is ``lru`` before.
    unified
        Whether it is the tree of 0.5.19 to 0.5.23: a look makes each node on its way
        older than the one below it, the lower part of a node that is split is touched,
        and the upper one is as old as the node was.
    sorts_pages
        Whether the pages of an evicted node are freed in order, as before 0.5.20.
    window
        Its slots of layers with a window; None where there are none.

    Attributes
    ----------
    num_evictable_tokens, num_protected_tokens
        Of nodes without and with a lock.
    num_nodes
        Without the root.
    evictions
        Each call of `evict` that removed something: tokens asked for, and length and
        first slot of each node. Emptied by its reader.
    latest
        The node that the latest insertion ended with.
    num_found_tokens
        Of the latest look: those that are there, reusable or not.

    Notes
    -----
    Source: SGLang 0.5.9, ``mem_cache/radix_cache.py``; 0.5.23,
    ``mem_cache/unified_cache/unified_tree_core.py``. The release's heap is made anew
    for each eviction; this one is kept, and entries that no longer hold are skipped.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        eviction_policy: str = "lru",
        *,
        counts_hits: bool = False,
        unified: bool = False,
        sorts_pages: bool = False,
        window: TreeWindow | None = None,
    ) -> None:
        if eviction_policy not in RANKS:
            raise CacheConfigError(
                f"radix_eviction_policy must be one of {', '.join(RANKS)}, got "
                f"'{eviction_policy}'"
            )
        self.page_size = allocator.page_size
        self.num_evictable_tokens = 0
        self.num_protected_tokens = 0
        self.num_nodes = 0
        self.evictions: list[tuple[int, list[tuple[int, int]]]] = []
        self.root = TreeNode(NO_SLOTS, NO_SLOTS, None, 0, 0)
        self._allocator = allocator
        self._rank = RANKS[eviction_policy]
        self._counts_hits = counts_hits
        self.unified = unified
        self._sorts = sorts_pages and allocator.page_size > 1
        self.window = window
        self.latest = self.root
        self.num_found_tokens = 0
        self._now = 0
        self._num_offers = 0
        self._leaves: list[tuple[Rank, int, TreeNode]] = []  # unlocked, or were so

    # -- looking --------------------------------------------------------------

    def match(self, tokens: Slots) -> tuple[Slots, TreeNode]:
        """Return the slots of the longest prefix that is reusable, and its node.

        Looks change the tree: nodes on the way are touched, and one that matches in
        part is split.
        """
        key = tokens[: len(tokens) // self.page_size * self.page_size]
        self.num_found_tokens = 0
        if not len(key):
            return NO_SLOTS, self.root
        now = 0 if self.unified else self._look()
        window, num_in_row = self.window, inf
        node = best = self.root
        node.access = now
        found: list[Slots] = []
        num_best = 0
        while len(key):
            child = node.children.get(self._first_page(key))
            if child is None:
                break
            if not self.unified:
                self._touch(child, now)
            num_common = self._num_common(child.key, key)
            if num_common < len(child.key):
                child = self.split(child, num_common)
            found.append(child.slots)
            node = child
            self.num_found_tokens += num_common
            if window is None:
                best, num_best = node, len(found)
            else:
                num_in_row = window.reach(num_in_row, node)
                if num_in_row >= window.num_tokens:
                    best, num_best = node, len(found)
            key = key[num_common:]
            if len(child.children) == 0:
                break
        if window is not None:
            window.touch(best)
        if self.unified:
            self._touch_path(best)
        return np.concatenate(found[:num_best]) if num_best else NO_SLOTS, best

    def insert(
        self,
        tokens: Slots,
        slots: Slots,
        priority: int = 0,
        *,
        counts: bool = True,
        num_counted: int = 0,
        insertion: Insertion | None = None,
    ) -> int:
        """Add a prefix of whole pages; return how many of its tokens were there.

        `counts` says whether it is a hit of the nodes that it passes, but for those
        that end within the first `num_counted` tokens. `insertion` is told which nodes
        were there, and which one is new.
        """
        now = self._look()
        may_count = counts and self._counts_hits
        node = self.root
        node.access = now
        node.priority = max(node.priority, priority)
        num_found, key = 0, tokens
        while len(key):
            child = node.children.get(self._first_page(key))
            if child is None:
                break
            self._touch(child, self._look() if self.unified else now)
            num_common = self._num_common(child.key, key)
            if num_common < len(child.key):
                child = self.split(child, num_common)
            counts = may_count and num_found + num_common > num_counted
            is_more_urgent = priority > child.priority
            if is_more_urgent:
                child.priority = priority
            if insertion is not None:
                insertion.passed(child, num_found, num_found + num_common)
            child.hit_count += counts
            if is_more_urgent or counts:
                self._offer(child)
            node = child
            num_found += num_common
            key = key[num_common:]
        if len(key):
            node = self._added(node, key, slots[num_found:].copy(), priority)
            if insertion is not None:
                insertion.added(node, num_found)
        if self.window is not None:
            self.window.touch(node)
        if len(key):
            # by what is left of it, where it was cut
            node.hit_count += may_count and num_found + len(node.key) > num_counted
            self._offer(node)
        self.latest = node
        return num_found

    def _added(
        self, parent: TreeNode, key: Slots, slots: Slots, priority: int
    ) -> TreeNode:
        new = TreeNode(key, slots, parent, self._look(), priority)
        parent.children[self._first_page(key)] = new
        self.num_nodes += 1
        self.num_evictable_tokens += len(key)
        if self.window is not None:
            new.window = NodeWindow(new)
        return new

    def slots_above(self, node: TreeNode) -> Slots:
        """Return the slots of a node and of all above it, in the order of tokens."""
        found: list[Slots] = []
        at: TreeNode | None = node
        while at is not None:
            found.append(at.slots)
            at = at.parent
        return np.concatenate(found[::-1])

    def _look(self) -> int:
        self._now += 1
        return self._now

    def _first_page(self, key: Slots) -> bytes:
        return key[: self.page_size].tobytes()

    def _num_common(self, first: Slots, second: Slots) -> int:
        """Return the length of the common prefix, in whole pages of tokens.

        The first page is the same: where that is all, as where beams part token by
        token, nothing is compared.
        """
        most = min(len(first), len(second))
        if most == self.page_size:
            return most
        differs = first[:most] != second[:most]
        at = int(differs.argmax())
        if differs[at]:
            most = at
        return most // self.page_size * self.page_size

    def _touch(self, node: TreeNode, now: float) -> None:
        node.access = now
        if not (node.lock_ref or node.children):
            self._offer(node)

    def _touch_path(self, last: TreeNode) -> None:
        """Touch a node and all above it, each a little earlier than those below."""
        now: float = self._look()
        node: TreeNode | None = last
        while node is not None:
            self._touch(node, now)
            now -= _STEP
            node = node.parent

    def split(self, node: TreeNode, length: int) -> TreeNode:
        """Cut a node in two; return the upper part, which is new."""
        parent = node.parent
        assert parent is not None
        upper = TreeNode(
            node.key[:length].copy(),
            node.slots[:length].copy(),
            parent,
            self._look(),
            node.priority,
        )
        upper.lock_ref, upper.hit_count = node.lock_ref, node.hit_count
        parent.children[self._first_page(node.key)] = upper
        node.key = node.key[length:].copy()
        node.slots = node.slots[length:].copy()
        node.parent = upper
        upper.children[self._first_page(node.key)] = node
        if self.window is not None:
            self.window.split(upper, node)
        if self.unified:
            upper.born = node.born
            self._touch(node, self._look())
        self.num_nodes += 1
        return upper

    # -- holding --------------------------------------------------------------

    def lock(self, node: TreeNode) -> int:
        """Hold a node and all above it; return where its window ends, for later."""
        at: TreeNode | None = node
        while at is not None and at.parent is not None:
            if not at.lock_ref:
                self.num_evictable_tokens -= len(at.key)
                self.num_protected_tokens += len(at.key)
            at.lock_ref += 1
            at = at.parent
        return 0 if self.window is None else self.window.lock(node)

    def unlock(self, node: TreeNode, boundary: int = 0) -> None:
        """Let go of a node and all above it, whose window ended so."""
        if self.window is not None:
            self.window.unlock(node, boundary)
        at: TreeNode | None = node
        while at is not None and at.parent is not None:
            require(at.lock_ref > 0, "a node is unlocked that nobody holds")
            at.lock_ref -= 1
            if not at.lock_ref:
                self.num_evictable_tokens += len(at.key)
                self.num_protected_tokens -= len(at.key)
                self._offer(at)
            at = at.parent

    # -- evicting -------------------------------------------------------------

    def evict(self, num_tokens: int, num_window_tokens: int = 0) -> None:
        """Remove unlocked leaves until so many tokens are gone, or none is left.

        Then drop what a window keeps until so much of that is gone: of whole leaves,
        or of nodes that stay.
        """
        removed: list[tuple[int, int]] = []
        dropped: list[tuple[int, int]] = []
        num_removed = num_dropped = 0
        leaves, window = self._leaves, self.window
        while num_removed < num_tokens and leaves:
            rank, _, node = heappop(leaves)
            if not self._is_evictable(node) or rank != self._rank(node):
                continue
            num_dropped += self._remove(node, removed, dropped)
            num_removed += len(node.key)
        if window is not None and num_dropped < num_window_tokens:
            for node in window.oldest_first():
                if self._is_evictable(node):
                    num_dropped += self._remove(node, removed, dropped)
                else:
                    dropped.append((len(node.key), int(node.slots[0])))
                    num_dropped += window.drop(node)
                if num_dropped >= num_window_tokens:
                    break
        if removed or dropped:
            self.evictions.append((num_tokens, removed))
            if window is not None:
                window.evictions.append((num_window_tokens, dropped))

    def _remove(
        self,
        node: TreeNode,
        removed: list[tuple[int, int]],
        dropped: list[tuple[int, int]],
    ) -> int:
        """Remove a leaf; return what a window kept of it."""
        parent, window = node.parent, self.window
        assert parent is not None
        told, num_dropped = (len(node.key), int(node.slots[0])), 0
        removed.append(told)
        if window is None:
            self._allocator.free(np.sort(node.slots) if self._sorts else node.slots)
        else:
            num_dropped = window.drop(node)
            window.slots.free_full(node.slots)
            if num_dropped:
                dropped.append(told)
        del parent.children[self._first_page(node.key)]
        node.parent = None
        self.num_nodes -= 1
        self.num_evictable_tokens -= len(node.key)
        self._offer(parent)
        return num_dropped

    @staticmethod
    def _is_evictable(node: TreeNode) -> bool:
        return node.parent is not None and not (node.lock_ref or node.children)

    def _offer(self, node: TreeNode) -> None:
        """Let an unlocked leaf be evicted by its present rank."""
        if not self._is_evictable(node):
            return
        self._num_offers += 1
        heappush(self._leaves, (self._rank(node), self._num_offers, node))
        if len(self._leaves) > 4 * self.num_nodes + 64:
            self._forget_stale()

    def _forget_stale(self) -> None:
        kept: dict[int, tuple[Rank, int, TreeNode]] = {}
        for rank, number, node in self._leaves:
            if self._is_evictable(node) and rank == self._rank(node):
                kept[id(node)] = rank, number, node
        self._leaves[:] = kept.values()
        heapify(self._leaves)

    def clear(self) -> None:
        """Forget all prefixes; nothing of the tree may be used any more.

        Nodes refer to each other in circles, which stay in memory where Python's
        collector is paused.
        """
        for node in [*self.nodes()]:
            node.parent = None
            node.children.clear()
        self.root.children.clear()

    # -- proofs ---------------------------------------------------------------

    def nodes(self) -> Iterator[TreeNode]:
        """Yield all nodes but the root, parents first."""
        todo = [*self.root.children.values()]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def check(self) -> None:
        """Prove the counts, and that locks, pages and links fit together, in O(n)."""
        num_evictable = num_protected = num_nodes = 0
        offered = {
            id(node) for rank, _, node in self._leaves if rank == self._rank(node)
        }
        for node in self.nodes():
            num_nodes += 1
            length = len(node.key)
            require(
                length == len(node.slots) > 0 and length % self.page_size == 0,
                f"a node has {length} tokens and {len(node.slots)} slots",
            )
            require(node.lock_ref >= 0, f"a node is locked {node.lock_ref} times")
            require(
                node.lock_ref >= sum(each.lock_ref for each in node.children.values()),
                "a node is locked less often than those below it",
            )
            for first, child in node.children.items():
                require(
                    child.parent is node and first == self._first_page(child.key),
                    "a node hangs below another one, or under another page",
                )
            if node.lock_ref:
                num_protected += length
            else:
                num_evictable += length
                require(
                    bool(node.children) or id(node) in offered,
                    "an unlocked leaf cannot be evicted",
                )
        if self.window is not None:
            self.window.check(self.nodes())
        for name, found, counted in (
            ("evictable tokens", num_evictable, self.num_evictable_tokens),
            ("protected tokens", num_protected, self.num_protected_tokens),
            ("nodes", num_nodes, self.num_nodes),
        ):
            require(found == counted, f"{found} {name}, {counted} counted")
