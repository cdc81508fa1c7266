"""Pulses of requests at once, also on top of a steady rate."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads._checks import finite, positive, whole
from workloads.arrivals.base import MAX_REQUESTS
from workloads.arrivals.renewal import PoissonArrivals
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


@dataclass(frozen=True, slots=True)
class BurstArrivals:
    """Pulses: ``burst_size`` requests at once, every ``interval_s``.

    The mean rate is ``base_rate + burst_size / interval_s``.

    Parameters
    ----------
    burst_size
        Requests in a pulse, at least 1.
    interval_s
        Seconds from one pulse to the next, above 0.
    start_s
        Time of the first pulse in seconds, at least 0.
    base_rate
        Requests per second of Poisson arrivals beside the pulses; 0 for none.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range.
    """

    burst_size: int
    interval_s: float
    start_s: float = 0.0
    base_rate: float = 0.0

    def __post_init__(self) -> None:
        remedy = "give the requests of one pulse, such as 64"
        whole("burst_size", self.burst_size, 1, MAX_REQUESTS, remedy)
        positive("interval_s", self.interval_s, "give seconds between pulses")
        if finite("start_s", self.start_s, "give seconds, such as 0") < 0:
            raise WorkloadError(
                f"start_s must be >= 0; got {self.start_s!r}; "
                "the workload starts at time 0"
            )
        if self.base_rate != 0:
            remedy = "give requests per second, or 0 for pulses alone"
            positive("base_rate", self.base_rate, remedy)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        if self.base_rate == 0:
            return self._pulses_s()
        base_s = PoissonArrivals(float(self.base_rate)).times_s(rng)
        return heapq.merge(base_s, self._pulses_s())

    def _pulses_s(self) -> Iterator[float]:
        pulse = 0
        while True:
            time_s = self.start_s + pulse * self.interval_s
            for _ in range(self.burst_size):
                yield time_s
            pulse += 1
