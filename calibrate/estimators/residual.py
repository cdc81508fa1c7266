"""Residuals of a roofline, learned from points: log of measured over predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.threads import one_thread
from sim.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FEW_POINTS: Final = 400
"""Below so many points a smooth kernel interpolates; from here on trees learn."""

_SMALL_TABLE: Final = 8_000
"""Points below which trees of half the leaves are as accurate, in half of the time."""
_LARGE_TABLE: Final = 30_000
"""Points from which few trees of many leaves know more than many of few leaves do, in
two thirds of the time."""

_LENGTHS: Final = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Candidate reach of a point, in octaves a feature."""
_NOISES: Final = (1e-4, 1e-2, 1e-1)
"""Candidate shares of variance that are noise."""


class TreeResidual:
    """Gradient-boosted trees over the features; constant outside the points' range.

    Of several forests the mean is taken. One for squared errors follows every point,
    those for absolute errors keep to the middle where times of neighbouring shapes
    jump, and one that sees half of the features at each split makes other mistakes
    than one that sees all.

    scikit-learn is imported by the constructor of the trees, so that this module can
    be loaded without it.
    """

    def __init__(
        self,
        *,
        num_iterations: int = 240,
        seed: int = 0,
        forests: tuple[tuple[str, float], ...] = (("squared_error", 1.0),),
        fewer: int = 4,
    ) -> None:
        self.num_iterations = num_iterations
        self.seed = seed
        self.forests = forests
        self.fewer = fewer

    def fit(self, features: Floats, log_ratio: Floats) -> TreeResidual:
        self.forests_ = [
            _fitted_trees(
                features,
                log_ratio,
                loss=loss,
                max_features=max_features,
                max_bins=64,
                **self._size(len(log_ratio)),
                min_samples_leaf=5,
                early_stopping=False,
                random_state=self.seed,
            )
            for loss, max_features in self.forests
        ]
        self.bounds_ = float(log_ratio.min()), float(log_ratio.max())
        return self

    def _size(self, num_points: int) -> dict[str, Any]:
        """Return how many trees of how many leaves learn so many points."""
        if num_points < _LARGE_TABLE:
            leaves = 31 if num_points < _SMALL_TABLE else 63
            return {
                "max_iter": self.num_iterations,
                "max_leaf_nodes": leaves,
                "learning_rate": 0.2,
            }
        return {
            "max_iter": max(1, self.num_iterations // self.fewer),
            "max_leaf_nodes": 255,
            "learning_rate": 0.3,
        }

    def predict(self, features: Floats) -> Floats:
        """Return log ratios, never beyond the smallest and largest learned."""
        with one_thread():
            each = [forest.predict(features) for forest in self.forests_]
        found: Floats = np.clip(np.mean(each, axis=0), *self.bounds_)
        return found


class KernelResidual:
    """Gaussian kernel interpolation, for tables of tens or hundreds of points.

    Reach and noise are those with the least leave-one-out error. Far from every
    point the residual fades to its mean: the roofline alone remains.
    """

    def fit(self, features: Floats, log_ratio: Floats) -> KernelResidual:
        self.points_ = features
        self.mean_ = float(np.mean(log_ratio))
        self.bounds_ = float(log_ratio.min()), float(log_ratio.max())
        centred = log_ratio - self.mean_
        squares = _squares(features, features)
        best = np.inf
        for length in _LENGTHS:
            for noise in _NOISES:
                gram = np.exp(-squares / (2 * length * length))
                inverse = np.linalg.inv(gram + noise * np.eye(len(gram)))
                weights = inverse @ centred
                # the residual of a point left out, in closed form
                error = float(np.mean(np.abs(weights / np.diag(inverse))))
                if error < best:
                    best, self.length_, self.weights_ = error, length, weights
        return self

    def predict(self, features: Floats) -> Floats:
        squares = _squares(features, self.points_)
        near = np.exp(-squares / (2 * self.length_ * self.length_))
        found: Floats = np.clip(self.mean_ + near @ self.weights_, *self.bounds_)
        return found


def _squares(left: Floats, right: Floats) -> Floats:
    distance: Floats = (
        (left * left).sum(axis=1)[:, None]
        + (right * right).sum(axis=1)[None, :]
        - 2.0 * left @ right.T
    )
    return np.asarray(np.maximum(distance, 0.0))


def _fitted_trees(features: Floats, log_ratio: Floats, **parameters: Any) -> Any:
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"fitting {FEW_POINTS} points or more needs scikit-learn; install "
            "'kvsim[fit]'"
        ) from error
    features = np.asfortranarray(features)  # which are sorted one by one
    with one_thread():
        return HistGradientBoostingRegressor(**parameters).fit(features, log_ratio)
