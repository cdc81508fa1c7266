"""A request's record in a tier: from its first lookup until it has finished."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class SessionHint(NamedTuple):
    """The client's hint on the session of a request.

    Attributes
    ----------
    session_id
        Its number.
    returns_s
        Seconds from the end of the answer to the next request of the session; infinity
        after its last one.
    """

    session_id: int
    returns_s: float


class RequestAccess:
    """The chunks that a request has stored, loaded or found there.

    Parameters
    ----------
    request_id
        Its number, for those who log.
    session
        Its session's hint; None without one.

    Attributes
    ----------
    positions
        Place in the request of each key that it has used, in the order of first uses.
    inserted, reused, missed
        Keys that it stored; that it read, or wanted to store when another request had
        done so; and that it had to store, whether or not there was room. Kept by
        policies that ask for them.
    rank
        The policy's own; 0 before the first contact.
    ranked, is_sorted, is_own
        The policy's own: keys that it ranks with the request; whether they stand by
        place, and whether none of them is ranked with another by now.
    is_finished, end_s
        Whether the request has ended, and when, if that was said.
    """

    __slots__ = (
        "_is_in_order",
        "_next_place",
        "end_s",
        "inserted",
        "is_finished",
        "is_own",
        "is_sorted",
        "missed",
        "positions",
        "rank",
        "ranked",
        "request_id",
        "reused",
        "session",
    )

    def __init__(
        self, request_id: int = -1, session: SessionHint | None = None
    ) -> None:
        self.request_id = request_id
        self.session = session
        self.end_s = 0.0
        self.positions: dict[int, int] = {}
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()
        self.rank = 0
        self.ranked: list[int] = []
        self.is_sorted = self.is_own = True
        self.is_finished = False
        self._is_in_order = True  # keys were noted in the order of their places
        self._next_place = 0

    def show(
        self, keys: Sequence[int], first: int, shown: Collection[int] | None = None
    ) -> Sequence[int]:
        """Note the places of keys; return those that are new to the request.

        Parameters
        ----------
        keys
            Successive chunks of the request.
        first
            Place of the first of them.
        shown
            Those of them to note; None for all.
        """
        positions, new = self.positions, keys
        if shown is None and first >= self._next_place:
            positions.update(zip(keys, count(first)))
        else:
            places = {
                key: place
                for place, key in enumerate(keys, first)
                if key not in positions and (shown is None or key in shown)
            }
            positions.update(places)
            new = list(places)
        if new:
            self._is_in_order &= positions[new[0]] >= self._next_place
            self._next_place = max(self._next_place, positions[new[-1]] + 1)
        return new

    def by_place(self) -> list[int]:
        """Return the keys in the order of their places in the request."""
        positions = self.positions
        if self._is_in_order:
            return list(positions)
        return sorted(positions, key=positions.__getitem__)
