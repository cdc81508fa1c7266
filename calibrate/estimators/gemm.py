"""Matrix products ``(m, k) x (k, n)`` of the linear layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from calibrate.estimators.costs import CostSum
from calibrate.estimators.kernel import KernelEstimator
from calibrate.estimators.neighbours import Neighbours
from calibrate.estimators.residual import TreeResidual
from calibrate.estimators.roofline import SoftRoofline, Work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]

_TILES: Final = ((64, 128), (128, 128), (128, 256))
"""Rows and columns of output tiles that libraries choose among."""
_STEPS: Final = (16, 64, 128, 256)
"""Multiples of m at which kernels jump."""


_LAST_OCTAVES: Final = 5
"""Of tokens, up to the most, whose products tell how those of more tokens go on."""
_PRICED_OCTAVES: Final = 2.5
"""The last of them, which tell what each cost of a longer one is."""
_SHORTEST_ROW: Final = 256
"""Rows of weights that a token's share of an output takes at least."""
_MOST_WAVES: Final = 5.0
_MOST_CACHES: Final = 3.0
"""Octaves of waves of tiles, and of caches of bytes, from which all are alike."""


class Gemm(KernelEstimator):
    """``m`` tokens through weights of ``n`` rows and ``k`` columns.

    `dtype` is a small integer that names the precision and scaling scheme within one
    table; `weight_bits` its bits an element of the weights.

    Between two measured numbers of tokens of one shape of weights a third forest, which
    also sees the neighbours' times, has half of the say. Elsewhere it has none: on
    shapes of weights that were not measured it is a fifth worse than the others.

    Beyond the most tokens the costs of the longest products are added up (`CostSum`),
    and one forest says what they miss, by features that longer products stay within:
    how full waves of tiles are, FLOPs a byte, which cost is how much of the time, and
    how long the chip computes, by which some chips slow their clock. A precision that
    was not measured has no prices: it follows the forests of all products.
    """

    operation = "gemm"
    columns = ("m", "n", "k", "weight_bits", "dtype")
    keys = ("weight_bits", "dtype")
    curve = ("k", "weight_bits", "dtype")
    batch = "n"
    long = "m"
    choice = 4
    fades = True
    forests = (("squared_error", 1.0), ("absolute_error", 0.5))
    trees = 150
    fewer = 3

    def work(self, columns: Columns) -> Work:
        m, n, k = (columns[key].astype(float) for key in "mnk")
        bits = columns["weight_bits"].astype(float)
        device = self.device
        peak = np.where(bits < 16, device.flops_8bit_per_s, device.flops_per_s)
        peak = np.where(bits < 8, 2.0 * peak, peak)
        return Work(
            bytes=(m * k + n * k) * bits / 8.0 + 2.0 * m * n,
            flops_s=2.0 * m * n * k / peak,
            units=np.ceil(m / 128) * np.ceil(n / 128),
        )

    def _fit_points(self, columns: Columns, time_s: Floats) -> None:
        super()._fit_points(columns, time_s)
        if self.few_:
            return
        self.longest_ = int(columns["m"].max())
        self.priced_ = np.unique(columns["dtype"])
        log_ratio = np.log(time_s / self.roofline_.predict(self.work(columns)))
        self.neighbours_ = Neighbours(("m", "n", "k"), ("weight_bits", "dtype"))
        self.neighbours_.fit(columns, log_ratio)
        self.beside_ = TreeResidual(
            num_iterations=self.num_iterations, seed=self.seed, fewer=self.fewer
        )
        self.costs_ = CostSum()
        self.onward_ = TreeResidual(
            num_iterations=self.num_iterations,
            seed=self.seed,
            forests=self.forests,
            fewer=self.fewer,
        )
        self._for_beside: tuple[Columns, Floats] | None = columns, log_ratio
        self._for_onward: tuple[Columns, Floats] | None = columns, time_s

    def for_slope(self, columns: Columns) -> Floats:
        """As `near`; plain slopes know no neighbours, of which the edge has none."""
        return self._seconds(
            columns, self._alone if self.plain_slopes else self._residual
        )

    def _residual(self, columns: Columns) -> Floats:
        found = self._alone(columns)
        if self.few_:
            return found
        near = self.neighbours_.features(columns)
        own = Neighbours.between(near)
        if own.any():
            features = np.hstack([self.features(columns), near])[own]
            known = self._learn_beside().predict(features)
            found[own] = (found[own] + known) / 2.0
        return found

    def complete(self) -> Self:
        if not self.few_:
            self._learn_beside()
            self._learn_onward()
        return self

    def _learn_beside(self) -> TreeResidual:
        """Learn from neighbours when first asked; plain judges of growths never are."""
        if self._for_beside is not None:
            columns, log_ratio = self._for_beside
            near = self.neighbours_.features(columns)
            self.beside_.fit(np.hstack([self.features(columns), near]), log_ratio)
            self._for_beside = None
        return self.beside_

    def _learn_onward(self) -> TreeResidual:
        """Learn the longest products when first asked for longer ones."""
        if self._for_onward is not None:
            columns, time_s = self._for_onward
            part, last_s = self._last(columns, time_s, _PRICED_OCTAVES)
            self.costs_.fit(part["dtype"], self._amounts(part), last_s)
            part, last_s = self._last(columns, time_s, _LAST_OCTAVES)
            costs_s = self.costs_.predict(part["dtype"], self._amounts(part))
            self.onward_.fit(self._lasting_features(part), np.log(last_s / costs_s))
            self._for_onward = None
        return self.onward_

    def _last(
        self, columns: Columns, time_s: Floats, octaves: float
    ) -> tuple[Columns, Floats]:
        """Return the products of the most tokens of each kind."""
        kinds = columns["dtype"].astype(np.int64)
        most = np.zeros(kinds.max() + 1)
        np.maximum.at(most, kinds, columns["m"])
        last = columns["m"] >= most[kinds] / 2.0**octaves
        return {key: values[last] for key, values in columns.items()}, time_s[last]

    def _alone(self, columns: Columns) -> Floats:
        beyond = np.zeros(len(columns["m"]), dtype=np.bool_)
        if not self.few_:
            is_priced = np.isin(columns["dtype"], self.priced_)
            beyond = (columns["m"] > self.longest_) & is_priced
        found = np.empty(len(beyond))
        for own, residual in ((~beyond, super()._residual), (beyond, self._onward)):
            if own.any():
                part = {key: values[own] for key, values in columns.items()}
                found[own] = residual(part)
        return found

    def _onward(self, columns: Columns) -> Floats:
        """Return the residual of products of more tokens than were measured."""
        missed = self._learn_onward().predict(self._lasting_features(columns))
        costs_s = self.costs_.predict(columns["dtype"], self._amounts(columns))
        base_s = self.roofline_.predict(self.work(columns))
        found: Floats = np.log(costs_s / base_s) + missed
        return found

    def _amounts(self, columns: Columns) -> Floats:
        """Return (n, c) of what a product may cost: calls, elements, FLOPs and so on.

        Some kernels scale each token first, some read what has left the cache, and all
        compute whole tiles, in waves.
        """
        m, n, k = (columns[key].astype(float) for key in "mnk")
        work, cache = self.work(columns), self.device.l2_bytes
        padded = _whole(m, 128) * _whole(n, 128) * k
        found = [np.ones_like(m), m, m * k, m * n, n * k, work.flops_s]
        found += [padded, m * np.maximum(n, _SHORTEST_ROW) * k]
        found += [np.maximum(size - cache, 0.0) for size in (work.bytes, 2.0 * m * n)]
        for tiles in self._tiles(columns):
            waves = np.ceil(tiles / self.device.num_sms)
            found += [waves, waves * k]
        return np.stack(found, axis=1)

    def floor(self, columns: Columns) -> Floats:
        """Return FLOPs at their peak, and bytes where they do not fit the L2 cache.

        Tables time one product again and again, so that small weights stay in the
        cache; a step reads them from memory, which a cost model asks for when it reads
        the tables.
        """
        work = self.work(columns)
        cached = work.bytes <= self.device.l2_bytes
        moved = replace(work, bytes=np.where(cached, 0.0, work.bytes))
        return SoftRoofline(self.device).floor(moved)

    def features(self, columns: Columns) -> Floats:
        m, n, k = (columns[key].astype(float) for key in "mnk")
        work = self.work(columns)
        found = [
            np.log2(m),
            np.log2(n),
            np.log2(k),
            columns["dtype"].astype(float),
            columns["weight_bits"].astype(float),
            np.log2(m * n),
            np.log2(n * k),
            np.log2(m * k),
            np.log2(work.flops_s),
            np.log2(work.bytes),
            np.log2(work.flops_s / work.bytes),
        ]
        for tiles in self._tiles(columns):
            waves = tiles / self.device.num_sms
            found += [np.log2(tiles), waves / np.ceil(waves)]
        found += _fractions(m)
        return np.stack(found, axis=1)

    def _lasting_features(self, columns: Columns) -> Floats:
        """Return features that do not grow with the tokens for ever."""
        m, n, k = (columns[key].astype(float) for key in "mnk")
        work, cache = self.work(columns), self.device.l2_bytes
        of_caches = [np.log2(size / cache) for size in (work.bytes, 2.0 * m * n)]
        found = [
            np.log2(n),
            np.log2(k),
            columns["dtype"].astype(float),
            columns["weight_bits"].astype(float),
            np.log2(work.flops_s / work.bytes),
            np.log2(work.flops_s),
            *(np.clip(each, -_MOST_CACHES, _MOST_CACHES) for each in of_caches),
            *self.costs_.shares(columns["dtype"], self._amounts(columns)).T,
        ]
        for tiles in self._tiles(columns):
            waves = tiles / self.device.num_sms
            found += [np.minimum(np.log2(waves), _MOST_WAVES), waves / np.ceil(waves)]
        found += _fractions(m)
        return np.stack(found, axis=1)

    @staticmethod
    def _tiles(columns: Columns) -> Iterator[Floats]:
        """Yield how many tiles of each kind the output has."""
        m, n = columns["m"], columns["n"]
        for rows, width in _TILES:
            yield np.ceil(m / rows) * np.ceil(n / width)


def _whole(size: Floats, step: int) -> Floats:
    """Return the size rounded up to whole steps."""
    found: Floats = step * np.ceil(size / step)
    return found


def _fractions(m: Floats) -> list[Floats]:
    """Return how full the last step of rows is."""
    return [m / _whole(m, step) for step in _STEPS]
