"""Files that a run writes on request, beside its results: ``--record``."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sim.engine.loop import Engine
from sim.errors import ConfigError
from sim.results.output import write_json
from sim.results.recording.blocks import BLOCKS_FILE, BlockTimes, blocks_to_dict
from sim.results.recording.schedule import SCHEDULE_FILE, ScheduleFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from cache.stats import BlockTier
    from sim.simulation.run import Simulation

RECORDS = ("schedule", "blocks")
"""Kinds of records that a run can write besides."""


@contextmanager
def recording(
    simulation: Simulation, kinds: Collection[str], directory: Path
) -> Iterator[None]:
    """Write files while `simulation` runs within; they are complete at the exit.

    Parameters
    ----------
    simulation
        Has not begun.
    kinds
        Of `RECORDS`.
    directory
        Where to; must exist.

    Raises
    ------
    ConfigError
        If there is no such kind, or none for this scheduler; nothing was written then.
    """
    for kind in kinds:
        if kind not in RECORDS:
            raise ConfigError(
                f"nothing is recorded as '{kind}'; there are: {', '.join(RECORDS)}"
            )
    if not isinstance(simulation.engine, Engine):
        raise ConfigError(
            "--record is built for one engine; leave it out, or "
            "engine.data_parallel_size at 1"
        )
    with ExitStack() as stack:
        if "blocks" in kinds:
            stack.enter_context(_timing_blocks(simulation, directory / BLOCKS_FILE))
        if "schedule" in kinds:
            path = directory / SCHEDULE_FILE
            file = ScheduleFile(path, simulation.scheduler, _facts(simulation))
            writer = stack.enter_context(file)
            simulation.engine.listeners.append(writer)
        yield


def _facts(simulation: Simulation) -> dict[str, Any]:
    """Return the facts with which the files are read; the same on either path."""
    config, capacity = simulation.config, simulation.capacity
    engine = config.engine
    return {
        "scheduler": engine.scheduler_kind,
        "engine_version": engine.version,
        "model": engine.model,
        "gpu": engine.gpu,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "block_size": engine.block_size,
        "num_gpu_blocks": capacity.num_gpu_blocks,
        "num_cpu_blocks": capacity.num_cpu_blocks,
        "max_model_len": capacity.max_model_len,
        "enable_prefix_caching": engine.prefix_caching,
        "seed": config.seed,
    }


@contextmanager
def _timing_blocks(simulation: Simulation, path: Path) -> Iterator[None]:
    """Observe all blocks, and write what was seen."""
    tiers = _tiers(simulation.scheduler)
    times = [BlockTimes(simulation.env, tier.num_ids) for tier in tiers]
    for tier, observer in zip(tiers, times, strict=True):
        tier.store.observer = observer
    yield
    seen = {}
    for tier, observer in zip(tiers, times, strict=True):
        observer.close(tier.store.cached_block_ids())
        seen[tier.name] = {"num_blocks": tier.num_blocks} | observer.to_dict()
    write_json(
        path, blocks_to_dict(seen, float(simulation.env.now), _facts(simulation))
    )


def _tiers(scheduler: Any) -> list[BlockTier]:
    """Return the tiers of a scheduler's cache.

    Raises
    ------
    ConfigError
        If its blocks cannot be observed.
    """
    if hasattr(type(scheduler), "tiers"):
        tiers: list[BlockTier] = scheduler.tiers()
        return tiers
    raise ConfigError(
        f"--record blocks is built for the schedulers cacheflow, v0_2, v0, v1 and "
        f"hf_fifo and those derived of them; {type(scheduler).__name__} keeps blocks "
        f"elsewhere, leave it out"
    )
