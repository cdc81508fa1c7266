"""The least that a call must move and compute: the floor under its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrate.precisions import weight_bits
from sim.hardware.models.architecture import DTYPE_BYTES

if TYPE_CHECKING:
    from calibrate.harness.device import Physics
    from calibrate.measurement import Curve, Point


def least_bytes(point: Point) -> float:
    """Return the bytes that must cross the device's memory bus, or the host's.

    Each input is read once and each output written once; queries, outputs and tables of
    attention are left out beside keys and values.
    """
    axes, at = point.axes, point.curve
    if at.operation in {"swap", "copy_blocks", "launch"}:
        return _moved_bytes(point)
    if at.operation == "routed_experts":
        weights = _expert_weights(at) * weight_bits(at.dtype) / 8
        # tokens and their sums are of 16 bits, whatever the weights are
        tokens = 4 * axes["num_tokens"] * at.constant("hidden_size")
        return axes["num_touched"] * weights + tokens
    itemsize = DTYPE_BYTES[at.dtype]
    if at.operation in {"gemm", "router"}:
        n, k = _product(at)
        m = axes["num_tokens"]
        return float(itemsize * (n * k + m * (n + k)))
    if at.operation.endswith("_attention"):
        keys = sum(axes.get(name, 0) for name in ("past_tokens", "context_tokens"))
        keys += axes.get("query_tokens", 0)
        width = at.constant("num_kv_heads") * at.constant("head_dim")
        return float(2 * itemsize * keys * width)
    return float(2 * itemsize * next(iter(axes.values())) * _width(point))


def _moved_bytes(point: Point) -> float:
    axes, at = point.axes, point.curve
    if at.operation == "swap":
        return float(axes["num_pages"] * axes["page_bytes"])
    if at.operation == "launch":
        return 0.0
    planes = 2 * at.constant("num_layers")
    return 2.0 * planes * at.constant("page_bytes") * axes["num_blocks"]


def _product(at: Curve) -> tuple[int, int]:
    """Return (n, k) of a product (m, k) times (k, n)."""
    if at.operation == "router":
        return at.constant("num_experts"), at.constant("hidden_size")
    return at.constant("n"), at.constant("k")


def _expert_weights(at: Curve) -> int:
    """Return the weights of one expert: gate, up and down projection."""
    return 3 * at.constant("hidden_size") * at.constant("intermediate_size")


def _width(point: Point) -> int:
    """Return elements of a token, read once and written once."""
    at = point.curve
    if at.operation in {"rope", "cache_write"}:
        heads = at.constant("num_kv_heads")
        heads = 2 * heads if at.operation == "cache_write" else heads
        extra = at.constant("num_heads") if at.operation == "rope" else 0
        return (heads + extra) * at.constant("head_dim")
    names = {
        "norm": "hidden_size",
        "activation": "intermediate_size",
        "sampler": "vocab_size",
    }
    # a sampler reads its logits and writes one token
    width = at.constant(names[at.operation])
    return width // 2 if at.operation == "sampler" else width


def least_flops(point: Point) -> float:
    """Return the operations of matrix units that a call needs."""
    axes, at = point.axes, point.curve
    if at.operation in {"gemm", "router"}:
        n, k = _product(at)
        return 2.0 * axes["num_tokens"] * n * k
    if at.operation == "routed_experts":
        rows = axes["num_tokens"] * at.constant("experts_per_token")
        return 2.0 * rows * _expert_weights(at)
    if at.operation.endswith("_attention"):
        width = at.constant("num_heads") * at.constant("head_dim")
        query = axes.get("query_tokens", 0)
        # causal: token i of the chunk sees past + i + 1 keys
        pairs = query * axes.get("past_tokens", 0) + query * (query + 1) / 2
        return 4.0 * width * (pairs + axes.get("context_tokens", 0))
    return 0.0


def floor_s(point: Point, physics: Physics) -> float:
    """Return the time in seconds that a call cannot be below at datasheet rates."""
    if point.curve.operation == "swap":
        # both directions at once share the pages
        ways = 2 if point.curve.text("direction") == "both" else 1
        return least_bytes(point) / (ways * physics.host_bytes_per_s)
    # only weights of FP8 are multiplied in eight bits
    is_fp8 = point.curve.dtype.startswith("fp8")
    flops = physics.flops_8bit_per_s if is_fp8 else physics.flops_per_s
    return max(
        least_bytes(point) / physics.memory_bytes_per_s, least_flops(point) / flops
    )
