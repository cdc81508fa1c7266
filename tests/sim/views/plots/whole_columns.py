"""Columns as `sim.views.plots.binning` gathers them by batch, of whole arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from sim.views.plots.binning import IDLE_SHARE

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]
    Indices: TypeAlias = npt.NDArray[np.intp]


class WholeColumns:
    """Equal columns of simulated time, and values of the steps in each.

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
