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
    """Whether a mask has a True; its own method takes three times as long."""
    return bool(np.count_nonzero(mask))


def is_all(mask: Mask) -> bool:
    """Whether a mask has nothing but True."""
    return bool(np.count_nonzero(mask) == len(mask))


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
        self._num_holders = [0]  # by row

    def find(self, key: int) -> int:
        """Return the place of a key, -1 if there is none."""
        row = self._rows.get(key >> _PAGE_BITS)
        if row is None:
            return -1
        return int(self.places[(row << _PAGE_BITS) | (key & (_PAGE - 1))])

    def hold(self, keys: Ints) -> tuple[Ints, list[int]]:
        """Return the cell of each key, and what is to be handed to `release`."""
        pages = keys >> _PAGE_BITS
        cuts = (pages[1:] != pages[:-1]).nonzero()[0]
        cuts += 1
        starts = np.concatenate(([0], cuts, [len(keys)]))
        known, num_holders = self._rows, self._num_holders
        rows: list[int] = []
        for page in pages[starts[:-1]].tolist():
            row = known.get(page)
            if row is None:
                row = known[page] = self._take_row()
            num_holders[row] += 1
            rows.append(row)
        first = np.array(rows, np.int64)
        first <<= _PAGE_BITS
        return first.repeat(starts[1:] - starts[:-1]) + (keys & (_PAGE - 1)), rows

    def release(self, rows: list[int]) -> None:
        """Let go of pages."""
        num_holders = self._num_holders
        for row in rows:
            num_holders[row] -= 1

    def _take_row(self) -> int:
        if not self._free_rows:
            self._give_up_pages()
        return self._free_rows.pop()

    def _give_up_pages(self) -> None:
        """Free rows without a chunk or a holder; if they are few, make more."""
        num_rows = len(self._num_holders)
        latest = np.maximum.reduce(self.places.reshape(-1, _PAGE), axis=1).tolist()
        num_holders = self._num_holders
        for page, row in list(self._rows.items()):
            if latest[row] < 0 and not num_holders[row]:
                del self._rows[page]
                self._free_rows.append(row)
        if 2 * len(self._free_rows) < num_rows:
            self.places = longer(self.places, 2 * len(self.places), -1)
            self._num_holders += [0] * num_rows
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
            min(self._num_holders) >= 0, "tier: a page is let go of that nobody holds"
        )
