"""The capacity estimate in words: GiB by GiB, group by group, block by block."""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING

from sim.hardware.capacity.sglang import AITER_SHARE, is_sglang
from sim.hardware.gpus import GIB

if TYPE_CHECKING:
    from sim.hardware.capacity.estimate import CapacityEstimate

KIB, MIB = 2**10, 2**20


def capacity_rows(estimate: CapacityEstimate) -> list[tuple[str, str, str]]:
    """Return the parts as (name, GiB, remark), in the order of the sum.

    An override is no part of the sum, and follows it.
    """
    if is_sglang(estimate.engine_version):
        return _in_gib(_sglang_rows(estimate) + _pool_rows(estimate))
    share = f"{estimate.gpu_memory_utilization:g} of {estimate.gpu}{_origin(estimate)}"
    graphs = "not subtracted"
    if estimate.cuda_graph_bytes:
        graphs = "what the release keeps for them beforehand"
    parts = [
        ("total memory", estimate.total_bytes, estimate.gpu),
        ("requested", estimate.requested_bytes, f"gpu_memory_utilization {share}"),
        ("- weights", estimate.weights_bytes, _weights_remark(estimate)),
        *_expert_rows(estimate),
        *_draft_rows(estimate),
        (
            "- activation peak",
            estimate.activation_peak_bytes,
            _activation_remark(estimate),
        ),
        ("- non-torch", estimate.non_torch_bytes, "CUDA context, NCCL"),
        ("- CUDA graphs", estimate.cuda_graph_bytes, graphs),
    ]
    return _in_gib(parts + _pool_rows(estimate))


def _in_gib(parts: list[tuple[str, int, str]]) -> list[tuple[str, str, str]]:
    return [(name, f"{size / GIB:.2f}", remark) for name, size, remark in parts]


def _pool_rows(estimate: CapacityEstimate) -> list[tuple[str, int, str]]:
    """Return the bytes left for the pool, and its size where that is given."""
    if estimate.pool_source == "profile":
        return [("= KV cache", estimate.left_bytes, "what is left")]
    return [
        ("= left", estimate.left_bytes, f"not used: {estimate.pool_source} wins"),
        ("KV cache", estimate.available_kv_bytes, f"by {estimate.pool_source}"),
    ]


def _sglang_rows(estimate: CapacityEstimate) -> list[tuple[str, int, str]]:
    """Return the bytes that SGLang takes off: a share of free memory, and no more."""
    free = estimate.total_bytes - estimate.requested_bytes
    share = free / (estimate.total_bytes - estimate.non_torch_bytes)
    kept = (1 - share) / estimate.gpu_memory_utilization
    factor = f"{AITER_SHARE:g} " if isclose(kept, AITER_SHARE, rel_tol=1e-4) else ""
    remark = (
        f"and graphs: {share:.3g} of the rest (1 - {factor}mem_fraction_static"
        f"{_origin(estimate)})"
    )
    if estimate.requested_bytes <= 0:  # of an overridden pool
        remark = (
            "and graphs, by the release's rule: more than there is, so that SGLang does"
            " not start (mem_fraction_static would be"
            f" {estimate.gpu_memory_utilization:g}); give a batch fewer prompt tokens"
        )
    return [
        ("total memory", estimate.total_bytes, f"{estimate.gpu}, as its driver says"),
        ("- CUDA context", estimate.non_torch_bytes, "before the weights"),
        ("- activations", free, remark),
        ("- weights", estimate.weights_bytes, _weights_remark(estimate)),
        *_expert_rows(estimate),
    ]


def _origin(estimate: CapacityEstimate) -> str:
    is_default = "gpu_memory_utilization" in estimate.defaults
    return ", the release's default" if is_default else ""


def _activation_remark(estimate: CapacityEstimate) -> str:
    if estimate.activation_argument == "warm_compile_cache":
        return "a first start: kernels are timed on a copy of the embedding"
    if estimate.activation_argument == "max_model_len":
        return "encoding the longest video that max_model_len holds"
    tokens, seqs = estimate.max_num_batched_tokens, estimate.max_num_seqs
    return f"{tokens} tokens, {seqs} sequences"


def _weights_remark(estimate: CapacityEstimate) -> str:
    precision = estimate.quantization or estimate.dtype
    ranks = f"TP {estimate.tensor_parallel_size}"
    if estimate.pipeline_parallel_size > 1:
        stages = estimate.pipeline_parallel_size
        ranks += f", PP {stages}, stage {estimate.stage + 1} of {stages}"
    if estimate.data_parallel_size > 1:
        ranks += f", DP {estimate.data_parallel_size}"
    return f"{estimate.model}, {precision}, {ranks}"


def _expert_rows(estimate: CapacityEstimate) -> list[tuple[str, int, str]]:
    """Return a row for what ranks divide, and what each of them holds whole."""
    if not estimate.expert_bytes:
        return []
    ranks = estimate.tensor_parallel_size * estimate.data_parallel_size
    how = "a share of each"
    if estimate.enable_expert_parallel:
        how = "some of them whole"
    return [("  of them experts", estimate.expert_bytes, f"{how}, over {ranks} GPUs")]


def _draft_rows(estimate: CapacityEstimate) -> list[tuple[str, int, str]]:
    """Return a row for what a drafter takes of the weights, and of the pool."""
    if not estimate.draft_kv_share:
        return []
    share = f"its cache is {estimate.draft_kv_share:.2%} of the pool"
    return [("  of them drafter", estimate.draft_bytes, share)]


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
        _block_in_words(estimate),
        f"num_gpu_blocks: {estimate.num_gpu_blocks:,} ({origin})",
        *_tokens_in_words(estimate),
        *_ranks_in_words(estimate),
        *_groups_in_words(estimate),
        f"KV cache: {estimate.kv_cache_tokens:,} tokens,"
        f" {estimate.max_concurrency:.2f} requests of {estimate.max_model_len:,}",
        f"engine {estimate.engine_version}: {estimate.constants_source}",
    ]
    if estimate.num_cpu_blocks:
        lines.append(f"num_cpu_blocks: {estimate.num_cpu_blocks:,}")
    if estimate.defaults:
        resolved = (f"{name}={getattr(estimate, name)}" for name in estimate.defaults)
        lines.append(f"at their defaults: {', '.join(resolved)}")
    lines += [f"not simulated: {line}" for line in estimate.not_simulated]
    lines += [f"warning: {warning}" for warning in estimate.warnings]
    lines += [f"outside the data: {reason}" for reason in estimate.extrapolated]
    return "\n".join(lines)


def _tokens_in_words(estimate: CapacityEstimate) -> list[str]:
    """Return the pool as SGLang's log tells it."""
    if not is_sglang(estimate.engine_version):
        return []
    num_requests = estimate.max_num_seqs
    windows = ""
    if estimate.swa_max_total_num_tokens:
        windows = f"of layers with a window {estimate.swa_max_total_num_tokens:,}, "
    return [
        f"max_total_num_tokens: {estimate.kv_cache_tokens:,}, {windows}"
        f"max_running_requests: {num_requests:,}"
    ]


def _ranks_in_words(estimate: CapacityEstimate) -> list[str]:
    size = estimate.data_parallel_size
    if size == 1:
        return []
    return [f"  on each of {size} data-parallel ranks, a pool of its own"]


def _block_in_words(estimate: CapacityEstimate) -> str:
    size = f"block: {estimate.block_bytes / MIB:g} MiB"
    groups = estimate.kv_cache_groups
    if not groups:
        tokens = f"{estimate.block_size} tokens"
        return f"{size} ({tokens}, KV in {estimate.kv_cache_dtype})"
    if estimate.swa_max_total_num_tokens:
        tokens = f"{estimate.block_size} tokens, KV in {estimate.kv_cache_dtype}"
        return f"{size} ({tokens}), with what stands beside it in the other pool"
    layers = max(group["num_layers"] for group in groups)
    return (
        f"{size} ({layers} layers, KV in {estimate.kv_cache_dtype}), whichever group it"
        " belongs to"
    )


def _groups_in_words(estimate: CapacityEstimate) -> list[str]:
    """Return a line for groups alike: layers, tokens, pages, blocks of a request."""
    groups = estimate.kv_cache_groups
    if not groups:
        return []
    number = sum(group["num_groups"] for group in groups)
    most = sum(group["num_groups"] * group["blocks_per_request"] for group in groups)
    where = f"{number} group{'s' * (number > 1)} in one pool"
    if estimate.swa_max_total_num_tokens:
        where = f"{number} pools"
    lines = [
        f"{where}; a request of"
        f" {estimate.max_model_len:,} tokens holds at most {most:,} blocks:"
    ]
    for group in groups:
        times = f"{group['num_groups']} x " if group["num_groups"] > 1 else ""
        lines += [
            f"  {times}{group['num_layers']} layers, {group['kind']}:"
            f" {group['block_size']:,} tokens a block,"
            f" {group['blocks_per_request']:,} blocks a request"
            + (f" of {group['num_blocks']:,}" if "num_blocks" in group else ""),
            *(
                f"    page of {count} layers: {size / KIB:g} KiB, {words}"
                for count, size, words in group["pages"]
            ),
        ]
    layout = estimate.plan.layout if estimate.plan is not None else None
    if layout is not None and layout.has_hits_inside_blocks:
        lines.append(
            f"prefix hits are multiples of {layout.cache_hit_alignment:,} tokens, also"
            " inside a block, which is then copied"
        )
    return lines
