"""Values of the measured points before and after a shape, along each axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


class Neighbours:
    """Values of the nearest points on both sides along `axes`, one at a time.

    All other columns, and `kinds`, are the same. A point is no neighbour of itself, so
    that a fit to the features of measured points holds for new ones.
    """

    def __init__(self, axes: tuple[str, ...], kinds: tuple[str, ...]) -> None:
        self.axes = axes
        self.names = (*axes, *kinds)

    def fit(self, columns: Columns, values: Floats) -> Neighbours:
        self.levels_ = {name: np.unique(columns[name]) for name in self.names}
        self.sorted_ = {}
        for axis in self.axes:
            places = self._places(columns, axis)
            order = np.argsort(places, kind="stable")
            self.sorted_[axis] = places[order], values[order]
        return self

    def features(self, columns: Columns) -> Floats:
        """Return (n, 5) an axis, side by side; NaN where there is no neighbour.

        The value before and its distance in octaves, those after, and the straight line
        between.
        """
        return np.hstack([self._along(columns, axis) for axis in self.axes])

    @staticmethod
    def between(features: Floats) -> NDArray[np.bool_]:
        """Return which shapes have neighbours on both sides along the first axis."""
        both: NDArray[np.bool_] = ~np.isnan(features[:, 0] + features[:, 2])
        return both

    def _along(self, columns: Columns, axis: str) -> Floats:
        """Return values and octaves before and after, and the line between (n, 5)."""
        measured, values = self.sorted_[axis]
        places = self._places(columns, axis)
        width, octaves = self._width(axis), np.log2(self.levels_[axis].astype(float))
        here = np.log2(columns[axis].astype(float))
        found = []
        for at in (
            np.searchsorted(measured, places, side="left") - 1,
            np.searchsorted(measured, places, side="right"),
        ):
            near = measured[np.clip(at, 0, len(measured) - 1)]
            there = (at >= 0) & (at < len(measured)) & (places >= 0)
            there &= near // width == places // width
            distance = np.abs(octaves[near % width // 2] - here)
            value = values[np.clip(at, 0, len(measured) - 1)]
            found += [np.where(there, each, np.nan) for each in (value, distance)]
        before, back, after, ahead = found
        line = (before * ahead + after * back) / (back + ahead)
        alone = np.where(np.isnan(before), after, before)
        line = np.where(np.isnan(line), alone, line)
        return np.stack([*found, line], axis=1)

    def _width(self, axis: str) -> int:
        return 2 * len(self.levels_[axis]) + 1

    def _places(self, columns: Columns, axis: str) -> Integers:
        """Return integers that sort by all other columns, then along the axis.

        Measured values of the axis are odd, places between them even. Below 0 where
        another column has a value that was not measured.
        """
        group = np.zeros(len(columns[axis]), dtype=np.int64)
        known = np.ones(len(group), dtype=np.bool_)
        for name in self.names:
            if name != axis:
                levels = self.levels_[name]
                at = np.minimum(np.searchsorted(levels, columns[name]), len(levels) - 1)
                known &= levels[at] == columns[name]
                group = group * len(levels) + at
        levels = self.levels_[axis]
        at = np.searchsorted(levels, columns[axis])
        exact = levels[np.minimum(at, len(levels) - 1)] == columns[axis]
        places = group * self._width(axis) + 2 * at + exact
        return np.where(known, places, -1)
