"""The blocks of a request in a group of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.block import KVCacheBlock

Copies = list[tuple["KVCacheBlock", "KVCacheBlock"]]
"""Blocks that are copied before a step, source and target."""


class GroupTable:
    """The blocks of a request in one group.

    Attributes
    ----------
    blocks
        In logical order; the null block stands where none is needed.
    num_passed
        Leading entries that attention has left behind: null blocks.
    num_seen
        Leading full blocks that were looked at for registration.
    shared_tail
        Index of an entry that the cache holds on to as it is, and that a fresh block
        must take the place of before the request writes on; -1 for none.
    checkpoint
        Tokens of a state that the step in progress writes inside its chunk, or 0.
    is_begun
        Whether blocks were allocated, hits aside.
    """

    __slots__ = (
        "blocks",
        "checkpoint",
        "is_begun",
        "num_passed",
        "num_seen",
        "shared_tail",
    )

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.num_passed = 0
        self.num_seen = 0
        self.shared_tail = -1
        self.checkpoint = 0
        self.is_begun = False
