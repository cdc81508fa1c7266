"""How far off fits are on points that they did not see, and what no fit can avoid."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from calibrate.device import DeviceFacts
from calibrate.estimators.points import aggregated, longest_share
from calibrate.points import Points, estimator_of, points_of, with_parts
from calibrate.side_by_side import side_by_side

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from calibrate.estimators import KernelEstimator
    from calibrate.estimators.kernel import Columns
    from calibrate.side_by_side import ShowFits
    from sim.costs.measured.profile import OpTable, Profile

    Floats = NDArray[np.float64]
    _Asked = tuple[KernelEstimator, Columns, Floats]
    """An estimator, and the aggregated points that it is fitted to, in seconds."""

SKEWED: Final = "decode_attention_skewed"
"""Decodes whose contexts differ: ``batch`` of them, ``total`` keys, ``longest``."""
EVEN: Final = f"{SKEWED}.even"
"""Those with the mean context in place of their own, timed beside them."""
_SPREAD: Final = 0.3113
"""Mean distance from the median, over p90 - p10, of a normal distribution."""
_HEADS: Final = ("num_heads", "num_kv_heads", "head_dim")
MOST_SPLITS: Final = 5
_HELD_OUT: Final = 0.2
_ENOUGH_HELD: Final = 500
"""Points held out, of all splits, whose mean error is known to 6 % of itself."""
_FEWEST: Final = 10
"""Different shapes below which none are held out."""
_COVERED: Final = 0.9
"""Share of new points that the intervals are to hold."""
_LONGEST: Final = {
    "mixed_attention": "decode_context",
    "moe": "tokens",
    "delta_decode": "batch",
    "gemm": "m",
    "allreduce": "bytes",
    "layer": "tokens",
    "swap": "num_blocks",
    "copy": "num_blocks",
}
"""Axis of which the longest points are held out, where the estimator has no trend."""


def floor_percent(points: Points) -> float | None:
    """Return the mean distance of one measurement from the true one, in percent.

    Where a table has shapes several times, it is the distance of those times from
    their median, corrected for the median being made of them. Where it has quantiles,
    that of one call from the median of its calls: less than what a second calibration
    of the same point would show. None where a table has neither.
    """
    table = np.stack(list(points.columns.values()), axis=1)
    _, places, counts = np.unique(
        table, axis=0, return_inverse=True, return_counts=True
    )
    if (counts > 1).any():
        return _of_repeats(points.time_s, places, counts)
    if points.spread is None or not len(points.spread):
        return None
    return float(100.0 * _SPREAD * points.spread.mean())


def _of_repeats(
    time_s: Floats, places: NDArray[np.intp], counts: NDArray[np.intp]
) -> float:
    order = np.argsort(places, kind="stable")
    groups = np.split(time_s[order], np.cumsum(counts)[:-1])
    distances = [
        np.abs(times / np.median(times) - 1.0).mean() * np.sqrt(size / (size - 1))
        for times in groups
        if (size := len(times)) > 1
    ]
    return float(100.0 * np.mean(distances))


class Uneven(NamedTuple):
    """Decodes of uneven contexts."""

    points: Points
    """With the mean of each batch for its context."""
    even_s: Floats | None
    """(n,) seconds of the even batches, where they were timed beside them."""


def uneven_decodes(profile: Profile, decodes: Points | None) -> Uneven | None:
    """Return uneven decodes as even ones of their mean context; None without any."""
    if decodes is None:
        return None
    own = _of_variant(profile, SKEWED, decodes)
    if not own:
        return None
    parts = [_even_columns(table) for table in own]
    points = Points(
        name=SKEWED,
        operation=decodes.operation,
        columns={
            key: np.concatenate([part[key] for part in parts]) for key in parts[0]
        },
        time_s=_medians(own),
        codes={},
        variants=tuple(sorted({table.variant for table in own})),
    )
    even = _of_variant(profile, EVEN, decodes)
    same = [t.axes for t in even] == [t.axes for t in own]
    return Uneven(points, _medians(even) if same else None)


def _of_variant(profile: Profile, name: str, decodes: Points) -> list[OpTable]:
    tables = [table for table in profile.tables(name) if table.num_points]
    return [table for table in tables if table.variant in decodes.variants] or tables


def _medians(tables: Sequence[OpTable]) -> Floats:
    return np.concatenate([np.array(table.quantiles["p50_s"]) for table in tables])


def _even_columns(table: OpTable) -> dict[str, NDArray[np.int64]]:
    batch = np.array(table.axes["num_seqs"], dtype=np.int64)
    total = np.array(table.axes["context_tokens"], dtype=np.int64)
    constants = {key: int(table.constants[key]) for key in _HEADS}
    constants["kv_itemsize"] = int(table.constants.get("kv_itemsize", 2))
    constants["window"] = int(table.constants.get("window", 0))
    columns = {key: np.full(len(batch), value) for key, value in constants.items()}
    # the fit knows even batches: of the same sum of contexts
    return columns | {"batch": batch, "context": np.maximum(1, total // batch)}


@dataclass(frozen=True, slots=True)
class OperationReport:
    """Errors of one operation on points held out, in percent."""

    n: int
    """Different shapes."""
    mape_inside: float | None
    """Mean absolute error within the hull of the fifth held out; median of seeds."""
    p90_inside: float | None
    mape_beyond: float | None
    """The same where the longest eighth of the lengths is held out."""
    p90_beyond: float | None
    bias: float | None
    """Mean signed error within the hull: above 0 predicts too slow."""
    max_inside: float | None
    interval_inside: float | None
    """Half-width that holds nine of ten new points (split conformal)."""
    interval_beyond: float | None
    floor: float | None = None
    """How far one measurement lies from another of its shape: what no method can do
    better than on single measurements. See `calibrate.fit_report.floor_percent`."""


@dataclass(frozen=True, slots=True)
class FitReport:
    """Errors of all operations of a profile."""

    operations: dict[str, OperationReport]

    def to_json(self) -> dict[str, Any]:
        """Return numbers by operation, rounded to thousandths of a percent."""
        return {
            name: {key: _rounded(value) for key, value in asdict(report).items()}
            for name, report in self.operations.items()
        }


def num_splits(count: int) -> int:
    """Return how many random fifths of so many points judge a fit well, 1 to 5."""
    return min(MOST_SPLITS, max(1, -(-_ENOUGH_HELD // round(_HELD_OUT * count + 1))))


def fit_report(
    profile: Profile,
    num_seeds: int | None = None,
    only: Sequence[str] = (),
    variants: Mapping[str, str] | None = None,
    show: ShowFits | None = None,
) -> FitReport:
    """Cross-validate the estimators of all operations, by random splits of a fifth.

    `num_seeds` are the splits of each; None for what its points ask for, `num_splits`.
    `show` is told of fits that are done.
    """
    device = DeviceFacts.from_json(profile.device)
    every = {points.name: points for points in points_of(profile, variants)}
    asked: list[_Asked] = []
    enough: list[Points] = []
    for points in every.values():
        columns, time_s = aggregated(points.columns, points.time_s)
        if len(time_s) >= _FEWEST and (not only or points.operation in only):
            asked.append((estimator_of(points, device), columns, time_s))
            enough.append(points)
    reports = _reports(asked, num_seeds, show)
    found = {
        points.name: replace(report, floor=floor_percent(points))
        for points, report in zip(enough, reports, strict=True)
    }
    if not only or SKEWED in only:
        decodes = with_parts(every).get("decode_attention")
        uneven = uneven_decodes(profile, decodes)
        if decodes is not None and uneven is not None:
            found[SKEWED] = _uneven_report(decodes, uneven, device)
    return FitReport(found)


def _uneven_report(
    decodes: Points, uneven: Uneven, device: DeviceFacts
) -> OperationReport:
    """Return how far even decodes of the same sum of contexts are from uneven ones.

    Even ones are those timed beside them, or what the fit says.
    """
    points = uneven.points
    if uneven.even_s is not None:
        errors = np.log(uneven.even_s / points.time_s)
        beyond = np.zeros(len(errors), dtype=np.bool_)
    else:
        estimator = estimator_of(decodes, device)
        estimator.fit(*aggregated(decodes.columns, decodes.time_s))
        errors = np.log(estimator.predict(points.columns) / points.time_s)
        beyond = estimator.extrapolated(points.columns)
    return _judged(len(errors), [errors[~beyond]], [errors[beyond]])


class Split(NamedTuple):
    """Points held out of a fit, to judge it."""

    held: NDArray[np.bool_]
    is_beyond: bool
    """Whether they are the longest, not some at random."""


def splits_of(
    estimator: KernelEstimator, columns: Columns, num_seeds: int
) -> list[Split]:
    """Return the splits of points (aggregated, (n,) each) that judge a fit."""
    spared = estimator.spared(columns)
    found = []
    for seed in range(num_seeds):
        held = np.random.default_rng(seed).random(len(spared)) < _HELD_OUT
        held &= ~spared
        if held.any():
            found.append(Split(held, is_beyond=False))
    axis = estimator.long or _LONGEST[estimator.operation]
    longest = longest_share(columns[axis]) & ~spared
    if longest.any() and (~longest).sum() >= 5:
        found.append(Split(longest, is_beyond=True))
    return found


def errors_of(
    estimator: KernelEstimator, columns: Columns, time_s: Floats, split: Split
) -> Floats:
    """Return log errors of the points held out; at random, of those in the hull."""
    held = split.held
    kept = {key: values[~held] for key, values in columns.items()}
    fresh = estimator.fresh().fit(kept, time_s[~held], judge=split.is_beyond)
    return _errors_by(fresh, columns, time_s, split)


def fitted_with_errors(
    estimator: KernelEstimator, columns: Columns, time_s: Floats, split: Split
) -> tuple[KernelEstimator, Floats]:
    """Return the fit to all points, and the errors of a lean one at those held out."""
    lean = estimator.fit_beside(columns, time_s, split.held)
    return estimator, _errors_by(lean, columns, time_s, split)


def _errors_by(
    fitted: KernelEstimator, columns: Columns, time_s: Floats, split: Split
) -> Floats:
    asked = {key: values[split.held] for key, values in columns.items()}
    errors: Floats = np.log(fitted.predict(asked) / time_s[split.held])
    return errors if split.is_beyond else errors[~fitted.extrapolated(asked)]


def report_of(
    count: int, splits: Sequence[Split], errors: Sequence[Floats]
) -> OperationReport:
    """Return the report of the errors of each split."""
    both = list(zip(splits, errors, strict=True))
    return _judged(
        count,
        [found for split, found in both if not split.is_beyond],
        [found for split, found in both if split.is_beyond],
    )


def operation_report(
    estimator: KernelEstimator,
    columns: Columns,
    time_s: Floats,
    num_seeds: int | None = None,
) -> OperationReport:
    """Cross-validate one estimator on points (aggregated, (n,) each)."""
    return _reports([(estimator, columns, time_s)], num_seeds)[0]


def _reports(
    asked: Sequence[_Asked], num_seeds: int | None, show: ShowFits | None = None
) -> list[OperationReport]:
    """Cross-validate each, all fits beside each other."""
    splits = [
        splits_of(estimator, columns, num_seeds or num_splits(len(time_s)))
        for estimator, columns, time_s in asked
    ]
    both = zip(asked, splits, strict=True)
    jobs = [(*of, split) for of, own in both for split in own]
    sizes = [len(time_s) for _, _, time_s, _ in jobs]
    done = iter(side_by_side(errors_of, jobs, sizes, show))
    return [
        report_of(len(time_s), own, [next(done) for _ in own])
        for (_, _, time_s), own in zip(asked, splits, strict=True)
    ]


def _judged(
    count: int, inside: Sequence[Floats], beyond: Sequence[Floats]
) -> OperationReport:
    """Return the medians over splits of what log errors amount to."""
    inside, beyond = ([e for e in each if len(e)] for each in (inside, beyond))
    return OperationReport(
        n=count,
        mape_inside=_median([_percent(abs(ratio(e))).mean() for e in inside]),
        p90_inside=_median([_quantile(_percent(abs(ratio(e))), 0.9) for e in inside]),
        mape_beyond=_median([_percent(abs(ratio(e))).mean() for e in beyond]),
        p90_beyond=_median([_quantile(_percent(abs(ratio(e))), 0.9) for e in beyond]),
        bias=_median([_percent(ratio(e)).mean() for e in inside]),
        max_inside=_median([_percent(abs(ratio(e))).max() for e in inside]),
        interval_inside=_median([_conformal(abs(e)) for e in inside]),
        interval_beyond=_median([_conformal(abs(e)) for e in beyond]),
    )


def ratio(log_error: Floats) -> Floats:
    found: Floats = np.expm1(log_error)
    return found


def _percent(value: Floats) -> Floats:
    return 100.0 * value


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share))


def _conformal(errors: Floats) -> float:
    """Return in percent what split-conformal prediction needs for `_COVERED`."""
    count = len(errors)
    rank = min(count, int(np.ceil((count + 1) * _COVERED)))
    return float(100.0 * np.expm1(np.sort(errors)[rank - 1]))


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def _rounded(value: float | int | None) -> float | int | None:
    return round(value, 3) if isinstance(value, float) else value
