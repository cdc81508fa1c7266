"""Independent gaps: Poisson, gamma and Weibull arrivals, and constant ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads._checks import between, positive
from workloads.arrivals.base import CHUNK, after_gaps_s, check_rate
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """Evenly spaced arrivals, the first at 0: ``k / rate``.

    Parameters
    ----------
    rate
        Requests per second, above 0.

    Raises
    ------
    WorkloadError
        If the rate is not finite or not above 0.
    """

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        del rng  # nothing is random here
        position = 0
        while True:
            # A division each, and no running sum, so that errors do not add up.
            yield position / self.rate
            position += 1


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Independent arrivals: exponential gaps, the first one before the first arrival.

    Parameters
    ----------
    rate
        Mean requests per second, above 0.

    Raises
    ------
    WorkloadError
        If the rate is not finite or not above 0.
    """

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        return after_gaps_s(lambda: rng.standard_exponential(CHUNK) / self.rate)


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Gamma-distributed gaps: more or less bursty than Poisson, at the same rate.

    Parameters
    ----------
    rate
        Mean requests per second, above 0.
    burstiness
        Shape of the gamma distribution, 0.001 to 1e9. The gaps' coefficient of
        variation is ``1 / sqrt(burstiness)``: 1 is Poisson, draw by draw; below 1
        is burstier, above 1 more even.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range.

    Notes
    -----
    Source: the meaning of ``--burstiness`` in ``vllm bench serve`` (vLLM 0.11,
    ``vllm/benchmarks/serve.py``), which also rescales the drawn gaps so that the
    last request falls on ``num_requests / rate``; we do not.
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        remedy = "give the gamma shape of the gaps: 1 is Poisson, below 1 is burstier"
        if positive("burstiness", self.burstiness, remedy) < 1e-3:
            # Below this nearly all gaps underflow to 0 and the rate is lost.
            raise WorkloadError(
                f"burstiness must be at least 0.001; got {self.burstiness!r}; "
                "use the burst process for arrivals at once"
            )

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        scale = self.rate * self.burstiness
        return after_gaps_s(lambda: rng.standard_gamma(self.burstiness, CHUNK) / scale)


@dataclass(frozen=True, slots=True)
class WeibullArrivals:
    """Independent gaps of a Weibull distribution, with mean ``1 / rate``.

    Parameters
    ----------
    rate
        Mean requests per second, above 0.
    shape
        Shape of the Weibull distribution, 0.1 to 1000: 1 is Poisson, draw by draw;
        below 1 is burstier, above 1 more even. `gap_cv` is the coefficient of
        variation of the gaps: 2.24 for 0.5, 1.46 for 0.7, 0.52 for 2.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range.
    """

    rate: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        remedy = "give the Weibull shape of the gaps: 1 is Poisson, below 1 is burstier"
        between("shape", self.shape, 0.1, 1000, remedy)

    @property
    def gap_cv(self) -> float:
        """Coefficient of variation of the gaps: their deviation over their mean."""
        square = math.gamma(1 + 2 / self.shape) / math.gamma(1 + 1 / self.shape) ** 2
        return math.sqrt(max(0.0, square - 1))

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        scale = self.rate * math.gamma(1 + 1 / self.shape)
        power = 1 / self.shape
        return after_gaps_s(lambda: rng.standard_exponential(CHUNK) ** power / scale)
