"""vLLM's V1 engine, releases 0.8 to 0.33."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.scheduler.generation import (
    SCHEDULE_REQUEST_S,
    Generation,
    GraphRule,
    Parts,
    SwapRule,
)

if TYPE_CHECKING:
    from sim.scheduler.v1.keywords import V1Scheduler
    from sim.scheduler.v1.scheduler import Scheduler
    from sim.scheduler.v1.settings import Settings

__all__ = ["V1", "Scheduler", "Settings", "V1Scheduler"]


def _parts() -> Parts:
    from cache.v1.policies import CACHE_POLICIES, CachePolicy
    from sim.scheduler.log.v1 import V1Log
    from sim.scheduler.v1.ahead import AheadScheduler
    from sim.scheduler.v1.batch_queue import BatchQueueScheduler
    from sim.scheduler.v1.connectors.ahead import AheadConnectorScheduler
    from sim.scheduler.v1.connectors.in_flight import QueuedConnectorScheduler
    from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler
    from sim.scheduler.v1.connectors.speculative import SpeculativeConnectorScheduler
    from sim.scheduler.v1.scheduler import Scheduler
    from sim.scheduler.v1.settings import Settings
    from sim.scheduler.v1.speculative import SpeculativeScheduler

    return Parts(
        Scheduler,
        Settings,
        V1Log,
        CACHE_POLICIES,
        CachePolicy,
        queued=BatchQueueScheduler,
        ahead=AheadScheduler,
        speculative=SpeculativeScheduler,
        speculative_connected=SpeculativeConnectorScheduler,
        connected=ConnectorScheduler,
        queued_connected=QueuedConnectorScheduler,
        ahead_connected=AheadConnectorScheduler,
    )


V1 = Generation(
    name="v1",
    parts=_parts,
    engine_version="0.33",
    versions=r"0\.(8|9|[12]\d|3[0-3])(\.\d{1,3})?",
    versions_in_words="0.8 to 0.33",
    keys=frozenset(
        {
            "admission",
            "async_scheduling",
            "cudagraph_capture_sizes",
            "disable_cascade_attn",
            "disable_hybrid_kv_cache_manager",
            "enable_chunked_prefill",
            "evictor",
            "gdn_prefill_backend",
            "long_prefill_token_threshold",
            "long_prefill_token_threshold_adaptive",
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "max_num_active_seqs",
            "max_num_scheduled_tokens",
            "override_generation_config",
            "preemption_victim",
            "prefill_schedule_interval",
            "prefix_cache_retention_interval",
            "prefix_match_unit",
            "scheduler_reserve_full_isl",
            "scheduling_policy",
            "sliding_window",
            "watermark",
        }
    ),
    enable_prefix_caching=True,
    has_cpu_tier=False,
    schedules_groups=False,
    swap=SwapRule("batch", "joined", overlap=True),
    graphs=GraphRule(512, only_decodes=False, piece_launches=3),
    schedule_request_s=SCHEDULE_REQUEST_S,
    always_chunks=True,
    keeps_decode_clock=True,
    has_batch_queue=True,
    has_ranks=True,
    has_drafts=True,
    has_kv_cache_groups=True,
    has_kv_connectors=True,
    kv_flow="nixl",
)


def __getattr__(name: str) -> Any:
    if name == "Settings":
        return V1.parts().settings
    if name == "Scheduler":
        return V1.parts().scheduler
    if name == "V1Scheduler":
        from sim.scheduler.v1.keywords import V1Scheduler

        return V1Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
