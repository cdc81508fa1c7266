"""Gamma-distributed gaps: burstiness by one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads._checks import positive
from workloads.arrivals.base import CHUNK, after_gaps_s, check_rate
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


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
        """Return arrival times in seconds; see `ArrivalProcess.times_s`."""
        scale = self.rate * self.burstiness
        return after_gaps_s(lambda: rng.standard_gamma(self.burstiness, CHUNK) / scale)
