"""The data-parallel ranks of one run: engines beside each other, on one clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.costs.base import Together
from sim.costs.steps.ahead import HostAhead
from sim.costs.steps.lock_step import steps_together
from sim.engine.lock_step import LockStep
from sim.engine.loop import Engine
from sim.errors import ConfigError
from sim.fleet.balancer import Load, LoadBalancer
from sim.fleet.engines import Engines, horizon_of
from sim.fleet.scrapes import load_of
from sim.results.metrics import cache_and_queues, latencies, throughput
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import simpy

    from sim.config.engine import EngineConfig
    from sim.costs.base import CostModel
    from sim.engine.clock import Clock
    from sim.engine.lock_step import Rank
    from sim.engine.sampling import Sampler
    from sim.results.fleet.ranks import RankRecorders
    from sim.results.recording.recorder import Recorder, Recording
    from sim.scheduler.base import Scheduler
    from sim.simulation.pools import Pool


def locks_of(pool: Pool, env: simpy.Environment) -> list[LockStep | None]:
    """Return by replica what its ranks keep pace by; None where they do not.

    They do where they divide experts; others have nothing to exchange.

    Raises
    ------
    ConfigError
        If a key needs what lock-step has not.
    """
    config, model, cost_model = pool.engine, pool.model, pool.cost_model
    if config.data_parallel_size == 1 or not model.num_moe_layers:
        return [None] * pool.num_replicas
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"engine.pipeline_parallel_size: ranks that divide experts step together, "
            f"without stages; got {config.pipeline_parallel_size} with "
            f"data_parallel_size {config.data_parallel_size} and {model.name}, leave "
            f"one of them out"
        )
    host = cost_model if isinstance(cost_model, HostAhead) else None
    price = steps_together(cost_model if host is None else host.model)
    return [
        LockStep(env, config.data_parallel_size, price, host=host)
        for _ in range(pool.num_replicas)
    ]


def lock_step_warnings(pool: Pool) -> list[str]:
    """Say so if a step of all ranks is priced without what they do together."""
    cost_model = pool.cost_model
    if isinstance(cost_model, HostAhead):
        cost_model = cost_model.model
    if pool.locks[0] is None or isinstance(cost_model, Together):
        return []
    kind = cost_model.describe().get("kind")
    return [
        f"cost: {kind} prices ranks one by one: a step takes the longest, without the "
        f"exchange of tokens between them"
    ]


def make_engines(
    env: Clock,
    config: EngineConfig,
    schedulers: Sequence[Scheduler],
    *,
    cost_model: CostModel,
    recorders: RankRecorders,
    paces: Sequence[Rank | None],
    sampler: Callable[[Scheduler, Recorder], Sampler],
    stepwise: bool,
) -> Engines:
    """Construct the engines of all ranks, and the balancer before them."""
    space_prefills(schedulers, paces)
    engines = [
        Engine(
            env,
            scheduler,
            cost_model,
            recorder,
            sample=sampler(scheduler, recorder),
            admission_check=config.admission_check,
            stepwise=stepwise,
            pace=pace,
            place=place,
        )
        for place, (scheduler, recorder, pace) in enumerate(
            zip(schedulers, recorders.of_rank, paces, strict=True)
        )
    ]

    def loads() -> list[Load]:
        return [load_of(engine) for engine in engines]

    num_servers = config.api_server_count or len(engines)
    balancer = LoadBalancer(env, loads, len(engines), num_servers)
    return Engines(env, engines, balancer)


def space_prefills(
    schedulers: Sequence[Scheduler], paces: Sequence[Rank | None]
) -> None:
    """Let the schedulers of ranks that step together count each other's turns."""
    for scheduler, rank in zip(schedulers, paces, strict=True):
        if rank is not None:
            own: Any = scheduler
            own.space_prefills_by(rank.turns)


def let_run_ahead(engines: Engines) -> None:
    """Let stretches of each engine last until a request comes or loads are read.

    Requests must come by `Engines.announced`, whatever becomes of those before.
    """
    balancer = engines.router
    assert isinstance(balancer, LoadBalancer)
    horizon = horizon_of(engines, [balancer], heeds_arrivals=True)
    for engine in engines.engines:
        engine.horizon = horizon


def merged_counters(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counters of several schedulers added up, and their hit rates.

    Some count what others do not have.
    """
    known = {key: value for one in reversed(told) for key, value in one.items()}
    whole = {
        key: added(each[key] for each in told if key in each)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else value
        for key, value in known.items()
    }
    for name in ("prefix_cache", "external_prefix_cache"):
        if queries := whole.get(f"{name}_queries"):
            whole[f"{name}_hit_rate"] = whole[f"{name}_hits"] / queries
    return whole


def numbers_of_ranks(
    recording: Recording,
    recorders: RankRecorders,
    schedulers: Sequence[Scheduler],
    duration_s: float,
    lock: LockStep | None,
) -> dict[str, Any]:
    """Return the numbers of each rank, and the time of waiting for each other."""
    ranks = [*_ranks(recording, recorders, schedulers, duration_s)]
    waits = waits_of(recorders, range(len(ranks)), [lock], recording.totals.busy_s)
    return {"ranks": ranks} | waits


def waits_of(
    recorders: RankRecorders,
    places: Sequence[int],
    locks: Sequence[LockStep | None],
    busy_s: float,
) -> dict[str, Any]:
    """Return the time that ranks waited for each other; nothing where they do not.

    Parameters
    ----------
    recorders, places
        Of the ranks.
    locks
        What they step together by, a replica each.
    busy_s
        Seconds in steps, of all.
    """
    num_waves = [lock.num_waves for lock in locks if lock is not None]
    if not num_waves:
        return {}
    wait_s = added(map(recorders.wait_s, places))
    return {
        "num_waves": sum(num_waves),
        "num_dummy_steps": sum(map(recorders.num_dummy_steps, places)),
        "wait_share": wait_s / busy_s if busy_s else 0.0,
    }


def _ranks(
    recording: Recording,
    recorders: RankRecorders,
    schedulers: Sequence[Scheduler],
    duration_s: float,
) -> Iterator[dict[str, Any]]:
    pairs = zip(recording.of_rank, schedulers, strict=True)
    for rank, (one, scheduler) in enumerate(pairs):
        table = one.request_table
        yield (
            {"rank": rank}
            | throughput(table, table.num_rows, duration_s)
            | latencies(table, one.itl)
            | cache_and_queues(one, duration_s)
            | scheduler.summary()
            | {
                "num_dummy_steps": recorders.num_dummy_steps(rank),
                "wait_s": recorders.wait_s(rank),
            }
        )
