"""The estimator that every operation shares: roofline x learned residual, bounded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Self

import numpy as np

from calibrate.estimators.hull import Hull
from calibrate.estimators.points import (
    aggregated,
    interpolated,
    longest_share,
    octaves,
)
from calibrate.estimators.residual import FEW_POINTS, KernelResidual, TreeResidual
from calibrate.estimators.roofline import SoftRoofline, Work
from calibrate.estimators.rows import unique_rows
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from numpy.typing import NDArray

    from calibrate.device import DeviceFacts

    Floats = NDArray[np.float64]
    Columns = Mapping[str, NDArray[Any]]

_MIN_POINTS: Final = 200
"""With fewer points none are spared to judge by; the model alone is followed."""
_BACK: Final = 4
"""A curve's slope is taken between its longest point and a quarter of that."""
_OWN_SLOPE: Final = 0
_OWN_EDGE: Final = 1
_NO_POINT: Final = 2
"""How many points a curve was measured at: an octave of lengths, fewer, or none."""


class KernelEstimator(ABC):
    """Seconds of one kernel on one device, from columns of shapes.

    A subclass names its columns, says what work a shape is and which features the
    residual may look at. Constructors only store; what ``fit`` learned ends in ``_``.

    Parameters
    ----------
    device
        Datasheet: no prediction is faster than it allows.
    num_iterations
        Trees of each forest of the residual, where there are points enough for trees;
        None for what suits the operation.
    seed
        Of the trees' tie breaking.
    launch_s
        Seconds that a call takes at least, where that is known apart from the points.
    """

    operation: ClassVar[str]
    """Name of the operation in profiles."""
    columns: ClassVar[tuple[str, ...]]
    """Columns that ``fit`` and ``predict`` read, exact integers."""
    curve: ClassVar[tuple[str, ...]] = ()
    """Columns that make a geometry; `batch` and `long` vary within it."""
    batch: ClassVar[str] = ""
    long: ClassVar[str] = ""
    """The axis that is followed beyond its longest points; empty for none."""
    choice: ClassVar[int] = 2
    """Power of their errors by which two growths beyond the longest points are weighed
    against each other."""
    fades: ClassVar[bool] = False
    """Whether the line counts for less where more octaves lie beyond the longest
    point: it is judged within one."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Columns that tell kinds of the kernel apart; time grows along the others."""
    reach: ClassVar[float] = 0.0
    """Octaves between a key that was measured and one that was not, but still counts
    as inside; summed over the keys."""
    forests: ClassVar[tuple[tuple[str, float], ...]] = (("squared_error", 1.0),)
    """Of each forest of the residual: what it minimises, and the share of features that
    it sees at a split."""
    lines: ClassVar[tuple[str, ...]] = ()
    """Columns along which trees are asked at measured values only, with straight lines
    in octaves between."""
    fewest: ClassVar[int] = 5
    """Different shapes that a fit needs."""
    trees: ClassVar[int] = 240
    """Trees of a forest where the constructor is not told."""
    fewer: ClassVar[int] = 4
    """Times fewer trees, of more leaves, that a large table is learned by."""

    def __init__(
        self,
        device: DeviceFacts,
        *,
        num_iterations: int | None = None,
        seed: int = 0,
        launch_s: float | None = None,
    ) -> None:
        self.device = device
        self.num_iterations = num_iterations or self.trees
        self.seed = seed
        self.launch_s = launch_s
        self.plain_slopes = False

    def fresh(self) -> Self:
        """Return an estimator with the same parameters that learned nothing."""
        return type(self)(
            self.device,
            num_iterations=self.num_iterations,
            seed=self.seed,
            launch_s=self.launch_s,
        )

    def lean(self, *, plain_slopes: bool = False) -> Self:
        """Return a fresh one of half the trees: to judge by, never to predict with.

        Its errors are a tenth larger, so that intervals taken from them are wide. With
        `plain_slopes` it and its judge leave out of slopes what costs a forest.
        """
        found = self.fresh()
        found.num_iterations = max(1, self.num_iterations // 2)
        found.plain_slopes = self.plain_slopes or plain_slopes
        return found

    @abstractmethod
    def work(self, columns: Columns) -> Work:
        """Return bytes, FLOP seconds and units of each shape."""

    @abstractmethod
    def features(self, columns: Columns) -> Floats:
        """Return (n, f) features, mostly octaves (base-2 logarithms)."""

    def shape_features(self, columns: Columns) -> Floats:
        """Return (n, f) of the columns alone, in octaves, for few points."""
        return octaves(columns, self.columns)

    def growth(self, columns: Columns) -> Floats:
        """Return the quantity with which time grows along `long`, far out."""
        return columns[self.long].astype(np.float64)

    def fit(
        self,
        columns: Columns,
        time_s: Floats,
        *,
        judge: bool = True,
        judged_by: Self | None = None,
    ) -> Self:
        """Learn from measured seconds (n,); of rows of one shape the median counts.

        `judge` says whether to hold points out once more to learn which growth to
        follow beyond the longest; without, the model alone is followed, in half the
        time. `judged_by` is a lean fit to the same points without the longest, where
        there is one already. There must be `fewest` shapes.
        """
        columns, time_s = aggregated(self._checked(columns), time_s)
        if len(time_s) < self.fewest:
            raise UserError(
                f"{self.operation}: a fit needs at least {self.fewest} different "
                f"shapes; got {len(time_s)}: measure more"
            )
        self._fit_points(columns, time_s)
        self.trend_: Trend | None = None
        if self.long:
            self.trend_ = Trend(self)
            self.trend_.fit(columns, time_s, judge=judge, judged_by=judged_by)
        return self

    def fit_beside(
        self, columns: Columns, time_s: Floats, held: NDArray[np.bool_]
    ) -> Self:
        """Learn from all points (aggregated), and return a lean fit without those held.

        That one also judges the growths where the longest points are held out, so that
        no third fit is made.
        """
        kept = {key: values[~held] for key, values in columns.items()}
        lean = self.lean().fit(kept, time_s[~held])
        is_judge = bool(self.long) and np.array_equal(
            held, longest_share(columns[self.long])
        )
        self.fit(columns, time_s, judged_by=lean if is_judge else None)
        return lean

    def complete(self) -> Self:
        """Learn now what `fit` leaves until it is asked."""
        return self

    def spread_over(
        self, columns: Columns, time_s: Floats, judged_by: Self | None
    ) -> Self:
        """Reach as far as all points (aggregated), where this was fitted to most.

        `judged_by` is a lean fit without the longest, or None to follow the model.
        """
        self._reach(columns)
        if self.long:
            judge = judged_by is not None
            self.trend_ = Trend(self)
            self.trend_.fit(columns, time_s, judge=judge, judged_by=judged_by)
        return self

    def spared(self, columns: Columns) -> NDArray[np.bool_]:
        """Return which points no judge of the fit may hold out; none here."""
        return np.zeros(len(next(iter(columns.values()))), dtype=np.bool_)

    def _fit_points(self, columns: Columns, time_s: Floats) -> None:
        work = self.work(columns)
        self.roofline_ = SoftRoofline(self.device, self.launch_s)
        self.roofline_.fit(work, time_s)
        log_ratio = np.log(time_s / self.roofline_.predict(work))
        self.few_ = len(time_s) < FEW_POINTS
        self.residual_: KernelResidual | TreeResidual
        if self.few_:
            self.residual_ = KernelResidual()
        else:
            self.residual_ = TreeResidual(
                num_iterations=self.num_iterations,
                seed=self.seed,
                forests=self.forests,
                fewer=self.fewer,
            )
        self.residual_.fit(self._features(columns), log_ratio)
        self._reach(columns)

    def _reach(self, columns: Columns) -> None:
        """Note between which points a time is interpolated."""
        self.nodes_ = {key: np.unique(columns[key]) for key in self.lines}
        amounts = tuple(key for key in self.columns if key not in self.keys)
        hull = Hull(
            self.keys, amounts, self.reach, open_below=self.launch_s is not None
        )
        self.hull_ = hull.fit(columns)

    def predict(self, columns: Columns) -> Floats:
        """Return seconds of each shape: above zero, finite, not below the floor."""
        columns = self._checked(columns)
        time_s = self.near(columns)
        if self.trend_ is not None:
            time_s = self.trend_.follow(columns, time_s)
        floor: Floats = np.maximum(time_s, self.floor(columns))
        return floor

    def near(self, columns: Columns) -> Floats:
        """Return roofline x residual, without the trend along `long`."""
        return self._seconds(columns, self._residual)

    def for_slope(self, columns: Columns) -> Floats:
        """Return the seconds that a curve's slope is taken from, as `near`."""
        return self.near(columns)

    def _seconds(
        self, columns: Columns, residual: Callable[[Columns], Floats]
    ) -> Floats:
        base = self.roofline_.predict(self.work(columns))
        nodes = {} if self.few_ else self.nodes_
        time_s: Floats = base * np.exp(interpolated(columns, nodes, residual))
        return time_s

    def _residual(self, columns: Columns) -> Floats:
        return self.residual_.predict(self._features(columns))

    def floor(self, columns: Columns) -> Floats:
        """Return the seconds below which no measurement can be right."""
        work = self.work(columns)
        return SoftRoofline(self.device).floor(work)

    def extrapolated(self, columns: Columns) -> NDArray[np.bool_]:
        """Return which shapes lie outside the hull of what was fitted."""
        outside = self.hull_.outside(columns)
        if self.trend_ is not None:
            outside |= self.trend_.beyond(columns)
        return outside

    def _features(self, columns: Columns) -> Floats:
        if self.few_:
            return self.shape_features(columns)
        return self.features(columns)

    def _checked(self, columns: Columns) -> Columns:
        if missing := [key for key in self.columns if key not in columns]:
            raise UserError(
                f"{self.operation}: column '{missing[0]}' is missing; it needs "
                f"{', '.join(self.columns)}"
            )
        return {key: np.asarray(columns[key]) for key in self.columns}


class _Curves(NamedTuple):
    """The curve that each of some shapes lies on."""

    geometry: NDArray[np.int64]
    start: NDArray[np.int64]
    """Its shortest measured length."""
    edge: NDArray[np.int64]
    """Its longest."""
    batch: NDArray[np.int64]
    """Its batch, or the smallest that was measured where it has less."""
    kind: NDArray[np.int64]
    """`_OWN_SLOPE` and so on."""

    def of(self, places: NDArray[np.intp]) -> _Curves:
        return _Curves(*(column[places] for column in self))


class Trend:
    """Times beyond the longest measured point of a curve.

    A *curve* is a geometry and a batch; its *edge* is its longest measured point.
    Beyond the edge a time is that at the edge times a growth, and two growths compete:
    that of the model (roofline x residual, which knows what other geometries did
    there), and the straight line through the curve's own last two octaves (which
    knows a kernel that walks keys one after the other, and so takes as long for fewer
    sequences than were measured). The longest eighth of the distinct lengths is held
    out once and each geometry takes the two in proportion to how well they did on it,
    on curves of one kind: the slope of one that was measured at a single point is the
    model's guess, and says more or less than a measured one by the GPU.

    Attributes
    ----------
    shares_
        (3, g) share of the straight line for each kind of curve and geometry, 0 to 1;
        0 where none was held out.
    """

    def __init__(self, estimator: KernelEstimator) -> None:
        self.estimator = estimator

    def fit(
        self,
        columns: Columns,
        time_s: Floats,
        *,
        judge: bool = True,
        judged_by: KernelEstimator | None = None,
    ) -> Self:
        """Note the edges, and judge the growths where there are points to spare."""
        self._note_edges(columns)
        self.shares_ = np.zeros((3, len(self.geometries_)))
        longest = longest_share(columns[self.estimator.long])
        kept = ~longest
        if judge and len(time_s) >= _MIN_POINTS and kept.sum() >= _MIN_POINTS // 2:
            self._judge(columns, time_s, longest, judged_by)
        return self

    def beyond(self, columns: Columns) -> NDArray[np.bool_]:
        outside: NDArray[np.bool_] = (
            columns[self.estimator.long] > self._curves(columns).edge
        )
        return outside

    def follow(self, columns: Columns, time_s: Floats) -> Floats:
        """Return `time_s` of the model with points beyond the edges replaced."""
        curves = self._curves(columns)
        outside = np.flatnonzero(columns[self.estimator.long] > curves.edge)
        if not len(outside):
            return time_s
        part = {key: values[outside] for key, values in columns.items()}
        curves = curves.of(outside)
        line_s = self._straight(part, curves)
        share = self.shares_[curves.kind, curves.geometry]
        if self.estimator.fades:
            share = share / (1.0 + np.log2(part[self.estimator.long] / curves.edge))
        found = time_s.copy()
        found[outside] = line_s**share * time_s[outside] ** (1.0 - share)
        return found

    def _straight(self, columns: Columns, curves: _Curves) -> Floats:
        """Return seconds on the straight line through each curve's last octaves."""
        estimator = self.estimator
        has_slope = curves.kind == _OWN_SLOPE
        back = np.maximum(curves.edge // _BACK, np.where(has_slope, curves.start, 1))
        columns = {**columns, estimator.batch: curves.batch}
        at_edge = {**columns, estimator.long: curves.edge}
        behind = {**columns, estimator.long: back}
        edge_s, behind_s = map(estimator.for_slope, (at_edge, behind))
        here, there, then = map(estimator.growth, (at_edge, columns, behind))
        span = np.maximum(here - then, 1.0)
        slope = np.maximum(edge_s - behind_s, 0.0) / span
        # never steeper than in proportion: kernels have a fixed cost, not a bonus
        slope = np.minimum(slope, edge_s / np.maximum(here, 1.0))
        seconds: Floats = edge_s + slope * np.maximum(there - here, 0.0)
        return seconds

    def _judge(
        self,
        columns: Columns,
        time_s: Floats,
        longest: NDArray[np.bool_],
        judge: KernelEstimator | None,
    ) -> None:
        """Set `shares_` by the longest points, predicted from the others."""
        kept = {key: values[~longest] for key, values in columns.items()}
        if judge is None:
            judge = self.estimator.lean()
            judge._fit_points(kept, time_s[~longest])
        trial = Trend(judge)
        trial._note_edges(kept)
        held = {key: values[longest] for key, values in columns.items()}
        curves = trial._curves(held)
        log_time = np.log(time_s[longest])
        both = [
            np.abs(np.log(seconds) - log_time)
            for seconds in (trial._straight(held, curves), judge.near(held))
        ]
        geometry = self._curves(held).geometry
        for kind in np.unique(curves.kind):
            own = curves.kind == kind
            self.shares_[kind] = self._share(geometry[own], [x[own] for x in both])

    def _share(self, geometry: NDArray[np.int64], both: list[Floats]) -> Floats:
        """Return the share of the line for each geometry, by its errors and ours."""
        num_geometries = len(self.geometries_)
        count = np.bincount(geometry, minlength=num_geometries)
        # each geometry's own evidence beside four points' worth of all
        prior = 4.0
        sums = [
            np.bincount(geometry, x, num_geometries) + prior * x.mean() for x in both
        ]
        line_error, model_error = (s / (count + prior) for s in sums)
        power = self.estimator.choice
        line, model = line_error**power, model_error**power
        share: Floats = model / (line + model + 1e-18)
        return share

    def _note_edges(self, columns: Columns) -> None:
        keys = self.estimator.curve
        table = np.stack([columns[key] for key in keys], axis=1).astype(np.int64)
        self.geometries_, places = unique_rows(table)
        self._places = {
            tuple(row): i for i, row in enumerate(self.geometries_.tolist())
        }
        batch, length = columns[self.estimator.batch], columns[self.estimator.long]
        order = np.lexsort((length, batch, places))
        changes = (np.diff(places[order]) != 0) | (np.diff(batch[order]) != 0)
        last = np.append(np.flatnonzero(changes), len(order) - 1)
        first = np.append(0, last[:-1] + 1)
        curves = [batch[order[last]], length[order[first]], length[order[last]]]
        starts = np.flatnonzero(np.diff(places[order[last]])) + 1
        self.curves_ = np.split(np.stack(curves, axis=1).astype(float), starts)

    def _curves(self, columns: Columns) -> _Curves:
        """Return the curve of each shape; between two batches, what lies between."""
        table = np.stack([columns[key] for key in self.estimator.curve], axis=1)
        rows, places = unique_rows(table.astype(np.int64))
        nearest = np.array([self._nearest(row) for row in rows], dtype=np.int64)
        geometry = nearest[places]
        start, edge, kind = np.empty((3, len(places)), dtype=np.int64)
        batch = np.array(columns[self.estimator.batch], dtype=np.int64)
        order = np.argsort(geometry, kind="stable")
        for own in np.split(order, np.flatnonzero(np.diff(geometry[order])) + 1):
            if not len(own):
                continue
            batches, starts, ends = self.curves_[geometry[own[0]]].T
            measured = np.isin(batch[own], batches)
            batch[own] = np.maximum(batch[own], int(batches[0]))
            at, where = np.log(batch[own].astype(float)), np.log(batches)
            start[own] = np.rint(np.exp(np.interp(at, where, np.log(starts))))
            edge[own] = np.rint(np.exp(np.interp(at, where, np.log(ends))))
            octave = (ends >= 2.0 * starts).astype(float)
            spans = np.interp(at, where, octave, left=0.0, right=0.0) == 1.0
            spans &= measured | (batch[own] != batches[0])
            kind[own] = np.where(
                spans, _OWN_SLOPE, np.where(measured, _OWN_EDGE, _NO_POINT)
            )
        return _Curves(geometry, start, edge, batch, kind)

    def _nearest(self, row: NDArray[np.int64]) -> int:
        place = self._places.get(tuple(row.tolist()))
        if place is not None:
            return place
        octaves = np.log2(1.0 + self.geometries_) - np.log2(1.0 + row)
        return int(np.argmin(np.abs(octaves).sum(axis=1)))
