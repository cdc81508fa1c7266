"""A request's record in a tier: from its first lookup until it has finished."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from cache.tiers.places import Lot, Spans

if TYPE_CHECKING:
    from cache.tiers.extents import Chunks
    from cache.tiers.places import Span


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
    inserted, reused, missed
        Keys that it stored; that it read, or wanted to store when another request had
        done so; and that it had to store, whether or not there was room. Kept by
        policies that ask for them.
    rank
        The policy's own; 0 before the first contact.
    ranked, is_sorted
        The policy's own: the chunks that it ranks with the request, others among them
        that it ranks with another one by now; and whether they stand by position.
    groups, is_settled
        The policy's own: the groups of these, and whether they were ranked anew.
    is_finished, end_s
        Whether the request has ended, and when, if that was said.
    """

    __slots__ = (
        "_lots",
        "_shown",
        "end_s",
        "groups",
        "inserted",
        "is_finished",
        "is_settled",
        "is_sorted",
        "missed",
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
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()
        self.rank = 0
        self.ranked: list[Chunks] = []
        self.groups: set[int] = set()
        self.is_sorted = True
        self.is_settled = False
        self.is_finished = False
        self._lots: dict[int, list[Lot]] = {}  # by group
        self._shown: dict[int, Spans] = {}

    @property
    def num_shown(self) -> int:
        """Chunks that it has shown."""
        return sum(map(len, self._shown.values()))

    @property
    def lots(self) -> list[Lot]:
        """The lots of prompts that the request has shown, by group and position."""
        return [
            lot
            for _, lots in sorted(self._lots.items())
            for lot in sorted(lots, key=attrgetter("first"))
        ]

    def show(self, lot: Lot) -> list[Span]:
        """Note positions of a prompt; return those that are new to the request."""
        keys, group = lot.keys, lot.keys.group
        shown = self._shown.get(group)
        if shown is None:
            shown = self._shown[group] = Spans()
            self._lots[group] = []
        new, lots = shown.add(lot.first, lot.stop), self._lots[group]
        for first, stop in new:
            is_next = lots and lots[-1].keys is keys and lots[-1].stop == first
            lots.append(Lot(keys, lots.pop().first if is_next else first, stop))
        return new

    def list(self, chunks: Chunks) -> None:
        """List chunks with the request that ranks them."""
        ranked = self.ranked
        if ranked and ranked[-1].position > chunks.position:
            self.is_sorted = False
        ranked.append(chunks)
        self.groups.add(chunks.extent.keys.group)

    def rank_anew(self, rank: int) -> None:
        """Begin its list of ranked chunks anew, with a rank."""
        self.rank, self.ranked, self.groups = rank, [], set()
        self.is_sorted = self.is_settled = True

    def forget(self) -> None:
        """Forget the chunks that an ended request has shown; its rank stays."""
        self._lots, self._shown = {}, {}
