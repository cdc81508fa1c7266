"""The normal law for arrays, without scipy, and the Gaussian copula."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

# Turned into Python's numbers at once, which take four times the memory of the array.
_CHUNK = 4096


def normal_quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return standard normal quantiles, finite also at probabilities 0 and 1.

    0 and 1 stand for the nearest numbers that have a finite quantile, about -9.0 and
    8.2.
    """
    # The standard library's inverse is C code, exact to about 1e-16, and spares
    # the import of scipy.special, which costs more than a trace's worth of calls.
    return _each(NormalDist().inv_cdf, u.clip(1e-19, 1 - 2**-53))


def normal_probability(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard normal distribution function, of any shape."""
    # erfc and not 1 + erf: the lower tail keeps its digits.
    return 0.5 * _each(math.erfc, z * -math.sqrt(0.5))


def _each(
    function: Callable[[float], float], numbers: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the function of each number; `numbers` is the caller's to lose."""
    flat = numbers.ravel()
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        part[:] = [*map(function, part.tolist())]
    return flat.reshape(numbers.shape)


def coupled(
    u: NDArray[np.float64], v: NDArray[np.float64], rank_correlation: float
) -> NDArray[np.float64]:
    """Return uniforms that follow ``u`` with a given rank correlation, Spearman's rho.

    At 0 the result is ``v`` itself; it moves continuously from there. Two normals with
    Pearson correlation ``r`` have the rank correlation ``6 / pi * asin(r / 2)``, hence
    ``r = 2 * sin(pi * rho / 6)`` (Pearson, 1907). Rounding the lengths to whole tokens
    makes ties, which weaken the correlation that is achieved a little.
    """
    if rank_correlation == 0:
        return v
    r = 2 * math.sin(math.pi * rank_correlation / 6)
    independent = math.sqrt(max(0.0, 1 - r * r)) * normal_quantile(v)
    return normal_probability(r * normal_quantile(u) + independent)
