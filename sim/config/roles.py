"""Roles that a table with `kind` can fill inside another: protocol to built-ins.

A constructor's argument whose annotation is one of these (or optional, or a list or a
table of them) takes tables, at any depth; see `sim.config.plug.build`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from workloads.arrivals import ARRIVALS, ArrivalProcess
from workloads.counts import COUNTS, CountDistribution
from workloads.durations import DURATIONS, DurationDistribution
from workloads.lengths import (
    LENGTH_PAIRS,
    LENGTHS,
    LengthDistribution,
    LengthPairs,
)
from workloads.prefixes import PREFIXES, PrefixStructure
from workloads.traces import TRACE_READERS, TraceReader

if TYPE_CHECKING:
    from collections.abc import Mapping

ROLES: Mapping[Any, Mapping[str, type]] = MappingProxyType(
    {
        ArrivalProcess: ARRIVALS,
        CountDistribution: COUNTS,
        DurationDistribution: DURATIONS,
        LengthDistribution: LENGTHS,
        LengthPairs: LENGTH_PAIRS,
        PrefixStructure: PREFIXES,
        TraceReader: TRACE_READERS,
    }
)
"""Built-in classes by kind, for each role."""
