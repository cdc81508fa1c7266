"""Coupling of two uniform samples by a rank correlation: the Gaussian copula."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workloads.normal import normal_probability, normal_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def coupled(
    u: NDArray[np.float64], v: NDArray[np.float64], rank_correlation: float
) -> NDArray[np.float64]:
    """Return uniforms that follow ``u`` with a given rank correlation.

    Parameters
    ----------
    u, v
        Independent uniforms in [0, 1], one shape.
    rank_correlation
        Spearman's rho in [-1, 1] between ``u`` and the result. At 0 the result is
        ``v`` itself; it moves continuously from there.

    Returns
    -------
    numpy.ndarray of float64
        Uniforms in [0, 1], the shape of ``u``.

    Notes
    -----
    Two normals with Pearson correlation ``r`` have the rank correlation
    ``6 / pi * asin(r / 2)``, hence ``r = 2 * sin(pi * rho / 6)`` (Pearson, 1907).
    Rounding the lengths to whole tokens makes ties, which weaken the correlation
    that is achieved a little.
    """
    if rank_correlation == 0:
        return v
    r = 2 * math.sin(math.pi * rank_correlation / 6)
    independent = math.sqrt(max(0.0, 1 - r * r)) * normal_quantile(v)
    return normal_probability(r * normal_quantile(u) + independent)
