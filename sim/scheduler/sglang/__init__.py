"""The scheduler of SGLang 0.5.9 to 0.5.12 and of 0.5.19 to 0.5.23."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.scheduler.generation import Generation, GraphRule, Parts, Server, SwapRule
from sim.scheduler.sglang.names import (
    MAX_TOTAL_TOKENS,
    NAMES,
    NEGATED,
    SAME_SWITCHES,
)

if TYPE_CHECKING:
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.sglang.scheduler import SglangScheduler
    from sim.scheduler.sglang.settings import Settings


def _parts() -> Parts:
    from sim.scheduler.log.sglang import SglangLog
    from sim.scheduler.sglang.clocked import ClockedSglangScheduler
    from sim.scheduler.sglang.scheduler import SglangScheduler
    from sim.scheduler.sglang.settings import Settings

    return Parts(
        SglangScheduler,
        Settings,
        SglangLog,
        queued=SglangScheduler,
        ahead=ClockedSglangScheduler,
        clocked=ClockedSglangScheduler,
        connected=_one_side,
        queued_connected=_one_side,
    )


def _one_side(settings: Settings, cache: CacheConfig) -> SglangScheduler:
    """Return the scheduler of an engine that only prefills, or only decodes."""
    from sim.scheduler.sglang.decode import DecodeScheduler
    from sim.scheduler.sglang.prefill import PrefillScheduler

    kind = DecodeScheduler if settings.only_decodes else PrefillScheduler
    return kind(settings, cache)


SGLANG = Generation(
    name="sglang",
    parts=_parts,
    engine_version="0.5.9",
    versions=r"0\.5\.(9|1[0-2]|19|2[0-3])",
    versions_in_words="SGLang 0.5.9 to 0.5.12 and 0.5.19 to 0.5.23",
    keys=frozenset(
        {
            "async_scheduling",
            "disable_hybrid_swa_memory",
            "enable_chunked_prefill",
            "enable_mixed_chunk",
            "enable_priority_scheduling",
            "max_prefill_tokens",
            "max_queued_requests",
            "prefill_max_requests",
            "priority_scheduling_preemption_threshold",
            "radix_eviction_policy",
            "schedule_conservativeness",
            "schedule_low_priority_values_first",
            "schedule_policy",
            "swa_full_tokens_ratio",
        }
    ),
    enable_prefix_caching=True,
    has_cpu_tier=False,
    schedules_groups=False,
    swap=SwapRule("batch"),
    # decodes are graphs; the largest one by the card's memory is 256 on most
    graphs=GraphRule(256),
    defaults=MappingProxyType({"block_size": 1}),
    always_chunks=True,
    fills_last_block=True,
    keeps_decode_clock=True,
    has_batch_queue=True,
    has_pipelines=False,
    kv_flow="sglang",
    always_ahead=True,
    ahead_in_words="overlap scheduling",
    server=Server(
        command=("python", "-m", "sglang.launch_server", "--model-path"),
        names=MappingProxyType({common: own for own, common in NAMES.items()}),
        off_switches=MappingProxyType({common: own for own, common in NEGATED.items()}),
        eager=next(iter(SAME_SWITCHES)),
        pool_in_tokens=MAX_TOTAL_TOKENS,
        dialect="sglang",
    ),
)
