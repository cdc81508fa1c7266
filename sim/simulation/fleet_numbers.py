"""Numbers of a fleet, from the recordings of its engines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sim.fleet.replicas import Replicas
from sim.results.fleet.ranks import merged
from sim.results.fleet.series import absences, series, state_spans
from sim.results.fleet.summary import engine_numbers, imbalance
from sim.simulation.autoscaling import replicas_by_pool
from sim.simulation.ranks import merged_counters, waits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.fleet.engines import Engines
    from sim.results.fleet.ranks import RankRecorders
    from sim.results.fleet.series import Change
    from sim.results.recording.recorder import Recording
    from sim.simulation.pools import Pool


def with_series(
    recording: Recording, pools: Sequence[Pool], engines: Engines, now_s: float
) -> Recording:
    """Return a recording with the fleet over time, pool by pool."""
    names = [pool.name for pool in pools]
    places = [*zip(names, replicas_by_pool(pools), strict=True)]
    num_places = sum(pool.num_engines for pool in pools)
    spans = state_spans(_changes(engines), num_places, now_s)
    held = engines.held if isinstance(engines, Replicas) else []
    return replace(recording, fleet_table=series(recording, places, spans, held, now_s))


def _changes(engines: Engines) -> Iterator[Change]:
    if isinstance(engines, Replicas):
        for time_s, place, state in engines.roster.changes:
            yield time_s, place, state.value


def numbers(
    recording: Recording,
    pools: Sequence[Pool],
    engines: Engines,
    duration_s: float,
    recorders: RankRecorders,
) -> dict[str, Any]:
    """Return the numbers of each pool and each engine, and their imbalance."""
    of_engines: list[dict[str, Any]] = []
    of_pools = []
    for pool in pools:
        first = len(of_engines)
        places = range(first, first + pool.num_engines)
        parts = recording.of_rank[first : first + pool.num_engines]
        counters = [
            merged_counters(
                [each.scheduler.summary() for each in engines.all_at(place)]
            )
            for place in places
        ]
        cache = {
            "num_gpu_blocks": pool.capacity.num_gpu_blocks,
            "block_size": pool.capacity.block_size,
        }
        every = zip(places, parts, counters, pool.paces, strict=True)
        for place, part, told, pace in every:
            name = {"engine": place, "pool": pool.name} | cache
            own = engine_numbers(part, duration_s) | told
            if pace is not None:
                own |= {
                    "num_dummy_steps": recorders.num_dummy_steps(place),
                    "wait_s": recorders.wait_s(place),
                }
            of_engines.append(name | own)
        whole = recording
        if len(pools) > 1:
            whole = merged(parts, parts[0].step_table, "engine")
        facts = {
            "pool": pool.name,
            "role": pool.role,
            "replicas": pool.num_replicas,
            "data_parallel_size": pool.engine.data_parallel_size,
            "scheduler": pool.engine.scheduler_kind,
            "engine_version": pool.engine.version,
            "gpu": pool.engine.gpu,
            "num_gpus": pool.engine.tensor_parallel_size
            * pool.engine.pipeline_parallel_size,
        } | cache
        own = engine_numbers(whole, duration_s) | merged_counters(counters)
        waits = waits_of(recorders, places, pool.locks, own["busy_s"])
        of_pools.append(facts | own | waits)
    spans = state_spans(_changes(engines), len(of_engines), duration_s)
    for engine, absent in zip(of_engines, absences(spans), strict=True):
        if absent:
            engine["absent_s"] = absent
    told = engines.summary() if isinstance(engines, Replicas) else {}
    up_s = told.get("up_s") or [duration_s] * len(of_engines)
    return {
        "engines": of_engines,
        "pools": of_pools,
        "imbalance": imbalance(of_engines, up_s),
    } | told
