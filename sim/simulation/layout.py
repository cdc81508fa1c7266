"""The KV cache groups of an engine whose model has layers of several kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cache.errors import CacheError
from cache.v1.planning import plan_kv_cache
from sim.errors import ConfigError
from sim.hardware.models.kv_layers import KVCacheOptions, kv_cache_layers
from sim.scheduler.v1 import V1

if TYPE_CHECKING:
    from cache.v1.planning import KVCachePlan
    from cache.v1.specs import KVCacheLayout
    from sim.config.tables import EngineConfig
    from sim.hardware.capacity import CapacityEstimate
    from sim.hardware.models.architecture import ModelArchitecture


def planned(
    engine: EngineConfig, model: ModelArchitecture, capacity: CapacityEstimate
) -> tuple[CapacityEstimate, KVCacheLayout | None]:
    """Return the pool as it is cut for the model's layers, and the groups in it.

    Layers of one kind of attention are served without groups: None.

    Raises
    ------
    ConfigError
        If the scheduler knows no groups, or the memory holds no request.
    """
    plan = _plan(engine, model, capacity)
    if plan is None:
        return capacity, None
    layout = plan.layout
    capacity = replace(
        capacity,
        block_size=plan.block_size,
        block_bytes=layout.bytes_per_block,
        num_gpu_blocks=layout.num_blocks,
        kv_cache_tokens=plan.kv_cache_size_tokens,
        max_concurrency=plan.max_concurrency,
        max_model_len=plan.max_model_len,
    )
    return capacity, layout


def _plan(
    engine: EngineConfig, model: ModelArchitecture, capacity: CapacityEstimate
) -> KVCachePlan | None:
    kinds = {k for k in model.layer_kinds if k.is_attention or k.has_state}
    if len(kinds) == 1 and not any(kind.has_state for kind in kinds):
        return None
    if engine.generation.name != V1.name:
        raise ConfigError(
            f"engine.model: {model.name} has layers of several kinds, whose blocks "
            f"the {engine.scheduler_kind} scheduler does not tell apart; use v1, or a "
            f"model with one kind"
        )
    options = KVCacheOptions(
        block_size=engine.block_size,
        tensor_parallel_size=engine.tensor_parallel_size,
        kv_cache_dtype=engine.kv_cache_dtype,
        enable_prefix_caching=engine.prefix_caching,
    )
    is_given = capacity.pool_source == "num_gpu_blocks_override"
    try:
        return plan_kv_cache(
            kv_cache_layers(model, options),
            block_size=engine.block_size,
            available_bytes=capacity.available_kv_bytes,
            max_model_len=capacity.max_model_len,
            max_in_flight_tokens=capacity.max_num_batched_tokens,
            fit_max_model_len=True,
            num_gpu_blocks_override=capacity.num_gpu_blocks if is_given else None,
            enable_prefix_caching=engine.prefix_caching,
        )
    except CacheError as error:
        raise ConfigError(f"engine: {error}") from error
