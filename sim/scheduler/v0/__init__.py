"""vLLM's V0 engine, release 0.7.3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.scheduler.generation import Generation, GraphRule, Parts, Server

if TYPE_CHECKING:
    from sim.scheduler.v0.scheduler import Scheduler

__all__ = ["V0", "Scheduler"]


def _parts() -> Parts:
    from cache.v0.evictor import EVICTORS, Evictor
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.log.groups import V0Log
    from sim.scheduler.v0.scheduler import Scheduler

    return Parts(Scheduler, SchedulerConfig, V0Log, EVICTORS, Evictor)


V0 = Generation(
    name="v0",
    parts=_parts,
    engine_version="0.7.3",
    versions=r"0\.7(\.\d{1,3})?",
    versions_in_words="0.7",
    keys=frozenset(
        {
            "cudagraph_capture_sizes",
            "enable_chunked_prefill",
            "evictor",
            "long_prefill_token_threshold",
            "max_long_partial_prefills",
            "max_num_partial_prefills",
            "num_lookahead_slots",
            "override_generation_config",
            "preemption_victim",
            "scheduler_delay_factor",
            "scheduling_policy",
            "sliding_window",
            "watermark",
        }
    ),
    enable_prefix_caching=False,
    has_cpu_tier=True,
    schedules_groups=True,
    keeps_decode_clock=True,
    watermark=0.01,
    graphs=GraphRule(256),
    budget_follows_length=True,
    heeds_priority_in_chunks=False,
    server=Server(
        options=frozenset({"preemption_mode", "swap_space"}),
        valued_switches=frozenset({"enable_chunked_prefill"}),
    ),
)


def __getattr__(name: str) -> Any:
    if name == "Scheduler":
        return V0.parts().scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
