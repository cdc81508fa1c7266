"""The slots of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cache.sglang.allocator import NO_SLOTS

if TYPE_CHECKING:
    from cache.sglang.allocator import Slots
    from cache.sglang.nodes import TreeNode


class SlotTable:
    """The slots of a request in the order of its tokens: a row of ``req_to_token``.

    Attributes
    ----------
    num_stored_tokens
        Slots that it holds.
    num_protected_tokens
        Of these, the first ones that belong to the tree.
    num_inserted_tokens
        Of these, those that the request has put there itself, or found there then.
    num_slid_tokens
        Of a model with windows: those before which it has no slots of theirs, of its
        own ones.
    num_branch_tokens
        Of such a model: tokens that were found and could not be reused, after which it
        puts its own into the tree; 0 for none.
    node, boundary
        The node that it locks, and where the lock's window ends; None while it locks
        none.
    """

    __slots__ = (
        "_slots",
        "boundary",
        "node",
        "num_branch_tokens",
        "num_inserted_tokens",
        "num_protected_tokens",
        "num_slid_tokens",
        "num_stored_tokens",
    )

    def __init__(self) -> None:
        self._slots: Slots = NO_SLOTS
        self.num_stored_tokens = 0
        self.num_protected_tokens = 0
        self.num_inserted_tokens = 0
        self.num_slid_tokens = self.num_branch_tokens = 0
        self.node: TreeNode | None = None
        self.boundary = 0

    @property
    def slots(self) -> Slots:
        """All that it holds; a view."""
        return self._slots[: self.num_stored_tokens]

    @property
    def last(self) -> int:
        """Its last slot, or -1."""
        return int(self._slots[self.num_stored_tokens - 1]) if len(self) else -1

    def __len__(self) -> int:
        return self.num_stored_tokens

    def begin(self, slots: Slots) -> None:
        """Take the slots of a cached prefix, in place of what it had."""
        self._slots = slots.copy()
        self.num_stored_tokens = len(slots)

    def append(self, slots: Slots) -> None:
        """Add slots behind the others."""
        until = self.num_stored_tokens + len(slots)
        self._make_room(until)
        self._slots[self.num_stored_tokens : until] = slots
        self.num_stored_tokens = until

    def append_one(self, slot: int) -> None:
        """Add a slot behind the others."""
        at = self.num_stored_tokens
        if at == len(self._slots):
            self._make_room(at + 1)
        self._slots[at] = slot
        self.num_stored_tokens = at + 1

    def replace(self, first: int, slots: Slots) -> None:
        """Put the tree's slots in place of its own, from a token on."""
        self._slots[first : first + len(slots)] = slots

    def clear(self) -> None:
        """Forget all slots."""
        self._slots = NO_SLOTS
        self.num_stored_tokens = self.num_protected_tokens = 0
        self.num_inserted_tokens = 0
        self.num_slid_tokens = self.num_branch_tokens = 0
        self.node = None
        self.boundary = 0

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens > len(self._slots):
            room = np.empty(max(num_tokens + 64, num_tokens * 5 // 4), np.int64)
            room[: self.num_stored_tokens] = self.slots
            self._slots = room
