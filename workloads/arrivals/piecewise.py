"""A rate that follows a curve of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from workloads._checks import between, finite, one_of
from workloads._numpy import np
from workloads.arrivals.base import unit_arrivals
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_REMEDY = "give [time_s, rate] pairs, such as [[0, 2.0], [600, 8.0]]"
_MAX = 1e9


@dataclass(frozen=True, slots=True)
class PiecewiseArrivals:
    """Poisson arrivals whose rate follows a curve: ramps, steps, a recorded day.

    Drawn by the inverse of the integrated rate, hence exact: the number of arrivals
    in any span is Poisson, its mean the area under the curve.

    Parameters
    ----------
    points
        Pairs ``[time_s, rate]``: seconds, the first 0, rising; requests per second,
        at least 0.
    interpolation
        ``"linear"`` from point to point, or ``"step"``: each rate holds until the
        next point.
    afterwards
        After the last point, ``"hold"`` its rate for ever, ``"repeat"`` the curve
        from its start, or ``"end"``. In steps the last point holds for no time before
        that, so to repeat, its rate must be the first one's; to end, 0.

    Raises
    ------
    WorkloadError
        If a rule is broken, or nothing would ever arrive.
    """

    points: Sequence[Sequence[float]]
    interpolation: Literal["linear", "step"] = "linear"
    afterwards: Literal["hold", "repeat", "end"] = "hold"

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", _points(self.points))
        one_of("interpolation", self.interpolation, ("linear", "step"))
        one_of("afterwards", self.afterwards, ("hold", "repeat", "end"))
        self._check_end()

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        curve = _curve(self.points, self.interpolation)
        before_s = 0.0
        for areas in unit_arrivals(rng):
            times_s = self._inverse_s(curve, areas)
            # Neighbours may be closer than rounding: times never fall.
            times_s = np.maximum.accumulate(times_s.clip(min=before_s))
            yield from times_s.tolist()
            if len(times_s) < len(areas):
                return
            before_s = float(times_s[-1])

    def _inverse_s(
        self, curve: _Curve, areas: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return when the integrated rate reaches `areas`, the reached ones only."""
        whole, end_s = curve.area, curve.end_s
        if self.afterwards == "repeat":
            rounds = np.floor(areas / whole)
            rest = (areas - rounds * whole).clip(0, whole)
            return rounds * end_s + curve.inverse_s(rest)
        last_rate = self.points[-1][1] if self.afterwards == "hold" else 0.0
        inside = areas[: areas.searchsorted(whole)]
        times_s = curve.inverse_s(inside)
        if last_rate == 0:
            return times_s
        beyond_s = end_s + (areas[len(inside) :] - whole) / last_rate
        return np.concatenate([times_s, beyond_s])

    def _check_end(self) -> None:
        rates = [rate for _, rate in self.points]
        first, last = rates[0], rates[-1]
        wanted = {"hold": last, "repeat": first, "end": 0.0}[self.afterwards]
        if self.interpolation == "step" and last != wanted:
            raise WorkloadError(
                f"the last of the steps must have rate {wanted:g} to "
                f"{self.afterwards}; got {last:g}; add a point where the step ends"
            )
        is_endless = self.afterwards == "hold"
        if max(rates) == 0 or (len(rates) == 1 and not is_endless):
            raise WorkloadError(
                f"points must have a rate above 0 for some time; got none; {_REMEDY}"
            )


class _Curve(NamedTuple):
    """Pieces on which the rate is linear, each array of shape ``(num_pieces,)``."""

    starts_s: NDArray[np.float64]
    rates: NDArray[np.float64]
    slopes: NDArray[np.float64]
    areas_before: NDArray[np.float64]
    area: float
    end_s: float

    def inverse_s(self, areas: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the times at which the area reaches `areas`, from 0 to `area`."""
        if not len(self.starts_s):
            return areas  # nothing lies within a curve of one point
        piece = self.areas_before.searchsorted(areas, side="right") - 1
        left = areas - self.areas_before[piece]
        rate, slope = self.rates[piece], self.slopes[piece]
        # The root of rate * x + slope * x**2 / 2 = left that loses no digits, at a
        # slope of 0 too.
        root = rate + np.sqrt((rate * rate + 2 * slope * left).clip(min=0))
        reached = np.divide(2 * left, root, out=np.zeros_like(left), where=root > 0)
        times_s: NDArray[np.float64] = self.starts_s[piece] + reached
        return times_s


def _curve(points: Sequence[Sequence[float]], interpolation: str) -> _Curve:
    times_s, rates = np.array(points, dtype=np.float64).T
    lengths_s = np.diff(times_s)
    ends = rates[1:] if interpolation == "linear" else rates[:-1]
    areas = (rates[:-1] + ends) / 2 * lengths_s
    reached = np.concatenate([[0.0], areas.cumsum()])
    return _Curve(
        times_s[:-1],
        rates[:-1],
        (ends - rates[:-1]) / lengths_s,
        reached[:-1],
        float(reached[-1]),
        float(times_s[-1]),
    )


def _points(points: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    if isinstance(points, str) or not isinstance(points, Sequence) or not points:
        raise WorkloadError(f"points must be a list; got {points!r}; {_REMEDY}")
    checked = tuple(_point(i, point) for i, point in enumerate(points))
    if checked[0][0] != 0:
        raise WorkloadError(
            f"points must begin at 0 s; got {checked[0][0]:g} s; give the rate before"
        )
    for i, ((early_s, _), (late_s, _)) in enumerate(pairwise(checked), start=1):
        # Smaller pieces would make slopes beyond a float.
        if not late_s - early_s >= 1e-6:
            raise WorkloadError(
                f"points must rise in time, by 1e-06 s at least; got {late_s:g} s "
                f"after {early_s:g} s at index {i}; sort them"
            )
    return checked


def _point(index: int, point: Sequence[float]) -> tuple[float, float]:
    name = f"points[{index}]"
    if isinstance(point, str) or not isinstance(point, Sequence) or len(point) != 2:
        raise WorkloadError(f"{name} must be two numbers; got {point!r}; {_REMEDY}")
    time_s, rate = (finite(name, number, _REMEDY) for number in point)
    between(f"{name}: the time", time_s, 0, _MAX, _REMEDY)
    if rate != 0:
        between(f"{name}: the rate", rate, 1 / _MAX, _MAX, _REMEDY)
    return time_s, rate
