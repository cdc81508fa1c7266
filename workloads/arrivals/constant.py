"""Evenly spaced arrivals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads.arrivals.base import check_rate

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
        """Yield arrival times in seconds; see `ArrivalProcess.times_s`."""
        del rng  # nothing is random here
        position = 0
        while True:
            # A division each, and no running sum, so that errors do not add up.
            yield position / self.rate
            position += 1
