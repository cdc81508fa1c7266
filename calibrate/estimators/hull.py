"""The hull of measured shapes: a shape is inside between two measured ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from calibrate.estimators.rows import unique_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Columns = Mapping[str, NDArray[Any]]

_MOST_PAIRS: Final = 1 << 22
"""Comparisons of rows that are held in memory at once."""


class _Points(NamedTuple):
    """Measured points of one key."""

    rest: Integers
    """(r, a - 1) distinct amounts but for the last."""
    least: Integers
    """(r,) smallest last amount of each."""
    most: Integers


class Hull:
    """Shapes between measured ones, along every amount at once.

    A shape is inside where some measured point of its key has no smaller amount, and
    some no larger one. So a corner that was left out is outside, though a box around
    the points holds it: short contexts of small batches, or the largest page times the
    largest count. Holes between points are inside.

    `reach` is in octaves, summed over the keys, within which a key that was not
    measured is taken for the nearest one that was. With `open_below` a shape below
    every measured point is inside, too: where the least that a call takes was
    measured, its time lies between that and theirs.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        amounts: tuple[str, ...],
        reach: float = 0.0,
        *,
        open_below: bool = False,
    ) -> None:
        self.keys = keys
        self.amounts = amounts
        self.reach = reach
        self.open_below = open_below

    def fit(self, columns: Columns) -> Hull:
        # rows of all amounts but the last are compared: they are to be few
        self.amounts = tuple(
            sorted(self.amounts, key=lambda name: len(np.unique(columns[name])))
        )
        self.of_keys_, groups = self._groups(columns)
        amounts = _table(columns, self.amounts)
        self.points_ = [_points(amounts[own]) for own in groups]
        return self

    def outside(self, columns: Columns) -> NDArray[np.bool_]:
        """Return which shapes have no measured point on one side of them."""
        keys, groups = self._groups(columns)
        amounts = _table(columns, self.amounts)
        found = np.ones(len(amounts), dtype=np.bool_)
        for key, own in zip(keys, groups, strict=True):
            place = self._place(key)
            if place is not None:
                found[own] = _outside(
                    self.points_[place], amounts[own], open_below=self.open_below
                )
        return found

    def _groups(self, columns: Columns) -> tuple[Integers, list[NDArray[np.intp]]]:
        table = _table(columns, self.keys)
        if not self.keys:
            table = np.zeros((len(columns[self.amounts[0]]), 1), dtype=np.int64)
        keys, places = unique_rows(table)
        order = np.argsort(places, kind="stable")
        ends = np.cumsum(np.bincount(places, minlength=len(keys)))[:-1]
        return keys, np.split(order, ends)

    def _place(self, key: Integers) -> int | None:
        octaves = np.abs(np.log2(1.0 + self.of_keys_) - np.log2(1.0 + key)).sum(axis=1)
        nearest = int(np.argmin(octaves))
        return nearest if octaves[nearest] <= self.reach else None


def _table(columns: Columns, names: tuple[str, ...]) -> Integers:
    if not names:
        return np.empty((0, 0), dtype=np.int64)
    return np.stack([columns[name] for name in names], axis=1).astype(np.int64)


def _points(amounts: Integers) -> _Points:
    rest, places = unique_rows(amounts[:, :-1])
    least = np.full(len(rest), np.iinfo(np.int64).max)
    most = np.full(len(rest), np.iinfo(np.int64).min)
    np.minimum.at(least, places, amounts[:, -1])
    np.maximum.at(most, places, amounts[:, -1])
    return _Points(rest, least, most)


def _outside(
    points: _Points, amounts: Integers, *, open_below: bool
) -> NDArray[np.bool_]:
    rows, places = unique_rows(amounts[:, :-1])
    sides = [_sides(points, part) for part in _parts(rows, len(points.rest))]
    least, most = (np.concatenate(side) for side in zip(*sides, strict=True))
    last = amounts[:, -1]
    outside: NDArray[np.bool_] = last > most[places]
    return outside if open_below else outside | (last < least[places])


def _parts(rows: Integers, width: int) -> Iterator[Integers]:
    step = max(1, _MOST_PAIRS // max(1, width))
    yield from (rows[at : at + step] for at in range(0, len(rows), step))


def _sides(points: _Points, rows: Integers) -> tuple[Integers, Integers]:
    """Return the smallest last amount at or below each row, the largest above it."""
    below = np.ones((len(rows), len(points.rest)), dtype=np.bool_)
    above = below.copy()
    for axis in range(rows.shape[1]):
        mine, theirs = rows[:, axis, None], points.rest[None, :, axis]
        below &= theirs <= mine
        above &= theirs >= mine
    numbers = np.iinfo(np.int64)
    least = np.where(below, points.least[None, :], numbers.max).min(axis=1)
    most = np.where(above, points.most[None, :], numbers.min).max(axis=1)
    return least, most
