"""Independent arrivals at one rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads.arrivals.base import CHUNK, after_gaps_s, check_rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


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
        """Return arrival times in seconds; see `ArrivalProcess.times_s`."""
        return after_gaps_s(lambda: rng.standard_exponential(CHUNK) / self.rate)
