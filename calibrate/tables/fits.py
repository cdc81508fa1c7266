"""Estimators of a profile's operations, and how uncertain each is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from calibrate.alone import with_parts
from calibrate.device import DeviceFacts
from calibrate.estimators.kernel import aggregated
from calibrate.fit_report import operation_report
from calibrate.points import Points, estimator_of, points_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calibrate.estimators import KernelEstimator
    from sim.costs.profile import Profile

UNKNOWN: Final = (25.0, 50.0)
"""Half-widths in percent where there are too few points to hold any out."""
ESTIMATED: Final = (65.0, 65.0)
"""Half-widths in percent of what comes from the datasheet, as the cost model has them
(`sim.costs.widths.ESTIMATE`)."""
_FEWEST_HELD: Final = 10


@dataclass(slots=True)
class Fits:
    """Fitted estimators by the name of their points."""

    device: DeviceFacts
    estimators: dict[str, KernelEstimator] = field(default_factory=dict)
    points: dict[str, Points] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name to the half-widths, in percent, inside and beyond."""

    def add(self, points: Points, estimator: KernelEstimator) -> None:
        """Fit `estimator` to `points`, and find how far off it is."""
        columns, time_s = aggregated(points.columns, points.time_s)
        if len(time_s) < estimator.fewest:
            return
        self.intervals[points.name] = UNKNOWN
        if len(time_s) >= _FEWEST_HELD:
            report = operation_report(estimator, columns, time_s, 1)
            inside = report.interval_inside or UNKNOWN[0]
            beyond = report.interval_beyond or max(inside, UNKNOWN[1])
            self.intervals[points.name] = inside, beyond
        self.estimators[points.name] = estimator.fit(columns, time_s)
        self.points[points.name] = points


def fit_operations(profile: Profile, variants: Mapping[str, str] | None = None) -> Fits:
    """Fit every operation of a profile, one variant of each.

    Where attention was measured for whole steps only, the steps with decodes alone and
    those with a chunk alone are fitted as the operations that they are.

    Parameters
    ----------
    profile
        Tables.
    variants
        Operation to the variant that is taken; the fastest where it is not named.
    """
    fits = Fits(DeviceFacts.from_json(profile.device))
    found = {points.name: points for points in points_of(profile, variants)}
    for points in with_parts(found).values():
        fits.add(points, estimator_of(points, fits.device))
    return fits
