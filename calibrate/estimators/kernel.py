"""The estimator that every operation shares: roofline x learned residual, bounded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from calibrate.estimators.between import interpolated
from calibrate.estimators.hull import Hull
from calibrate.estimators.residual import FEW_POINTS, KernelResidual, TreeResidual
from calibrate.estimators.roofline import SoftRoofline, Work
from calibrate.estimators.trend import Trend
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from numpy.typing import NDArray

    from calibrate.device import DeviceFacts

    Floats = NDArray[np.float64]
    Columns = Mapping[str, NDArray[Any]]

_RATES = (1e-9, 1e5)
"""Seconds that a kernel may take; anything else is a wrong unit."""


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
    trees: ClassVar[int] = 300
    """Trees of a forest where the constructor is not told."""

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

    def fresh(self) -> Self:
        """Return an estimator with the same parameters that learned nothing."""
        return type(self)(
            self.device,
            num_iterations=self.num_iterations,
            seed=self.seed,
            launch_s=self.launch_s,
        )

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
        """Return what time grows with along `long`, far out."""
        return columns[self.long].astype(np.float64)

    def fit(self, columns: Columns, time_s: Floats, *, judge: bool = True) -> Self:
        """Learn from measured seconds.

        Parameters
        ----------
        columns
            Arrays (n,) by name: at least `self.columns`.
        time_s
            (n,) seconds of one call. Several rows of one shape count as one: their
            median.
        judge
            Whether to hold points out once more to learn which growth to follow
            beyond the longest; without, the model alone is followed, in half the time.

        Raises
        ------
        UserError
            When there are fewer than `fewest` shapes, or a time is not above zero and
            finite.
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
            self.trend_ = Trend(self).fit(columns, time_s, judge=judge)
        return self

    def spared(self, columns: Columns) -> NDArray[np.bool_]:
        """Return which points no judge of the fit may hold out; none here."""
        return np.zeros(len(next(iter(columns.values()))), dtype=np.bool_)

    def _fit_points(self, columns: Columns, time_s: Floats) -> None:
        """Fit roofline and residual; no trend."""
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
            )
        self.residual_.fit(self._features(columns), log_ratio)
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
        base = self.roofline_.predict(self.work(columns))
        nodes = {} if self.few_ else self.nodes_
        time_s: Floats = base * np.exp(interpolated(columns, nodes, self._residual))
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


def octaves(columns: Columns, names: tuple[str, ...]) -> Floats:
    """Return (n, len(names)) base-2 logarithms of 1 + each column."""
    return np.log2(1.0 + np.stack([columns[n] for n in names], axis=1, dtype=float))


def aggregated(columns: Columns, time_s: Floats) -> tuple[Columns, Floats]:
    """Return each shape once, with the median of its times.

    Raises
    ------
    UserError
        When a time is not above zero, or so large or small that its unit is wrong.
    """
    time_s = np.asarray(time_s, dtype=np.float64)
    low, high = _RATES
    if bad := np.flatnonzero(~((time_s >= low) & (time_s <= high))).tolist():
        raise UserError(
            f"a time must lie between {low:g} and {high:g} seconds; got "
            f"{time_s[bad[0]]:g} in row {bad[0]}: check the unit"
        )
    if not len(time_s):
        return columns, time_s
    table = np.stack([np.asarray(values) for values in columns.values()], axis=1)
    shapes, places = np.unique(table, axis=0, return_inverse=True)
    order = np.lexsort((time_s, places))
    counts = np.bincount(places)
    starts = np.cumsum(counts) - counts
    sorted_s = time_s[order]
    middle = (sorted_s[starts + (counts - 1) // 2] + sorted_s[starts + counts // 2]) / 2
    return dict(zip(columns, shapes.T, strict=True)), middle
