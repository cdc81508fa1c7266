"""A capacity estimate in words: a table, GiB by GiB, and what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.hardware.gpus import GIB

if TYPE_CHECKING:
    from sim.hardware.capacity.estimate import CapacityEstimate


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
