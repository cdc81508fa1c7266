"""A request's record in a tier: from its first lookup until it has finished."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cache.tiers.places import Spans

if TYPE_CHECKING:
    from cache.tiers.extents import Chunks
    from cache.tiers.places import Keys, Span


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
    lots
        What it has shown: prompt, from which position on, and before which.
    is_finished, end_s
        Whether the request has ended, and when, if that was said.
    """

    __slots__ = (
        "_shown",
        "end_s",
        "inserted",
        "is_finished",
        "is_sorted",
        "lots",
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
        self.is_sorted = True
        self.is_finished = False
        self.lots: list[tuple[Keys, int, int]] = []
        self._shown = Spans()

    @property
    def num_shown(self) -> int:
        """Chunks that it has shown."""
        return len(self._shown)

    def show(self, keys: Keys, first: int, stop: int) -> list[Span]:
        """Note positions of a prompt; return those that are new to the request."""
        new = self._shown.add(first, stop)
        for span in new:
            self.lots.append((keys, *span))
            if len(self.lots) > 1:
                before, start, end = self.lots[-2]
                if before is keys and end == span[0]:
                    self.lots[-2:] = [(keys, start, span[1])]
        return new

    def list(self, chunks: Chunks) -> None:
        """List chunks with the request that ranks them."""
        ranked = self.ranked
        if ranked and ranked[-1].position > chunks.position:
            self.is_sorted = False
        ranked.append(chunks)

    def forget(self) -> None:
        """Forget the chunks that an ended request has shown; its rank stays."""
        self.lots, self._shown = [], Spans()
