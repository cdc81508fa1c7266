"""Nodes of the radix tree, and by which order its leaves go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.sglang.allocator import Slots


class NodeWindow:
    """Slots of layers with a window that a node keeps, and its place by recency.

    Attributes
    ----------
    is_kept
        Whether all of its slots have peers; none has otherwise.
    lock_ref
        Requests whose window reaches it, whether it is kept or not.
    boundary
        A number of locks that reach up to it, and not beyond; 0 for none.
    newer, older
        Its neighbours, while it is kept.
    """

    __slots__ = ("boundary", "is_kept", "lock_ref", "newer", "node", "older")

    def __init__(self, node: TreeNode | None) -> None:
        self.node = node
        self.is_kept = False
        self.lock_ref = self.boundary = 0
        self.newer = self.older = self


class TreeNode:
    """Tokens behind those of its parent, and the slots that hold them.

    Attributes
    ----------
    key, slots
        Its tokens, whole pages, and their slots.
    children
        By the first page of their keys.
    lock_ref
        Requests that hold it, or a node below.
    access, born
        Times by the tree's own clock, which grows by one a look; the unified tree has
        parts of one.
    hit_count
        Insertions that passed or made it; counted from 0.5.10 on.
    priority
        The most urgent of the requests that inserted it.
    window
        Its slots of layers with a window; None in a tree without.
    """

    __slots__ = (
        "access",
        "born",
        "children",
        "hit_count",
        "key",
        "lock_ref",
        "parent",
        "priority",
        "slots",
        "window",
    )

    def __init__(
        self, key: Slots, slots: Slots, parent: TreeNode | None, now: int, priority: int
    ) -> None:
        self.key = key
        self.slots = slots
        self.parent = parent
        self.children: dict[bytes, TreeNode] = {}
        self.lock_ref = 0
        self.hit_count = 0
        self.access: float = now
        self.born = now
        self.priority = priority
        self.window: NodeWindow | None = None


Rank = tuple[float, ...]
_PROTECTED_HITS: Final = 2

RANKS: Final[dict[str, Callable[[TreeNode], Rank]]] = {
    "lru": lambda node: (node.access,),
    "lfu": lambda node: (node.hit_count, node.access),
    "slru": lambda node: (node.hit_count >= _PROTECTED_HITS, node.access),
    "fifo": lambda node: (node.born,),
    "mru": lambda node: (-node.access,),
    "filo": lambda node: (-node.born,),
    "priority": lambda node: (node.priority, node.access),
}
"""Ranks by ``radix_eviction_policy``: the leaf of the smallest is evicted first.

Source: SGLang 0.5.9, ``mem_cache/evict_policy.py``; ``slru`` of 0.5.10.
"""
