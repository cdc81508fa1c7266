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

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from sim.errors import CapacityError
from sim.hardware.capacity import constants
from sim.hardware.capacity.arguments import EngineArguments, parse_engine_version
from sim.hardware.capacity.groups import shares_of
from sim.hardware.capacity.kernels import block_size_warnings
from sim.hardware.capacity.parts import MemoryParts, memory_parts, uncertainty
from sim.hardware.capacity.pool import draft_kv_share, sized_pool
from sim.hardware.capacity.sglang import (
    CONSTANTS_SOURCE as SGLANG_CONSTANTS_SOURCE,
)
from sim.hardware.capacity.sglang import (
    encoder_warnings,
    is_sglang,
    sglang_memory,
    with_requests,
)
from sim.hardware.capacity.transformers import (
    CONSTANTS_SOURCE,
    is_transformers,
    transformers_memory,
)
from sim.hardware.gpus import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cache.v1.planning import KVCachePlan
    from sim.hardware.capacity.sglang_windows import WindowPools


_IF_THERE = (
    "expert_bytes",
    "draft_bytes",
    "draft_kv_share",
    "sliding_window_size",
    "swa_max_total_num_tokens",
)


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """The KV pool of one engine, per rank, and how it came about."""

    model: str
    gpu: str
    engine_version: str
    tensor_parallel_size: int
    block_size: int
    """Tokens of the smallest block: as asked, unless it must cover a state."""
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
    """Memory that `gpu_memory_utilization` grants the engine on one GPU."""
    weights_bytes: int
    activation_peak_bytes: int
    non_torch_bytes: int
    cuda_graph_bytes: int
    """CUDA graphs, where the release subtracts them; 0 elsewhere."""
    available_kv_bytes: int
    """Memory that the pool is cut from."""
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
    """Problems that a real engine would have, in words."""
    constants_source: str
    kv_cache_groups: tuple[Mapping[str, Any], ...] = ()
    """Groups of layers, alike ones together: see `shares_of`. Empty where a request
    keeps all blocks of its tokens, in one group of layers alike."""
    not_simulated: tuple[str, ...] = ()
    """Features of the model that a run does not show, a line each."""
    data_parallel_size: int = 1
    """Engines with a pool like this one each, between which experts are divided."""
    enable_expert_parallel: bool = False
    expert_bytes: int = 0
    """Those of `weights_bytes` that routed experts take, where ranks divide them."""
    draft_bytes: int = 0
    """Those of `weights_bytes` that a drafter takes."""
    draft_kv_share: float = 0.0
    """Of the pool, the share that is the drafter's own cache."""
    sliding_window_size: int = 0
    swa_max_total_num_tokens: int = 0
    """SGLang's window, and the tokens of the pool of layers with one, beside
    `kv_cache_tokens` of the others; 0 where one pool has all layers."""
    pipeline_parallel_size: int = 1
    stage: int = 0
    """Of a pipeline, the stage with least room, from 0: the parts are those of its
    GPUs, the pool is every stage's."""
    activation_argument: str = field(default="", repr=False, compare=False)
    """The argument that most of `activation_peak_bytes` goes by."""
    plan: KVCachePlan | None = field(default=None, repr=False, compare=False)
    """Groups and pages, for what is built on them; None in an estimate from a file."""

    @property
    def kv_cache_size_tokens(self) -> int:
        """Tokens of the pool as the release prints them.

        Older releases print the blocks of one group, newer ones what `max_concurrency`
        requests of the longest length hold together.
        """
        assert self.plan is not None
        minor = parse_engine_version(self.engine_version)
        if minor >= constants.FIRST_PRINTING_REQUESTS_MINOR:
            return self.plan.kv_cache_size_tokens
        groups = self.plan.layout.groups
        return self.num_gpu_blocks // len(groups) * self.plan.block_size

    @property
    def left_bytes(self) -> int:
        """Bytes of the request left for the pool; an override may differ."""
        held = self.weights_bytes + self.activation_peak_bytes
        return (
            self.requested_bytes - held - self.non_torch_bytes - self.cuda_graph_bytes
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data; groups only where there are several."""
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        del told["plan"], told["activation_argument"]
        if sum(len(group["pages"]) for group in self.kv_cache_groups) <= 1:
            del told["kv_cache_groups"]
        if not self.not_simulated:
            del told["not_simulated"]
        if self.data_parallel_size == 1 and not self.enable_expert_parallel:
            for name in ("data_parallel_size", "enable_expert_parallel"):
                del told[name]
        if self.pipeline_parallel_size == 1:
            del told["pipeline_parallel_size"], told["stage"]
        for name in _IF_THERE:
            if not told[name]:
                del told[name]
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in told.items()
        }


def estimate_of(arguments: EngineArguments, engine_version: str) -> CapacityEstimate:
    """Return the estimate of an engine by the rule of its release."""
    if is_transformers(engine_version):
        return _estimate_transformers(arguments, engine_version)
    if is_sglang(engine_version):
        return _estimate_sglang(arguments, engine_version)
    _refuse_images_on_v0(arguments)
    stages = range(arguments.pipeline_parallel_size)
    return min(
        (_of_stage(replace(arguments, stage=each), engine_version) for each in stages),
        key=lambda estimate: estimate.num_gpu_blocks,
    )


def _of_stage(arguments: EngineArguments, engine_version: str) -> CapacityEstimate:
    parts = memory_parts(arguments.of_stage)
    estimate = _assembled(arguments, parts, engine_version)
    if estimate.pool_source != "profile":
        return estimate
    margin, reasons = uncertainty(arguments.of_stage, parts)
    available = estimate.available_kv_bytes
    # Nothing but the weights is certain to be held.
    most = min(available + margin, parts.requested_bytes - parts.weights_bytes)
    return replace(
        estimate,
        num_gpu_blocks_low=max(0, available - margin) // estimate.block_bytes,
        num_gpu_blocks_high=most // estimate.block_bytes,
        extrapolated=reasons,
    )


def _estimate_transformers(
    arguments: EngineArguments, engine_version: str
) -> CapacityEstimate:
    memory = transformers_memory(arguments)
    estimate = _assembled(memory.arguments, memory.parts, engine_version)
    estimate = replace(estimate, constants_source=CONSTANTS_SOURCE)
    if estimate.pool_source != "profile":
        return estimate
    return replace(
        estimate,
        num_gpu_blocks_low=memory.num_blocks_low,
        num_gpu_blocks_high=memory.num_blocks_high,
    )


def _estimate_sglang(
    arguments: EngineArguments, engine_version: str
) -> CapacityEstimate:
    memory = sglang_memory(arguments, engine_version)
    estimate = _assembled(memory.arguments, memory.parts, engine_version)
    if memory.windows is not None:
        estimate = _of_two_pools(estimate, memory.windows, arguments, memory.parts)
    num_seqs = with_requests(arguments, estimate.kv_cache_tokens).max_num_seqs
    estimate = replace(
        estimate,
        constants_source=SGLANG_CONSTANTS_SOURCE,
        max_num_seqs=num_seqs,
        total_bytes=memory.total_bytes,
        num_cpu_blocks=0,
    )
    if estimate.pool_source != "profile":
        return estimate
    return replace(
        estimate,
        num_gpu_blocks_low=memory.num_blocks_low,
        num_gpu_blocks_high=memory.num_blocks_high,
        warnings=estimate.warnings + encoder_warnings(arguments),
    )


def _of_two_pools(
    estimate: CapacityEstimate,
    pools: WindowPools,
    arguments: EngineArguments,
    parts: MemoryParts,
) -> CapacityEstimate:
    """Return an estimate of the first pool's pages with what both pools have.

    `arguments` are those that were given.
    """
    num_pages = estimate.num_gpu_blocks
    num_tokens = pools.window_tokens_beside(num_pages)
    source, available = "profile", parts.available_kv_bytes
    if arguments.num_gpu_blocks_override:
        source = "num_gpu_blocks_override"
        available = pools.bytes_of(num_pages, num_tokens)
    elif arguments.kv_cache_memory_bytes:
        source, available = "kv_cache_memory_bytes", arguments.kv_cache_memory_bytes
    return replace(
        estimate,
        pool_source=source,
        available_kv_bytes=available,
        block_bytes=round(pools.bytes_per_page),
        sliding_window_size=pools.sliding_window_size,
        swa_max_total_num_tokens=num_tokens,
        kv_cache_groups=pools.shares(num_pages, num_tokens, estimate.max_model_len),
        warnings=_warnings(arguments, parts, available),
    )


def _assembled(
    arguments: EngineArguments, parts: MemoryParts, engine_version: str
) -> CapacityEstimate:
    """Return the estimate without an interval around the number of blocks."""
    plan, available, source = sized_pool(arguments, parts)
    blocks, block_bytes = plan.layout.num_blocks, plan.layout.bytes_per_block
    cpu_blocks = int(arguments.swap_space * GIB) // block_bytes
    return CapacityEstimate(
        model=arguments.model.name,
        gpu=arguments.gpu.name,
        engine_version=engine_version,
        tensor_parallel_size=arguments.tensor_parallel_size,
        block_size=plan.block_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
        max_model_len=plan.max_model_len,
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
        block_bytes=block_bytes,
        num_gpu_blocks=blocks,
        num_gpu_blocks_low=blocks,
        num_gpu_blocks_high=blocks,
        num_cpu_blocks=0 if arguments.is_v1 else cpu_blocks,
        kv_cache_tokens=_tokens_held(arguments, plan),
        max_concurrency=plan.max_concurrency,
        pool_source=source,
        extrapolated=(),
        defaults=tuple(
            name
            for name in arguments.defaults
            if name != "block_size" or plan.block_size == arguments.block_size
        ),
        warnings=_warnings(arguments, parts, available),
        constants_source=arguments.constants_source,
        kv_cache_groups=shares_of(plan),
        not_simulated=arguments.model.not_simulated,
        data_parallel_size=arguments.experts.data_parallel_size,
        enable_expert_parallel=arguments.experts.enable_expert_parallel,
        expert_bytes=parts.expert_bytes,
        draft_bytes=parts.draft_bytes,
        draft_kv_share=draft_kv_share(arguments, plan),
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        stage=arguments.stage,
        activation_argument=parts.activation_argument,
        plan=plan,
    )


def _tokens_held(arguments: EngineArguments, plan: KVCachePlan) -> int:
    """Return the tokens that the pool holds, by the measure of the release."""
    num_groups = len(plan.layout.groups)
    first = constants.FIRST_PRINTING_REQUESTS_MINOR
    if num_groups > 1 and arguments.engine_minor >= first:
        return plan.kv_cache_size_tokens
    return plan.layout.num_blocks // num_groups * plan.block_size


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
    total, found = arguments.gpu.memory_bytes, block_size_warnings(arguments)
    if held + pool_bytes <= total:
        return found
    return (
        *found,
        f"the pool needs {pool_bytes / GIB:.2f} GiB beside {held / GIB:.2f} GiB of the"
        f" engine's, {arguments.gpu.name} has {total / GIB:.2f}: a real engine would"
        " run out of memory",
    )
