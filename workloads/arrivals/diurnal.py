"""A rate that swells and falls with the time of day."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads._checks import between, finite, positive
from workloads._numpy import np
from workloads.arrivals.base import check_rate, unit_arrivals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

# Newton's steps with a bracket; halving alone would need some 60.
_MAX_STEPS = 100


@dataclass(frozen=True, slots=True)
class DiurnalArrivals:
    """Poisson arrivals whose rate is a sine wave, such as that of a day.

    The rate at ``t`` is ``rate * (1 + (peak_to_mean - 1) * cos(2 * pi * (t - peak_s) /
    period_s))``. Drawn by the inverse of the integrated rate, hence exact: the number
    of arrivals in any span is Poisson.

    Parameters
    ----------
    rate
        Mean requests per second over a period, above 0.
    peak_to_mean
        Highest rate over the mean, 1 (steady) to 2 (nothing in the trough). For
        higher peaks draw the curve with `PiecewiseArrivals`.
    period_s
        Seconds from peak to peak; a day by default.
    peak_s
        When the first peak is, in seconds; None is half a period, so that the
        workload begins in the trough.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range.
    """

    rate: float
    peak_to_mean: float = 1.5
    period_s: float = 86_400.0
    peak_s: float | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate)
        remedy = "give the peak's share of the mean rate; higher: kind piecewise"
        between("peak_to_mean", self.peak_to_mean, 1, 2, remedy)
        positive("period_s", self.period_s, "give seconds, such as 86400 for a day")
        if self.peak_s is not None:
            remedy = "give the seconds from the start to the peak"
            between("peak_s", finite("peak_s", self.peak_s, remedy), 0, 1e9, remedy)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        turn = 2 * math.pi
        peak_s = self.period_s / 2 if self.peak_s is None else self.peak_s
        # Angles from the peak, in which the integrated rate is x + swing * sin(x).
        start = -turn * (peak_s / self.period_s % 1)
        swing = self.peak_to_mean - 1
        per_turn = self.rate * self.period_s / turn
        before_s = 0.0
        for areas in unit_arrivals(rng):
            wanted = areas / per_turn + start + swing * math.sin(start)
            turns = np.floor(wanted / turn)
            angles = turns * turn + _inverse(wanted - turns * turn, swing)
            times_s = (angles - start) / turn * self.period_s
            # Neighbours may be closer than rounding: times never fall.
            times_s = np.maximum.accumulate(times_s.clip(min=before_s))
            yield from times_s.tolist()
            before_s = float(times_s[-1])


def _inverse(wanted: NDArray[np.float64], swing: float) -> NDArray[np.float64]:
    """Return the ``x`` with ``x + swing * sin(x) = wanted``, for a swing from 0 to 1.

    Kepler's equation. Newton's method, held in a bracket that every step narrows: at a
    swing of 1 the slope is 0 in the trough.
    """
    low, high = wanted - swing, wanted + swing
    x = wanted.copy()
    for _ in range(_MAX_STEPS):
        error = x + swing * np.sin(x) - wanted
        low, high = np.where(error < 0, x, low), np.where(error < 0, high, x)
        slope = 1 + swing * np.cos(x)
        step = np.divide(error, slope, out=np.full_like(x, np.inf), where=slope > 0)
        middle = (low + high) / 2
        is_inside = (x - step >= low) & (x - step <= high)
        moved = np.where(is_inside, x - step, middle)
        if (np.abs(moved - x) <= 1e-13).all():
            break
        x = moved
    return x
