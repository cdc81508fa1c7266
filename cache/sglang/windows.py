"""Layers with a window beside others: their slots, and which nodes of a tree hold some.

Every token has a slot of the layers that attend to all tokens, and one of those with a
window until it is out of that. The tree keeps a prefix as long as it has the former; it
can be reused up to where the latter are there for a whole window::

    full    | a a a | b b b b | c c |      node by node
    window  | . . . | . . b b | c c |      reusable up to the end of c, by 4 tokens

Source: SGLang 0.5.23, ``mem_cache/allocator/swa.py`` and
``mem_cache/unified_cache/components/swa.py``.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from cache.errors import CacheConfigError, NoFreeBlocksError, require
from cache.sglang.allocator import SlotAllocator
from cache.sglang.nodes import NodeWindow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cache.sglang.allocator import Slots
    from cache.sglang.nodes import TreeNode


class WindowedSlots(SlotAllocator):
    """`SlotAllocator` of full layers, each slot of which has a *peer* for a while.

    Both are taken together, and given back together or one after the other.

    Parameters
    ----------
    num_tokens, num_window_tokens
        Sizes of both pools, multiples of `page_size`.
    page_size, need_sort
        See `SlotAllocator`; pages are freed in the order of tokens.

    Attributes
    ----------
    window
        What hands out peers.
    """

    def __init__(
        self,
        num_tokens: int,
        num_window_tokens: int,
        page_size: int = 1,
        *,
        need_sort: bool = False,
    ) -> None:
        super().__init__(num_tokens, page_size, need_sort=need_sort, in_order=True)
        self.window = SlotAllocator(
            num_window_tokens, page_size, need_sort=need_sort, in_order=True
        )
        self._peers = np.zeros(num_tokens + page_size + 1, np.int64)  # 0 for none
        self._peers[-1] = -1  # of the last slot of a request without any, which is -1

    @property
    def num_available_peers(self) -> int:
        return self.window.num_available_tokens

    def peers(self, slots: Slots) -> Slots:
        """Return the peer of each slot; 0 where it has none."""
        return self._peers[slots]

    def allocate(self, num_tokens: int) -> Slots:
        self._require_peers(num_tokens)
        slots = super().allocate(num_tokens)
        self._peers[slots] = self.window.allocate(num_tokens)
        return slots

    def extend(
        self, prefixes: Iterable[tuple[int, int, int]], num_tokens: int
    ) -> list[Slots]:
        grown, size = list(prefixes), self.page_size
        self._require_peers(
            sum(-(-after // size) - -(-before // size) for before, after, _ in grown)
        )
        lasts = [int(self._peers[last]) for _, _, last in grown]
        found = super().extend(grown, num_tokens)
        peers = self.window.extend(
            [
                (before, after, last)
                for (before, after, _), last in zip(grown, lasts, strict=True)
            ],
            num_tokens,
        )
        for slots, own in zip(found, peers, strict=True):
            self._peers[slots] = own
        return found

    def decode(self, lasts: Slots, lengths: Slots) -> Slots:
        size = self.page_size
        self._require_peers(int(np.count_nonzero(lengths % size == 0)))
        slots = super().decode(lasts, lengths)
        self._peers[slots] = self.window.decode(self._peers[lasts], lengths)
        return slots

    def _require_peers(self, num_pages: int) -> None:
        num_free = self.window.num_available_tokens // self.page_size
        if num_pages > num_free:
            raise NoFreeBlocksError(
                f"{num_pages} pages of {self.page_size} tokens are needed for layers "
                f"with a window, {num_free} are free"
            )

    # -- freeing --------------------------------------------------------------

    def free(self, slots: Slots) -> None:
        """Give slots back that all have a peer, and these."""
        self.free_peers(slots)
        self.free_full(slots)

    def free_full(self, slots: Slots) -> None:
        """Give slots back that have no peer any more."""
        super().free(slots)

    def free_peers(self, slots: Slots) -> None:
        """Give back the peers of slots that stay."""
        self.window.free(self._peers[slots])
        self._peers[slots] = 0

    def move_peers(self, slots: Slots, to: Slots) -> None:
        """Let the peers of some slots be those of others."""
        self._peers[to] = self._peers[slots]
        self._peers[slots] = 0

    def begin_group(self) -> None:
        super().begin_group()
        self.window.begin_group()

    def end_group(self) -> None:
        super().end_group()
        self.window.end_group()

    def check(self, held: Iterable[Slots]) -> None:
        """Prove both pools, in O(pool), and that slots that are free have no peers."""
        slots = [*held]
        super().check(slots)
        peers = [self._peers[each] for each in slots]
        peers = [each[each > 0] for each in peers]
        self.window.check(peers)
        require(
            sum(map(len, peers)) == np.count_nonzero(self._peers[:-1]),
            "a slot that nobody holds has a peer",
        )


class TreeWindow:
    """Which nodes of a tree layers with a window keep, and in which order they go.

    A look touches the nodes within a window and a page of its end. A lock holds those
    within a window; above it they may go while the node stays.

    Parameters
    ----------
    num_tokens
        Of a window.
    slots
        Of all layers.

    Attributes
    ----------
    num_evictable_tokens, num_protected_tokens
        Of nodes that are kept, without and with a lock.
    evictions
        For each of the tree's: tokens asked for, and length and first slot of each
        node that is kept no more. Emptied by its reader.
    """

    def __init__(self, num_tokens: int, slots: WindowedSlots) -> None:
        if num_tokens < 1:
            raise CacheConfigError(f"a window must have a token, got {num_tokens}")
        self.num_tokens = num_tokens
        self.num_evictable_tokens = self.num_protected_tokens = 0
        self.evictions: list[tuple[int, list[tuple[int, int]]]] = []
        self.slots = slots
        self._ring = NodeWindow(None)  # before the newest, behind the oldest
        self._boundaries = count(1)

    def of(self, node: TreeNode) -> NodeWindow:
        """Return what is kept of a node."""
        assert node.window is not None
        return node.window

    # -- recency --------------------------------------------------------------

    def _link(self, part: NodeWindow, newer: NodeWindow) -> None:
        older = newer.older
        part.newer, part.older = newer, older
        newer.older = older.newer = part

    @staticmethod
    def _unlink(part: NodeWindow) -> None:
        part.newer.older, part.older.newer = part.older, part.newer

    def touch(self, node: TreeNode) -> None:
        """Make a node the newest, then those above it within a window and a page."""
        most, newer = self.num_tokens + self.slots.page_size, self._ring
        num_passed, at = 0, node
        while at.parent is not None and num_passed < most:
            part = self.of(at)
            if part.is_kept:
                self._unlink(part)
                self._link(part, newer)
                newer = part
            num_passed += len(at.key)
            at = at.parent

    def oldest_first(self) -> Iterator[TreeNode]:
        """Yield nodes that are kept and without a lock; each may be dropped then."""
        part = self._ring.newer
        while part is not self._ring:
            following = part.newer
            if not part.lock_ref:
                assert part.node is not None
                yield part.node
            part = following

    # -- keeping --------------------------------------------------------------

    def keep(self, node: TreeNode) -> None:
        """Take note that all slots of a node have peers: it is the newest."""
        part = self.of(node)
        part.is_kept = True
        self._link(part, self._ring)
        if part.lock_ref:
            self.num_protected_tokens += len(node.key)
        else:
            self.num_evictable_tokens += len(node.key)

    def drop(self, node: TreeNode) -> int:
        """Free the peers of a node without a lock; return how many there were."""
        part = self.of(node)
        if not part.is_kept:
            return 0
        self.slots.free_peers(node.slots)
        part.is_kept = False
        self._unlink(part)
        self.num_evictable_tokens -= len(node.key)
        return len(node.key)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Let the upper part of a node, which is new, be kept as the lower one is.

        It is a little older, and the locks that reach up to the node reach up to it.
        """
        new, part = NodeWindow(upper), self.of(lower)
        upper.window = new
        new.lock_ref = part.lock_ref
        new.boundary, part.boundary = part.boundary, 0
        if part.is_kept:
            new.is_kept = True
            self._link(new, part)

    def reach(self, num_tokens: float, node: TreeNode) -> float:
        """Return for how many tokens up to a node's end peers are there in a row.

        `num_tokens` is that of the node above, infinite before the first.
        """
        return num_tokens + len(node.key) if self.of(node).is_kept else 0

    # -- holding --------------------------------------------------------------

    def lock(self, node: TreeNode) -> int:
        """Hold a window of tokens up to a node's end; return where it ends, for later.

        It is a number of the uppermost node, or 0 where that is the root.
        """
        num_held, boundary, at = 0, 0, node
        while at.parent is not None and num_held < self.num_tokens:
            part = self.of(at)
            if part.is_kept and not part.lock_ref:
                self.num_evictable_tokens -= len(at.key)
                self.num_protected_tokens += len(at.key)
            part.lock_ref += 1
            num_held += len(at.key)
            if num_held >= self.num_tokens:
                part.boundary = boundary = part.boundary or next(self._boundaries)
            at = at.parent
        return boundary

    def unlock(self, node: TreeNode, boundary: int) -> None:
        """Let go of what a lock that ended so has held."""
        at = node
        while at.parent is not None:
            part = self.of(at)
            require(part.lock_ref > 0, "a window is unlocked that nobody holds")
            part.lock_ref -= 1
            if part.is_kept and not part.lock_ref:
                self.num_evictable_tokens += len(at.key)
                self.num_protected_tokens -= len(at.key)
            if boundary and part.boundary == boundary:
                return
            at = at.parent

    # -- proofs ---------------------------------------------------------------

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Prove counts, peers and recency of a tree's nodes, in O(n)."""
        kept = set[int]()
        num_evictable = num_protected = 0
        for node in nodes:
            part = self.of(node)
            require(
                0 <= part.lock_ref <= node.lock_ref and part.node is node,
                f"a window is locked {part.lock_ref} times, its node {node.lock_ref}",
            )
            num_peers = np.count_nonzero(self.slots.peers(node.slots))
            require(
                num_peers == (len(node.key) if part.is_kept else 0),
                f"a node of {len(node.key)} tokens has {num_peers} peers",
            )
            if part.is_kept:
                kept.add(id(part))
                num_evictable += 0 if part.lock_ref else len(node.key)
                num_protected += len(node.key) if part.lock_ref else 0
        part, linked = self._ring.older, set[int]()
        while part is not self._ring:
            require(part.newer.older is part, "a window has lost its place")
            linked.add(id(part))
            part = part.older
        require(linked == kept, "a window is kept that no eviction can find")
        for name, found, counted in (
            ("evictable", num_evictable, self.num_evictable_tokens),
            ("protected", num_protected, self.num_protected_tokens),
        ):
            require(
                found == counted, f"{found} {name} window tokens, {counted} counted"
            )
