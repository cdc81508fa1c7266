"""The pool of KV blocks that an engine plans, by its release."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cache.errors import CacheConfigError
from cache.v1.planning import KVCachePlan, longest_request, plan_groups
from sim.errors import CapacityError
from sim.hardware.capacity import constants
from sim.hardware.capacity.kernels import checkpoint_options
from sim.hardware.gpus import GIB
from sim.hardware.models.kv_layers import KVCacheOptions, kv_cache_layers
from sim.hardware.models.layers import LayerKind
from sim.hardware.models.stages import span_of_stage

if TYPE_CHECKING:
    from sim.hardware.capacity.arguments import EngineArguments
    from sim.hardware.capacity.parts import MemoryParts
    from sim.hardware.models.architecture import ModelArchitecture

LEAST_BLOCKS = 2


def groups_of(arguments: EngineArguments) -> KVCachePlan:
    """Return how the model's layers share the pool of one rank, without its size.

    Raises
    ------
    CapacityError
        When the release does not hold such layers in one pool.
    """
    minor = arguments.engine_minor
    model = arguments.model
    drafter = None if arguments.drafter is None else arguments.drafter.model
    if minor < constants.FIRST_HYBRID_POOL_MINOR:
        model = _before_hybrid_pools(model, minor)
        drafter = drafter and _before_hybrid_pools(drafter, minor)
    longest = arguments.max_model_len or model.max_position_embeddings
    options = KVCacheOptions(
        block_size=arguments.block_size,
        tensor_parallel_size=arguments.tensor_parallel_size,
        kv_cache_dtype=arguments.kv_cache_dtype,
        mamba_cache_dtype=arguments.mamba_cache_dtype,
        mamba_ssm_cache_dtype=arguments.mamba_ssm_cache_dtype,
        enable_prefix_caching=arguments.enable_prefix_caching,
        num_speculative_tokens=arguments.num_speculative_tokens,
        **checkpoint_options(
            model, arguments.gpu, minor, arguments.gdn_prefill_backend
        ),
    )
    try:
        plan = plan_groups(
            kv_cache_layers(model, options, drafter),
            block_size=arguments.block_size,
            max_model_len=longest,
            max_in_flight_tokens=arguments.num_steps_in_flight
            * arguments.max_num_batched_tokens,
            enable_prefix_caching=arguments.enable_prefix_caching,
            prefix_match_unit=arguments.prefix_match_unit,
            disable_hybrid_kv_cache_manager=_keeps_all_blocks(arguments),
            padding_limit=constants.padding_limit_of(minor),
        )
    except CacheConfigError as error:
        raise CapacityError(f"{model.name}: {error}") from error
    if arguments.pipeline_parallel_size == 1:
        return plan
    span = span_of_stage(
        model.num_hidden_layers, arguments.pipeline_parallel_size, arguments.stage
    )
    return _on_stage(plan, range(*span))


def _keeps_all_blocks(arguments: EngineArguments) -> bool:
    """Return whether windows and chunks keep all their blocks.

    Chunks do of the release's own accord beside drafts that are made of the target's
    hidden states, and in releases whose steps the manager made slower.

    Source: vLLM 0.11.2 and 0.33.0, ``vllm/config/vllm.py``.
    """
    if arguments.disable_hybrid_kv_cache_manager:
        return True
    if not arguments.model.chunked_attention:
        return False
    drafter = arguments.drafter
    reads_target = drafter is not None and drafter.method != "draft_model"
    return reads_target or arguments.engine_minor < constants.FIRST_HYBRID_CHUNKS_MINOR


def draft_kv_share(arguments: EngineArguments, plan: KVCachePlan) -> float:
    """Return the share of all layers' caches that is the drafter's."""
    layers = plan.layers.values()
    own = sum(spec.page_size_bytes for spec in layers if spec.is_draft)
    return own / sum(spec.page_size_bytes for spec in layers)


def _on_stage(plan: KVCachePlan, layers: range) -> KVCachePlan:
    """Return a plan of the whole model with the bytes of some layers only.

    Source: vLLM 0.33, ``vllm/v1/core/kv_cache_planning.py``
    (`_project_kv_cache_groups_to_worker`).
    """
    groups = []
    for group in plan.layout.groups:
        names = [
            name for name in group.layer_names if int(name.split(".")[2]) in layers
        ]
        pages, held = (
            sum(plan.layers[name].page_size_bytes for name in each)
            for each in (group.layer_names, names)
        )
        groups.append(
            replace(
                group,
                layer_names=tuple(names),
                bytes_per_block=group.bytes_per_block * held // pages,
            )
        )
    most = max(group.bytes_per_block for group in groups)
    layout = replace(plan.layout, groups=tuple(groups), bytes_per_block=most)
    return replace(plan, layout=layout)


def _before_hybrid_pools(model: ModelArchitecture, minor: int) -> ModelArchitecture:
    """Return the model as older releases held it: windows kept all their blocks."""
    first = constants.FIRST_HYBRID_POOL_MINOR
    if model.num_state_layers:
        raise CapacityError(
            f"{model.name} has layers with a state, which share a pool with attention"
            f" since 0.{first}; got engine_version 0.{minor}, use 0.{first} or later, "
            f"or the newest (scheduler v1) to run it"
        )
    full = (LayerKind.FULL_ATTENTION,) * model.num_attention_layers
    alike = model.sliding_heads is None and model.kv_lora_rank is None
    return replace(model, mixed_layer_kinds=full) if alike else model


def sized_pool(
    arguments: EngineArguments, parts: MemoryParts
) -> tuple[KVCachePlan, int, str]:
    """Return the plan with its blocks and longest request, the pool's bytes, and why.

    An override is taken as it is: its length is not checked.
    """
    plan = groups_of(arguments)
    bytes_per_block = plan.layout.bytes_per_block
    if arguments.num_gpu_blocks_override:
        blocks = arguments.num_gpu_blocks_override
        available, source = blocks * bytes_per_block, "num_gpu_blocks_override"
    elif arguments.kv_cache_memory_bytes:
        available, source = arguments.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    else:
        available, source = parts.available_kv_bytes, "profile"
    blocks = available // bytes_per_block
    if blocks < LEAST_BLOCKS:
        raise CapacityError(_no_room(arguments, parts, source))
    plan = plan.of_size(blocks)
    length = _max_model_len(arguments, plan, source)
    return replace(plan, max_model_len=length), available, source


def _no_room(arguments: EngineArguments, parts: MemoryParts, source: str) -> str:
    if source != "profile":
        more = "2" if source == "num_gpu_blocks_override" else "more"
        return (
            f"{source} must hold two blocks at least (V1 keeps one as the null block);"
            f" got {getattr(arguments, source)}; give {more}, or a smaller block_size"
        )
    other = parts.non_torch_bytes + parts.cuda_graph_bytes
    smaller = ", a smaller block_size" if parts.available_kv_bytes > 0 else ""
    argument, less = parts.activation_argument, ""
    share = "gpu_memory_utilization"
    if argument == "mem_fraction_static":
        share = argument
        if parts.requested_bytes <= 0:
            return (
                f"{share} is {arguments.gpu_memory_utilization:g} by SGLang's rule, as "
                f"{arguments.max_num_batched_tokens:,} prompt tokens of a batch need "
                f"more than a {arguments.gpu.name} has; give fewer "
                f"(chunked_prefill_size, without chunks max_prefill_tokens), or {share}"
            )
    elif argument == "warm_compile_cache":
        less = " or a start with compiled code cached (warm_compile_cache)"
    elif argument == "max_model_len":
        less = " or a max_model_len that holds a shorter video"
    elif parts.available_kv_bytes + parts.activation_peak_bytes > 0:
        less = f" or less than {getattr(arguments, argument)} for {argument}"
    return (
        f"no room for a KV cache: {arguments.model.name} on {arguments.gpu.name}"
        f" leaves {parts.available_kv_bytes / GIB:.2f} GiB of"
        f" {parts.requested_bytes / GIB:.2f} GiB (weights"
        f" {parts.weights_bytes / GIB:.2f}, activations"
        f" {parts.activation_peak_bytes / GIB:.2f}, other {other / GIB:.2f}); use a"
        f" larger tensor_parallel_size, quantization, a larger GPU{smaller}{less}, or"
        f" a larger {share}"
    )


def _max_model_len(arguments: EngineArguments, plan: KVCachePlan, source: str) -> int:
    """Return the longest request, and refuse one that the pool cannot hold.

    An override is taken as it is: the engine checks the length against the memory it
    profiled, not against the override.
    """
    asked, blocks = arguments.max_model_len, plan.layout.num_blocks
    # The null block holds no tokens: leave it out of what a request may fill.
    fitting = longest_request(plan, blocks - 1 if arguments.is_v1 else blocks)
    if asked is None:
        return max(1, fitting)
    keeps_null_block = arguments.engine_minor >= constants.FIRST_NULL_BLOCK_CHECK_MINOR
    needed = sum(plan.blocks_for(asked)) + keeps_null_block
    if needed > blocks and source != "num_gpu_blocks_override":
        bytes_per_block = plan.layout.bytes_per_block
        raise CapacityError(
            f"max_model_len must fit the KV cache: {asked} tokens need"
            f" {needed * bytes_per_block / GIB:.2f} GiB,"
            f" the pool has {blocks * bytes_per_block / GIB:.2f} GiB; lower it to"
            f" {fitting}, or use a larger gpu_memory_utilization or"
            " tensor_parallel_size"
        )
    return asked
