"""Keys that were set and change nothing, or are outside of what is modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.generations import GENERATIONS
from sim.scheduler.victims import VICTIMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.config.engine import EngineConfig
    from sim.config.tables import RunConfig

_NODE = 8
"""GPUs that one NVLink switch joins, but in racks."""
_RACKS = ("gb200", "gb300")
_MOST_HOST_GIB = 2**15
"""32 TiB, the largest memory that one machine is sold with."""


def idle_key_warnings(config: RunConfig) -> list[str]:
    """Say which keys were set and change nothing."""
    engine, workload = config.engine, config.workload
    warnings = []
    if engine.evictor is not None and not engine.prefix_caching:
        warnings.append("engine.evictor does nothing without enable_prefix_caching")
    if workload.priority != 0 and not _heeds_priority(engine):
        warnings.append(
            "workload.priority does nothing unless engine.scheduling_policy is "
            "priority, or engine.preemption_victim lowest_priority"
        )
    chunks = engine.enable_chunked_prefill
    if (
        engine.scheduling_policy == "priority"
        and chunks
        and engine.scheduler_kind in GENERATIONS
        and not engine.generation.heeds_priority_in_chunks
    ):
        warnings.append(
            "engine.scheduling_policy: v0 heeds priorities only without chunked prefill"
        )
    if workload.beam_width != 1 and workload.best_of != 1:
        warnings.append("workload.best_of does nothing for requests that draw beams")
    return [*warnings, *_without_drafts(config), *_beyond(engine)]


def _without_drafts(config: RunConfig) -> Iterator[str]:
    """Yield keys of the traffic on drafts that are not there, or always found."""
    acceptance, drafts = config.workload.acceptance, config.engine.speculative_config
    pools = config.fleet.pools if config.fleet else ()
    is_of_some = any("speculative_config" in pool.engine for pool in pools)
    if acceptance is not None and drafts is None and not is_of_some:
        yield "workload.acceptance does nothing without engine.speculative_config"
    if (
        acceptance is not None
        and drafts is not None
        and drafts.method != "ngram"
        and "proposal_rate" in acceptance
    ):
        yield (
            f"workload.acceptance.proposal_rate does nothing with {drafts.method}: "
            f"only ngram may find no drafts"
        )


def _heeds_priority(engine: EngineConfig) -> bool:
    victim = engine.preemption_victim
    kind = victim.get("kind") if isinstance(victim, dict) else victim
    blind = {None, *VICTIMS} - {"lowest_priority"}
    return engine.scheduling_policy == "priority" or kind not in blind


def _beyond(engine: EngineConfig) -> Iterator[str]:
    """Yield settings that have no effect, or that no engine would take."""
    default = type(engine).model_fields["swap_space"].default
    if not engine.generation.has_cpu_tier and engine.swap_space not in (0, default):
        yield (
            f"engine.swap_space does nothing: {engine.scheduler_kind} has no blocks on "
            f"the CPU"
        )
    yield from _beyond_hosts(engine)
    ranks = engine.tensor_parallel_size
    if ranks > _NODE and not str(engine.gpu).startswith(_RACKS):
        yield (
            f"engine.tensor_parallel_size: {ranks} GPUs are more than the {_NODE} of a "
            f"node, and are priced as if one node had them"
        )
    size = engine.block_size
    if size & (size - 1):
        yield (
            f"engine.block_size: {size} is no power of two, and vLLM's kernels take "
            f"multiples of 16; decisions are simulated all the same"
        )


def _beyond_hosts(engine: EngineConfig) -> Iterator[str]:
    """Yield sizes of host memory that no host has."""
    num_hosts = -(-engine.tensor_parallel_size // _NODE)
    most = _MOST_HOST_GIB * num_hosts
    per_gpu = engine.swap_space * engine.tensor_parallel_size
    table = engine.kv_transfer_config
    num_bytes = (table.extra.cpu_bytes_to_use if table is not None else None) or 0
    extra = "kv_transfer_config.kv_connector_extra_config"
    for key, unit, size_gib in (
        ("kv_offloading_size", "GiB", engine.kv_offloading_size or 0.0),
        (f"{extra}.cpu_bytes_to_use", "bytes", num_bytes / 2**30),
        ("swap_space", "GiB, for each GPU", per_gpu),
    ):
        if size_gib > most:
            yield (
                f"engine.{key}: {size_gib / 1024:,.4g} TiB is more memory than any "
                f"host has ({_MOST_HOST_GIB // 1024} TiB); the key is in {unit}"
            )
