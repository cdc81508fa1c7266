"""``kvsim capacity``: how many KV blocks fit, and why."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from sim.cli import options
from sim.cli.console import print_json


def capacity(
    model: str,
    *,
    gpu: str,
    engine: Literal["vllm", "sglang"] = "vllm",
    tensor_parallel_size: options.TensorParallelSize = 1,
    pipeline_parallel_size: Annotated[
        int, Parameter(name=["--pipeline-parallel-size", "-pp"])
    ] = 1,
    data_parallel_size: Annotated[
        int, Parameter(name=["--data-parallel-size", "-dp"])
    ] = 1,
    enable_expert_parallel: Annotated[
        options.Flag, Parameter(name=["--enable-expert-parallel", "-ep"])
    ] = False,
    gpu_memory_utilization: float | None = None,
    block_size: options.BlockSize | None = None,
    dtype: options.WeightDtype = "auto",
    quantization: str | None = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    max_model_len: options.Size = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: options.Size = None,
    engine_version: str | None = None,
    enforce_eager: options.Flag = False,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: options.Size = None,
    weights_gib: float | None = None,
    enable_prefix_caching: bool = True,
    async_scheduling: bool | None = None,
    disable_hybrid_kv_cache_manager: options.Flag = False,
    swa_full_tokens_ratio: float | None = None,
    mamba_cache_dtype: str = "auto",
    mamba_ssm_cache_dtype: str = "auto",
    gdn_prefill_backend: str | None = None,
    prefix_match_unit: int | None = None,
    use_flashinfer_sampler: bool | None = None,
    warm_compile_cache: options.Flag = False,
    num_speculative_tokens: int = 0,
    speculative_method: str = "mtp",
    draft_model: str | None = None,
    quiet: options.Flag = False,
    json: options.Json = False,
) -> int:
    """Predict the number of KV blocks of an engine, explained GiB by GiB.

    Parameters
    ----------
    model
        Bundled name, or path to a config.json.
    gpu
        GPU name, such as h200_sxm.
    engine
        Whose rules and defaults hold; sglang means --engine-version 0.5.9.
    pipeline_parallel_size
        Stages; the parts are those of the stage with least room.
    data_parallel_size
        Ranks with an attention and a pool of their own, which divide the experts.
    enable_expert_parallel
        GPUs of all ranks divide the experts one by one, rather than each of them.
    gpu_memory_utilization
        Share of physical memory that the engine may use (SGLang:
        mem_fraction_static); default: that of the release.
    block_size
        Tokens a block, or a page; default: 16, or 1 of SGLang.
    quantization
        Quantisation scheme of the weights.
    max_model_len
        Longest sequence; default: the model's own, or what the pool holds.
    max_num_seqs
        Most running sequences; default: the release's for this GPU.
    max_num_batched_tokens
        Token budget of a step; default: the release's for this GPU.
    engine_version
        vLLM release, such as 0.11 or 0.19; 5.17 for transformers; 0.5.9 for SGLang;
        default: 0.33, or 0.5.9 of SGLang.
    enforce_eager
        Without CUDA graphs.
    num_gpu_blocks_override
        Use this many blocks, whatever fits.
    kv_cache_memory_bytes
        Use this much memory for the cache, whatever fits.
    weights_gib
        Weights of a rank in GiB, from an engine's log, instead of counting them.
    enable_prefix_caching
        Whether states of Mamba and gated delta nets are kept at the ends of blocks.
    async_scheduling
        Whether two steps are in flight, which windows are sized for; default: the
        release's.
    disable_hybrid_kv_cache_manager
        Windows and chunks keep all their blocks.
    swa_full_tokens_ratio
        Of SGLang: tokens of layers with a window for each one of the others; default:
        0.8.
    mamba_cache_dtype
        Precision of states: auto (the model's), float32, bfloat16 or float16.
    mamba_ssm_cache_dtype
        The same of their matrices alone: auto (the file's, or that of the states).
    gdn_prefill_backend
        Kernel of gated delta nets in prompts: flashinfer, triton or cutedsl; default:
        the release's for this GPU.
    prefix_match_unit
        Tokens of which prefix hits are multiples, in models with states.
    use_flashinfer_sampler
        Whether FlashInfer samples, as the engine's log says (vLLM up to 0.20, 0.33);
        default: as in vLLM's images.
    warm_compile_cache
        Compiled code is cached, as after a first start: no memory for compiling.
    num_speculative_tokens
        Draft tokens of a step; a drafter has weights and a cache.
    speculative_method
        Where drafts come from: mtp, eagle, eagle3, draft_model or ngram.
    draft_model
        The model of that method: bundled name, or path to a config.json.
    quiet
        Print the number of blocks only.
    """
    from sim.config.sglang import read_arguments
    from sim.errors import UserError
    from sim.hardware.capacity import estimate_capacity, format_capacity
    from sim.hardware.capacity.sglang import is_sglang
    from sim.hardware.gpus import load_gpu
    from sim.hardware.models.bundled import load_model

    chosen: dict[str, Any] = {
        "gpu": gpu,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": gpu_memory_utilization,
        "block_size": block_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "engine_version": engine_version,
    }
    chosen = {key: value for key, value in chosen.items() if value is not None}
    if engine == "sglang" or is_sglang(engine_version or ""):
        chosen = read_arguments({"block_size": 1, "engine_version": "0.5.9"} | chosen)
        if not is_sglang(chosen["engine_version"]):
            raise UserError(
                "--engine-version must be 0.5.9 to 0.5.12, or 0.5.19 to 0.5.23, with "
                f"--engine sglang, got '{engine_version}'"
            )
    estimate = estimate_capacity(
        **chosen | {"gpu": load_gpu(gpu)},
        model=load_model(model),
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enforce_eager=enforce_eager,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        swa_full_tokens_ratio=swa_full_tokens_ratio,
        mamba_cache_dtype=mamba_cache_dtype,
        mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        gdn_prefill_backend=gdn_prefill_backend,
        prefix_match_unit=prefix_match_unit,
        use_flashinfer_sampler=use_flashinfer_sampler,
        warm_compile_cache=warm_compile_cache,
        num_speculative_tokens=num_speculative_tokens,
        speculative_method=speculative_method,
        draft_model=draft_model,
        weights_gib=weights_gib,
    )
    if json:
        print_json(estimate.to_dict())
    elif quiet:
        print(estimate.num_gpu_blocks)
    else:
        print(format_capacity(estimate))
    return 0
