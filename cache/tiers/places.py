"""Chunks in columns: their keys, and the places of a tier that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import require
from cache.hashing import KEY_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_PAGE = KEY_ALIGNMENT
"""Keys of a page."""
_PAGE_BITS = _PAGE.bit_length() - 1

NO_INTS: Ints = np.empty(0, np.int64)


class Chunks(NamedTuple):
    """Chunks of a request, in columns of one length.

    Attributes
    ----------
    keys
        What they hold.
    ids
        Their places in the tier; -1 for those that are not there.
    positions
        Their places in the request.
    """

    keys: Ints
    ids: Ints
    positions: Ints

    def where(self, mask: Mask) -> Chunks:
        """Return those of a mask, in their order."""
        return Chunks(self.keys[mask], self.ids[mask], self.positions[mask])


def is_any(mask: Mask) -> bool:
    """Whether a mask has a True; counting them takes eight times as long."""
    return 1 in mask.tobytes()


def is_all(mask: Mask) -> bool:
    """Whether a mask has nothing but True."""
    return 0 not in mask.tobytes()


def as_ints(numbers: Sequence[int] | Ints) -> Ints:
    """Return keys, or places, as a column."""
    return np.asarray(numbers, np.int64)


def longer(column: Ints, length: int, fill: int = 0) -> Ints:
    """Return a column of at least so many rows; new ones are filled with a number."""
    if length <= len(column):
        return column
    grown = np.full(max(length, 2 * len(column), _PAGE), fill, np.int64)
    grown[: len(column)] = column
    return grown


class ChunkIndex:
    """Places by key.

    Keys of neighbours in a prompt count up, so the index has pages of 32 successive
    keys, which are rows of one table. A request finds the *cells* of its keys once, a
    look-up for up to 32 chunks, and holds their pages until it ends.
    Pages without a holder and a chunk are given up when the table is full.

    Attributes
    ----------
    places
        By cell; -1 for a key that is not there.
    """

    def __init__(self) -> None:
        self.places: Ints = np.full(_PAGE, -1, np.int64)
        self._rows: dict[int, int] = {}
        self._free_rows = [0]
        self._num_holders: Ints = np.zeros(1, np.int64)  # by row

    def find(self, key: int) -> int:
        """Return the place of a key, -1 if there is none."""
        row = self._rows.get(key >> _PAGE_BITS)
        if row is None:
            return -1
        return int(self.places[(row << _PAGE_BITS) | (key & (_PAGE - 1))])

    def hold(self, keys: Ints) -> tuple[Ints, Ints]:
        """Return the cell of each key, and what is to be handed to `release`."""
        pages = keys >> _PAGE_BITS
        starts = (pages[1:] != pages[:-1]).nonzero()[0]
        starts += 1
        first = [int(pages[0]), *pages[starts].tolist()]
        known = self._rows
        rows = [known.get(page, -1) for page in first]
        if -1 in rows:
            self._take_rows(first, rows)
        held = np.array(rows, np.int64)
        self._num_holders[held] += 1
        lengths = np.empty(len(rows), np.int64)
        lengths[:-1] = starts
        lengths[-1] = len(keys)
        lengths[1:] -= starts
        cells = (held << _PAGE_BITS).repeat(lengths)
        cells += keys & (_PAGE - 1)
        return cells, held

    def release(self, rows: Ints) -> None:
        """Let go of pages."""
        self._num_holders[rows] -= 1

    def _take_rows(self, pages: list[int], rows: list[int]) -> None:
        """Give a row to each page that has none (-1)."""
        num_new, free, known = rows.count(-1), self._free_rows, self._rows
        if len(free) < num_new:
            self._give_up_pages({*rows})
        while len(free) < num_new:
            self._make_rows()
        for place, page in enumerate(pages):
            if page not in known:
                known[page] = free.pop()
            rows[place] = known[page]

    def _give_up_pages(self, wanted: set[int]) -> None:
        """Free rows without a chunk or a holder; if they are few, make more.

        Those that are wanted are about to be held.
        """
        num_rows = len(self._num_holders)
        latest = np.maximum.reduce(self.places.reshape(-1, _PAGE), axis=1)
        is_idle = ((latest < 0) & (self._num_holders == 0)).tolist()
        for page, row in list(self._rows.items()):
            if is_idle[row] and row not in wanted:
                del self._rows[page]
                self._free_rows.append(row)
        if 2 * len(self._free_rows) < num_rows:
            self._make_rows()

    def _make_rows(self) -> None:
        """Double the table."""
        num_rows = len(self._num_holders)
        self.places = longer(self.places, 2 * len(self.places), -1)
        more = np.zeros(num_rows, np.int64)
        self._num_holders = np.concatenate([self._num_holders, more])
        self._free_rows += range(2 * num_rows - 1, num_rows - 1, -1)

    def check(self) -> None:
        """Prove that each row has one page, or none and no chunk. O(n).

        Raises
        ------
        InvariantError
            With the row.
        """
        rows = [*self._rows.values(), *self._free_rows]
        require(
            sorted(rows) == list(range(len(self._num_holders))),
            "tier: a row of the index has two pages, or is lost",
        )
        places = self.places.reshape(-1, _PAGE)
        for row in self._free_rows:
            require(
                not self._num_holders[row] and bool((places[row] < 0).all()),
                "tier: row {} of the index is free and in use",
                row,
            )
        require(
            int(self._num_holders.min()) >= 0,
            "tier: a page is let go of that nobody holds",
        )
