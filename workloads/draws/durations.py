"""How long people think and tools take: distributions of seconds by their inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from workloads._checks import between, check_order
from workloads.draws.normal import normal_quantile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

MAX_SECONDS = 1e9
"""Longest duration; thirty years."""
_REMEDY = "give seconds, such as 10.0"


@runtime_checkable
class DurationDistribution(Protocol):
    """Durations in seconds, by inverse cumulative distribution."""

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the duration at each probability.

        Parameters
        ----------
        u
            Probabilities in [0, 1), any shape.

        Returns
        -------
        numpy.ndarray of float64
            Seconds, finite and at least 0, the shape of ``u``; never falling as ``u``
            rises.
        """


@dataclass(frozen=True, slots=True)
class FixedDuration:
    """Always the same.

    Parameters
    ----------
    value_s
        Seconds, 0 to 1e9.

    Raises
    ------
    WorkloadError
        If it is out of range.
    """

    value_s: float

    def __post_init__(self) -> None:
        _check("value_s", self.value_s)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.full(u.shape, float(self.value_s))


@dataclass(frozen=True, slots=True)
class UniformDuration:
    """Every duration between two is equally likely.

    Parameters
    ----------
    low_s, high_s
        Seconds, ``0 <= low_s <= high_s <= 1e9``.

    Raises
    ------
    WorkloadError
        If one is out of range.
    """

    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        _check("low_s", self.low_s)
        _check("high_s", self.high_s)
        check_order("low_s", self.low_s, "high_s", self.high_s)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.low_s + u * (self.high_s - self.low_s)


@dataclass(frozen=True, slots=True)
class ExponentialDuration:
    """Memoryless: the classical think time.

    Parameters
    ----------
    mean_s
        Mean in seconds, before cutting.
    max_s
        Longer ones become this one; None for no limit (but 1e9).

    Raises
    ------
    WorkloadError
        If one is out of range.
    """

    mean_s: float
    max_s: float | None = None

    def __post_init__(self) -> None:
        _check("mean_s", self.mean_s)
        if self.max_s is not None:
            _check("max_s", self.max_s)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        # The last double below 1 instead of 1, whose quantile is infinite.
        below = np.minimum(u, math.nextafter(1, 0))
        return _cut(-self.mean_s * np.log1p(-below), 0.0, self.max_s)


@dataclass(frozen=True, slots=True)
class LognormalDuration:
    """Durations whose logarithm is normal: mostly short, now and then very long.

    Parameters
    ----------
    median_s
        Half of them are shorter; seconds.
    sigma
        Standard deviation of the natural logarithm, 0 to 10.
    min_s, max_s
        Shorter and longer ones become these; None for no upper limit (but 1e9).

    Raises
    ------
    WorkloadError
        If one is out of range, or ``min_s > max_s``.
    """

    median_s: float
    sigma: float
    min_s: float = 0.0
    max_s: float | None = None

    def __post_init__(self) -> None:
        _check("median_s", self.median_s)
        between("sigma", self.sigma, 0, 10, "give the log's deviation, such as 1.0")
        _check("min_s", self.min_s)
        if self.max_s is not None:
            _check("max_s", self.max_s)
            check_order("min_s", self.min_s, "max_s", self.max_s)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        z: NDArray[np.float64] = self.sigma * normal_quantile(u)
        return _cut(self.median_s * np.exp(z), self.min_s, self.max_s)


def _cut(
    seconds: NDArray[np.float64], min_s: float, max_s: float | None
) -> NDArray[np.float64]:
    return np.clip(seconds, min_s, MAX_SECONDS if max_s is None else max_s)


def _check(name: str, seconds: float) -> None:
    between(name, seconds, 0, MAX_SECONDS, _REMEDY)


DURATIONS: Mapping[str, type[DurationDistribution]] = MappingProxyType(
    {
        "exponential": ExponentialDuration,
        "fixed": FixedDuration,
        "lognormal": LognormalDuration,
        "uniform": UniformDuration,
    }
)
"""Distributions of seconds by the ``kind`` of a configuration."""
