"""Weibull-distributed gaps: heavier tails than gamma gaps of the same variation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads._checks import between
from workloads.arrivals.base import CHUNK, after_gaps_s, check_rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


@dataclass(frozen=True, slots=True)
class WeibullArrivals:
    """Independent gaps of a Weibull distribution, with mean ``1 / rate``.

    Parameters
    ----------
    rate
        Mean requests per second, above 0.
    shape
        Shape of the Weibull distribution, 0.1 to 1000: 1 is Poisson, draw by draw;
        below 1 is burstier, above 1 more even. `gap_cv` is what it makes of the
        gaps: 0.5 has a coefficient of variation of 2.24, 0.7 of 1.46, 2 of 0.52.

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
        """Return arrival times in seconds; see `ArrivalProcess.times_s`."""
        scale = self.rate * math.gamma(1 + 1 / self.shape)
        power = 1 / self.shape
        return after_gaps_s(lambda: rng.standard_exponential(CHUNK) ** power / scale)
