"""How far off the fit is at each point that it did not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from calibrate.estimators.trend import longest_share
from calibrate.figures.axes import LAYOUTS
from sim.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.estimators import KernelEstimator
    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]
    Mask = NDArray[np.bool_]

NUM_FOLDS: Final = 5


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Predicted over measured less one, in percent, by a fit without the point.

    Parameters
    ----------
    inside
        (n,) from five folds; NaN where the point lay outside the others' hull.
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
        """Return what nine in ten absolute errors stay below, in percent."""
        errors = self._known(beyond)
        return float(np.quantile(errors, 0.9)) if errors.size else None

    def _known(self, beyond: bool) -> Floats:
        errors = self.beyond if beyond else self.inside
        known: Floats = np.abs(errors[np.isfinite(errors)])
        return known


def held_out(estimator: KernelEstimator, columns: Columns, time_s: Floats) -> HeldOut:
    """Return the errors at points held out.

    Parameters
    ----------
    estimator
        With its parameters; what it learned is not looked at.
    columns, time_s
        Shapes once each, and their seconds, (n,).
    """
    folds = np.random.default_rng(0).permutation(len(time_s)) % NUM_FOLDS
    inside = np.full(len(time_s), np.nan)
    for fold in range(NUM_FOLDS):
        _judge(estimator, columns, time_s, folds == fold, inside)
    beyond = np.full(len(time_s), np.nan)
    axis = estimator.long or LAYOUTS[estimator.operation].along
    longest = longest_share(columns[axis])
    if longest.any() and (~longest).sum() >= NUM_FOLDS:
        _judge(estimator, columns, time_s, longest, beyond, trend=True)
    return HeldOut(inside, beyond)


def _judge(
    estimator: KernelEstimator,
    columns: Columns,
    time_s: Floats,
    held: Mask,
    errors: Floats,
    *,
    trend: bool = False,
) -> None:
    """Write the errors at `held` of a fit to the rest; none where it has too few."""
    kept = {key: values[~held] for key, values in columns.items()}
    asked = {key: values[held] for key, values in columns.items()}
    try:
        fresh = estimator.fresh().fit(kept, time_s[~held], judge=trend)
    except UserError:
        return
    percent = 100.0 * (fresh.predict(asked) / time_s[held] - 1.0)
    if not trend:
        percent[fresh.extrapolated(asked)] = np.nan
    errors[held] = percent
