"""The real device's code on a CPU: small, with the host's clock for a stopwatch."""

from __future__ import annotations

from typing import Any

from calibrate.gpu.device import GpuDevice, Hardware
from calibrate.harness.device import Physics
from calibrate.harness.geometry import Geometry
from calibrate.harness.grid import MIB
from calibrate.measurement import Point, curve
from tests.calibrate.cpu_timers import CpuTimers

TINY = Geometry(
    model="tiny",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=128,
    dtype="bfloat16",
    block_size=16,
)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}

EXPERTS = {
    "hidden_size": 64,
    "num_experts": 8,
    "experts_per_token": 2,
    "intermediate_size": 96,
}


class CpuDevice(GpuDevice):
    """Says who it is without asking a driver."""

    def facts(self) -> dict[str, Any]:
        return {"kind": "measured", "device": {"name": "cpu"}, "versions": {}}

    def clocks(self) -> dict[str, Any]:
        return {}


def cpu_device(*backends: str) -> GpuDevice:
    names = ("vllm", "flashinfer", "cuda", "triton", "torch")
    hardware = Hardware(
        Physics(1e12, 1e15, 1e15, 1e12, 1e12),
        num_sms=4,
        l2_bytes=MIB,
        arena_bytes=24 * MIB,
        transfer_bytes=4 * MIB,
    )
    missing = {name: "" if name in backends else f"no {name}" for name in names}
    return CpuDevice(CpuTimers(), hardware, missing, None)


def small_points(operation: str, variant: str) -> list[Point]:
    """Return a few shapes of an operation in the tiny geometry."""
    dtype = TINY.dtype
    if operation == "decode_attention":
        at = curve(operation, variant, dtype, HEADS)
        return [Point(at, (2, 40, 20)), Point(at, (3, 200, 100))]
    if operation == "prefill_attention":
        at = curve(operation, variant, dtype, HEADS)
        return [Point(at, (9, 30)), Point(at, (16, 0))]
    if operation == "mixed_attention":
        return [Point(curve(operation, variant, dtype, HEADS), (8, 10, 2, 33))]
    if operation == "copy_blocks":
        constants = {"num_layers": 2, "page_bytes": TINY.page_bytes}
        return [Point(curve(operation, variant, dtype, constants), (3,))]
    if operation == "launch":
        return [Point(curve(operation, variant, "none", {}), (8,))]
    if operation == "swap":
        return [
            Point(
                curve(
                    operation,
                    variant,
                    "bytes",
                    {"direction": direction, "memory": "pinned"},
                ),
                (5, 4096),
            )
            for direction in ("h2d", "d2h", "both")
        ]
    constants = {
        "gemm": {"layer": "o", "n": 48, "k": 32},
        "norm": {"hidden_size": 64},
        "activation": {"intermediate_size": 96},
        "sampler": {"vocab_size": 128},
        "rope": {key: HEADS[key] for key in ("num_heads", "num_kv_heads", "head_dim")},
        "cache_write": HEADS,
        "router": {key: EXPERTS[key] for key in EXPERTS if key[0] != "i"},
        "routed_experts": EXPERTS,
    }[operation]
    if operation == "routed_experts":
        at = curve(operation, variant, dtype, constants)
        return [Point(at, (5, 6)), Point(at, (40, 8))]
    return [Point(curve(operation, variant, dtype, constants), (5,))]
