"""Seconds as a sum of costs, none of them below zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from scipy.optimize import nnls

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_MAX_POINTS: Final = 4096
"""Points of a kind that the costs are fitted to; a fixed stride keeps at most these."""
_ROUNDS: Final = 3
"""Times that points are weighed again, so that absolute errors are the least."""
_CLOSE: Final = 0.02
"""Relative error below which points weigh no more than others."""


class CostSum:
    """``sum(price * amount)`` of each kind of kernel, no price below zero.

    Where more is asked for than was measured, each cost goes on to grow by its own
    amount. Which of them is most of the time is a feature that does not grow for ever.

    Attributes
    ----------
    prices_
        (kinds, c) seconds of a unit of each cost.
    """

    def fit(self, kinds: NDArray[np.int64], amounts: Floats, time_s: Floats) -> CostSum:
        """Learn prices from (n, c) amounts; relative errors are what counts."""
        self.kinds_ = np.unique(kinds)
        self.prices_ = np.stack(
            [
                _prices(amounts[own], time_s[own])
                for own in kinds == self.kinds_[:, None]
            ]
        )
        return self

    def predict(self, kinds: NDArray[np.int64], amounts: Floats) -> Floats:
        found: Floats = self._each(kinds, amounts).sum(axis=1)
        return found

    def shares(self, kinds: NDArray[np.int64], amounts: Floats) -> Floats:
        """Return (n, c) shares of the time."""
        each = self._each(kinds, amounts)
        found: Floats = each / each.sum(axis=1, keepdims=True)
        return found

    def _each(self, kinds: NDArray[np.int64], amounts: Floats) -> Floats:
        places = np.searchsorted(self.kinds_, kinds)
        found: Floats = amounts * self.prices_[places]
        return found


def _prices(amounts: Floats, time_s: Floats) -> Floats:
    stride = max(1, -(-len(time_s) // _MAX_POINTS))
    rows = amounts[::stride] / time_s[::stride, None]
    scale = rows.max(axis=0)
    scale[scale == 0.0] = 1.0
    rows = rows / scale
    weights = np.ones(len(rows))
    for _ in range(1 + _ROUNDS):
        prices, _ = nnls(rows * weights[:, None], weights)
        weights = np.maximum(np.abs(rows @ prices - 1.0), _CLOSE) ** -0.5
    found: Floats = prices / scale
    return found
