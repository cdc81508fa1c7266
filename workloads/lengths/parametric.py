"""Lengths by a formula of few parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from workloads._checks import MAX_TOKENS, between, check_order, whole
from workloads._numpy import np
from workloads.draws.normal import normal_quantile
from workloads.errors import WorkloadError
from workloads.lengths.base import (
    LENGTH_REMEDY,
    check_range,
    clipped,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ZIPF_TOKENS = 10**7
"""Longest length that `ZipfLength` makes a table for (240 MB while it draws)."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same length.

    Parameters
    ----------
    tokens
        The length in tokens, at least 1.

    Raises
    ------
    WorkloadError
        If it is no integer or below 1.
    """

    tokens: int

    def __post_init__(self) -> None:
        whole("tokens", self.tokens, 1, MAX_TOKENS, LENGTH_REMEDY)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.full(u.shape, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Every length from ``low`` to ``high``, both included, equally likely.

    Parameters
    ----------
    low, high
        Shortest and longest length in tokens, ``1 <= low <= high``.

    Raises
    ------
    WorkloadError
        If one is no integer, below 1, or ``low > high``.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        whole("low", self.low, 1, MAX_TOKENS, LENGTH_REMEDY)
        whole("high", self.high, 1, MAX_TOKENS, LENGTH_REMEDY)
        check_order("low", self.low, "high", self.high)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        tokens = self.low + np.floor(u * (self.high - self.low + 1)).astype(np.int64)
        # u = 1 would be one step too far.
        return np.minimum(tokens, self.high)


@dataclass(frozen=True, slots=True)
class LognormalLength:
    """Lengths whose logarithm is normal, rounded and clipped.

    Before clipping the mean is ``median * exp(sigma**2 / 2)`` and the coefficient of
    variation ``sqrt(exp(sigma**2) - 1)``. Clipping gathers the tails at ``min`` and
    ``max``, as an engine's length limit does, and leaves the median where it is.

    Parameters
    ----------
    median
        Half of the lengths are shorter; tokens, from 1 to 1e9.
    sigma
        Standard deviation of the natural logarithm, 0 to 10; 1 is a common value.
    min
        Shortest length in tokens, at least 1.
    max
        Longest length in tokens; None for no limit (but 1e9).

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range, or ``min > max``.
    """

    median: float
    sigma: float
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        between("median", self.median, 1, MAX_TOKENS, LENGTH_REMEDY)
        between("sigma", self.sigma, 0, 10, "give the log's deviation, such as 1.0")
        check_range(self.min, self.max)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        z: NDArray[np.float64] = self.sigma * normal_quantile(u)
        return clipped(self.median * np.exp(z), self.min, self.max)


@dataclass(frozen=True, slots=True)
class NormalLength:
    """Normally distributed lengths, truncated: those outside are drawn again.

    The law is the normal one given that it lies from ``min`` to ``max``, so nothing
    gathers at the ends. Where they cut off much, the mean of the lengths is not
    ``mean``.

    Parameters
    ----------
    mean
        Mean in tokens before truncation, from 1 to 1e9.
    std
        Standard deviation in tokens before truncation, 1e-9 to 1e9.
    min
        Shortest length in tokens, at least 1.
    max
        Longest length in tokens; None for no limit (but 1e9).

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range, ``min > max``, or less than a
        millionth of the distribution lies between them.
    """

    mean: float
    std: float
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        between("mean", self.mean, 1, MAX_TOKENS, LENGTH_REMEDY)
        between("std", self.std, 1e-9, 1e9, "give a deviation in tokens, such as 100")
        check_range(self.min, self.max)
        low, high = self._probabilities()
        if high - low < 1e-6:
            raise WorkloadError(
                "min to max must hold a millionth of the distribution; got "
                f"{high - low:g} of mean {self.mean:g}, std {self.std:g}; move them"
            )

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        low, high = self._probabilities()
        z = normal_quantile(low + (high - low) * u)
        return clipped(self.mean + self.std * z, self.min, self.max)

    def _probabilities(self) -> tuple[float, float]:
        """Return the distribution function half a token outside of both ends."""
        law = NormalDist(self.mean, self.std)
        longest = MAX_TOKENS if self.max is None else self.max
        return law.cdf(self.min - 0.5), law.cdf(longest + 0.5)


@dataclass(frozen=True, slots=True)
class ExponentialLength:
    """Exponential lengths rounded up: a geometric law, which has no memory.

    Before clipping the mean is ``mean`` exactly, and after every token the answer
    ends with probability ``1 / mean``.

    Parameters
    ----------
    mean
        Mean in tokens before clipping, from 1 to 1e9.
    min
        Shortest length in tokens, at least 1; shorter ones become this one.
    max
        Longest length in tokens; None for no limit (but 1e9).

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range, or ``min > max``.
    """

    mean: float
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        between("mean", self.mean, 1, MAX_TOKENS, LENGTH_REMEDY)
        check_range(self.min, self.max)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        scale = -1 / math.log1p(-1 / self.mean) if self.mean > 1 else 0.0
        tokens = np.ceil(-np.log1p(-u.clip(0, 1 - 2**-53)) * scale)
        return clipped(tokens, self.min, self.max)


@dataclass(frozen=True, slots=True)
class GammaLength:
    """Gamma-distributed lengths, rounded and clipped.

    Lighter in the upper tail than lognormal lengths of the same mean and variation.

    Parameters
    ----------
    mean
        Mean in tokens before rounding and clipping, from 1 to 1e9.
    cv
        Coefficient of variation, standard deviation over mean, 0.01 to 10; 1 is
        exponential.
    min
        Shortest length in tokens, at least 1; shorter ones become this one.
    max
        Longest length in tokens; None for no limit (but 1e9).

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range, or ``min > max``.
    """

    mean: float
    cv: float
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        between("mean", self.mean, 1, MAX_TOKENS, LENGTH_REMEDY)
        between("cv", self.cv, 0.01, 10, "give deviation over mean, such as 1.0")
        check_range(self.min, self.max)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        # Half a second that other lengths need not pay.
        from scipy.special import gammaincinv  # noqa: PLC0415

        shape = 1 / self.cv**2
        scaled = np.asarray(gammaincinv(shape, u.clip(0, 1 - 2**-53)), np.float64)
        return clipped(scaled * (self.mean / shape), self.min, self.max)


@dataclass(frozen=True, slots=True)
class ZipfLength:
    """Lengths by a power law: a length ``n`` has probability ``~ n ** -exponent``.

    Many short and few very long ones, without a typical length.

    Parameters
    ----------
    exponent
        0 (uniform) to 10; the larger, the fewer long ones.
    max
        Longest length in tokens, at most 10 million.
    min
        Shortest length in tokens, at least 1.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range, or ``min > max``.
    """

    exponent: float
    max: int
    min: int = 1

    def __post_init__(self) -> None:
        between("exponent", self.exponent, 0, 10, "give a power, such as 1.2")
        whole("max", self.max, 1, MAX_ZIPF_TOKENS, LENGTH_REMEDY)
        check_range(self.min, self.max)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        # Over the shortest, or a large power would underflow.
        lengths = np.arange(self.min, self.max + 1) / self.min
        reached = (lengths**-self.exponent).cumsum()
        steps = reached.searchsorted(u * reached[-1], side="right")
        tokens: NDArray[np.int64] = np.minimum(steps, len(reached) - 1) + self.min
        return tokens
