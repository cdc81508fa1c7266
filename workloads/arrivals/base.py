"""The role of arrival processes, where they stop, and the parts that they share."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from workloads._checks import positive, whole
from workloads._numpy import np
from workloads.errors import WorkloadError
from workloads.requests.long_arrays import PART_ROWS, Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

MAX_REQUESTS = 10_000_000
"""Most requests that one workload may hold: 240 MB of columns, 4 GB of objects."""

CHUNK = 4096
"""Numbers drawn at once. Part of the results: another size would draw the same numbers
but round their running sum differently."""


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
    found = taken_arrivals(process, rng, num_requests, duration_s, rate_scale)
    return list(found.tolist())


def taken_arrivals(
    process: ArrivalProcess,
    rng: np.random.Generator,
    num_requests: int | None = None,
    duration_s: float | None = None,
    rate_scale: float = 1.0,
) -> NDArray[np.float64]:
    """Return the times of `arrival_times_s` as an array that is `spilled`."""
    check_stop(num_requests, duration_s)
    positive("rate_scale", rate_scale, "give a factor, such as 2.0 for twice the rate")
    most = MAX_REQUESTS + 1 if num_requests is None else num_requests
    end_s = math.inf if duration_s is None else duration_s
    taken = Collector("float64")
    num_taken = 0
    times_s = array("d")
    room = min(most, PART_ROWS)
    previous_s = 0.0
    times = process.times_s(rng)
    if not isinstance(times, Iterable):  # users bring their own processes
        raise WorkloadError(
            f"arrival times must be yielded; got {times!r:.80}; mend "
            f"{type(process).__name__}.times_s"
        )
    for raw_s in times:
        try:
            time_s = raw_s / rate_scale
        except TypeError:
            raise _broken_process(process, raw_s, previous_s * rate_scale) from None
        if not previous_s <= time_s < math.inf:
            raise _broken_process(process, raw_s, previous_s * rate_scale)
        if time_s >= end_s:
            break
        times_s.append(time_s)
        previous_s = time_s
        if len(times_s) == room:
            taken.add(np.frombuffer(times_s))
            num_taken += room
            times_s = array("d")
            room = min(most - num_taken, PART_ROWS)
            if not room:
                break
    if times_s:
        taken.add(np.frombuffer(times_s))
    _check_taken(num_taken + len(times_s), num_requests, duration_s)
    return taken.mapped()


def check_stop(
    number: int | None, duration_s: float | None, what: str = "requests"
) -> None:
    """Check that exactly one limit is given, a number of `what` or a time."""
    if (number is None) == (duration_s is None):
        raise WorkloadError(
            f"exactly one of num_{what} and duration_s must be given; "
            f"got num_{what}={number!r}, duration_s={duration_s!r}; "
            f"{'add' if number is None else 'remove'} one"
        )
    if number is not None:
        remedy = f"give the number of {what}, such as 1000"
        whole(f"num_{what}", number, 1, MAX_REQUESTS, remedy)
    if duration_s is not None:
        positive("duration_s", duration_s, "give seconds, such as 600")


def check_rate(rate: float) -> None:
    positive("rate", rate, "give requests per second, such as 8.0")


def after_gaps_s(draw_gaps_s: Callable[[], NDArray[np.float64]]) -> Iterator[float]:
    """Yield arrival times after gaps, drawn `CHUNK` at a time in seconds from 0."""
    start_s = 0.0
    while True:
        times_s = (start_s + draw_gaps_s().cumsum()).tolist()
        yield from times_s
        start_s = times_s[-1]


def unit_arrivals(rng: np.random.Generator) -> Iterator[NDArray[np.float64]]:
    """Yield chunks of the arrival times of a Poisson process of rate 1, without end.

    Through the inverse of an integrated rate they become arrivals at that rate,
    exactly: the time rescaling of a process whose rate changes with time.
    """
    area = 0.0
    while True:
        areas = area + rng.standard_exponential(CHUNK).cumsum()
        yield areas
        area = float(areas[-1])


def _broken_process(
    process: ArrivalProcess, time_s: float, previous_s: float
) -> WorkloadError:
    return WorkloadError(
        f"arrival times must be finite, >= 0 and never fall; got {time_s!r:.80} s "
        f"after {previous_s!r} s; mend {type(process).__name__}.times_s"
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
