"""How long prompts and outputs are: distributions given by their inverse.

A distribution is one method, ``quantile``: probabilities in, tokens out. Prompt and
output lengths are coupled by coupling the probabilities (`workloads.copula`), so any
two distributions can be correlated without knowing each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from workloads._checks import MAX_TOKENS, between, finite, whole
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

_LENGTH_REMEDY = "give a length in tokens, such as 512"

# Turned into Python's numbers at once, which take four times the memory of the array.
_CHUNK = 4096


@runtime_checkable
class LengthDistribution(Protocol):
    """Lengths in tokens, by inverse cumulative distribution."""

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the length at each probability.

        Parameters
        ----------
        u
            Probabilities in [0, 1], any shape.

        Returns
        -------
        numpy.ndarray of int64
            Tokens, at least 1, the shape of ``u``; never falling as ``u`` rises.
        """
        ...


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
        whole("tokens", self.tokens, 1, MAX_TOKENS, _LENGTH_REMEDY)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the length; see `LengthDistribution.quantile`."""
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

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
        whole("low", self.low, 1, MAX_TOKENS, _LENGTH_REMEDY)
        whole("high", self.high, 1, MAX_TOKENS, _LENGTH_REMEDY)
        _check_order("low", self.low, "high", self.high)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return lengths; see `LengthDistribution.quantile`."""
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

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
        between("median", self.median, 1, MAX_TOKENS, _LENGTH_REMEDY)
        between("sigma", self.sigma, 0, 10, "give the log's deviation, such as 1.0")
        whole("min", self.min, 1, MAX_TOKENS, _LENGTH_REMEDY)
        if self.max is not None:
            whole("max", self.max, 1, MAX_TOKENS, _LENGTH_REMEDY)
            _check_order("min", self.min, "max", self.max)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return lengths; see `LengthDistribution.quantile`."""
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        z: NDArray[np.float64] = self.sigma * normal_quantile(u)
        longest = MAX_TOKENS if self.max is None else self.max
        tokens = np.clip(self.median * np.exp(z), self.min, longest)
        return np.rint(tokens).astype(np.int64)


@dataclass(frozen=True, slots=True)
class QuantileLength:
    """An empirical table of quantiles, linear in between, rounded.

    Parameters
    ----------
    probabilities
        Rising from exactly 0 to exactly 1.
    values
        The length in tokens at each probability; at least 1, never falling.

    Raises
    ------
    WorkloadError
        If the table breaks one of these rules.
    """

    probabilities: Sequence[float]
    values: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "probabilities", _numbers(self, "probabilities"))
        object.__setattr__(self, "values", _numbers(self, "values"))
        _check_table(self.probabilities, self.values)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return lengths; see `LengthDistribution.quantile`."""
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        tokens = np.interp(u, self.probabilities, self.values)
        return np.rint(tokens).astype(np.int64)


def normal_quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return standard normal quantiles, finite also at probabilities 0 and 1.

    Parameters
    ----------
    u
        Probabilities in [0, 1], any shape. 0 and 1 stand for the nearest numbers
        that have a finite quantile, about -9.0 and 8.2.

    Returns
    -------
    numpy.ndarray of float64
        Quantiles, the shape of ``u``.
    """
    # The standard library's inverse is C code, exact to about 1e-16, and spares
    # the import of scipy.special, which costs more than a trace's worth of calls.
    inverse = NormalDist().inv_cdf
    z = u.clip(1e-19, 1 - 2**-53).ravel()
    for start in range(0, len(z), _CHUNK):
        part = z[start : start + _CHUNK]
        part[:] = [*map(inverse, part.tolist())]
    return z.reshape(u.shape)


def _check_order(low_name: str, low: int, high_name: str, high: int) -> None:
    if low > high:
        raise WorkloadError(
            f"{low_name} must be <= {high_name}; got {low_name}={low}, "
            f"{high_name}={high}; exchange them"
        )


def _numbers(table: QuantileLength, name: str) -> tuple[float, ...]:
    numbers = getattr(table, name)
    remedy = "give a list of numbers, such as [0, 0.5, 1]"
    if isinstance(numbers, str) or not isinstance(numbers, Sequence):
        raise WorkloadError(f"{name} must be a list; got {numbers!r}; {remedy}")
    return tuple(finite(f"{name}[{i}]", n, remedy) for i, n in enumerate(numbers))


def _check_table(probabilities: Sequence[float], values: Sequence[float]) -> None:
    if len(probabilities) != len(values) or len(probabilities) < 2:
        raise WorkloadError(
            "probabilities and values must have one length, at least 2; got "
            f"{len(probabilities)} and {len(values)}; give one value a probability"
        )
    if (probabilities[0], probabilities[-1]) != (0.0, 1.0):
        raise WorkloadError(
            "probabilities must run from 0 to 1; got "
            f"{probabilities[0]!r} to {probabilities[-1]!r}; add the ends"
        )
    for i, (low, high) in enumerate(pairwise(probabilities), start=1):
        if low >= high:
            raise WorkloadError(
                f"probabilities must rise; got {high!r} after {low!r} at index {i}; "
                "sort them and drop repeats"
            )
    for i, (shorter, longer) in enumerate(pairwise(values), start=1):
        if shorter > longer:
            raise WorkloadError(
                f"values must not fall; got {longer!r} after {shorter!r} at index "
                f"{i}; sort them"
            )
    between("values[0]", values[0], 1, MAX_TOKENS, "lengths are at least 1 token")
    between("values[-1]", values[-1], 1, MAX_TOKENS, "lengths are at most 1e9 tokens")


LENGTHS: Mapping[str, type[LengthDistribution]] = MappingProxyType(
    {
        "fixed": FixedLength,
        "lognormal": LognormalLength,
        "quantiles": QuantileLength,
        "uniform": UniformLength,
    }
)
"""Length distributions by the ``kind`` of a configuration."""
