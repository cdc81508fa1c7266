"""Tables of a profile as a cost model looks them up: straight lines between nodes."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sim.costs.parts import Memo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]

Segment = tuple[float, float, int, bool]
"""Seconds where a segment begins and seconds a unit of the *total* amount on it, the
total where it begins, and whether it touches what was extrapolated."""
Row = tuple[Segment, ...]
"""Segments of so many sequences: one below the first node, one from each node on."""


class Surface:
    """Seconds over (number of sequences, mean amount a sequence).

    Between nodes lie straight lines, first over the number of sequences, then over the
    total amount, so that a step needs one search, one product and one sum. Beyond the
    last node the last line goes on; below the first, what it says holds. Both say that
    they are extrapolated. More of an amount never costs less: where a table says so
    (noise, or another kernel taking over), the dearer value holds.

    Parameters
    ----------
    counts, amounts
        Nodes, ascending.
    seconds
        (counts, amounts) at the nodes.
    beyond
        (counts, amounts), whether a node was extrapolated.
    """

    __slots__ = ("_beyond", "_counts", "_seconds", "amounts", "rows")

    def __init__(
        self,
        counts: Sequence[int],
        amounts: Sequence[int],
        seconds: Seconds,
        beyond: NDArray[np.bool_],
    ) -> None:
        self.amounts = tuple(amounts)
        self.rows: Memo[Row] = Memo()
        self._counts = tuple(counts)
        raised = np.maximum.accumulate(seconds, axis=1)
        self._seconds: list[list[float]] = raised.tolist()
        self._beyond: list[list[bool]] = beyond.tolist()

    def row(self, count: int) -> Row:
        """Return the row of `count` sequences, at least 1, computed once."""
        return self.rows.get(count) or self.rows.keep(count, self._row(count))

    def _row(self, count: int) -> Row:
        values, beyond = self._nodes(count)
        starts = [count * amount for amount in self.amounts]
        slopes = [
            (after_s - before_s) / (end - start)
            for (before_s, after_s), (start, end) in zip(
                pairwise(values), pairwise(starts), strict=True
            )
        ]
        touched = [left or right for left, right in pairwise(beyond)]
        below: Segment = values[0], 0.0, starts[0], True
        segments = zip(
            values, (*slopes, slopes[-1]), starts, (*touched, True), strict=True
        )
        return below, *segments

    def _nodes(self, count: int) -> tuple[list[float], list[bool]]:
        """Return seconds at each amount, and whether they were extrapolated."""
        counts = self._counts
        place = min(max(bisect_right(counts, count) - 1, 0), len(counts) - 2)
        low, high = counts[place], counts[place + 1]
        outside = not counts[0] <= count <= counts[-1]
        step = max(count - low, 0)
        values: list[float] = []
        for before_s, after_s in zip(
            self._seconds[place], self._seconds[place + 1], strict=True
        ):
            slope = (after_s - before_s) / (high - low)
            if outside and slope < 0.0:
                slope = 0.0
            value = before_s + slope * step
            # interpolation of two rising rows rises, but for the last bit
            values.append(max(value, values[-1]) if values else value)
        flags = zip(self._beyond[place], self._beyond[place + 1], strict=True)
        return values, [outside or x or (y and step > 0) for x, y in flags]

    def at(self, count: int, total: int) -> tuple[float, bool]:
        """Return seconds of `count` sequences of `total` amount, and the flag."""
        row = self.row(count)
        value, slope, start, beyond = row[bisect_right(self.amounts, total // count)]
        return value + slope * (total - start), beyond


class Curve:
    """Seconds over one amount: straight lines between nodes, level below the first.

    Below the first node and beyond the last they were extrapolated.
    """

    __slots__ = ("_beyond", "_nodes", "_values")

    def __init__(
        self, nodes: Sequence[int], values: Sequence[float], beyond: Sequence[int]
    ) -> None:
        self._nodes = tuple(nodes)
        self._values: list[float] = np.maximum.accumulate(np.asarray(values)).tolist()
        self._beyond = tuple(map(bool, beyond))

    def at(self, amount: int) -> tuple[float, bool]:
        """Return seconds of `amount`, and whether they were extrapolated."""
        nodes, values = self._nodes, self._values
        j = min(max(bisect_right(nodes, amount) - 1, 0), len(nodes) - 2)
        slope = (values[j + 1] - values[j]) / (nodes[j + 1] - nodes[j])
        outside = not nodes[0] <= amount <= nodes[-1]
        # a segment touches both its nodes, what lies on its first that one alone
        touches = self._beyond[j] or (self._beyond[j + 1] and amount > nodes[j])
        return values[j] + slope * max(amount - nodes[j], 0), outside or touches
