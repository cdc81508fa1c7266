"""The parts of a run, made from its configuration."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sim.capacity import CapacityEstimate, estimate_capacity
from sim.cost import EMPTY_SHAPE, CostModel
from sim.costs import COST_MODELS
from sim.errors import ConfigError
from sim.model import resolved_model
from sim.plug import build
from sim.scheduler import SCHEDULERS
from workloads.arrivals import ARRIVALS
from workloads.errors import WorkloadError
from workloads.lengths import LENGTHS
from workloads.preset import PresetWorkload
from workloads.traces import TRACE_READERS
from workloads.workload import SyntheticWorkload, TraceWorkload, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.architecture import ModelArchitecture
    from sim.config import EngineConfig, RunConfig, WorkloadConfig
    from sim.hardware import GpuSpec
    from sim.scheduler.base import Scheduler

MAX_NUM_GPU_BLOCKS = 50_000_000
"""About 5 GB of block objects; an endless cache for any trace at hand."""

_TRACE_KEYS = ("rate_scale", "window", "limit")


def make_capacity(
    engine: EngineConfig, model: ModelArchitecture, gpu: GpuSpec
) -> CapacityEstimate:
    """Return the pool of the engine and its resolved arguments.

    Raises
    ------
    CapacityError
        If the model leaves no room, or arguments do not fit together.
    ConfigError
        If the pool is larger than this simulator holds.
    """
    capacity = estimate_capacity(
        model=model,
        gpu=gpu,
        tensor_parallel_size=engine.tensor_parallel_size,
        block_size=engine.block_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        dtype=engine.dtype,
        quantization=engine.quantization,
        kv_cache_dtype=engine.kv_cache_dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        engine_version=engine.engine_version,
        enforce_eager=engine.enforce_eager,
        num_gpu_blocks_override=engine.num_gpu_blocks_override,
        kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
        swap_space=engine.swap_space,
    )
    if capacity.num_gpu_blocks > MAX_NUM_GPU_BLOCKS:
        raise ConfigError(
            f"a simulated pool holds at most {MAX_NUM_GPU_BLOCKS:,} blocks, got "
            f"{capacity.num_gpu_blocks:,}; lower num_gpu_blocks_override or "
            f"kv_cache_memory_bytes, or raise block_size"
        )
    if capacity.kv_cache_tokens != capacity.num_gpu_blocks * engine.block_size:
        raise ConfigError(
            f"engine.model: {model.name} has layers of several kinds of attention, "
            f"whose blocks the scheduler does not tell apart yet; use a model with one "
            f"kind ('kvsim capacity' knows both)"
        )
    # V1 never hands out its null block, and an override is not checked: what no
    # table can hold is no length to promise.
    most = (capacity.num_gpu_blocks - 1) * engine.block_size
    if engine.admission_check and capacity.max_model_len > most:
        return replace(capacity, max_model_len=most)
    return capacity


def make_cost_model(
    config: RunConfig, model: ModelArchitecture, gpu: GpuSpec
) -> CostModel:
    """Construct the cost model for the weights as the engine holds them.

    Raises
    ------
    ConfigError, CapacityError
        If it cannot be made, or does not keep the protocol.
    """
    engine = config.engine
    cost_model: CostModel = build(
        COST_MODELS,
        config.cost,
        "cost",
        {
            "model": resolved_model(model, engine.dtype, engine.quantization),
            "gpu": gpu,
            "tensor_parallel_size": engine.tensor_parallel_size,
            "block_size": engine.block_size,
            "kv_cache_dtype": engine.kv_cache_dtype,
        },
    )
    if config.cost["kind"] not in COST_MODELS:
        _check_protocol(cost_model, config.cost["kind"])
    return cost_model


def _check_protocol(cost_model: CostModel, kind: str) -> None:
    """Try a user's cost model on an empty step, before anything is simulated."""
    try:
        json.dumps(cost_model.describe(), allow_nan=False)
        total_s, *parts, _ = cost_model.step(EMPTY_SHAPE)
        problem = None
        if not 0 < total_s < math.inf:
            problem = f"an empty step must take more than 0 s, got {total_s}"
        elif any(parts) and not math.isclose(sum(parts), total_s):
            problem = f"the parts of a step must add up to {total_s}, got {sum(parts)}"
    except Exception as error:
        problem = (
            f"it needs step(shape) -> StepCost and a JSON-ready describe(): "
            f"{type(error).__name__}: {error}"
        )
    if problem:
        raise ConfigError(f"cost: '{kind}': {problem}; mend your class")


def make_scheduler(config: EngineConfig, capacity: CapacityEstimate) -> Scheduler:
    """Construct the scheduler, and with it the block pool.

    Raises
    ------
    ConfigError
        If it cannot be made.
    """
    kind = config.scheduler
    scheduler: Scheduler = build(
        SCHEDULERS,
        {"kind": kind} if isinstance(kind, str) else kind,
        "engine.scheduler",
        {
            "num_gpu_blocks": capacity.num_gpu_blocks,
            "block_size": config.block_size,
            "max_num_batched_tokens": capacity.max_num_batched_tokens,
            "max_num_seqs": capacity.max_num_seqs,
            "max_model_len": capacity.max_model_len,
            "enable_prefix_caching": config.enable_prefix_caching,
            "long_prefill_token_threshold": config.long_prefill_token_threshold,
        },
    )
    return scheduler


def make_workload(config: WorkloadConfig, seed: int) -> Workload:
    """Construct the workload.

    Raises
    ------
    ConfigError, WorkloadError
        With the path of the key.
    """
    if config.trace is not None:
        common = {key: config.trace[key] for key in _TRACE_KEYS if key in config.trace}
        own = {key: v for key, v in config.trace.items() if key not in _TRACE_KEYS}
        reader = build(TRACE_READERS, own, "workload.trace", more_keys=_TRACE_KEYS)
        return _refusing("workload.trace", TraceWorkload, reader=reader, **common)
    if config.synthetic is not None:
        where = "workload.synthetic"
        settings = dict(config.synthetic)
        tables = {"arrivals": ARRIVALS, "prompt_tokens": LENGTHS}
        tables["output_tokens"] = LENGTHS
        for key, table in tables.items():
            settings[key] = build(table, settings[key], f"{where}.{key}")
        return _refusing(where, SyntheticWorkload, seed=seed, **settings)
    assert config.preset is not None
    return _refusing(
        "workload.preset", PresetWorkload, seed=seed, **dict(config.preset)
    )


def _refusing(where: str, make: Callable[..., Workload], **arguments: Any) -> Workload:
    """Call `make`; name the table in what it refuses."""
    try:
        return make(**arguments)
    except WorkloadError as error:
        raise ConfigError(f"{where}: {error}") from error
