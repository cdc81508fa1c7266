"""The highest rate that holds: bracketing, then halving with the slope as a guide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf, log, sqrt

Margin = Callable[[float], float]
"""From a rate to how far it misses the objectives: at most 0 where it holds, see
`sim.studies.planning.objectives.Objective.margin`."""

_NEAR = 1.1
"""Ends of a bracket so close that a line between their margins can be trusted."""
_EDGE = 0.1
"""The slope may choose a point within the middle of a bracket, 80 % of it."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Where the objectives stop to hold, for one seed.

    Parameters
    ----------
    rate
        The threshold; a bound if the search ended there.
    tried
        Rates and margins in the order in which they were tried.
    at_bound
        ``"low"`` if not even the lowest rate holds, ``"high"`` if the highest does;
        else empty.
    """

    rate: float
    tried: tuple[tuple[float, float], ...]
    at_bound: str = ""


@dataclass(slots=True)
class _Bracket:
    """A rate that holds and a higher one that does not, as far as they are known."""

    holds: tuple[float, float] | None = None
    misses: tuple[float, float] | None = None

    def take(self, rate: float, margin: float) -> None:
        if margin <= 0:
            self.holds = (rate, margin)
        else:
            self.misses = (rate, margin)

    @property
    def ratio(self) -> float:
        if self.holds is None or self.misses is None:
            return inf
        return self.misses[0] / self.holds[0]

    def is_closed(self, tolerance: float) -> bool:
        """Whether the crossing is known to within `tolerance`, as a share."""
        if self.ratio <= 1 + tolerance:
            return True
        if self.ratio > _NEAR or not self.has_slope:
            return False
        assert self.holds is not None
        width, below = log(self.ratio), log(self.crossing() / self.holds[0])
        return min(below, width - below) <= log(1 + tolerance) / 2

    @property
    def has_slope(self) -> bool:
        """Whether both margins are numbers to draw a line through."""
        assert self.holds is not None
        assert self.misses is not None
        return -inf < self.holds[1] and self.misses[1] < inf

    def crossing(self) -> float:
        """Return where a line through both margins is 0; the middle without slopes."""
        assert self.holds is not None
        assert self.misses is not None
        (low, below), (high, above) = self.holds, self.misses
        share = -below / (above - below) if self.has_slope else 0.5
        return low * exp(share * log(high / low))

    def next_inside(self, tolerance: float) -> float:
        """Return a rate just beyond the crossing, so that the bracket closes there."""
        assert self.holds is not None
        low, width = self.holds[0], log(self.ratio)
        share = log(self.crossing() / low) / width
        nudge = log(1 + tolerance) / 2 / width
        share += nudge if share < 0.5 else -nudge
        return low * exp(width * min(max(share, _EDGE), 1 - _EDGE))


def find_threshold(
    margin: Margin,
    guess: float,
    *,
    step: float = 1.25,
    tolerance: float = 0.01,
    bounds: tuple[float, float] = (0.0, inf),
) -> Threshold:
    """Return the rate at which `margin` crosses 0, if it rises with the rate.

    Rates are tried outwards from `guess`, each step the square of the one before,
    until one holds and one does not. The bracket is then cut where a line through both
    margins says, and in half wherever that left more than half of it.

    Parameters
    ----------
    margin
        Asked once for each rate that is tried.
    guess
        Where to begin.
    step
        First factor of the search for a bracket; above 1.
    tolerance
        Share by which the result may be off: the ends of the bracket are so close, or
        a line between margins of ends within 10 % meets 0 so close to one of them.
    bounds
        Lowest and highest rate to try.

    Notes
    -----
    Where the margin falls somewhere, as queues make it do now and then, the result is
    one of several crossings.
    """
    bracket, tried = _Bracket(), []
    low, high = bounds
    rate = min(max(guess, low), high)
    while True:
        found = margin(rate)
        tried.append((rate, found))
        before = bracket.ratio
        bracket.take(rate, found)
        if bracket.ratio < inf and bracket.is_closed(tolerance):
            return Threshold(bracket.crossing(), tuple(tried))
        if bracket.ratio < inf:
            assert bracket.holds is not None
            shrank = bracket.ratio <= sqrt(before)
            rate = (
                bracket.next_inside(tolerance)
                if shrank
                else bracket.holds[0] * sqrt(bracket.ratio)
            )
        elif found <= 0:
            if rate >= high:
                return Threshold(high, tuple(tried), "high")
            rate, step = min(rate * step, high), step * step
        else:
            if rate <= low:
                return Threshold(low, tuple(tried), "low")
            rate, step = max(rate / step, low), step * step
