"""How long prompts and outputs are: distributions given by their inverse.

A distribution is one method, ``quantile``: probabilities in, tokens out. Prompt and
output lengths are coupled by coupling the probabilities (`workloads.draws.normal`), so
that any two distributions can be correlated without knowing each other; `LengthPairs`
draws both.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from workloads.draws.normal import normal_quantile
from workloads.lengths.base import LengthDistribution
from workloads.lengths.empirical import EmpiricalLength, QuantileLength, TraceLength
from workloads.lengths.joint import (
    LENGTH_PAIRS,
    CoupledLengths,
    JointTraceLengths,
    LengthPairs,
)
from workloads.lengths.parametric import (
    ExponentialLength,
    FixedLength,
    GammaLength,
    LognormalLength,
    NormalLength,
    UniformLength,
    ZipfLength,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

LENGTHS: Mapping[str, type[LengthDistribution]] = MappingProxyType(
    {
        "empirical": EmpiricalLength,
        "exponential": ExponentialLength,
        "fixed": FixedLength,
        "gamma": GammaLength,
        "lognormal": LognormalLength,
        "normal": NormalLength,
        "quantiles": QuantileLength,
        "trace": TraceLength,
        "uniform": UniformLength,
        "zipf": ZipfLength,
    }
)
"""Length distributions by the ``kind`` of a configuration."""

__all__ = [
    "LENGTHS",
    "LENGTH_PAIRS",
    "CoupledLengths",
    "EmpiricalLength",
    "ExponentialLength",
    "FixedLength",
    "GammaLength",
    "JointTraceLengths",
    "LengthDistribution",
    "LengthPairs",
    "LognormalLength",
    "NormalLength",
    "QuantileLength",
    "TraceLength",
    "UniformLength",
    "ZipfLength",
    "normal_quantile",
]
