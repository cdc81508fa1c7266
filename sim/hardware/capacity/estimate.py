"""How many KV blocks an engine has, explained part by part.

::

    requested     = total memory * gpu_memory_utilization
    available KV  = requested - weights - activation peak - non-torch [- CUDA graphs]
    num_gpu_blocks = floor(available KV / block bytes)

What the formula needs beside the model is measured, and stands in
`sim.hardware.capacity.constants`. The printed number of blocks includes V1's null
block.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sim.errors import CapacityError
from sim.hardware.capacity import constants
from sim.hardware.capacity.arguments import (
    EngineArguments,
    check_numbers,
    check_parallelism,
    parse_engine_version,
    resolve_batch,
    resolve_dtypes,
)
from sim.hardware.capacity.parts import (
    MemoryParts,
    kv_layout,
    memory_parts,
    uncertainty,
)
from sim.hardware.capacity.transformers import (
    CONSTANTS_SOURCE,
    STAND_IN_MINOR,
    batch_limits,
    is_transformers,
    transformers_memory,
)
from sim.hardware.gpus import GIB, GpuSpec, load_gpu
from sim.hardware.models.bundled import load_model
from sim.hardware.models.quantization import quantization_scheme

if TYPE_CHECKING:
    from sim.hardware.capacity.parts import KvLayout
    from sim.hardware.models.architecture import ModelArchitecture


DEFAULT_UTILIZATION = 0.9
DEFAULT_BLOCK_SIZE = 16
DEFAULT_ENGINE_VERSION = "0.33"
LEAST_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """The KV pool of one engine, per rank, and how it came about."""

    model: str
    gpu: str
    engine_version: str
    tensor_parallel_size: int
    block_size: int
    gpu_memory_utilization: float
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enforce_eager: bool
    total_bytes: int
    """Physical memory of one GPU."""
    requested_bytes: int
    """What `gpu_memory_utilization` grants the engine on one GPU."""
    weights_bytes: int
    activation_peak_bytes: int
    non_torch_bytes: int
    cuda_graph_bytes: int
    """CUDA graphs, where the release subtracts them; 0 elsewhere."""
    available_kv_bytes: int
    """What the pool is cut from."""
    block_bytes: int
    """Bytes of one block on one rank."""
    num_gpu_blocks: int
    """As the engine prints it: V1's null block is one of them."""
    num_gpu_blocks_low: int
    num_gpu_blocks_high: int
    num_cpu_blocks: int
    """Blocks of ``swap_space`` (V0 only; 0 on V1)."""
    kv_cache_tokens: int
    max_concurrency: float
    """Requests of `max_model_len` tokens that fit at once."""
    pool_source: str
    """``profile``, ``kv_cache_memory_bytes`` or ``num_gpu_blocks_override``."""
    extrapolated: tuple[str, ...]
    """Why the interval is wider than the data's, in words; empty inside the data."""
    defaults: tuple[str, ...]
    """Arguments at the release's defaults: left to them, or given as they are."""
    warnings: tuple[str, ...]
    """What would not work on a real engine, in words."""
    constants_source: str

    @property
    def left_bytes(self) -> int:
        """What is left of the request for the pool; an override may differ."""
        held = self.weights_bytes + self.activation_peak_bytes
        return (
            self.requested_bytes - held - self.non_torch_bytes - self.cuda_graph_bytes
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }


def estimate_capacity(
    model: str | ModelArchitecture,
    gpu: str | GpuSpec,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    block_size: int = DEFAULT_BLOCK_SIZE,
    gpu_memory_utilization: float = DEFAULT_UTILIZATION,
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
) -> CapacityEstimate:
    """Predict the number of KV blocks of a vLLM engine.

    Parameters
    ----------
    model, gpu
        Bundled names, paths, or the loaded objects.
    tensor_parallel_size, pipeline_parallel_size
        Ranks; pipelines are refused.
    block_size
        Tokens of a block.
    gpu_memory_utilization
        Share of the GPU's memory that the engine may use, in (0, 1].
    dtype, kv_cache_dtype, quantization
        Precisions, in vLLM's names; a quantised checkpoint needs no `quantization`,
        and its own scheme may be an unknown one where `weights_gib` is given.
    max_model_len
        Tokens of the longest request; None for the least of the model's and what the
        pool holds.
    max_num_seqs, max_num_batched_tokens
        Limits of a step; None for the release's defaults on this GPU.
    engine_version
        ``0.NN`` or ``0.NN.N``; releases before 0.8 are V0, and widen the interval.
        ``5.17`` is transformers' continuous batching, whose rule is its own.
    enforce_eager
        Whether CUDA graphs are off.
    num_gpu_blocks_override, kv_cache_memory_bytes
        Number of blocks, or bytes of the pool; each wins over the formula, in this
        order.
    weights_gib
        Measured weights of a rank, in place of the count.
    swap_space
        GiB of CPU blocks (V0).

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
    (55191, 54329, 56052)
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
        "block_size": block_size,
        "num_gpu_blocks_override": num_gpu_blocks_override,
    }
    check_numbers(
        counts,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        weights_gib=weights_gib,
        swap_space=swap_space,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    check_parallelism(model, tensor_parallel_size)
    if is_transformers(engine_version):
        minor = STAND_IN_MINOR
        tokens, seqs = batch_limits(max_num_batched_tokens, max_num_seqs)
    else:
        minor = parse_engine_version(engine_version)
        tokens, seqs = resolve_batch(model, gpu, minor, **given)
    standing = {
        "gpu_memory_utilization": gpu_memory_utilization == DEFAULT_UTILIZATION,
        "block_size": block_size == DEFAULT_BLOCK_SIZE,
        "kv_cache_dtype": kv_cache_dtype == "auto",
        "engine_version": engine_version == DEFAULT_ENGINE_VERSION,
    }
    if quantization:
        quantization_scheme(quantization)
    dtype, kv_cache_dtype = resolve_dtypes(model, dtype, kv_cache_dtype)
    arguments = EngineArguments(
        model=model,
        gpu=gpu,
        engine_minor=minor,
        tensor_parallel_size=tensor_parallel_size,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        quantization=quantization or model.quantization,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        enforce_eager=enforce_eager,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        weights_gib=weights_gib,
        swap_space=swap_space,
        defaults=(
            *(name for name, value in given.items() if value is None),
            *(name for name, stands in standing.items() if stands),
        ),
    )
    if is_transformers(engine_version):
        return _estimate_transformers(arguments, str(engine_version))
    return _estimate(arguments, str(engine_version))


def _estimate(arguments: EngineArguments, engine_version: str) -> CapacityEstimate:
    _refuse_images_on_v0(arguments)
    parts = memory_parts(arguments)
    layout = kv_layout(arguments)
    estimate = _assembled(arguments, parts, layout, engine_version)
    if estimate.pool_source != "profile":
        return estimate
    margin, reasons = uncertainty(arguments, parts)
    available = estimate.available_kv_bytes
    # Nothing but the weights is certain to be held.
    most = min(available + margin, parts.requested_bytes - parts.weights_bytes)
    return replace(
        estimate,
        num_gpu_blocks_low=max(0, available - margin) // layout.block_bytes,
        num_gpu_blocks_high=most // layout.block_bytes,
        extrapolated=reasons,
    )


def _estimate_transformers(
    arguments: EngineArguments, engine_version: str
) -> CapacityEstimate:
    memory = transformers_memory(arguments)
    estimate = _assembled(memory.arguments, memory.parts, memory.layout, engine_version)
    estimate = replace(estimate, constants_source=CONSTANTS_SOURCE)
    if estimate.pool_source != "profile":
        return estimate
    return replace(
        estimate,
        num_gpu_blocks_low=memory.num_blocks_low,
        num_gpu_blocks_high=memory.num_blocks_high,
    )


def _assembled(
    arguments: EngineArguments,
    parts: MemoryParts,
    layout: KvLayout,
    engine_version: str,
) -> CapacityEstimate:
    """Return the estimate without an interval around the number of blocks."""
    available, blocks, source = _pool(arguments, parts, layout)
    max_model_len = _max_model_len(arguments, layout, blocks, source)
    cpu_blocks = int(arguments.swap_space * GIB) // layout.block_bytes
    return CapacityEstimate(
        model=arguments.model.name,
        gpu=arguments.gpu.name,
        engine_version=engine_version,
        tensor_parallel_size=arguments.tensor_parallel_size,
        block_size=arguments.block_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
        max_model_len=max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        enforce_eager=arguments.enforce_eager,
        total_bytes=arguments.gpu.memory_bytes,
        requested_bytes=parts.requested_bytes,
        weights_bytes=parts.weights_bytes,
        activation_peak_bytes=parts.activation_peak_bytes,
        non_torch_bytes=parts.non_torch_bytes,
        cuda_graph_bytes=parts.cuda_graph_bytes,
        available_kv_bytes=available,
        block_bytes=layout.block_bytes,
        num_gpu_blocks=blocks,
        num_gpu_blocks_low=blocks,
        num_gpu_blocks_high=blocks,
        num_cpu_blocks=0 if arguments.is_v1 else cpu_blocks,
        kv_cache_tokens=blocks // layout.num_groups * arguments.block_size,
        max_concurrency=blocks / layout.blocks_for(max_model_len),
        pool_source=source,
        extrapolated=(),
        defaults=arguments.defaults,
        warnings=_warnings(arguments, parts, available),
        constants_source=constants.era_of(arguments.engine_minor).source,
    )


def _refuse_images_on_v0(arguments: EngineArguments) -> None:
    given = arguments.num_gpu_blocks_override or arguments.kv_cache_memory_bytes
    if arguments.is_v1 or given or not arguments.model.has_encoder:
        return
    raise CapacityError(
        "V0 engines profile a multimodal model with as many images as fit, which is"
        f" not modelled; got engine_version 0.{arguments.engine_minor}; use 0.8 or"
        " later, or num_gpu_blocks_override"
    )


def _warnings(
    arguments: EngineArguments, parts: MemoryParts, pool_bytes: int
) -> tuple[str, ...]:
    held = parts.requested_bytes - parts.available_kv_bytes
    total = arguments.gpu.memory_bytes
    if held + pool_bytes <= total:
        return ()
    return (
        f"the pool needs {pool_bytes / GIB:.2f} GiB beside {held / GIB:.2f} GiB of the"
        f" engine's, {arguments.gpu.name} has {total / GIB:.2f}: a real engine would"
        " run out of memory",
    )


def _pool(
    arguments: EngineArguments, parts: MemoryParts, layout: KvLayout
) -> tuple[int, int, str]:
    """Return the pool's bytes and blocks, and what decided them."""
    if arguments.num_gpu_blocks_override:
        blocks = arguments.num_gpu_blocks_override
        available, source = blocks * layout.block_bytes, "num_gpu_blocks_override"
    elif arguments.kv_cache_memory_bytes:
        available, source = arguments.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    else:
        available, source = parts.available_kv_bytes, "profile"
    blocks = available // layout.block_bytes
    if blocks < LEAST_BLOCKS:
        raise CapacityError(_no_room(arguments, parts, source))
    return available, blocks, source


def _no_room(arguments: EngineArguments, parts: MemoryParts, source: str) -> str:
    if source != "profile":
        more = "2" if source == "num_gpu_blocks_override" else "more"
        return (
            f"{source} must hold two blocks at least (V1 keeps one as the null block);"
            f" got {getattr(arguments, source)}; give {more}, or a smaller block_size"
        )
    other = parts.non_torch_bytes + parts.cuda_graph_bytes
    smaller = ", a smaller block_size" if parts.available_kv_bytes > 0 else ""
    batch = arguments.max_num_batched_tokens, arguments.max_num_seqs
    named = "max_num_batched_tokens", "max_num_seqs"
    value = batch[named.index(parts.activation_argument)]
    less = (
        f" or less than {value} for {parts.activation_argument}"
        if parts.available_kv_bytes + parts.activation_peak_bytes > 0
        else ""
    )
    return (
        f"no room for a KV cache: {arguments.model.name} on {arguments.gpu.name}"
        f" leaves {parts.available_kv_bytes / GIB:.2f} GiB of"
        f" {parts.requested_bytes / GIB:.2f} GiB (weights"
        f" {parts.weights_bytes / GIB:.2f}, activations"
        f" {parts.activation_peak_bytes / GIB:.2f}, other {other / GIB:.2f}); use a"
        f" larger tensor_parallel_size, quantization, a larger GPU{smaller}{less}, or"
        " a larger gpu_memory_utilization"
    )


def _max_model_len(
    arguments: EngineArguments, layout: KvLayout, blocks: int, source: str
) -> int:
    """Return the longest request, and refuse one that the pool cannot hold.

    An override is taken as it is: the engine checks the length against the memory it
    profiled, not against the override.
    """
    asked = arguments.max_model_len
    # The null block holds no tokens: leave it out of what a request may fill.
    fitting = layout.longest_request(blocks - 1 if arguments.is_v1 else blocks)
    if asked is None:
        return max(1, min(arguments.model.max_position_embeddings, fitting))
    if layout.blocks_for(asked) > blocks and source != "num_gpu_blocks_override":
        need = layout.blocks_for(asked) * layout.block_bytes / GIB
        raise CapacityError(
            f"max_model_len must fit the KV cache: {asked} tokens need {need:.2f} GiB,"
            f" the pool has {blocks * layout.block_bytes / GIB:.2f} GiB; lower it to"
            f" {fitting}, or use a larger gpu_memory_utilization or"
            " tensor_parallel_size"
        )
    return asked


# -- in words ------------------------------------------------------------------------


def capacity_rows(estimate: CapacityEstimate) -> list[tuple[str, str, str]]:
    """Return the parts as (name, GiB, remark), in the order of the sum.

    An override is no part of the sum, and follows it.
    """
    share = f"{estimate.gpu_memory_utilization:g} of {estimate.gpu}"
    graphs = "captured graphs" if estimate.cuda_graph_bytes else "not subtracted"
    parts = [
        ("total memory", estimate.total_bytes, estimate.gpu),
        ("requested", estimate.requested_bytes, f"gpu_memory_utilization {share}"),
        ("- weights", estimate.weights_bytes, _weights_remark(estimate)),
        (
            "- activation peak",
            estimate.activation_peak_bytes,
            f"{estimate.max_num_batched_tokens} tokens,"
            f" {estimate.max_num_seqs} sequences",
        ),
        ("- non-torch", estimate.non_torch_bytes, "CUDA context, NCCL"),
        ("- CUDA graphs", estimate.cuda_graph_bytes, graphs),
    ]
    if estimate.pool_source == "profile":
        parts.append(("= KV cache", estimate.left_bytes, "what is left"))
    else:
        parts += [
            ("= left", estimate.left_bytes, f"not used: {estimate.pool_source} wins"),
            ("KV cache", estimate.available_kv_bytes, f"by {estimate.pool_source}"),
        ]
    return [(name, f"{size / GIB:.2f}", remark) for name, size, remark in parts]


def _weights_remark(estimate: CapacityEstimate) -> str:
    precision = estimate.quantization or estimate.dtype
    return f"{estimate.model}, {precision}, TP {estimate.tensor_parallel_size}"


def format_capacity(estimate: CapacityEstimate) -> str:
    """Return the estimate as a text table, GiB by GiB, with what it rests on."""
    rows = capacity_rows(estimate)
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{n:<{width}}  {gib:>8} GiB  {remark}" for n, gib, remark in rows]
    origin = f"by {estimate.pool_source}"
    if estimate.pool_source == "profile":
        low, high = estimate.num_gpu_blocks_low, estimate.num_gpu_blocks_high
        origin = f"interval {low:,} to {high:,}"
    lines += [
        f"block: {estimate.block_bytes / 2**20:g} MiB"
        f" ({estimate.block_size} tokens, KV in {estimate.kv_cache_dtype})",
        f"num_gpu_blocks: {estimate.num_gpu_blocks:,} ({origin})",
        f"KV cache: {estimate.kv_cache_tokens:,} tokens,"
        f" {estimate.max_concurrency:.2f} requests of {estimate.max_model_len:,}",
        f"engine {estimate.engine_version}: {estimate.constants_source}",
    ]
    if estimate.num_cpu_blocks:
        lines.append(f"num_cpu_blocks: {estimate.num_cpu_blocks:,}")
    if estimate.defaults:
        resolved = (f"{name}={getattr(estimate, name)}" for name in estimate.defaults)
        lines.append(f"at their defaults: {', '.join(resolved)}")
    lines += [f"warning: {warning}" for warning in estimate.warnings]
    lines += [f"outside the data: {reason}" for reason in estimate.extrapolated]
    return "\n".join(lines)
