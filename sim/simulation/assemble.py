"""The parts of a run, made from its configuration."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cache.errors import CacheError
from sim.config.generations import GENERATION_KEYS, GENERATIONS
from sim.config.plug import build
from sim.costs import COST_MODELS
from sim.costs.base import EMPTY_SHAPE, CostModel, GraphRule, pricer_of
from sim.errors import ConfigError, SchedulerError
from sim.hardware.capacity import CapacityEstimate, estimate_capacity
from sim.hardware.capacity.arguments import parse_engine_version, v0_chunks_by_itself
from sim.hardware.capacity.constants import V0_CHUNKED_BATCHED_TOKENS
from sim.hardware.models.bundled import resolved_model
from sim.scheduler import SCHEDULERS
from sim.scheduler.base import PreemptionMode
from sim.scheduler.groups.settings import SchedulerConfig
from sim.scheduler.settings import CacheConfig
from sim.simulation.evictors import evictor_factory
from sim.simulation.policies import make_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cache.v0.evictor import Evictor
    from sim.config.tables import EngineConfig, RunConfig
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.scheduler.base import Scheduler
    from workloads.spec import RequestSpec

MAX_NUM_GPU_BLOCKS = 50_000_000
"""About 5 GB of block objects; an endless cache for any trace at hand."""

T = TypeVar("T")


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
        max_num_batched_tokens=_batched_tokens(engine, model),
        engine_version=engine.version,
        enforce_eager=engine.enforce_eager,
        num_gpu_blocks_override=engine.num_gpu_blocks_override,
        kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
        swap_space=engine.swap_space,
    )
    if engine.generation.has_cpu_tier and capacity.num_cpu_blocks > MAX_NUM_GPU_BLOCKS:
        raise ConfigError(
            f"engine.swap_space: a simulated pool holds at most {MAX_NUM_GPU_BLOCKS:,} "
            f"blocks, got {capacity.num_cpu_blocks:,} on the CPU; lower it"
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
    if engine.generation is GENERATIONS["hf_fifo"]:
        most = capacity.num_gpu_blocks * engine.block_size - 1
    if engine.admission_check and capacity.max_model_len > most:
        return replace(capacity, max_model_len=most)
    return capacity


def _chunks_prefill(engine: EngineConfig, model: ModelArchitecture) -> bool:
    """Whether an engine cuts prompts into chunks; of `v0`, by what it was given."""
    if engine.enable_chunked_prefill is not None:
        return engine.enable_chunked_prefill
    if engine.generation is GENERATIONS["hf_fifo"]:
        return True
    longest = engine.max_model_len or model.max_position_embeddings
    minor = parse_engine_version(engine.version)
    return engine.sliding_window is None and v0_chunks_by_itself(longest, minor)


def _batched_tokens(engine: EngineConfig, model: ModelArchitecture) -> int | None:
    """Return the budget that was given, or what chunking makes of it in `v0`.

    None leaves it to the release. Source: vLLM 0.7.3, ``vllm/config.py``
    (`SchedulerConfig`).
    """
    given = engine.max_num_batched_tokens
    if given is not None or engine.generation is not GENERATIONS["v0"]:
        return given
    if _chunks_prefill(engine, model):
        return V0_CHUNKED_BATCHED_TOKENS
    longest = engine.max_model_len or model.max_position_embeddings
    return max(longest, V0_CHUNKED_BATCHED_TOKENS)


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
    graphs = engine.generation.graphs
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
            "swap_rule": engine.generation.swap,
            "graph_rule": GraphRule() if engine.enforce_eager else graphs,
        },
    )
    if config.cost["kind"] not in COST_MODELS:
        _check_protocol(cost_model, config.cost["kind"])
    return cost_model


def _check_protocol(cost_model: CostModel, kind: str) -> None:
    """Try a user's cost model on an empty step, before anything is simulated."""
    try:
        json.dumps(cost_model.describe(), allow_nan=False)
        problem = _cost_problem(cost_model)
    except Exception as error:
        problem = (
            f"it needs step(shape) -> StepCost and a JSON-ready describe(): "
            f"{type(error).__name__}: {error}"
        )
    if problem:
        raise ConfigError(f"cost: '{kind}': {problem}; mend your class")


def _cost_problem(cost_model: CostModel) -> str | None:
    """Return what an empty step breaks, or None."""
    cost = cost_model.step(EMPTY_SHAPE)
    total_s, parts = cost.total_s, cost.parts
    if not 0 < total_s < math.inf:
        return f"an empty step must take more than 0 s, got {total_s}"
    if any(parts) and not math.isclose(sum(parts), total_s):
        return f"the parts of a step must add up to {total_s}, got {sum(parts)}"
    known = not (math.isnan(cost.lo_s) and math.isnan(cost.hi_s))
    if known and not 0 < cost.lo_s <= total_s <= cost.hi_s < math.inf:
        return (
            f"lo_s and hi_s must lie around {total_s} and above 0, got {cost.lo_s} and "
            f"{cost.hi_s}; leave both out if they are unknown"
        )
    pricer = pricer_of(cost_model)
    if pricer is not None:
        shape = pricer.columns(np.array([EMPTY_SHAPE], np.int64)).shape
        if shape != (1, len(cost)):
            return f"columns of 1 step must be (1, {len(cost)}), got {shape}"
    return None


def make_scheduler(
    config: EngineConfig,
    capacity: CapacityEstimate,
    model: ModelArchitecture,
    schedulers: Mapping[str, type] = SCHEDULERS,
    specs: Sequence[RequestSpec] = (),
) -> tuple[Scheduler, CapacityEstimate]:
    """Construct the scheduler, and with it the block pool.

    Parameters
    ----------
    config, model
        The engine, and what it serves.
    capacity
        Its pool.
    schedulers
        Classes by the name that ``engine.scheduler`` takes.
    specs
        The workload, for a policy that knows the future.

    Returns
    -------
    Scheduler
        The policy, empty.
    CapacityEstimate
        `capacity`, with the longest sequence that pool and scheduler can serve as
        `max_model_len` (invariant 7).

    Raises
    ------
    ConfigError
        If it cannot be made.
    """
    chunks = _chunks_prefill(config, model)
    make_evictor = evictor_factory(config, capacity, specs)
    construct = partial(_construct, config, chunks, schedulers, make_evictor)
    scheduler = construct(capacity)
    most = getattr(scheduler, "max_servable_tokens", capacity.max_model_len)
    if not config.admission_check or most >= capacity.max_model_len:
        return scheduler, capacity
    if most < 1:
        raise ConfigError(
            f"engine: a cache of {capacity.num_gpu_blocks} blocks of "
            f"{config.block_size} tokens cannot serve a single token under the rules "
            f"of the {config.scheduler} scheduler; give it a larger cache"
        )
    capacity = replace(capacity, max_model_len=most)
    if config.max_num_batched_tokens is None and not chunks and _pads(config):
        # What the release takes for that length: a budget of the model's own length
        # would let prompts be padded without end.
        budget = max(most, V0_CHUNKED_BATCHED_TOKENS)
        capacity = replace(capacity, max_num_batched_tokens=budget)
    return construct(capacity), capacity


def _pads(config: EngineConfig) -> bool:
    """Whether a step takes whole prompts, so that its budget follows the longest."""
    return config.generation in (GENERATIONS["v0_2"], GENERATIONS["v0"])


def _construct(
    config: EngineConfig,
    chunks: bool,
    schedulers: Mapping[str, type],
    make_evictor: Callable[[], Any] | None,
    capacity: CapacityEstimate,
) -> Scheduler:
    kind = config.scheduler
    policies = make_policies(config)
    optional = {
        key: getattr(config, key)
        for key in (*sorted(GENERATION_KEYS), "preemption_mode")
    }
    context = {
        "num_gpu_blocks": capacity.num_gpu_blocks,
        "num_cpu_blocks": capacity.num_cpu_blocks,
        "block_size": config.block_size,
        "max_num_batched_tokens": capacity.max_num_batched_tokens,
        "max_num_seqs": capacity.max_num_seqs,
        "max_model_len": capacity.max_model_len,
        "enable_prefix_caching": config.prefix_caching,
        "engine_version": config.version,
        "scheduler_config": replace(
            _scheduler_config(config, capacity, chunks),
            preemption_victim=policies.get("preemption_victim"),
        ),
        "cache_config": _cache_config(config, capacity, make_evictor),
    } | {key: value for key, value in optional.items() if value is not None}
    context |= policies
    if make_evictor is not None:
        context["evictor"] = make_evictor
    try:
        scheduler: Scheduler = build(
            schedulers,
            {"kind": kind} if isinstance(kind, str) else kind,
            "engine.scheduler",
            context,
        )
    except ConfigError as error:
        cause = error.__cause__
        # What it refuses begins with the key, where one key is to blame.
        if isinstance(cause, SchedulerError) and str(cause).split()[0] in context:
            raise ConfigError(f"engine.{cause}") from error
        raise
    except CacheError as error:
        # A manager's own refusal: a window that no block divides, and the like.
        raise ConfigError(f"engine: {error}") from error
    return scheduler


def _scheduler_config(
    config: EngineConfig, capacity: CapacityEstimate, chunks: bool
) -> SchedulerConfig:
    """Return what the generations before V1 are configured with."""
    mode = config.preemption_mode
    return SchedulerConfig(
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_num_seqs=capacity.max_num_seqs,
        max_model_len=capacity.max_model_len,
        max_paddings=_or(config.max_paddings, 256),
        preemption_mode=None if mode is None else PreemptionMode(mode),
        policy=_or(config.scheduling_policy, "fcfs"),
        enable_chunked_prefill=chunks,
        num_lookahead_slots=_or(config.num_lookahead_slots, 0),
        delay_factor=_or(config.scheduler_delay_factor, 0.0),
        max_num_partial_prefills=_or(config.max_num_partial_prefills, 1),
        max_long_partial_prefills=_or(config.max_long_partial_prefills, 1),
        long_prefill_token_threshold=_or(config.long_prefill_token_threshold, 0),
    )


def _cache_config(
    config: EngineConfig,
    capacity: CapacityEstimate,
    make_evictor: Callable[[], Evictor] | None,
) -> CacheConfig:
    return CacheConfig(
        block_size=config.block_size,
        num_gpu_blocks=capacity.num_gpu_blocks,
        num_cpu_blocks=capacity.num_cpu_blocks,
        watermark=_or(config.watermark, 0.01),
        sliding_window=config.sliding_window,
        enable_prefix_caching=config.prefix_caching,
        evictor=make_evictor,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
