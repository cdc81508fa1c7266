"""The capacity of an engine by keyword: what is given, checked, and its defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.hardware.capacity.arguments import (
    EngineArguments,
    check_expert_blocks,
    check_numbers,
    check_parallelism,
    check_pipeline,
    check_prefix_match_unit,
    check_state_dtypes,
    parse_release,
    resolve_batch,
    resolve_dtypes,
    schedules_ahead,
)
from sim.hardware.capacity.constants import LAST_PATCH, default_utilization
from sim.hardware.capacity.estimate import CapacityEstimate, estimate_of
from sim.hardware.capacity.sglang import (
    Launch,
    defaults_of,
    driver_mib,
    is_sglang,
)
from sim.hardware.capacity.transformers import (
    STAND_IN_MINOR,
    batch_limits,
    is_transformers,
)
from sim.hardware.gpus import GpuSpec, load_gpu
from sim.hardware.models.bundled import load_model
from sim.hardware.models.drafters import drafter_of
from sim.hardware.models.quantization import held_scheme_name
from sim.hardware.models.weights import ExpertRanks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.hardware.models.architecture import ModelArchitecture

DEFAULT_BLOCK_SIZE = 16
DEFAULT_ENGINE_VERSION = "0.33"


def estimate_capacity(
    model: str | ModelArchitecture,
    gpu: str | GpuSpec,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    block_size: int = DEFAULT_BLOCK_SIZE,
    gpu_memory_utilization: float | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    engine_version: str = DEFAULT_ENGINE_VERSION,
    enforce_eager: bool = False,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    weights_gib: float | None = None,
    swap_space: float = 4.0,
    enable_prefix_caching: bool = True,
    async_scheduling: bool | None = None,
    disable_hybrid_kv_cache_manager: bool = False,
    swa_full_tokens_ratio: float | None = None,
    mamba_cache_dtype: str = "auto",
    mamba_ssm_cache_dtype: str = "auto",
    gdn_prefill_backend: str | None = None,
    prefix_match_unit: int | None = None,
    use_flashinfer_sampler: bool | None = None,
    warm_compile_cache: bool = False,
    num_speculative_tokens: int = 0,
    speculative_method: str = "mtp",
    draft_model: str | None = None,
    enable_chunked_prefill: bool = True,
    cudagraph_capture_sizes: Sequence[int] | None = None,
) -> CapacityEstimate:
    """Predict the number of KV blocks of a vLLM engine.

    Parameters
    ----------
    model, gpu
        Bundled names, paths, or the loaded objects.
    tensor_parallel_size, pipeline_parallel_size
        Ranks of a stage, and stages; the pool is that of the stage with least room.
    data_parallel_size
        Engines beside this one, each with its own attention and pool; they divide the
        experts of the model between them.
    enable_expert_parallel
        Whether GPUs of all engines divide the experts one by one, rather than each.
    block_size
        Tokens of a block.
    gpu_memory_utilization
        Share of the GPU's memory that the engine may use, in (0, 1]; None for the
        release's default.
    dtype, kv_cache_dtype, quantization
        Precisions, in vLLM's names; a quantised checkpoint needs no `quantization`,
        and its own scheme may be an unknown one where `weights_gib` is given.
    max_model_len
        Tokens of the longest request; None: the model's, or what the pool holds.
    max_num_seqs, max_num_batched_tokens
        Limits of a step; None for the release's defaults on this GPU.
    engine_version
        ``0.NN`` or ``0.NN.N``; releases before 0.8 are V0, and widen the interval.
        ``5.17`` is transformers' continuous batching, whose rule is its own.
    enforce_eager
        Whether CUDA graphs are off.
    num_gpu_blocks_override, kv_cache_memory_bytes
        Blocks, or bytes of the pool; each wins over the formula, in this order.
    weights_gib
        Measured weights of a rank, in place of the count.
    swap_space
        GiB of CPU blocks (V0).
    enable_prefix_caching
        Whether states are kept at the ends of blocks.
    async_scheduling
        Whether two steps are in flight, for windows; None for the release's default.
    disable_hybrid_kv_cache_manager
        Whether windows keep all blocks.
    swa_full_tokens_ratio
        Of SGLang: tokens of the pool of layers with a window for each one of the
        others, in (0, 1]; None for its default.
    mamba_cache_dtype, mamba_ssm_cache_dtype, gdn_prefill_backend
        Of states: see `state_dtypes` and `checkpoint_options`.
    prefix_match_unit
        Tokens of which prefix hits are multiples, in models with states; or None.
    use_flashinfer_sampler
        vLLM's ``VLLM_USE_FLASHINFER_SAMPLER``, for releases up to 0.20 and 0.33; None
        for what its images do. Without it, those up to 0.16 sort the logits.
    warm_compile_cache
        Whether the engine starts with its compiled code cached. Compiling, it times
        kernels on a copy of the embedding, which its profile counts where that is more
        than a step holds.
    num_speculative_tokens, speculative_method, draft_model
        Draft tokens of a step, 0 for none, and what proposes them: see `drafter_of`.
    enable_chunked_prefill
        Whether SGLang cuts prompts; it makes no graphs of whole ones.
    cudagraph_capture_sizes
        Tokens of the graphs that are captured, for what is kept for them beforehand;
        None for the release's.

    Returns
    -------
    CapacityEstimate
        The estimate with all its parts and an interval.

    Raises
    ------
    CapacityError
        When an argument is impossible, or the model leaves no room for the cache.
    ConfigError
        When the model or GPU is unknown.

    Examples
    --------
    >>> from kvsim import estimate_capacity
    >>> pool = estimate_capacity("meta-llama/Llama-3.1-8B", "h200_sxm")
    >>> pool.num_gpu_blocks, pool.num_gpu_blocks_low, pool.num_gpu_blocks_high
    (56384, 55526, 57243)
    >>> round(pool.weights_bytes / 2**30, 2)
    14.99
    """
    if isinstance(model, str):
        model = load_model(model)
    if isinstance(gpu, str):
        gpu = load_gpu(gpu)
    given = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    counts = {
        **given,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "block_size": block_size,
        "num_gpu_blocks_override": num_gpu_blocks_override,
        "num_speculative_tokens": num_speculative_tokens or None,
        "data_parallel_size": data_parallel_size,
    }
    check_numbers(
        counts,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        weights_gib=weights_gib,
        swap_space=swap_space,
    )
    experts = ExpertRanks(data_parallel_size, enable_expert_parallel)
    check_parallelism(model, tensor_parallel_size, experts)
    minor, patch = STAND_IN_MINOR, LAST_PATCH
    if is_transformers(engine_version):
        tokens, seqs = batch_limits(max_num_batched_tokens, max_num_seqs)
    elif is_sglang(engine_version):
        defaults = defaults_of(driver_mib(gpu), tensor_parallel_size, engine_version)
        chunk = defaults.chunked_prefill_size
        tokens, seqs = max_num_batched_tokens or chunk, max_num_seqs or 0
    else:
        minor, patch = parse_release(engine_version)
        tokens, seqs = resolve_batch(model, gpu, minor, **given)
    check_pipeline(model, pipeline_parallel_size, minor)
    check_state_dtypes(
        mamba_cache_dtype=mamba_cache_dtype,
        mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
    )
    check_prefix_match_unit(prefix_match_unit, minor)
    own_utilization = default_utilization(minor)
    if is_sglang(engine_version):
        own_utilization = Launch(
            engine_version,
            model,
            gpu,
            tensor_parallel_size,
            chunked_prefill_size=tokens,
            has_chunks=enable_chunked_prefill,
            max_running_requests=max_num_seqs,
            enforce_eager=enforce_eager,
        ).default_fraction
    if gpu_memory_utilization is None:
        gpu_memory_utilization = own_utilization
    standing = {
        "gpu_memory_utilization": gpu_memory_utilization == own_utilization,
        "block_size": block_size == DEFAULT_BLOCK_SIZE,
        "kv_cache_dtype": kv_cache_dtype == "auto",
        "engine_version": engine_version == DEFAULT_ENGINE_VERSION,
    }
    held = held_scheme_name(quantization or None, model.quantization, model.name)
    if weights_gib is None:  # else an engine has started with them
        check_expert_blocks(model, held, tensor_parallel_size, experts, minor)
    dtype, kv_cache_dtype = resolve_dtypes(model, dtype, kv_cache_dtype, minor)
    arguments = EngineArguments(
        model=model,
        gpu=gpu,
        engine_minor=minor,
        engine_patch=patch,
        tensor_parallel_size=tensor_parallel_size,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        quantization=held,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        enforce_eager=enforce_eager,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        weights_gib=weights_gib,
        swap_space=swap_space,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=is_sglang(engine_version)
        or schedules_ahead(minor, pipeline_parallel_size)
        if async_scheduling is None
        else async_scheduling,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        swa_full_tokens_ratio=swa_full_tokens_ratio,
        has_chunks=enable_chunked_prefill,
        mamba_cache_dtype=mamba_cache_dtype,
        mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        gdn_prefill_backend=gdn_prefill_backend,
        prefix_match_unit=prefix_match_unit,
        use_flashinfer_sampler=use_flashinfer_sampler,
        warm_compile_cache=warm_compile_cache,
        num_speculative_tokens=num_speculative_tokens,
        drafter=(
            drafter_of(model, speculative_method, draft_model)
            if num_speculative_tokens
            else None
        ),
        experts=experts,
        pipeline_parallel_size=pipeline_parallel_size,
        cudagraph_capture_sizes=None
        if cudagraph_capture_sizes is None
        else tuple(sorted(set(cudagraph_capture_sizes))),
        defaults=(
            *(name for name, value in given.items() if value is None),
            *(name for name, stands in standing.items() if stands),
        ),
    )
    return estimate_of(arguments, str(engine_version))
