"""Beyond the longest points: follow each curve, or the model, whichever did better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns, KernelEstimator

    Floats = NDArray[np.float64]

_MIN_POINTS: Final = 200
"""With fewer points none are spared to judge by; the model alone is followed."""
_BACK: Final = 4
"""A curve's slope is taken between its longest point and a quarter of that."""


_DOUBT: Final = 8
"""Power that takes a share down where a curve's slope is the model's guess: only what
its geometry shows beyond doubt is left."""


class _Curves(NamedTuple):
    """The curve that each of some shapes lies on."""

    geometry: NDArray[np.int64]
    start: NDArray[np.int64]
    """Its shortest measured length."""
    edge: NDArray[np.int64]
    """Its longest."""
    spans: NDArray[np.bool_]
    """Whether it was measured over an octave at least, so that it has a slope."""

    def of(self, places: NDArray[np.intp]) -> _Curves:
        """Return those of some of the shapes."""
        geometry, start, edge, spans = self
        return _Curves(geometry[places], start[places], edge[places], spans[places])


class Trend:
    """Times beyond the longest measured point of a curve.

    A *curve* is a geometry and a batch; its *edge* is its longest measured point.
    Beyond the edge a time is that at the edge times a growth, and two growths compete:
    that of the model (roofline x residual, which knows what other geometries did
    there), and the straight line through the curve's own last two octaves (which
    knows a kernel that walks keys one after the other). The longest eighth of the
    distinct lengths is held out once and each geometry takes the two in proportion to
    how well they did on it.

    Attributes
    ----------
    shares_
        (g,) share of the straight line for each geometry, 0 to 1.
    """

    def __init__(self, estimator: KernelEstimator) -> None:
        self.estimator = estimator

    def fit(self, columns: Columns, time_s: Floats, *, judge: bool = True) -> Self:
        """Note the edges, and judge the growths where there are points to spare."""
        self._note_edges(columns)
        self.shares_ = np.zeros(len(self.geometries_))
        longest = longest_share(columns[self.estimator.long])
        kept = ~longest
        if judge and len(time_s) >= _MIN_POINTS and kept.sum() >= _MIN_POINTS // 2:
            self._judge(columns, time_s, longest)
        return self

    def beyond(self, columns: Columns) -> NDArray[np.bool_]:
        """Return which points lie beyond the edge of their curve."""
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
        share = self.shares_[curves.geometry]
        share = np.where(curves.spans, share, share**_DOUBT)
        found = time_s.copy()
        found[outside] = line_s**share * time_s[outside] ** (1.0 - share)
        return found

    def _straight(self, columns: Columns, curves: _Curves) -> Floats:
        """Return seconds on the straight line through each curve's last octaves."""
        estimator = self.estimator
        back = np.maximum(curves.edge // _BACK, np.where(curves.spans, curves.start, 1))
        at_edge = {**columns, estimator.long: curves.edge}
        behind = {**columns, estimator.long: back}
        edge_s, behind_s = estimator.near(at_edge), estimator.near(behind)
        here, there, then = map(estimator.growth, (at_edge, columns, behind))
        span = np.maximum(here - then, 1.0)
        slope = np.maximum(edge_s - behind_s, 0.0) / span
        # never steeper than in proportion: kernels have a fixed cost, not a bonus
        slope = np.minimum(slope, edge_s / np.maximum(here, 1.0))
        seconds: Floats = edge_s + slope * np.maximum(there - here, 0.0)
        return seconds

    def _judge(
        self, columns: Columns, time_s: Floats, longest: NDArray[np.bool_]
    ) -> None:
        """Set `shares_` by the longest points, predicted from the others."""
        judge = self.estimator.fresh()
        kept = {key: values[~longest] for key, values in columns.items()}
        judge._fit_points(kept, time_s[~longest])
        trial = Trend(judge)
        trial._note_edges(kept)
        held = {key: values[longest] for key, values in columns.items()}
        curves = trial._curves(held)
        if not curves.spans.any():
            return
        log_time = np.log(time_s[longest])
        errors = [
            np.abs(np.log(seconds) - log_time)[curves.spans]
            for seconds in (trial._straight(held, curves), judge.near(held))
        ]
        geometry = self._curves(held).geometry[curves.spans]
        count = np.bincount(geometry, minlength=len(self.shares_))
        # each geometry's own evidence beside four points' worth of everybody's
        prior = 4.0
        sums = [
            np.bincount(geometry, x, len(self.shares_)) + prior * x.mean()
            for x in errors
        ]
        line_error, model_error = (s / (count + prior) for s in sums)
        squares = line_error**2, model_error**2
        self.shares_ = squares[1] / (squares[0] + squares[1] + 1e-12)

    def _note_edges(self, columns: Columns) -> None:
        keys = self.estimator.curve
        table = np.stack([columns[key] for key in keys], axis=1).astype(np.int64)
        self.geometries_, places = np.unique(table, axis=0, return_inverse=True)
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
        rows, places = np.unique(table.astype(np.int64), axis=0, return_inverse=True)
        nearest = np.array([self._nearest(row) for row in rows], dtype=np.int64)
        geometry = nearest[places]
        start, edge = np.empty((2, len(places)), dtype=np.int64)
        spans = np.empty(len(places), dtype=np.bool_)
        log_batch = np.log(columns[self.estimator.batch].astype(float))
        order = np.argsort(geometry, kind="stable")
        for own in np.split(order, np.flatnonzero(np.diff(geometry[order])) + 1):
            if not len(own):
                continue
            batches, starts, ends = self.curves_[geometry[own[0]]].T
            at, where = log_batch[own], np.log(batches)
            start[own] = np.rint(np.exp(np.interp(at, where, np.log(starts))))
            edge[own] = np.rint(np.exp(np.interp(at, where, np.log(ends))))
            octave = (ends >= 2.0 * starts).astype(float)
            spans[own] = np.interp(at, where, octave, left=0.0, right=0.0) == 1.0
        return _Curves(geometry, start, edge, spans)

    def _nearest(self, row: NDArray[np.int64]) -> int:
        place = self._places.get(tuple(row.tolist()))
        if place is not None:
            return place
        octaves = np.log2(1.0 + self.geometries_) - np.log2(1.0 + row)
        return int(np.argmin(np.abs(octaves).sum(axis=1)))


def longest_share(length: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which points have one of the longest eighth of the distinct lengths."""
    distinct = np.unique(length)
    held = max(1, round(len(distinct) / 8))
    if held >= len(distinct):
        return np.zeros(len(length), dtype=np.bool_)
    longest: NDArray[np.bool_] = length >= distinct[-held]
    return longest
