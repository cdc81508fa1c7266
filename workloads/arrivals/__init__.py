"""When requests arrive: processes that yield times, and how many are taken.

A process is one method, an endless stream of times; where it stops is decided
outside, by `arrival_times_s`. So every process supports both a number of requests
and a duration, and the first ``n`` arrivals do not depend on where it stops.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from workloads.arrivals.base import (
    MAX_REQUESTS,
    ArrivalProcess,
    arrival_times_s,
    check_stop,
    taken_arrivals,
)
from workloads.arrivals.burst import BurstArrivals
from workloads.arrivals.diurnal import DiurnalArrivals
from workloads.arrivals.markov_modulated import MarkovModulatedArrivals
from workloads.arrivals.piecewise import PiecewiseArrivals
from workloads.arrivals.renewal import (
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    WeibullArrivals,
)
from workloads.arrivals.replay import ReplayArrivals

if TYPE_CHECKING:
    from collections.abc import Mapping

ARRIVALS: Mapping[str, type[ArrivalProcess]] = MappingProxyType(
    {
        "burst": BurstArrivals,
        "constant": ConstantArrivals,
        "diurnal": DiurnalArrivals,
        "gamma": GammaArrivals,
        "markov_modulated": MarkovModulatedArrivals,
        "piecewise": PiecewiseArrivals,
        "poisson": PoissonArrivals,
        "replay": ReplayArrivals,
        "weibull": WeibullArrivals,
    }
)
"""Arrival processes by the ``kind`` of a configuration."""

__all__ = [
    "ARRIVALS",
    "MAX_REQUESTS",
    "ArrivalProcess",
    "BurstArrivals",
    "ConstantArrivals",
    "DiurnalArrivals",
    "GammaArrivals",
    "MarkovModulatedArrivals",
    "PiecewiseArrivals",
    "PoissonArrivals",
    "ReplayArrivals",
    "WeibullArrivals",
    "arrival_times_s",
    "check_stop",
    "taken_arrivals",
]
