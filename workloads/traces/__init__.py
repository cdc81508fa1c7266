"""Recorded traces: a reader for each format, and a writer where one can be."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from workloads.traces.azure import AzureTraceReader, AzureTraceWriter
from workloads.traces.base import TraceReader, TraceWriter
from workloads.traces.burstgpt import BurstGptTraceReader, BurstGptTraceWriter
from workloads.traces.detect import guess_kind
from workloads.traces.kv_cache_tester import KvCacheTesterTraceReader
from workloads.traces.kvsim import KvsimTraceReader, KvsimTraceWriter
from workloads.traces.llmservingsim import (
    LlmServingSimTraceReader,
    LlmServingSimTraceWriter,
)
from workloads.traces.mooncake import MooncakeTraceReader, MooncakeTraceWriter
from workloads.traces.qwen_bailian import QwenBailianTraceReader
from workloads.traces.sharegpt import ShareGptTraceReader
from workloads.traces.table import TableTraceReader
from workloads.traces.vidur import VidurTraceReader, VidurTraceWriter
from workloads.traces.vllm_bench import VllmBenchTraceReader, VllmBenchTraceWriter
from workloads.traces.writing import write_trace

if TYPE_CHECKING:
    from collections.abc import Mapping

TRACE_READERS: Mapping[str, type[TraceReader]] = MappingProxyType(
    {
        "azure": AzureTraceReader,
        "burstgpt": BurstGptTraceReader,
        "kv_cache_tester": KvCacheTesterTraceReader,
        "kvsim": KvsimTraceReader,
        "llmservingsim": LlmServingSimTraceReader,
        "mooncake": MooncakeTraceReader,
        "qwen_bailian": QwenBailianTraceReader,
        "sharegpt": ShareGptTraceReader,
        "table": TableTraceReader,
        "vidur": VidurTraceReader,
        "vllm_bench": VllmBenchTraceReader,
    }
)
"""Trace readers by the ``kind`` of a configuration."""

TRACE_WRITERS: Mapping[str, type[TraceWriter]] = MappingProxyType(
    {
        "azure": AzureTraceWriter,
        "burstgpt": BurstGptTraceWriter,
        "kvsim": KvsimTraceWriter,
        "llmservingsim": LlmServingSimTraceWriter,
        "mooncake": MooncakeTraceWriter,
        "vidur": VidurTraceWriter,
        "vllm_bench": VllmBenchTraceWriter,
    }
)
"""Trace writers by kind; ShareGPT and kv-cache-tester have none, as words, or hashes,
would have to be made up."""

__all__ = [
    "TRACE_READERS",
    "TRACE_WRITERS",
    "AzureTraceReader",
    "AzureTraceWriter",
    "BurstGptTraceReader",
    "BurstGptTraceWriter",
    "KvCacheTesterTraceReader",
    "KvsimTraceReader",
    "KvsimTraceWriter",
    "LlmServingSimTraceReader",
    "LlmServingSimTraceWriter",
    "MooncakeTraceReader",
    "MooncakeTraceWriter",
    "QwenBailianTraceReader",
    "ShareGptTraceReader",
    "TableTraceReader",
    "TraceReader",
    "TraceWriter",
    "VidurTraceReader",
    "VidurTraceWriter",
    "VllmBenchTraceReader",
    "VllmBenchTraceWriter",
    "guess_kind",
    "write_trace",
]
