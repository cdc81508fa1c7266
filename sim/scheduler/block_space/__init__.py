"""The generations over `BlockSpaceManager`: the spring of 2023, and vLLM 0.2.7."""

from __future__ import annotations

from sim.scheduler.generation import Generation, GraphRule, Parts, Server

_SERVER = Server(
    command=("python", "-m", "vllm.entrypoints.openai.api_server", "--model"),
    options=frozenset({"swap_space"}),
)


def _cacheflow() -> Parts:
    from sim.scheduler.block_space.cacheflow import Scheduler
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.log.groups import CacheflowLog

    return Parts(Scheduler, SchedulerConfig, CacheflowLog)


def _v0_2() -> Parts:
    from sim.scheduler.block_space.v0_2 import Scheduler
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.log.groups import V02Log

    return Parts(Scheduler, SchedulerConfig, V02Log)


CACHEFLOW = Generation(
    name="cacheflow",
    parts=_cacheflow,
    engine_version="0.1.0",
    versions=r"0\.(0(\.\d+)?|1(\.[01])?)",
    versions_in_words="0.0 to 0.1.1",
    keys=frozenset({"preemption_victim", "watermark"}),
    enable_prefix_caching=None,
    has_cpu_tier=True,
    schedules_groups=True,
    keeps_decode_clock=True,
    watermark=0.01,
    server=_SERVER,
)

V0_2 = Generation(
    name="v0_2",
    parts=_v0_2,
    engine_version="0.2.7",
    versions=r"0\.2(\.\d{1,3})?",
    versions_in_words="0.2",
    keys=frozenset(
        {
            "cudagraph_capture_sizes",
            "max_paddings",
            "preemption_victim",
            "sliding_window",
            "watermark",
        }
    ),
    enable_prefix_caching=None,
    has_cpu_tier=True,
    schedules_groups=True,
    keeps_decode_clock=True,
    watermark=0.01,
    graphs=GraphRule(256),
    budget_follows_length=True,
    server=_SERVER,
)
