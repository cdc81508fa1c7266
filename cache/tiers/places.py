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

    def cut(self, number: int) -> tuple[Chunks, Chunks]:
        """Return the first so many, and the others."""
        keys, ids, positions = self
        return (
            Chunks(keys[:number], ids[:number], positions[:number]),
            Chunks(keys[number:], ids[number:], positions[number:]),
        )


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
    num_rows = max(length, 2 * len(column), _PAGE)
    # Memory of zeros is not touched before it is used.
    grown = np.full(num_rows, fill, np.int64) if fill else np.zeros(num_rows, np.int64)
    grown[: len(column)] = column
    return grown


class ChunkIndex:
    """Places by key.

    Keys of neighbours in a prompt count up, so the index has pages of 32 successive
    keys, which are rows of one table. A request finds the *cells* of its keys once, a
    look-up for up to 32 chunks, and holds their pages until it ends.
    Pages without a holder and a chunk are given up when the table is full.

    Parameters
    ----------
    num_chunks
        Places of the tier: a table of fewer cells grows before pages are given up.

    Attributes
    ----------
    places
        By cell; -1 for a key that is not there.
    """

    def __init__(self, num_chunks: int = 0) -> None:
        self.places: Ints = np.full(_PAGE, -1, np.int64)
        self._num_chunks = num_chunks
        self._rows: dict[int, int] = {}
        self._free_rows = [0]
        self._num_begun = 0
        self._held: dict[int, Ints] = {}  # rows by what `release` is handed

    def find(self, key: int) -> int:
        """Return the place of a key, -1 if there is none."""
        row = self._rows.get(key >> _PAGE_BITS)
        if row is None:
            return -1
        return int(self.places[(row << _PAGE_BITS) | (key & (_PAGE - 1))])

    def hold(self, keys: Ints) -> tuple[Ints, int]:
        """Return the cell of each key, and what is to be handed to `release`."""
        pages = keys >> _PAGE_BITS
        starts = (pages[1:] != pages[:-1]).nonzero()[0]
        starts += 1
        rows = self._rows_of([int(pages[0]), *pages[starts].tolist()])
        held = np.array(rows)
        self._num_begun = number = self._num_begun + 1
        self._held[number] = held
        lengths = np.empty(len(rows), np.int64)
        lengths[:-1] = starts
        lengths[-1] = len(keys)
        lengths[1:] -= starts
        cells = (held << _PAGE_BITS).repeat(lengths)
        cells += keys & (_PAGE - 1)
        return cells, number

    def release(self, number: int) -> None:
        """Let go of pages."""
        del self._held[number]

    def _rows_of(self, pages: list[int]) -> list[int]:
        """Return the row of each page; a page that has none gets one."""
        known, free = self._rows, self._free_rows
        if len(free) < len(pages) and len(self.places) >= self._num_chunks:
            self._give_up_pages({*pages})
        while len(free) < len(pages):
            self._make_rows()
        rows = []
        for page in pages:
            row = known.get(page)
            if row is None:
                row = known[page] = free.pop()
            rows.append(row)
        return rows

    def _give_up_pages(self, wanted: set[int]) -> None:
        """Free rows without a chunk or a holder; if they are few, make more.

        Pages that are wanted are about to be held.
        """
        num_rows = len(self.places) // _PAGE
        is_used = np.zeros(num_rows, np.bool_)
        is_used[(self.places >= 0).nonzero()[0] >> _PAGE_BITS] = True
        is_used[self._held_rows()] = True
        uses = is_used.tolist()
        rows = self._rows
        idle = [p for p, row in rows.items() if not uses[row] and p not in wanted]
        self._free_rows += map(rows.pop, idle)
        if 2 * len(self._free_rows) < num_rows:
            self._make_rows()

    def _held_rows(self) -> Ints:
        return np.concatenate([NO_INTS, *self._held.values()])

    def _make_rows(self) -> None:
        """Double the table."""
        num_rows = len(self.places) // _PAGE
        self.places = longer(self.places, 2 * len(self.places), -1)
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
            sorted(rows) == list(range(len(self.places) // _PAGE)),
            "tier: a row of the index has two pages, or is lost",
        )
        places, held = self.places.reshape(-1, _PAGE), {*self._held_rows().tolist()}
        for row in self._free_rows:
            require(
                row not in held and bool((places[row] < 0).all()),
                "tier: row {} of the index is free and in use",
                row,
            )
