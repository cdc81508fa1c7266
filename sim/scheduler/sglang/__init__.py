"""The scheduler of SGLang 0.5.9 and 0.5.10."""

from __future__ import annotations

from sim.scheduler.generation import Generation, Parts


def _parts() -> Parts:
    from sim.scheduler.log.sglang import SglangLog
    from sim.scheduler.sglang.scheduler import SglangScheduler
    from sim.scheduler.sglang.settings import Settings

    return Parts(SglangScheduler, Settings, SglangLog)


SGLANG = Generation(
    name="sglang",
    parts=_parts,
    engine_version="0.5.9",
    versions=r"0\.5\.(9|10)",
    versions_in_words="SGLang 0.5.9 and 0.5.10",
    keys=frozenset(),
    enable_prefix_caching=True,
    has_cpu_tier=False,
    schedules_groups=False,
)
