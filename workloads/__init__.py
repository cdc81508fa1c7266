"""Traffic: requests, their arrivals, lengths and shared text.

Everything ends in `RequestSpec` values in arrival order. Importing this package is
cheap: numpy is imported where numbers are drawn, not before. Public traces are
fetched by `workloads.fetch`.
"""

from __future__ import annotations

from workloads.acceptance import ACCEPTANCE, Acceptance
from workloads.arrivals import ARRIVALS, MAX_REQUESTS, ArrivalProcess, arrival_times_s
from workloads.draws.streams import Streams
from workloads.errors import TraceFormatError, WorkloadError, WorkloadWarning
from workloads.lengths import LENGTH_PAIRS, LENGTHS, LengthDistribution, LengthPairs
from workloads.preset import Preset, PresetWorkload, load_preset, preset_names
from workloads.requests.columns import RequestColumns, SpecIterator
from workloads.spec import RequestSpec, Segment
from workloads.traces import TRACE_READERS, TraceReader
from workloads.workload import SyntheticWorkload, TraceWorkload, Workload

__all__ = [
    "ACCEPTANCE",
    "ARRIVALS",
    "LENGTHS",
    "LENGTH_PAIRS",
    "MAX_REQUESTS",
    "TRACE_READERS",
    "Acceptance",
    "ArrivalProcess",
    "LengthDistribution",
    "LengthPairs",
    "Preset",
    "PresetWorkload",
    "RequestColumns",
    "RequestSpec",
    "Segment",
    "SpecIterator",
    "Streams",
    "SyntheticWorkload",
    "TraceFormatError",
    "TraceReader",
    "TraceWorkload",
    "Workload",
    "WorkloadError",
    "WorkloadWarning",
    "arrival_times_s",
    "load_preset",
    "preset_names",
]
