"""The unified tree frees, or takes over, slots of a request that inserts its prefix.

Source: SGLang 0.5.23, ``mem_cache/unified_cache/unified_tree_core.py`` and
``components/swa.py`` beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.sglang.allocator import SlotAllocator, Slots
    from cache.sglang.nodes import TreeNode
    from cache.sglang.radix_cache import RadixCache


class FreeingInsertion:
    """`Insertion` that frees the request's slots of tokens that the tree has.

    Parameters
    ----------
    allocator, slots
        What they came from, and those of the prefix, in whole pages.
    num_protected
        Of these, the first ones that are the tree's.
    """

    def __init__(
        self, allocator: SlotAllocator, slots: Slots, num_protected: int
    ) -> None:
        self.allocator = allocator
        self.slots = slots
        self.num_protected = num_protected

    def passed(self, node: TreeNode, first: int, end: int) -> None:
        """Free what a node has from one token to another."""
        del node
        self.allocator.free(self.slots[max(first, self.num_protected) : end])

    def added(self, node: TreeNode, first: int) -> None:
        """Take note of a node that is new, from a token on."""


class WindowInsertion(FreeingInsertion):
    """`Insertion` into a tree with a window.

    A node that is kept no more takes the request's peers, as far as these are there:
    its locked slots get them, those that nobody holds go and the request's stay. A new
    node is cut where they begin, and a window before its end, so that a lock holds no
    more than that.

    Parameters
    ----------
    tree
        Into which it goes.
    slots, num_protected
        See `FreeingInsertion`.
    num_slid
        Tokens before which the request has no peers of its own.
    """

    def __init__(
        self, tree: RadixCache, slots: Slots, num_protected: int, num_slid: int
    ) -> None:
        assert tree.window is not None
        super().__init__(tree.window.slots, slots, num_protected)
        self._tree, self._window = tree, tree.window
        self._num_slid = num_slid

    def passed(self, node: TreeNode, first: int, end: int) -> None:
        if self.num_protected >= end:
            return
        peers, until = self._window.slots, end
        if not self._window.of(node).is_kept:
            alive = max(first, self._num_slid)
            if alive < end:
                if alive > first:
                    self._tree.split(node, alive - first)
                self._adopt(node, self.slots[alive:end])
                until = alive
        first = max(first, self.num_protected)
        if first < until:
            middle = min(max(self._num_slid, first), until)
            peers.free_full(self.slots[first:middle])
            peers.free(self.slots[middle:until])

    def _adopt(self, node: TreeNode, slots: Slots) -> None:
        peers = self._window.slots
        if node.lock_ref:
            peers.move_peers(slots, node.slots)
            peers.free_full(slots)
        else:
            peers.free_full(node.slots)
            node.slots = slots.copy()
        self._window.keep(node)

    def added(self, node: TreeNode, first: int) -> None:
        size, end = self._window.slots.page_size, first + len(node.key)
        alive = max(first, self._num_slid)
        if alive >= end:
            return
        if alive > first:
            self._tree.split(node, alive - first)
        num_last = -(-self._window.num_tokens // size) * size
        if len(node.key) > num_last:
            self._window.keep(self._tree.split(node, len(node.key) - num_last))
        self._window.keep(node)
