"""From millions of steps to the columns of a screen, extremes kept.

A step holds its values from its start until its end (or until the next step starts,
if that is earlier). Between steps the engine is idle: what belongs to a step, such as
its latency, has a gap there; what belongs to the engine, such as its queues, is 0::

    steps            |-a-|-b-|         |---c---|
    columns          |     |     |     |     |     |
    high, of steps     a|b    b    nan    c     c
    high, of engine    a|b    b     0     c     c
    low, of engine     a|b    0     0     0     0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]
    Indices: TypeAlias = npt.NDArray[np.intp]


IDLE_SHARE = 1e-6
"""Share of a column's width below which a pause between steps is rounding."""


class StepColumns:
    """Equal columns of simulated time, and what the steps were worth in each.

    Parameters
    ----------
    start_s
        Start of each step in seconds, ascending.
    latency_s
        Length of each step in seconds.
    stop_s
        Right edge of the last column; the first begins at 0.
    num_columns
        Number of columns.
    idle_is_zero
        Whether values, none of them negative, count as 0 while the engine is idle.
    """

    def __init__(
        self,
        start_s: Floats,
        latency_s: Floats,
        stop_s: float,
        num_columns: int,
        *,
        idle_is_zero: bool = False,
    ) -> None:
        end_s = start_s + latency_s
        np.minimum(end_s[:-1], start_s[1:], out=end_s[:-1])
        self.edges_s: Floats = np.linspace(0.0, stop_s, num_columns + 1)
        self._length_s = end_s - start_s
        self._first: Indices = np.searchsorted(end_s, self.edges_s[:-1], "right")
        self._stop: Indices = np.searchsorted(start_s, self.edges_s[1:], "left")
        self._busy = self._first < self._stop
        self._starts_before: Indices = np.searchsorted(start_s, self.edges_s, "left")
        at_edge = np.searchsorted(start_s, self.edges_s, "right") - 1
        self._at_edge: Indices = np.maximum(at_edge, 0)
        self._idle_is_zero = idle_is_zero
        self._busy_s: Floats = np.zeros(num_columns)
        if start_s.size:
            into_s = self.edges_s - start_s[self._at_edge]
            self._into_s = np.clip(into_s, 0.0, self._length_s[self._at_edge])
            self._busy_s = self._integral(np.ones_like(start_s))
        self._is_partly_idle = self._busy_s < (1.0 - IDLE_SHARE) * self.width_s

    @property
    def width_s(self) -> float:
        """Width of a column in seconds."""
        return float(self.edges_s[1] - self.edges_s[0])

    def low(self, values: Floats) -> Floats:
        """Return the smallest value of each column."""
        low = self._reduce(np.minimum, values)
        return np.where(self._is_partly_idle, 0.0, low) if self._idle_is_zero else low

    def high(self, values: Floats) -> Floats:
        """Return the largest value of each column."""
        high = self._reduce(np.maximum, values)
        return np.nan_to_num(high, nan=0.0) if self._idle_is_zero else high

    def mean(self, values: Floats) -> Floats:
        """Return the mean of each column, weighted by time."""
        mean = self.low(values)
        if self._busy.any():
            over_s = self.width_s if self._idle_is_zero else self._busy_s
            integral = self._integral(values)
            np.divide(integral, over_s, out=mean, where=self._busy_s > 0.0)
        # Not beyond the extremes by rounding.
        return np.clip(mean, self.low(values), self.high(values))

    def median(self, values: Floats) -> Floats:
        """Return the median over the steps of each column, each step counted once."""
        median = np.full(self._busy.size, np.nan)
        for column in np.flatnonzero(self._busy):
            inside = values[self._first[column] : self._stop[column]]
            median[column] = np.median(inside)
        return median

    def mean_per_step(self, values: Floats) -> Floats:
        """Return the mean over the steps that start in each column.

        Each step counts once, however long it is. A column in which none starts has
        the value of the step that is still running, or a gap.
        """
        mean = self._reduce(np.minimum, values)
        until = np.concatenate([[0.0], np.cumsum(values)])
        num_steps = np.diff(self._starts_before)
        total = np.diff(until[self._starts_before])
        np.divide(total, num_steps, out=mean, where=num_steps > 0)
        return mean

    def _integral(self, values: Floats) -> Floats:
        """Return the integral of `values` over each column."""
        until = np.zeros(values.size + 1)
        np.cumsum(values * self._length_s, out=until[1:])
        at_edge = until[self._at_edge] + values[self._at_edge] * self._into_s
        return np.diff(at_edge)

    def _reduce(self, ufunc: np.ufunc, values: Floats) -> Floats:
        reduced = np.full(self._busy.size, np.nan)
        if self._busy.any():
            # `reduceat` takes [first, stop) pairs one after the other; what lies
            # between the pairs is dropped, and a stop may be one past the end.
            spans = np.stack([self._first, self._stop], axis=1)[self._busy].ravel()
            padded = np.append(values, values[-1])
            reduced[self._busy] = ufunc.reduceat(padded, spans)[::2]
        return reduced


def extremes_per_column(x: Floats, y: Floats, edges: Floats) -> Indices:
    """Return the indices of the points to keep: lowest and highest y per column."""
    if not x.size:
        return np.zeros(0, dtype=np.intp)
    column = np.searchsorted(edges, x, "right")
    order = np.lexsort((y, column))
    first = np.flatnonzero(np.diff(column[order], prepend=-1))
    last = np.append(first[1:], x.size) - 1
    return np.unique(order[np.concatenate([first, last])])


def cdf_points(values: Floats, num_points: int) -> tuple[Floats, Floats]:
    """Return the empirical distribution thinned to `num_points`, both ends kept.

    Parameters
    ----------
    values
        At least one number, in any order, no NaN.
    num_points
        Points to keep, at least 2.

    Returns
    -------
    x, share
        Sorted values, and the share of `values` no larger than each.
    """
    ordered = np.sort(values)
    kept = np.linspace(0, ordered.size - 1, min(num_points, ordered.size))
    index = np.unique(kept.astype(np.intp))
    return ordered[index], (index + 1.0) / ordered.size
