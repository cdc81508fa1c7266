"""The parts of a run, made from its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from cache.v1.planning import longest_request
from sim.config.plug import build
from sim.costs import COST_MODELS
from sim.costs.rates.collectives import all_reduce_s
from sim.costs.roofline import RooflineCost
from sim.costs.roofline.cascade import rule_of as cascade_rule_of
from sim.costs.roofline.graphs import release_sizes, rule_of
from sim.costs.roofline.launches import LaunchedRooflineCost
from sim.costs.roofline.sampling import rule_of as sampler_rule_of
from sim.costs.steps.ahead import HostAhead
from sim.costs.steps.pipeline import PipelineCost, StageLinks
from sim.errors import ConfigError
from sim.hardware.capacity import CapacityEstimate, estimate_capacity
from sim.hardware.capacity.arguments import (
    obeyed_kv_cache_dtype,
    parse_engine_version,
)
from sim.hardware.capacity.constants import V0_CHUNKED_BATCHED_TOKENS
from sim.hardware.capacity.sglang import MAX_PREFILL_TOKENS, is_sglang
from sim.hardware.capacity.transformers import STAND_IN_MINOR, is_transformers
from sim.hardware.interconnects import link_of, load_interconnect, pcie_choices
from sim.hardware.models.architecture import dtype_bytes
from sim.hardware.models.bundled import resolved_model
from sim.hardware.models.kv_layers import state_dtypes
from sim.hardware.models.stages import layers_of_stages, model_of_stage
from sim.scheduler.batch import BatchShape
from sim.scheduler.generation import GraphRule, HostRule
from sim.simulation.layout import layout_of
from sim.simulation.own_costs import hold_to_contract
from sim.simulation.schedulers import chunks_prefill
from sim.simulation.speculative import DRAFT_STEP_KEY, speculative_cost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.config.engine import EngineConfig
    from sim.config.tables import RunConfig
    from sim.costs.base import CostModel
    from sim.costs.roofline.cascade_rule import CascadeRule
    from sim.costs.roofline.sampling import SamplerRule
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture

MAX_NUM_GPU_BLOCKS = 50_000_000
"""About 5 GB of block objects; an endless cache for any trace at hand."""

_PROBE = BatchShape(8, 8_000, 1, 100, 100, 5_050)
"""A batch whose price tells whether a cost model looks at the model's layers."""


def make_capacity(
    engine: EngineConfig, model: ModelArchitecture, gpu: GpuSpec
) -> CapacityEstimate:
    """Return the pool of the engine and its resolved arguments."""
    capacity = estimate_capacity(
        model=model,
        gpu=gpu,
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        async_scheduling=engine.schedules_ahead,
        data_parallel_size=engine.data_parallel_size,
        enable_expert_parallel=engine.enable_expert_parallel,
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
        enable_prefix_caching=engine.prefix_caching,
        prefix_match_unit=engine.prefix_match_unit,
        disable_hybrid_kv_cache_manager=bool(
            engine.disable_hybrid_kv_cache_manager or engine.disable_hybrid_swa_memory
        ),
        swa_full_tokens_ratio=engine.swa_full_tokens_ratio,
        mamba_cache_dtype=engine.mamba_cache_dtype or "auto",
        mamba_ssm_cache_dtype=engine.mamba_ssm_cache_dtype or "auto",
        gdn_prefill_backend=engine.gdn_prefill_backend,
        enable_chunked_prefill=engine.enable_chunked_prefill is not False,
        cudagraph_capture_sizes=_given_sizes(engine),
        **_drafts(engine),
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
    # An override is not checked: what no table can hold is no length to promise.
    if layout_of(engine, model, capacity) is None:
        most = engine.generation.longest_sequence(
            capacity.num_gpu_blocks, engine.block_size
        )
    else:
        plan = capacity.plan
        assert plan is not None
        most = longest_request(plan, capacity.num_gpu_blocks - 1)
    if engine.admission_check and most < 1:
        raise ConfigError(
            f"a pool of {capacity.num_gpu_blocks} blocks holds no request of "
            f"{model.name}; raise num_gpu_blocks_override or kv_cache_memory_bytes"
        )
    if engine.admission_check and capacity.max_model_len > most:
        return replace(capacity, max_model_len=most)
    return capacity


def _drafts(engine: EngineConfig) -> dict[str, Any]:
    """Return the settings of drafts that the pool depends on."""
    drafts = engine.speculative
    if drafts is None:
        return {}
    return {
        "num_speculative_tokens": drafts.num_speculative_tokens,
        "speculative_method": drafts.method,
        "draft_model": drafts.model,
    }


def _batched_tokens(engine: EngineConfig, model: ModelArchitecture) -> int | None:
    """Return the budget that was given, or what chunking or its absence asks for.

    None leaves it to the release. Source: vLLM 0.7.3, ``vllm/config.py``
    (`SchedulerConfig`).
    """
    key, generation = engine.budget_key, engine.generation
    given: int | None = getattr(engine, key)
    if key == "max_prefill_tokens":
        return given or MAX_PREFILL_TOKENS
    may_chunk = "enable_chunked_prefill" in generation.keys
    if given is not None or not (generation.budget_follows_length and may_chunk):
        return given
    if chunks_prefill(engine, model, generation):
        return V0_CHUNKED_BATCHED_TOKENS
    longest = engine.max_model_len or model.max_position_embeddings
    return max(longest, V0_CHUNKED_BATCHED_TOKENS)


def make_cost_model(
    config: RunConfig,
    model: ModelArchitecture,
    gpu: GpuSpec,
    *,
    uses_drafts: bool = True,
) -> CostModel:
    """Construct the cost model for the weights as the engine holds them.

    Where drafts are not used, as by an engine that computes prompts for others, their
    drafter only keeps its cache.
    """
    engine = config.engine
    model = _as_held(engine, model)
    copied_bytes = _copied_block_bytes(engine, model, gpu)
    whole = _built_cost_model(config, model, gpu, copied_bytes, uses_drafts=uses_drafts)
    num_stages = engine.pipeline_parallel_size
    if num_stages == 1:
        return HostAhead(whole) if engine.schedules_ahead else whole
    stages = []
    for stage, layers in enumerate(
        layers_of_stages(model.num_hidden_layers, num_stages)
    ):
        own = model_of_stage(model, num_stages, stage)
        cost = _built_cost_model(config, own, gpu, copied_bytes)
        # A cost model that ignores layers prices all, whichever model it is given.
        is_whole = cost.step(_PROBE) == whole.step(_PROBE)
        stages.append((cost, layers / model.num_hidden_layers if is_whole else 1.0))
    tp = engine.tensor_parallel_size
    given = {
        key: load_interconnect(link)
        for key in ("interconnect", "network")
        if (link := getattr(engine, key)) is not None
    }
    piped = PipelineCost(stages, StageLinks(model, gpu, tp, num_stages, **given))
    return HostAhead(piped) if engine.schedules_ahead else piped


def _built_cost_model(
    config: RunConfig,
    model: ModelArchitecture,
    gpu: GpuSpec,
    copied_block_bytes: float | None,
    *,
    uses_drafts: bool = True,
) -> CostModel:
    """Construct the cost model for the layers of `model`."""
    engine = config.engine
    context = {
        "model": model,
        "gpu": gpu,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "block_size": engine.block_size,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "copied_block_bytes": copied_block_bytes,
        "swap_rule": engine.generation.swap,
        "enforce_eager": engine.enforce_eager,
        "graph_rule": graph_rule(engine),
        "graph_sizes": graph_sizes(engine),
        "host_rule": host_rule(engine),
        "cascade_rule": cascade_rule(engine, model, gpu),
        "sampler_rule": sampler_rule(engine, gpu),
        **_links(config),
    }
    _refuse_gone(config.cost)
    own = {key: config.cost[key] for key in config.cost if key != DRAFT_STEP_KEY}
    cost_model: CostModel = build(
        COST_MODELS, own, "cost", context, more_keys=(DRAFT_STEP_KEY,)
    )
    if type(cost_model) is RooflineCost:
        is_told = engine.enforce_eager or own.get("launch_s") is not None
        launched = LaunchedRooflineCost.of(cost_model)
        # the plain one is quicker, and as long where no step waits for its launches
        if is_told or (launched.is_launched_by_default and launched.may_wait):
            cost_model = launched
    if config.cost["kind"] not in COST_MODELS:
        hold_to_contract(cost_model, config.cost["kind"])
    return speculative_cost(
        config, cost_model, model, gpu, context, uses_drafts=uses_drafts
    )


def _refuse_gone(cost: Mapping[str, Any]) -> None:
    for key in ("allreduce_latency_s", "allreduce_efficiency"):
        if key in cost and cost["kind"] == "roofline":
            raise ConfigError(
                f"cost.{key} is gone: an all-reduce costs what its size and the link "
                f"say; name engine.interconnect, or give cost.link_bytes_per_s"
            )


def host_rule(engine: EngineConfig) -> HostRule:
    """Return the time of scheduling, which steps in flight hide, ahead or in stages."""
    is_hidden = engine.schedules_ahead or engine.pipeline_parallel_size > 1
    return HostRule(engine.generation.schedule_request_s, is_hidden)


def cascade_rule(
    engine: EngineConfig, model: ModelArchitecture, gpu: GpuSpec
) -> CascadeRule | None:
    """Return when a prefix that all requests share is read once, None for never.

    It is built for engines that step alone, without a tier behind their pool.
    """
    is_alone = engine.data_parallel_size == 1 and not engine.has_tier
    if not (engine.cascades and is_alone and engine.sliding_window is None):
        return None
    return cascade_rule_of(
        model,
        gpu,
        engine.tensor_parallel_size,
        engine.kv_cache_dtype,
        replays_decodes=engine.version == "0.11.0",
    )


def sampler_rule(engine: EngineConfig, gpu: GpuSpec) -> SamplerRule | None:
    """Return how logits are filtered, as requests ask for by default; None: not."""
    given = engine.override_generation_config
    if given is None:
        return None
    if engine.speculative is not None:
        raise ConfigError(
            "engine.override_generation_config: filters of drafts are not built; "
            "remove it, or speculative_config"
        )
    return sampler_rule_of(given.model_dump(), engine.version, gpu)


def graph_rule(engine: EngineConfig) -> GraphRule:
    """Return which steps are graphs: of sizes that are given, none beyond the last."""
    if engine.enforce_eager:
        return GraphRule()
    rule = rule_of(engine.generation.graphs, engine.version)
    sizes = graph_sizes(engine)
    return replace(rule, max_tokens=sizes[-1]) if sizes else rule


def _given_sizes(engine: EngineConfig) -> list[int] | None:
    asked = engine.cudagraph_capture_sizes
    return None if asked == "release" else asked


def graph_sizes(engine: EngineConfig) -> tuple[int, ...]:
    """Return the sizes to which steps are filled up; none where that is not asked."""
    asked = engine.cudagraph_capture_sizes
    if asked is None:
        return ()
    rule, key = engine.generation.graphs, "engine.cudagraph_capture_sizes"
    if engine.enforce_eager:
        raise ConfigError(f"{key}: enforce_eager runs without CUDA graphs; remove it")
    if engine.speculative is not None:
        raise ConfigError(f"{key}: sizes for drafts are not built; remove it")
    if asked == "release":
        seqs, budget = engine.max_num_seqs, engine.max_num_batched_tokens
        return release_sizes(rule, engine.version, seqs, budget)
    return tuple(sorted(set(asked)))


LINK_KEYS = ("interconnect", "enable_expert_parallel")
"""Keys of the engine that the table of the cost model had before."""


def _links(config: RunConfig) -> dict[str, Any]:
    """Return the links of GPUs, but for those in the cost table."""
    engine = config.engine
    given = {
        "data_parallel_size": engine.data_parallel_size,
        "all2all_backend": engine.all2all_backend,
        "network": engine.network,
    } | {key: getattr(engine, key) for key in LINK_KEYS}
    return {key: value for key, value in given.items() if key not in config.cost}


_TOLD_TOKENS: Final = 2048
"""Of a step, whose all-reduce is told over each link."""


def link_warnings(
    engine: EngineConfig, gpu: GpuSpec, model: ModelArchitecture
) -> list[str]:
    """Say how GPUs without NVLink are taken to be joined, and what else would cost."""
    num_ranks = engine.tensor_parallel_size
    if num_ranks == 1 or engine.interconnect is not None:
        return []
    link = link_of(gpu, num_ranks * engine.data_parallel_size)
    if link.has_peer_access or num_ranks > link.max_gpus:
        return []
    message = _TOLD_TOKENS * model.hidden_size * dtype_bytes(model.dtype)
    told = {
        each.name: f"{1e3 * all_reduce_s(each, num_ranks, message):.2g} ms"
        for each in pcie_choices(gpu)
        if num_ranks <= each.max_gpus
    }
    others = ", ".join(
        f"{seconds} over {name}" for name, seconds in told.items() if name != link.name
    )
    why = "has no peer access" if gpu.consumer else "is taken to have no peer access"
    return [
        f"engine.interconnect: {gpu.name} {why}, so all-reduces go through the host at "
        f"{link.bytes_per_s / 1e9:g} GB/s ({link.name}): {told[link.name]} for one of "
        f"{_TOLD_TOKENS:,} tokens, which would take {others}; name the link by "
        "its lanes ('nvidia-smi -q') and by 'nvidia-smi topo -p2p r' and 'topo -m', or "
        "fit it (--fit links)"
    ]


def moved_keys(config: RunConfig) -> list[str]:
    """Return a line for each key of the cost table that is the engine's by now."""
    return [
        f"cost.{key} is engine.{key} by now, which capacity heeds too; set that"
        for key in LINK_KEYS
        if key in config.cost
    ]


def _as_held(engine: EngineConfig, model: ModelArchitecture) -> ModelArchitecture:
    """Return the model in the precisions in which the engine holds it."""
    model = resolved_model(model, engine.dtype, engine.quantization)
    if model.kv_cache_dtype and engine.kv_cache_dtype == "auto":
        minor = (
            STAND_IN_MINOR
            if is_transformers(engine.version) or is_sglang(engine.version)
            else parse_engine_version(engine.version)
        )
        model = replace(model, kv_cache_dtype=obeyed_kv_cache_dtype(model, minor))
    if not model.num_state_layers:
        return model
    tail, matrices = state_dtypes(
        model,
        engine.mamba_cache_dtype or "auto",
        engine.mamba_ssm_cache_dtype or "auto",
    )
    return replace(model, conv_state_dtype=tail, state_dtype=matrices)


def _copied_block_bytes(
    engine: EngineConfig, model: ModelArchitecture, gpu: GpuSpec
) -> float | None:
    """Return the bytes that copying a block moves, where hits may end inside blocks.

    All of its bytes, whichever group it belongs to, are gathered, then written to their
    place. Source: vLLM 0.33, ``vllm/v1/worker/utils.py``
    (`copy_kv_cache_blocks_inplace`).
    """
    if engine.prefix_match_unit is None:
        return None
    return 2.0 * make_capacity(engine, model, gpu).block_bytes
