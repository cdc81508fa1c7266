"""How many turns, tool calls or documents: distributions of counts by their inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from workloads._checks import between, check_order, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

MAX_COUNT = 10_000
"""Most turns, calls or documents of one session or request."""
_REMEDY = "give a count, such as 4"


@runtime_checkable
class CountDistribution(Protocol):
    """Counts, by inverse cumulative distribution."""

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the count at each probability.

        Parameters
        ----------
        u
            Probabilities in [0, 1), any shape.

        Returns
        -------
        numpy.ndarray of int64
            Counts, at least 0, the shape of ``u``; never falling as ``u`` rises.
        """


@dataclass(frozen=True, slots=True)
class FixedCount:
    """Always the same.

    Parameters
    ----------
    number
        The count, 0 to 10,000.

    Raises
    ------
    WorkloadError
        If it is no integer or out of range.
    """

    number: int

    def __post_init__(self) -> None:
        whole("number", self.number, 0, MAX_COUNT, _REMEDY)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.full(u.shape, self.number, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class UniformCount:
    """Every count from ``low`` to ``high``, both included, equally likely.

    Parameters
    ----------
    low, high
        ``0 <= low <= high <= 10,000``.

    Raises
    ------
    WorkloadError
        If one is no integer or out of range.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        whole("low", self.low, 0, MAX_COUNT, _REMEDY)
        whole("high", self.high, 0, MAX_COUNT, _REMEDY)
        check_order("low", self.low, "high", self.high)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        counts = self.low + np.floor(u * (self.high - self.low + 1)).astype(np.int64)
        return np.minimum(counts, self.high)  # u = 1 would be one step too far


@dataclass(frozen=True, slots=True)
class GeometricCount:
    """At least one, and after each the same chance of another.

    Parameters
    ----------
    mean
        Mean before cutting, at least 1.
    max
        Larger counts become this one.

    Raises
    ------
    WorkloadError
        If one is out of range.
    """

    mean: float
    max: int = MAX_COUNT

    def __post_init__(self) -> None:
        between("mean", self.mean, 1, MAX_COUNT, _REMEDY)
        whole("max", self.max, 1, MAX_COUNT, _REMEDY)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        if self.mean == 1:
            return np.ones(u.shape, dtype=np.int64)
        # P(count > k) = (1 - 1 / mean) ** k; the last double below 1 instead of 1.
        below = np.minimum(u, math.nextafter(1, 0))
        further = np.floor(np.log1p(-below) / math.log1p(-1 / self.mean))
        counts: NDArray[np.int64] = np.minimum(further + 1, self.max).astype(np.int64)
        return counts


COUNTS: Mapping[str, type[CountDistribution]] = MappingProxyType(
    {"fixed": FixedCount, "geometric": GeometricCount, "uniform": UniformCount}
)
"""Distributions of counts by the ``kind`` of a configuration."""
