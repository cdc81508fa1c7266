"""Fitted operations of a profile, and their predictions at the nodes of tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.device import DeviceFacts
from calibrate.estimators.points import aggregated
from calibrate.fit_report import errors_of, fitted_with_errors, report_of, splits_of
from calibrate.points import Points, estimator_of, points_of, with_parts
from calibrate.side_by_side import side_by_side

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from calibrate.estimators import KernelEstimator
    from calibrate.fit_report import Split
    from calibrate.points import Points
    from calibrate.side_by_side import ShowFits
    from sim.costs.measured.profile import Profile

    Integers = NDArray[np.int64]

UNKNOWN: Final = (25.0, 50.0)
"""Half-widths in percent where there are too few points to hold any out."""
ESTIMATED: Final = (65.0, 65.0)
"""Half-widths in percent of what comes from the datasheet, as the cost model has them
(`sim.costs.rates.widths.ESTIMATE`)."""
_FEWEST_HELD: Final = 10
BATCHES: Final = 2 ** np.arange(13)
CONTEXTS: Final = 2 ** np.arange(21)
QUERIES: Final = np.unique([1, *(2 ** np.arange(4, 18)), *(3 * 2 ** np.arange(9, 16))])
TOKENS: Final = 2 ** np.arange(18)
_GAP: Final = 4
_MAX_NODES: Final = 128
"""Measured values of an axis beyond which only some of them are nodes."""


@dataclass(slots=True)
class Fits:
    """Fitted estimators by the name of their points."""

    device: DeviceFacts
    estimators: dict[str, KernelEstimator] = field(default_factory=dict)
    points: dict[str, Points] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name to the half-widths, in percent, inside and beyond."""


def fit_operations(
    profile: Profile,
    variants: Mapping[str, str] | None = None,
    show: ShowFits | None = None,
) -> Fits:
    """Fit every operation of a profile, one variant of each, by default the fastest.

    Where attention was measured for whole steps only, the steps with decodes alone and
    those with a chunk alone are fitted as the operations that they are.
    """
    fits = Fits(DeviceFacts.from_json(profile.device))
    found = {points.name: points for points in points_of(profile, variants)}
    jobs: list[tuple[Any, ...]] = []
    parts: dict[str, list[Split]] = {}
    for points in with_parts(found).values():
        estimator = estimator_of(points, fits.device)
        columns, time_s = aggregated(points.columns, points.time_s)
        if len(time_s) < estimator.fewest:
            continue
        is_judged = len(time_s) >= _FEWEST_HELD
        splits = splits_of(estimator, columns, 1) if is_judged else []
        parts[points.name] = splits
        fits.points[points.name] = points
        # a fit without the longest also judges the one to all points
        has_longest = bool(splits) and splits[-1].is_beyond
        last = splits[-1] if has_longest else None
        asked = [(each, False) for each in splits if each is not last]
        jobs += [(estimator, columns, time_s, *each) for each in ((last, True), *asked)]
    sizes = [len(time_s) for _, _, time_s, *_ in jobs]
    done = iter(side_by_side(_fitted, jobs, sizes, show))
    for name, splits in parts.items():
        fits.estimators[name], *longest = next(done)
        errors = [next(done) for _ in splits[len(longest) :]] + longest
        report = report_of(0, splits, errors)
        inside = report.interval_inside or UNKNOWN[0]
        beyond = report.interval_beyond or max(inside, UNKNOWN[1])
        fits.intervals[name] = (inside, beyond) if splits else UNKNOWN
    return fits


def _fitted(
    estimator: KernelEstimator,
    columns: Mapping[str, Any],
    time_s: NDArray[np.float64],
    split: Split | None,
    wanted: bool,
) -> Any:
    """Return errors of a fit that some points are held out of.

    Where that is `wanted`, the fit to all points comes first, alone without a split.
    """
    if split is None:
        return (estimator.fit(columns, time_s).complete(),)
    if wanted:
        fitted, errors = fitted_with_errors(estimator, columns, time_s, split)
        return fitted.complete(), errors
    return errors_of(estimator.lean(), columns, time_s, split)


def nodes(
    measured: Integers, regular: Integers | None = None, most: int = _MAX_NODES
) -> list[int]:
    """Return the nodes of an axis: measured values, and `regular` ones further out."""
    own = np.unique(measured)
    if len(own) > most:
        own = np.unique(np.append(own[:: len(own) // most + 1], own[-1]))
    more = own if regular is None else np.union1d(own, regular)
    found: list[int] = more.tolist()
    return found


def octaves(measured: Integers, first: int = 0) -> list[int]:
    """Return measured values of an axis from `first` on, the largest of each octave."""
    own = [value for value in np.unique(measured).tolist() if value >= first]
    by_octave = {value.bit_length() if value else -1: value for value in own}
    powers = {value.bit_length(): value for value in own if value.bit_count() == 1}
    return sorted((by_octave | powers).values())


def filled(values: Iterable[int]) -> list[int]:
    """Return ascending nodes with powers of two where two are over four times apart."""
    own = sorted(values)
    found = set(own)
    for low, high in itertools.pairwise(own):
        if low and high > _GAP * low:
            found |= {1 << e for e in range(low.bit_length(), high.bit_length())}
    return sorted(value for value in found if own[0] <= value <= own[-1])


def product(**axes: Iterable[int]) -> dict[str, Integers]:
    """Return the columns of every combination of values, the last axis fastest."""
    grids = np.meshgrid(*(list(values) for values in axes.values()), indexing="ij")
    return {
        key: grid.ravel().astype(np.int64)
        for key, grid in zip(axes, grids, strict=True)
    }


def broadcast(columns: Mapping[str, Any]) -> dict[str, Integers]:
    """Return columns of one length, of columns and numbers."""
    length = max(np.size(value) for value in columns.values())
    return {
        key: np.broadcast_to(np.asarray(value, dtype=np.int64), length)
        for key, value in columns.items()
    }


def predicted(
    estimator: KernelEstimator,
    columns: Mapping[str, Any],
    *shape: int,
    points: Points | None = None,
) -> dict[str, Any]:
    """Return ``time_s`` and ``beyond`` of a table of that shape, JSON-ready.

    The last axis is fastest. Where a node is a measured shape of `points`, its median
    stands, unless it is faster than the device.
    """
    full = broadcast(columns)
    seconds = estimator.predict(full)
    if points is not None:
        measured = _measured(points, estimator.columns)
        rows = zip(*(full[key].tolist() for key in estimator.columns), strict=True)
        own = np.array([measured.get(row, np.nan) for row in rows])
        least = np.maximum(own, estimator.floor(full))
        seconds = np.where(np.isnan(own), seconds, least)
    beyond = estimator.extrapolated(full).reshape(shape)
    return {
        "time_s": rounded(seconds.reshape(shape)),
        "beyond": beyond.astype(int).tolist(),
    }


def _measured(points: Points, names: Iterable[str]) -> dict[tuple[int, ...], float]:
    """Return shape to median seconds."""
    columns, time_s = aggregated(points.columns, points.time_s)
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    return dict(zip(rows, time_s.tolist(), strict=True))


def rounded(values: NDArray[np.float64]) -> Any:
    """Return seconds to six digits, nested as `values` is."""
    if values.ndim == 1:
        return [float(f"{value:.6g}") for value in values.tolist()]
    return [rounded(row) for row in values]
