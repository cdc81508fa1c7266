"""The engines of one run, pool by pool: one engine, its ranks, or those of a fleet."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.config.idle_keys import idle_key_warnings
from sim.config.pairs import ConnectorTable
from sim.errors import UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.results.summary.warnings import pool_warnings
from sim.scheduler.generations import GENERATIONS
from sim.scheduler.sglang.settings import Disaggregation
from sim.scheduler.v1.connectors.settings import KVRole, KVTransferSettings
from sim.scheduler.v1.dialect import LAST_MINOR, dialect_of
from sim.simulation.assemble import link_warnings, make_capacity, moved_keys
from sim.simulation.layout import frees_lone_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sim.config.engine import EngineConfig
    from sim.config.tables import RunConfig
    from sim.costs.base import CostModel
    from sim.engine.lock_step import LockStep, Rank
    from sim.hardware.capacity import CapacityEstimate
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.scheduler.base import Scheduler
    from sim.simulation.offloading import SharedTiers

IN_FLIGHT = "several steps are in flight"
"""Reason of a stepwise run whose decodes are looked at one by one for that."""


@dataclass(slots=True, eq=False)
class Pool:
    """Engines that are alike.

    Parameters
    ----------
    name
        Of a fleet's pool; empty without a fleet.
    config
        The run as if all engines were of this pool.
    num_replicas
        How many there are, each with as many data-parallel ranks as `engine` says.
    model, gpu
        What they run, and on what.
    capacity
        The KV cache of each.
    cost_model
        Says how long steps take; set before schedulers are.
    schedulers
        One for each engine: for each rank of each replica.
    locks
        Of each replica, what its ranks step together by; set before schedulers are.
    role
        What they do for a fleet.
    shared_tiers
        Tiers that all engines of the fleet have together, of all pools, as they are
        made.
    """

    name: str
    config: RunConfig
    num_replicas: int
    model: ModelArchitecture
    gpu: GpuSpec
    capacity: CapacityEstimate
    cost_model: CostModel = field(init=False)
    schedulers: list[Scheduler] = field(default_factory=list)
    locks: Sequence[LockStep | None] = ()
    role: str = "serve"
    shared_tiers: SharedTiers | None = None

    @property
    def engine(self) -> EngineConfig:
        """The arguments of each engine."""
        return self.config.engine

    @property
    def num_engines(self) -> int:
        """Ranks of all replicas: each is an engine with a pool of blocks."""
        return self.num_replicas * self.engine.data_parallel_size

    @property
    def paces(self) -> list[Rank | None]:
        """By engine, what it keeps pace with others by."""
        num_ranks = self.engine.data_parallel_size
        return [
            pace
            for lock in self.locks
            for pace in ([None] * num_ranks if lock is None else lock.ranks)
        ]

    def warnings(self) -> Iterator[str]:
        """Yield warnings of the pool before it runs."""
        config, capacity = self.config, self.capacity
        frees_window = frees_lone_window(config.engine, capacity)
        yield from pool_warnings(
            capacity, self.model, config, frees_window=frees_window
        )
        yield from idle_key_warnings(config)
        yield from moved_keys(config)
        yield from _tier_warnings(config.engine)
        if not {"interconnect", "link_bytes_per_s"} & set(config.cost):
            yield from link_warnings(config.engine, self.gpu, self.model)

    def why_stepwise(self) -> str:
        """Return why its engines take their steps one by one; empty if they do not."""
        engine = self.engine
        generation = GENERATIONS.get(engine.scheduler_kind)
        is_clocked = generation is not None and generation.keeps_decode_clock
        if engine.speculative is not None:
            return "steps verify drafts"
        if engine.pipeline_parallel_size > 1 or (
            engine.schedules_ahead and not is_clocked
        ):
            return IN_FLIGHT
        return "" if is_clocked else "the scheduler has no fast path"


def pools_of(config: RunConfig) -> list[Pool]:
    """Return the pools of a run, without cost models and schedulers.

    Raises
    ------
    ConfigError, CapacityError
        If an engine does not fit its GPU, or its arguments do not fit together.
    """
    if config.fleet is None:
        return [_pool("", config, 1)]
    shared: SharedTiers = {}
    pools = []
    for place, pool in enumerate(config.fleet.pools):
        with named_pool(config, place):
            made = _pool(
                pool.name,
                config.model_copy(update={"engine": config.engine_of(pool)}),
                config.fleet.most_replicas(pool),
                pool.role,
                shared,
            )
        pools.append(made)
    return pools


@contextmanager
def named_pool(config: RunConfig, place: int) -> Iterator[None]:
    """Say of which pool a mistake is, if that pool has keys of its own.

    Parameters
    ----------
    config
        The run.
    place
        Of the pool in the fleet, from 0.
    """
    own = config.fleet.pools[place].engine if config.fleet else {}
    try:
        yield
    except UserError as error:
        line = str(error).removeprefix("cost: ")
        key, _, _ = line.removeprefix("engine.").partition(":")
        if key.partition(".")[0] in own and line.startswith("engine."):
            error.args = (f"fleet.pools.{place}.{line}",)
        elif own:
            error.args = (f"fleet.pools.{place}.engine: {line}",)
        raise


def _tier_warnings(engine: EngineConfig) -> Iterator[str]:
    """Yield warnings of a tier behind the pool of an older release."""
    if not engine.has_tier:
        return
    dialect = dialect_of(engine.version)
    if not dialect.knows_offloading:
        yield (
            f"what the CPU tier keeps and loads is by the rules of 0.{LAST_MINOR}, the "
            f"rest by those of {dialect.release}: hits may differ"
        )
    if dialect.preempts_what_is_written and engine.schedules_ahead:
        yield (
            f"{dialect.release} scheduling ahead beside a tier preempts every request "
            f"behind the one that lacks a block (vLLM issue 49674): raise "
            f"engine_version to 0.30 or later, or set async_scheduling to false"
        )


def transfer_settings(pool: Pool) -> KVTransferSettings | Disaggregation | None:
    """Return the settings of a pool's schedulers on the engines beside them."""
    if pool.role not in _KV_ROLES:
        return None
    fleet = pool.config.fleet
    assert fleet is not None
    kind = pool.engine.generation.kv_flow
    given = (fleet.connector or ConnectorTable()).settings(kind)
    return _TRANSFERS[kind](pool.role, given)


_KV_ROLES = {"prefill": KVRole.PRODUCER, "decode": KVRole.CONSUMER}
_TRANSFERS: dict[str, Callable[..., KVTransferSettings | Disaggregation]] = {
    "nixl": lambda role, given: KVTransferSettings(_KV_ROLES[role], **given),
    "sglang": lambda role, given: Disaggregation(role, **given),
}


def _pool(
    name: str,
    config: RunConfig,
    num_replicas: int,
    role: str = "serve",
    shared: SharedTiers | None = None,
) -> Pool:
    model, gpu = load_model(config.engine.model), load_gpu(config.engine.gpu)
    capacity = make_capacity(config.engine, model, gpu)
    return Pool(
        name,
        config,
        num_replicas,
        model,
        gpu,
        capacity,
        role=role,
        shared_tiers=shared,
    )
