"""SGLang's names of arguments that other engines have, too."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

NAMES: Final = MappingProxyType(
    {
        "mem_fraction_static": "gpu_memory_utilization",
        "page_size": "block_size",
        "max_running_requests": "max_num_seqs",
        "context_length": "max_model_len",
        "chunked_prefill_size": "max_num_batched_tokens",
        "tp_size": "tensor_parallel_size",
    }
)
"""SGLang's names of keys that mean the same."""

NEGATED: Final = MappingProxyType(
    {
        "disable_radix_cache": "enable_prefix_caching",
        "disable_overlap_schedule": "async_scheduling",
    }
)
"""SGLang's names of their opposites."""

SAME_SWITCHES: Final = MappingProxyType({"disable_cuda_graph": "enforce_eager"})
"""Switches that mean the same."""

MAX_TOTAL_TOKENS: Final = "max_total_tokens"
"""Its name of a pool that is given, which it counts in tokens."""
