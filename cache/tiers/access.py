"""A request's record in a tier: from its first lookup until it has finished."""

from __future__ import annotations


class RequestAccess:
    """The chunks that a request has stored, loaded or found there.

    Attributes
    ----------
    positions
        Place in the request of each key that it has shown, in the order of showing.
    inserted, reused
        Keys that it stored; and those that it read, or offered while others had stored
        them already.
    missed
        Keys that it had to store, whether or not there was room.
    rank
        The policy's own; 0 before the first contact.
    is_finished
        Whether the request has ended.
    """

    __slots__ = ("inserted", "is_finished", "missed", "positions", "rank", "reused")

    def __init__(self) -> None:
        self.positions: dict[int, int] = {}
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()
        self.rank = 0
        self.is_finished = False

    def from_tail(self) -> list[int]:
        """Return the keys that it has shown, the last of the request first."""
        return sorted(self.positions, key=self.positions.__getitem__, reverse=True)
