"""Recorded traces: one reader a file, all of them `TraceReader`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from workloads.traces.azure import AzureTraceReader
from workloads.traces.base import TraceReader
from workloads.traces.mooncake import MooncakeTraceReader

if TYPE_CHECKING:
    from collections.abc import Mapping

TRACE_READERS: Mapping[str, type[TraceReader]] = MappingProxyType(
    {
        "azure": AzureTraceReader,
        "mooncake": MooncakeTraceReader,
    }
)
"""Trace readers by the ``kind`` of a configuration."""

__all__ = ["TRACE_READERS", "AzureTraceReader", "MooncakeTraceReader", "TraceReader"]
