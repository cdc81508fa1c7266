"""The title of a run, its scheduling and the versions of packages, in words."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.results.fleet.summary import fleet_title, gpus_of
from sim.scheduler.v1.dialect import dialect_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sim.config.engine import EngineConfig
    from sim.config.tables import RunConfig
    from sim.config.workload import WorkloadConfig

_PACKAGES = ("kvsim", "simpy", "numpy", "pandas", "pyarrow", "matplotlib")


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: _version(name) for name in _PACKAGES
    }


@cache
def _version(package: str) -> str:
    """Return a version that is looked up once: half the time of a tiny run."""
    return version(package)


def release_name(engine: EngineConfig) -> str:
    """Return the name of its scheduler, and the release."""
    return f"{scheduler_name(engine)} {engine.version}"


def scheduler_name(engine: EngineConfig) -> str:
    """Return the generation's name, or that of the user's class."""
    kind = engine.scheduler
    return Path(kind if isinstance(kind, str) else str(kind.get("kind"))).name


def scheduling(engines: Iterable[EngineConfig], numbers: Mapping[str, Any]) -> str:
    """Return how steps follow each other in the engines of each pool, in words."""
    engines = [*engines]
    ahead = [engine for engine in engines if engine.schedules_ahead]
    ways = [_ahead_in_words(ahead, numbers)] if ahead else []
    for engine in engines:
        if not engine.schedules_ahead:
            num_stages = engine.pipeline_parallel_size
            pipeline = f", {num_stages} steps in flight in a pipeline"
            ways.append(f"synchronous scheduling{pipeline if num_stages > 1 else ''}")
    return "; ".join(dict.fromkeys(ways))


def _ahead_in_words(engines: Sequence[EngineConfig], numbers: Mapping[str, Any]) -> str:
    """Return the schedulers that form steps ahead, with their gains and losses."""
    names = [
        each.generation.ahead_in_words
        + (f" of {num_stages} stages" if num_stages > 1 else "")
        for each in engines
        for num_stages in (each.pipeline_parallel_size,)
    ]
    has_stages = any(each.pipeline_parallel_size > 1 for each in engines)
    hidden = "overlapped" if has_stages else "of the host hidden"
    are_known = all(
        each.generation.always_ahead or dialect_of(each.version).knows_async_scheduling
        for each in engines
    )
    return (
        " and ".join(dict.fromkeys(names))
        + f" ({numbers['overlapped_s']:,.1f} s {hidden}, "
        f"{numbers['num_wasted_tokens']:,} tokens wasted"
        + ("" if are_known else "; preempted requests as from 0.28 on")
        + ")"
    )


def title(config: RunConfig) -> str:
    engine = config.engine
    on = gpus_of(engine) if config.fleet is None else fleet_title(config)
    users = config.workload.max_concurrent_users
    return ", ".join(
        (
            f"{Path(engine.model).name} on {on}",
            " and ".join(dict.fromkeys(map(release_name, config.engines()))),
            workload_title(config.workload),
            *([] if users is None else [f"{users:,} users"]),
        )
    )


def workload_title(workload: WorkloadConfig) -> str:
    if workload.trace:
        path = Path(str(workload.trace.get("path", "trace")))
        how = " by superposition" * (workload.trace.get("scale_by") == "superposition")
        return f"{path.name} at {workload.trace.get('rate_scale', 1.0):g} x rate{how}"
    if workload.preset:
        return f"{workload.preset.name} at {workload.preset.rate_scale:g} x rate"
    if workload.sessions:
        name = f"{Path(str(workload.sessions.get('kind'))).name} sessions"
        arrivals = dict(workload.sessions.get("arrivals") or {})
        scale = workload.sessions.get("rate_scale", 1.0)
    else:
        assert workload.synthetic is not None
        name, arrivals = "synthetic", workload.synthetic.arrivals
        scale = workload.synthetic.rate_scale
    rate = f" {arrivals['rate']:g}/s" if "rate" in arrivals else ""
    return f"{name}, {arrivals.get('kind')}{rate} at {scale:g} x rate"
