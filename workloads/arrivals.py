"""When requests arrive: processes that yield times, and how many are taken.

A process is one method, an endless stream of times; where it stops is decided
outside, by `arrival_times_s`. So every process supports both a number of requests
and a duration, and the first ``n`` arrivals do not depend on where it stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from workloads._checks import finite, positive, whole
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np

MAX_REQUESTS = 10_000_000
"""Most requests that one workload may hold (240 MB as columns, 4 GB as objects)."""

# Drawn at once. Part of the results: another size would draw the same numbers but
# round their running sum differently.
_CHUNK = 4096


@runtime_checkable
class ArrivalProcess(Protocol):
    """A stream of arrival times."""

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times in seconds: from 0, never falling, usually endless.

        Parameters
        ----------
        rng
            The stream ``"arrivals"``; the only randomness the process may use.

        Yields
        ------
        float
            Seconds from the start of the workload. Equal times are arrivals at
            once.
        """
        ...


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
        _check_rate(self.rate)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times in seconds; see `ArrivalProcess.times_s`."""
        start_s = 0.0
        while True:
            gaps_s = rng.standard_exponential(_CHUNK) / self.rate
            times_s = (start_s + gaps_s.cumsum()).tolist()
            yield from times_s
            start_s = times_s[-1]


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
        _check_rate(self.rate)
        remedy = "give the gamma shape of the gaps: 1 is Poisson, below 1 is burstier"
        if positive("burstiness", self.burstiness, remedy) < 1e-3:
            # Below this nearly all gaps underflow to 0 and the rate is lost.
            raise WorkloadError(
                f"burstiness must be at least 0.001; got {self.burstiness!r}; "
                "use the burst process for arrivals at once"
            )

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times in seconds; see `ArrivalProcess.times_s`."""
        start_s = 0.0
        while True:
            gaps_s = rng.standard_gamma(self.burstiness, _CHUNK)
            gaps_s /= self.rate * self.burstiness
            times_s = (start_s + gaps_s.cumsum()).tolist()
            yield from times_s
            start_s = times_s[-1]


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
        _check_rate(self.rate)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times in seconds; see `ArrivalProcess.times_s`."""
        del rng  # nothing is random here
        position = 0
        while True:
            # A division each, and no running sum, so that errors do not add up.
            yield position / self.rate
            position += 1


@dataclass(frozen=True, slots=True)
class BurstArrivals:
    """Pulses: ``burst_size`` requests at once, every ``interval_s``.

    Parameters
    ----------
    burst_size
        Requests in a pulse, at least 1.
    interval_s
        Seconds from one pulse to the next, above 0.
    start_s
        Time of the first pulse in seconds, at least 0.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range.
    """

    burst_size: int
    interval_s: float
    start_s: float = 0.0

    def __post_init__(self) -> None:
        remedy = "give the requests of one pulse, such as 64"
        whole("burst_size", self.burst_size, 1, MAX_REQUESTS, remedy)
        positive("interval_s", self.interval_s, "give seconds between pulses")
        if finite("start_s", self.start_s, "give seconds, such as 0") < 0:
            raise WorkloadError(
                f"start_s must be >= 0; got {self.start_s!r}; "
                "the workload starts at time 0"
            )

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times in seconds; see `ArrivalProcess.times_s`."""
        del rng  # nothing is random here
        pulse = 0
        while True:
            time_s = self.start_s + pulse * self.interval_s
            for _ in range(self.burst_size):
                yield time_s
            pulse += 1


def arrival_times_s(
    process: ArrivalProcess,
    rng: np.random.Generator,
    num_requests: int | None = None,
    duration_s: float | None = None,
    rate_scale: float = 1.0,
) -> list[float]:
    """Take arrival times from a process until it has yielded enough.

    Parameters
    ----------
    process
        Where the times come from.
    rng
        Its random stream.
    num_requests
        How many to take; or
    duration_s
        take those before this time, in seconds after scaling. Give exactly one.
    rate_scale
        Every time is divided by it: 2 doubles the rate.

    Returns
    -------
    list of float
        Non-decreasing times in seconds, all at least 0.

    Raises
    ------
    WorkloadError
        If not exactly one limit is given or one is out of range, if the process
        breaks its contract or ends too early, or if no arrival, or more than
        `MAX_REQUESTS`, fall into the duration.
    """
    check_stop(num_requests, duration_s)
    positive("rate_scale", rate_scale, "give a factor, such as 2.0 for twice the rate")
    most = MAX_REQUESTS + 1 if num_requests is None else num_requests
    end_s = math.inf if duration_s is None else duration_s
    times_s: list[float] = []
    previous_s = 0.0
    for raw_s in process.times_s(rng):
        time_s = raw_s / rate_scale
        if not previous_s <= time_s < math.inf:
            raise _broken_process(process, raw_s, previous_s * rate_scale)
        if time_s >= end_s:
            break
        times_s.append(time_s)
        previous_s = time_s
        if len(times_s) == most:
            break
    _check_taken(len(times_s), num_requests, duration_s)
    return times_s


def check_stop(num_requests: int | None, duration_s: float | None) -> None:
    """Check that exactly one limit is given and that it is in range.

    Raises
    ------
    WorkloadError
        If it is not.
    """
    if (num_requests is None) == (duration_s is None):
        raise WorkloadError(
            "exactly one of num_requests and duration_s must be given; "
            f"got num_requests={num_requests!r}, duration_s={duration_s!r}; "
            f"{'add' if num_requests is None else 'remove'} one"
        )
    if num_requests is not None:
        remedy = "give the number of requests, such as 1000"
        whole("num_requests", num_requests, 1, MAX_REQUESTS, remedy)
    if duration_s is not None:
        positive("duration_s", duration_s, "give seconds, such as 600")


def _check_rate(rate: float) -> None:
    positive("rate", rate, "give requests per second, such as 8.0")


def _broken_process(
    process: ArrivalProcess, time_s: float, previous_s: float
) -> WorkloadError:
    return WorkloadError(
        f"arrival times must be finite, >= 0 and never fall; got {time_s!r} s after "
        f"{previous_s!r} s; mend {type(process).__name__}.times_s"
    )


def _check_taken(
    num_taken: int, num_requests: int | None, duration_s: float | None
) -> None:
    if num_requests is not None and num_taken < num_requests:
        raise WorkloadError(
            f"num_requests is {num_requests}, but the arrival process ended after "
            f"{num_taken}; lower num_requests or give duration_s"
        )
    if num_taken == 0:
        raise WorkloadError(
            "a workload needs at least one request; none arrives in "
            f"duration_s={duration_s!r}; raise the rate or the duration"
        )
    if num_taken > MAX_REQUESTS:
        raise WorkloadError(
            f"a workload may hold {MAX_REQUESTS} requests; more arrive in "
            f"duration_s={duration_s!r}; lower the rate or the duration"
        )


ARRIVALS: Mapping[str, type[ArrivalProcess]] = MappingProxyType(
    {
        "burst": BurstArrivals,
        "constant": ConstantArrivals,
        "gamma": GammaArrivals,
        "poisson": PoissonArrivals,
    }
)
"""Arrival processes by the ``kind`` of a configuration."""
