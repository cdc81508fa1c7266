"""An operation of a profile as it is drawn: points, fit, errors and a few curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.device import DeviceFacts
from calibrate.estimators.points import aggregated, longest_share
from calibrate.estimators.rows import unique_rows
from calibrate.figures.axes import LAYOUTS, TIED
from calibrate.fit_report import num_splits
from calibrate.points import estimator_of, points_of
from calibrate.side_by_side import side_by_side
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from calibrate.estimators import KernelEstimator
    from calibrate.estimators.kernel import Columns
    from calibrate.points import Points
    from calibrate.side_by_side import ShowFits
    from sim.costs.measured.profile import Profile

    Floats = NDArray[np.float64]
    Mask = NDArray[np.bool_]
    _Judged = tuple[KernelEstimator | None, Floats]
    """A fit, None where it had too few points, and its errors in percent."""

NUM_FOLDS: Final = 5
NUM_CURVES: Final = 6
_FEW: Final = 3
"""Points that make a curve, where there are curves of so many."""
_ENOUGH: Final = 0.8
"""Share of the most points that a geometry needs to be preferred for another reason."""
_FEWEST: Final = 10
"""Points that an operation needs to be fitted and judged."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Predicted over measured less one, in percent, by a fit without the point.

    Parameters
    ----------
    inside
        (n,) from five folds, of a table of 2,500 points and more from one; NaN where
        the point was not held out, or lay outside the others' hull.
    beyond
        (n,) from a fit without the longest eighth of the lengths; NaN for the rest.
    """

    inside: Floats
    beyond: Floats

    def mape(self, *, beyond: bool = False) -> float | None:
        """Return the mean absolute error in percent; None where nothing was held."""
        errors = self._known(beyond)
        return float(errors.mean()) if errors.size else None

    def p90(self, *, beyond: bool = False) -> float | None:
        errors = self._known(beyond)
        return float(np.quantile(errors, 0.9)) if errors.size else None

    def _known(self, beyond: bool) -> Floats:
        errors = self.beyond if beyond else self.inside
        known: Floats = np.abs(errors[np.isfinite(errors)])
        return known


def _folds_of(time_s: Floats) -> list[Mask]:
    """Return the points that are held out in turn."""
    folds = np.random.default_rng(0).permutation(len(time_s)) % NUM_FOLDS
    drawn = 1 if num_splits(len(time_s)) == 1 else NUM_FOLDS
    return [folds == fold for fold in range(drawn)]


def _longest_of(estimator: KernelEstimator, columns: Columns) -> Mask | None:
    """Return the longest eighth of the lengths, where enough is left without."""
    axis = estimator.long or LAYOUTS[estimator.operation].along
    longest = longest_share(columns[axis])
    return longest if longest.any() and (~longest).sum() >= NUM_FOLDS else None


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _whole(
    estimator: KernelEstimator, columns: Columns, time_s: Floats, held: Mask | None
) -> tuple[KernelEstimator, Floats | None]:
    """Return the fit to all points, and the errors of one without the longest."""
    if held is None:
        return estimator.fit(columns, time_s), None
    try:
        lean = estimator.fit_beside(columns, time_s, held)
    except UserError:  # too few without them
        return estimator.fit(columns, time_s), np.full(int(held.sum()), np.nan)
    return estimator, _percent(lean, columns, time_s, held)


def _without(
    estimator: KernelEstimator,
    columns: Columns,
    time_s: Floats,
    held: Mask,
    *,
    beyond: bool,
) -> _Judged:
    """Return a lean fit to the rest and its errors at `held`; NaN where it has too few.

    Of `beyond` it is to find growths, of others it is judged within its hull only.
    """
    kept = {key: values[~held] for key, values in columns.items()}
    try:
        lean = estimator.lean(plain_slopes=True)
        fresh = lean.fit(kept, time_s[~held], judge=beyond)
    except UserError:
        return None, np.full(int(held.sum()), np.nan)
    percent = _percent(fresh, columns, time_s, held)
    if not beyond:
        asked = {key: values[held] for key, values in columns.items()}
        percent[fresh.extrapolated(asked)] = np.nan
    return fresh, percent


def _errors_at(
    estimator: KernelEstimator, columns: Columns, time_s: Floats, held: Mask
) -> Floats:
    return _without(estimator, columns, time_s, held, beyond=False)[1]


def _of_most(
    estimator: KernelEstimator, columns: Columns, time_s: Floats, held: Mask
) -> _Judged:
    return _without(estimator, columns, time_s, held, beyond=False)


def _of_shorter(
    estimator: KernelEstimator, columns: Columns, time_s: Floats, held: Mask
) -> _Judged:
    return _without(estimator, columns, time_s, held, beyond=True)


def _percent(
    fitted: KernelEstimator, columns: Columns, time_s: Floats, held: Mask
) -> Floats:
    asked = {key: values[held] for key, values in columns.items()}
    percent: Floats = 100.0 * (fitted.predict(asked) / time_s[held] - 1.0)
    return percent


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that differ along the leading axis only."""

    values: Mapping[str, int]
    """The facts in which it differs from the others."""
    places: NDArray[np.intp]
    """Its points, in order of the leading axis."""


@dataclass(frozen=True, slots=True)
class Family:
    """Curves of one geometry."""

    along: str
    fixed: Mapping[str, int]
    """The facts that they share; a tied column stands for its ratio."""
    curves: tuple[Curve, ...]

    def columns(self, names: Sequence[str], curve: Curve, along: Floats) -> Columns:
        """Return shapes on a curve at values of the leading axis, (n,) each."""
        found = {}
        at = np.rint(along).astype(np.int64)
        for name in names:
            if name == self.along:
                found[name] = at
            elif name in TIED:
                found[name] = at * self.fixed[name]
            else:
                value = curve.values.get(name, self.fixed.get(name, 0))
                found[name] = np.full(len(at), value)
        return found


@dataclass(frozen=True, slots=True)
class Subject:
    """One operation: shapes once each, their median times, and what was fitted."""

    points: Points
    columns: Columns
    time_s: Floats
    estimator: KernelEstimator
    """Fitted to all points; of 2,500 and more to four fifths, as its errors are."""
    errors: HeldOut

    @property
    def name(self) -> str:
        """The operation, with its variant where variants are fitted apart."""
        return self.points.name

    def family(self, along: str, by: Sequence[str]) -> Family:
        """Return the curves over `along`, one a value of `by`, of one geometry.

        That geometry has nearly the most points; of several, one without a window,
        in the widest type, with the most heads and decodes, replayed from a graph.
        """
        rest = [name for name in self.columns if name != along and name not in by]
        keys = np.stack([self._key(name) for name in (*rest, *by)], axis=1)
        drawn = np.flatnonzero(self.columns[along] > 0)
        best: tuple[tuple[int, ...], dict[str, int], list[Curve]] | None = None
        groups = list(_groups(keys[:, : len(rest)], drawn))
        most = max(len(places) for _, places in groups)
        for values, places in groups:
            fixed = dict(zip(rest, values, strict=True))
            members = list(_groups(keys[:, len(rest) :], places))
            few = min(_FEW, max(len(own) for _, own in members))
            curves = [
                Curve(dict(zip(by, value, strict=True)), self._in_order(along, own))
                for value, own in members
                if len(own) >= few
            ]
            enough = len(curves) > 0 and len(places) >= _ENOUGH * most
            rank = (int(enough), *self._rank(fixed), len(curves))
            if best is None or rank > best[0]:
                best = rank, fixed, curves
        if best is None:
            raise ValueError(f"{self.name} has no points along {along}")
        return Family(along, best[1], tuple(best[2]))

    def leading(self) -> Family:
        """Return the curves that stand for the operation, `NUM_CURVES` at most."""
        layout = LAYOUTS[self.points.operation]
        families = [self.family(layout.along, by) for by in layout.by]
        chosen = next((f for f in families if len(f.curves) > 1), families[0])
        return Family(chosen.along, chosen.fixed, spread(chosen.curves, NUM_CURVES))

    def _key(self, name: str) -> NDArray[np.int64]:
        values = np.asarray(self.columns[name], dtype=np.int64)
        if name in TIED:
            values = values // np.maximum(self.columns[TIED[name]], 1)
        return values

    def _rank(self, fixed: Mapping[str, int]) -> tuple[int, ...]:
        """Return the rank of a geometry among those that may stand for an operation."""
        variants = self.points.codes.get("variant", ())
        graph = "variant" in fixed and "graph" in variants[fixed["variant"]]
        return (
            -fixed.get("window", 0),
            fixed.get("kv_itemsize", 0) + fixed.get("weight_bits", 0),
            fixed.get("num_heads", 0),
            fixed.get("num_decodes", 0),
            int(graph),
            -fixed.get("variant", 0),
        )

    def _in_order(self, along: str, places: NDArray[np.intp]) -> NDArray[np.intp]:
        return places[np.argsort(self.columns[along][places], kind="stable")]


def _groups(
    keys: NDArray[np.int64], places: NDArray[np.intp]
) -> Iterator[tuple[list[int], NDArray[np.intp]]]:
    """Yield each distinct row of `keys` at `places`, and where it stands."""
    values, which = unique_rows(keys[places])
    order = np.argsort(which, kind="stable")
    starts = np.flatnonzero(np.diff(which[order])) + 1
    yield from zip(values.tolist(), np.split(places[order], starts), strict=True)


def spread(curves: Sequence[Curve], most: int) -> tuple[Curve, ...]:
    """Return at most `most` of the curves, from the smallest to the largest."""
    ordered = sorted(
        curves, key=lambda c: float(np.prod([*map(float, c.values.values())]))
    )
    places = np.unique(
        np.rint(np.linspace(0, len(ordered) - 1, min(most, len(ordered))))
    )
    return tuple(ordered[int(place)] for place in places)


def subjects(
    profile: Profile, only: Sequence[str] = (), show: ShowFits | None = None
) -> tuple[list[Subject], list[str]]:
    """Return the subjects that can be drawn, fitted, and the others with the reason.

    `show` is told of fits that are done.
    """
    device = DeviceFacts.from_json(profile.device)
    asked: list[tuple[Points, Columns, Floats]] = []
    left_out: list[str] = []
    for points in _asked(profile, only):
        columns, time_s = aggregated(points.columns, points.time_s)
        if len(time_s) < _FEWEST:
            left_out.append(
                f"{points.name} is not drawn: {len(time_s)} different shapes, "
                f"{_FEWEST} are needed"
            )
            continue
        asked.append((points, columns, time_s))
    if not asked:
        raise UserError(
            f"nothing to draw: a fit needs {_FEWEST} shapes of one operation at least; "
            "see 'kvsim profile show'"
        )
    return _judged(asked, device, show), left_out


def _judged(
    asked: Sequence[tuple[Points, Columns, Floats]],
    device: DeviceFacts,
    show: ShowFits | None,
) -> list[Subject]:
    """Fit every operation, and judge it by points held out, beside each other."""
    ofs = [(estimator_of(p, device), columns, time_s) for p, columns, time_s in asked]
    jobs = [job for of in ofs for job in _jobs(*of)]
    done = iter(side_by_side(_called, jobs, [len(job[3]) for job in jobs], show))
    found = []
    for (points, _, _), (estimator, columns, time_s) in zip(asked, ofs, strict=True):
        own = [next(done) for _ in _jobs(estimator, columns, time_s)]
        fitted, errors = _put_together(estimator, columns, time_s, own)
        found.append(Subject(points, columns, time_s, fitted, errors))
    return found


def _jobs(
    estimator: KernelEstimator, columns: Columns, time_s: Floats
) -> list[tuple[Any, ...]]:
    """Return the fits of an operation: all points or most, and parts to judge by.

    A large table is fitted without a fifth of it only, and that fit is drawn: a line
    through a hundred thousand points is the same without some of them.
    """
    of = estimator, columns, time_s
    longest, folds = _longest_of(estimator, columns), _folds_of(time_s)
    if len(folds) > 1:
        return [(_whole, *of, longest), *((_errors_at, *of, held) for held in folds)]
    most: tuple[Any, ...] = (_of_most, *of, folds[0])
    return [most] if longest is None else [most, (_of_shorter, *of, longest)]


def _put_together(
    estimator: KernelEstimator, columns: Columns, time_s: Floats, done: Sequence[Any]
) -> tuple[KernelEstimator, HeldOut]:
    """Return the fit to draw, and the errors of all, from the outcomes of `_jobs`."""
    inside, beyond = np.full((2, len(time_s)), np.nan)
    longest, folds = _longest_of(estimator, columns), _folds_of(time_s)
    if len(folds) > 1:
        (fitted, errors), *rest = done
    else:
        (fitted, inside_errors), *shorter = done
        judge, errors = shorter[0] if shorter else (None, None)
        if fitted is None:  # too few points of some curve
            fitted = estimator.fit(columns, time_s)
        else:
            fitted.spread_over(columns, time_s, judge)
        rest = [inside_errors]
    if longest is not None:
        beyond[longest] = errors
    for held, own in zip(folds, rest, strict=True):
        inside[held] = own
    return fitted, HeldOut(inside, beyond)


def _asked(profile: Profile, only: Sequence[str]) -> list[Points]:
    found = [points for points in points_of(profile) if points.operation in LAYOUTS]
    names = {name for points in found for name in (points.operation, points.name)}
    for name in only:
        if name not in names:
            raise UserError(
                f"--op {name} is no operation of this profile that is fitted; it has "
                f"{', '.join(sorted(names)) or 'none'}"
            )
    chosen = set(only) or names
    return [points for points in found if {points.operation, points.name} & chosen]


def source_line(profile: Profile) -> str:
    device = str(profile.device.get("name", "unknown device"))
    parts = [device, _origin(profile)]
    model = profile.provenance.get("model")
    if isinstance(model, dict):
        model = model.get("model")
    if model:
        parts.append(str(model).rpartition("/")[2])
    return "; ".join(parts)


def _origin(profile: Profile) -> str:
    source = profile.provenance.get("source")
    if profile.kind == "imported" and isinstance(source, dict):
        return f"imported from {source.get('name', 'a table')}"
    if profile.kind == "measured":
        return f"measured on {str(profile.provenance.get('date', ''))[:10]}"
    return str(profile.kind)
