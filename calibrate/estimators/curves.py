"""Operations that depend on one amount: layers by tokens, all-reduce by bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from calibrate.estimators.kernel import KernelEstimator
from calibrate.estimators.points import aggregated
from calibrate.estimators.roofline import SoftRoofline, Work
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]


class CurveEstimator(KernelEstimator):
    """Straight lines between measured points, one curve for each key.

    Lines in seconds over the amount, not in octaves: a kernel's start and a time for
    each token make one, whatever the gap between two points.

    Below the first point a curve is level, beyond the last it is the straight line
    through the last two octaves, never steeper than in proportion. Keys that were not
    measured take the curve of the nearest one.
    """

    amount: ClassVar[str]
    """The column along which a curve runs; `curve` names the others."""

    def fit(
        self,
        columns: Columns,
        time_s: Floats,
        *,
        judge: bool = True,
        judged_by: Self | None = None,
    ) -> Self:
        del judge, judged_by  # a curve has no second way to grow
        columns, time_s = aggregated(self._checked(columns), time_s)
        keys = self._keys(columns)
        self.keys_, places = np.unique(keys, axis=0, return_inverse=True)
        amount = columns[self.amount].astype(float)
        self.curves_ = []
        for place in range(len(self.keys_)):
            own = np.flatnonzero(places == place)
            if len(own) < 2:
                raise UserError(
                    f"{self.operation}: a curve needs 2 points at least; "
                    f"{dict(zip(self.curve, self.keys_[place].tolist(), strict=True))}"
                    f" has {len(own)}: measure more"
                )
            own = own[np.argsort(amount[own])]
            self.curves_.append((amount[own], time_s[own]))
        self.trend_ = None
        return self

    def spread_over(
        self, columns: Columns, time_s: Floats, judged_by: Self | None
    ) -> Self:
        return self.fit(columns, time_s, judged_by=judged_by)

    def spared(self, columns: Columns) -> NDArray[np.bool_]:
        """Return the two shortest points of each curve: without them it is none."""
        table = np.stack([columns[key] for key in self.curve], axis=1)
        order = np.lexsort((columns[self.amount], *table.T))
        starts = np.append(True, (np.diff(table[order], axis=0) != 0).any(axis=1))
        spared = np.zeros(len(order), dtype=np.bool_)
        spared[order] = starts | np.append(False, starts[:-1])
        return spared

    def extrapolated(self, columns: Columns) -> NDArray[np.bool_]:
        amount = columns[self.amount]
        outside = np.zeros(len(amount), dtype=np.bool_)
        for xs, own in self._of_curves(columns):
            outside[own] = (amount[own] < xs[0][0]) | (amount[own] > xs[0][-1])
        return outside

    def _of_curves(
        self, columns: Columns
    ) -> Iterator[tuple[tuple[Floats, Floats], NDArray[np.bool_]]]:
        """Yield each curve that is asked for, or the nearest, and where it is."""
        keys, places = np.unique(self._keys(columns), axis=0, return_inverse=True)
        for place, key in enumerate(keys):
            octaves = np.log2(1.0 + self.keys_) - np.log2(1.0 + key)
            nearest = int(np.argmin(np.abs(octaves).sum(axis=1)))
            yield self.curves_[nearest], places == place

    def _fit_points(self, columns: Columns, time_s: Floats) -> None:
        self.fit(columns, time_s)

    def near(self, columns: Columns) -> Floats:
        amount = columns[self.amount].astype(float)
        time_s = np.empty(len(amount))
        for (xs, ys), own in self._of_curves(columns):
            time_s[own] = _along(amount[own], xs, ys)
        return time_s

    def predict(self, columns: Columns) -> Floats:
        columns = self._checked(columns)
        found: Floats = np.maximum(self.near(columns), self.floor(columns))
        return found

    def features(self, columns: Columns) -> Floats:
        return self.shape_features(columns)

    def _keys(self, columns: Columns) -> NDArray[np.int64]:
        return np.stack([columns[key] for key in self.curve], axis=1).astype(np.int64)


def _along(amount: Floats, xs: Floats, ys: Floats) -> Floats:
    inside = np.interp(amount, xs, ys)
    back = int(np.searchsorted(xs, xs[-1] / 4, side="left"))
    back = min(back, len(xs) - 2)
    slope = max(0.0, (ys[-1] - ys[back]) / (xs[-1] - xs[back]))
    slope = min(slope, ys[-1] / max(xs[-1], 1.0))
    found: Floats = np.where(
        amount > xs[-1], ys[-1] + slope * (amount - xs[-1]), inside
    )
    return found


class AllReduce(CurveEstimator):
    """One all-reduce of `bytes` among `num_gpus`."""

    operation = "allreduce"
    columns = ("variant", "num_gpus", "bytes")
    curve = ("variant", "num_gpus")
    amount = "bytes"

    def work(self, columns: Columns) -> Work:
        nothing = np.zeros(len(columns["bytes"]))
        return Work(
            bytes=columns["bytes"].astype(float), flops_s=nothing, units=nothing
        )

    def floor(self, columns: Columns) -> Floats:
        return SoftRoofline(self.device).floor(self.work(columns))


class Layer(CurveEstimator):
    """A layer of the model that costs by tokens: norms, activations, embedding."""

    operation = "layer"
    columns = ("variant", "layer", "tokens")
    curve = ("variant", "layer")
    amount = "tokens"

    def work(self, columns: Columns) -> Work:
        nothing = np.zeros(len(columns["tokens"]))
        return Work(bytes=nothing, flops_s=nothing, units=nothing)


class _Transfer(KernelEstimator):
    """`num_blocks` of `block_bytes`, in `num_descriptors` pieces."""

    columns = ("num_blocks", "block_bytes", "num_descriptors")
    fewest = 3

    def _bytes(self, columns: Columns) -> Floats:
        return columns["num_blocks"].astype(float) * columns["block_bytes"]

    def features(self, columns: Columns) -> Floats:
        size = np.log2(1.0 + self._bytes(columns))
        return np.hstack([self.shape_features(columns), size[:, None]])


class Swap(_Transfer):
    """Blocks between host and device: ``max(c D, bytes / link)``, one direction."""

    operation = "swap"

    def work(self, columns: Columns) -> Work:
        moved = self._bytes(columns)
        return Work(
            bytes=np.zeros(len(moved)),
            flops_s=moved / self.device.host_bytes_per_s,
            units=columns["num_descriptors"].astype(float),
        )


class Copy(_Transfer):
    """Blocks copied on the device: each byte is read and written."""

    operation = "copy"

    def work(self, columns: Columns) -> Work:
        moved = self._bytes(columns)
        return Work(
            bytes=2.0 * moved,
            flops_s=np.zeros(len(moved)),
            units=columns["num_descriptors"].astype(float),
        )
