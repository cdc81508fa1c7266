"""A request's record in a tier: from its first lookup until it has finished."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cache.errors import CacheError
from cache.tiers.places import NO_INTS, is_all, is_any, longer

if TYPE_CHECKING:
    from cache.tiers.places import ChunkIndex, Ints, Mask


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
    num_chunks
        How many it may have, as far as that is known.

    Attributes
    ----------
    inserted, reused, missed
        Keys that it stored; that it read, or wanted to store when another request had
        done so; and that it had to store, whether or not there was room. Kept by
        policies that ask for them.
    rank, number
        The policy's own; 0 before the first contact.
    ranked, is_sorted, own_from
        The policy's own: places and positions of the chunks that it ranks with the
        request, by lots; whether they stand by position; and from which position on
        none of them is ranked with another by now. What requests share is their heads.
    is_whole
        Whether the policy has ranked all with the request that it has shown, and has
        given up none of it.
    lost
        The policy's own: places and positions of chunks that it ranks with others by
        now, by lots.
    keys, cells
        By position in the request: keys, and where the tier's index has them (-1: not
        known).
    num_known
        Positions of which they are known.
    pages
        What it holds of that index.
    is_finished, end_s
        Whether the request has ended, and when, if that was said.
    """

    __slots__ = (
        "_is_shown",
        "_num_chunks",
        "_num_reached",
        "cells",
        "end_s",
        "inserted",
        "is_finished",
        "is_sorted",
        "is_whole",
        "keys",
        "lost",
        "missed",
        "num_known",
        "number",
        "own_from",
        "pages",
        "rank",
        "ranked",
        "request_id",
        "reused",
        "session",
    )

    def __init__(
        self,
        request_id: int = -1,
        session: SessionHint | None = None,
        num_chunks: int = 0,
    ) -> None:
        self.request_id = request_id
        self.session = session
        self.end_s = 0.0
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()
        self.rank = self.number = 0
        self.ranked: list[tuple[Ints, Ints]] = []
        self.is_sorted = self.is_whole = True
        self.own_from = 0
        self.lost: list[tuple[Ints, Ints]] = []
        self.is_finished = False
        self.keys = self.cells = NO_INTS
        self.num_known = 0
        self._num_reached = 0  # leading positions that hold all of which keys are known
        self.pages: list[int] = []
        self._is_shown: Mask = np.zeros(0, np.bool_)  # by position
        self._num_chunks = num_chunks

    def know(self, keys: Ints, first: int, index: ChunkIndex) -> Ints:
        """Return the cells of keys, in the tier that this record belongs to.

        Parameters
        ----------
        keys
            Successive chunks of the request.
        first
            Position of the first of them.
        index
            Of the tier.

        Raises
        ------
        CacheError
            If other keys were there before.
        """
        stop = first + len(keys)
        if not (first or self.num_known) and stop >= self._num_chunks:
            self.keys = keys
            self.cells, pages = index.hold(keys)
            self._is_shown = np.zeros(stop, np.bool_)
            self.num_known = self._num_reached = stop
            self.pages.append(pages)
            return self.cells
        if stop > len(self.cells):
            self._reach(stop)
        cells = self.cells[first:stop]
        if self._num_reached <= first < stop:
            cells[:], pages = index.hold(keys)
            self.keys[first:stop] = keys
            self.num_known += stop - first
            self._num_reached = stop
            self.pages.append(pages)
            return cells
        if self.num_known < len(self.cells):
            is_new = cells < 0
            if is_any(is_new):
                new = keys[is_new]
                cells[is_new], pages = index.hold(new)
                self.keys[first:stop][is_new] = new
                self.num_known += len(new)
                self._num_reached = max(self._num_reached, stop)
                self.pages.append(pages)
        if is_any(self.keys[first:stop] != keys):
            raise CacheError(
                f"chunks {first} to {stop - 1} of a request have other keys than "
                f"before; say where the first one stands in the request"
            )
        return cells

    def _reach(self, num_chunks: int) -> None:
        """Make room for so many chunks."""
        num_known, num_chunks = len(self.cells), max(num_chunks, self._num_chunks)
        if self.num_known:
            num_chunks = max(num_chunks, 2 * num_known)
        self.cells = longer(self.cells, num_chunks, -1)
        self.keys = longer(self.keys, num_chunks, -1)
        is_shown = np.zeros(len(self.cells), np.bool_)
        is_shown[:num_known] = self._is_shown
        self._is_shown = is_shown

    def show(self, first: int, stop: int, among: Mask | None = None) -> Mask:
        """Note known keys; say which of them are new to the request.

        Parameters
        ----------
        first, stop
            Position of the first of them, and behind the last one.
        among
            Those of them to note; None for all.
        """
        shown = self._is_shown[first:stop]
        new: Mask = ~shown
        if among is not None:
            new &= among
        shown |= new
        return new

    def show_all(self, first: int, stop: int) -> bool:
        """Note known keys; say whether any of them is new to the request."""
        shown = self._is_shown[first:stop]
        has_new = not is_all(shown)
        shown[:] = True
        return has_new

    def shown(self) -> slice | Ints:
        """Return the positions of the keys that it has shown."""
        if is_all(self._is_shown):
            return slice(0, len(self._is_shown))
        positions: Ints = self._is_shown.nonzero()[0]
        return positions

    def forget(self) -> None:
        """Forget the keys of a request that has ended; its rank stays."""
        self.keys = self.cells = NO_INTS
        self._is_shown = np.zeros(0, np.bool_)
        self.pages, self.lost = [], []
