"""The summary when a calibration ends: its times beside their references."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibrate.harness.grid import GIB
from calibrate.harness.output import stability
from calibrate.harness.work import floor_s, least_bytes, least_flops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from calibrate.harness.device import Device, Physics
    from calibrate.harness.outcome import Outcome
    from calibrate.measurement import Measurement

FASTER_THAN_PHYSICS = 1.1
"""Share over the datasheet's peak that boost clocks explain."""


_THROTTLES = {
    0x04: "power limit",
    0x88: "slowed by its power supply",
    0x60: "too hot",
}
"""Bits of NVML's reasons to lower a clock (``nvmlClocksEventReason...``)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the summary."""

    what: str
    measured: str
    reference: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published time of one shape on one device."""

    device: str
    """In the device's name."""
    what: str
    operation: str
    axes: dict[str, int]
    constants: dict[str, int]
    low_s: float
    high_s: float


ANCHORS = (
    Anchor("H200", "GEMM 6144 x 4096, M = 1", "gemm", {"num_tokens": 1},
           {"n": 6144, "k": 4096}, 16e-6, 16e-6),
    Anchor("H200", "GEMM 6144 x 4096, M = 2048", "gemm", {"num_tokens": 2048},
           {"n": 6144, "k": 4096}, 132e-6, 132e-6),
    Anchor("H200", "prefill of 2048, a layer", "prefill_attention",
           {"query_tokens": 2048, "past_tokens": 0},
           {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}, 87e-6, 87e-6),
    Anchor("H200", "decode, 1 x 128 tokens, a layer", "decode_attention",
           {"num_seqs": 1, "longest_context_tokens": 128},
           {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}, 10e-6, 12e-6),
    Anchor("H200", "decode, 64 x 2048 tokens, a layer", "decode_attention",
           {"num_seqs": 64, "longest_context_tokens": 2048},
           {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}, 140e-6, 140e-6),
)  # fmt: skip
"""Times that others measured, bf16: the kernel tables of aiconfigurator (vLLM 0.24)."""


def rows(outcome: Outcome, device: Device, name: str) -> list[Row]:
    """Return the summary's lines; the device's name picks the anchors."""
    found = outcome.measurements
    physics = device.physics
    return [
        *_physical(found, physics),
        *_anchors(found, name),
        *_overlap(outcome),
        *_doubts(outcome, physics),
    ]


def _physical(found: Sequence[Measurement], physics: Physics) -> list[Row]:
    """Compare the best rate of each operation with the datasheet."""
    lines: list[Row] = []

    def best(
        what: str,
        chosen: list[Measurement],
        amount: Callable[[Measurement], float],
        peak: float,
        unit: tuple[float, str],
    ) -> None:
        if chosen:
            rate = max(amount(item) / item.median_s for item in chosen)
            scale, name = unit
            lines.append(
                Row(
                    what,
                    f"{rate / scale:,.1f} {name}",
                    f"{peak / scale:,.1f} {name} peak",
                    f"{rate / peak:.0%}",
                )
            )

    def of(operation: str, variant: str | None = None) -> list[Measurement]:
        return [
            item
            for item in found
            if item.point.curve.operation == operation
            and variant in {None, item.point.curve.variant}
        ]

    def moved(item: Measurement) -> float:
        return least_bytes(item.point)

    def computed(item: Measurement) -> float:
        return least_flops(item.point)

    terabytes, teraflops, gigabytes = (1e12, "TB/s"), (1e12, "TFLOP/s"), (1e9, "GB/s")
    memory, flops = physics.memory_bytes_per_s, physics.flops_per_s
    best("decode, best KV bandwidth", of("decode_attention"), moved, memory, terabytes)
    best("prefill, best rate", of("prefill_attention"), computed, flops, teraflops)
    best("GEMM, best rate", of("gemm"), computed, flops, teraflops)
    for variant in sorted({item.point.curve.variant for item in of("routed_experts")}):
        experts, name = of("routed_experts", variant), f"experts by {variant}"
        is_fp8 = experts[0].point.curve.dtype.startswith("fp8")
        peak = physics.flops_8bit_per_s if is_fp8 else flops
        best(f"{name}, bandwidth", experts, moved, memory, terabytes)
        best(f"{name}, rate", experts, computed, peak, teraflops)
    best("block copy, best bandwidth", of("copy_blocks"), moved, memory, terabytes)
    lines += _decode_beside_copy(of("decode_attention"), of("copy_blocks"))
    host = physics.host_bytes_per_s
    for variant in sorted({item.point.curve.variant for item in of("swap")}):
        best(f"swap, {variant}", of("swap", variant), moved, host, gigabytes)
    return lines


def _decode_beside_copy(
    decodes: Sequence[Measurement], copies: Sequence[Measurement]
) -> list[Row]:
    """Compare the decode nearest to 1 GiB of keys and values with the best copy.

    Both are limited by the same memory; a datasheet's bandwidth no kernel reaches.
    """
    large = [item for item in decodes if least_bytes(item.point) >= GIB / 2]
    if not large or not copies:
        return []
    off = {id(item): abs(math.log(least_bytes(item.point) / GIB)) for item in large}
    nearest = min(large, key=lambda item: (off[id(item)], item.median_s))
    decode, copy = (
        max(least_bytes(item.point) / item.median_s for item in items)
        for items in ([nearest], copies)
    )
    size = f"decode of {least_bytes(nearest.point) / GIB:.2g} GiB"
    reached, best = f"{decode / 1e12:,.1f} TB/s", f"{copy / 1e12:,.1f} TB/s copied"
    return [Row(size, reached, best, f"{decode / copy:.0%}")]


def _anchors(found: Sequence[Measurement], name: str) -> list[Row]:
    lines = []
    for anchor in ANCHORS:
        if anchor.device not in name:
            continue
        times = [item.median_s for item in found if _fits(anchor, item)]
        if times:
            best_s = min(times)
            span = f"{anchor.low_s * 1e6:.0f}"
            if anchor.high_s > anchor.low_s:
                span += f"-{anchor.high_s * 1e6:.0f}"
            middle_s = (anchor.low_s + anchor.high_s) / 2
            lines.append(
                Row(
                    anchor.what,
                    f"{best_s * 1e6:,.1f} us",
                    f"{span} us published",
                    f"{best_s / middle_s:.2f} x",
                )
            )
    return lines


def _fits(anchor: Anchor, item: Measurement) -> bool:
    at, axes = item.point.curve, item.point.axes
    constants = dict(at.constants)
    return (
        at.operation == anchor.operation
        and all(axes[name] == value for name, value in anchor.axes.items())
        and all(constants[name] == value for name, value in anchor.constants.items())
    )


def _overlap(outcome: Outcome) -> list[Row]:
    return [
        Row(
            "step beside a transfer",
            f"step {item['step_slowdown']:.2f} x",
            f"transfer {item['transfer_slowdown']:.2f} x",
        )
        for item in outcome.interference
    ]


def _clock(readings: Sequence[dict[str, Any]]) -> list[Row]:
    """Return how the clock of the GPU went, which kernels that compute follow."""
    key = "clocks.sm"
    rates = [reading[key] for reading in readings if key in reading]
    if not rates:
        return []
    seen = {str(reading.get("throttle_reasons")) for reading in readings}
    known = [int(bits, 16) for bits in seen if bits.startswith("0x")]
    causes = [why for bits, why in _THROTTLES.items() if any(bits & s for s in known)]
    span = f"{min(rates):,.0f} to {max(rates):,.0f} MHz"
    return [Row("clock of the GPU", span, "", ", ".join(causes))]


def _doubts(outcome: Outcome, physics: Physics) -> list[Row]:
    found = outcome.measurements
    lines = []
    fast = [
        item.point
        for item in found
        if item.median_s * FASTER_THAN_PHYSICS < floor_s(item.point, physics)
    ]
    if fast:
        lines.append(Row("faster than physics", f"{len(fast)} points", fast[0].key))
    verdict = stability(outcome)
    ratios = verdict["ratios"]
    worst = max(ratios, key=lambda name: ratios[name], default="")
    words = {True: "stable", False: "UNSTABLE", None: "too few blocks to tell"}
    lines.append(
        Row(
            "sentinels, p95 over p5",
            f"{ratios.get(worst, 1.0):.3f} {worst}".strip(),
            f"at most {verdict['threshold']}",
            words[verdict["stable"]],
        )
    )
    if verdict["stable"] is False:
        lines += _clock(outcome.clocks)
    if not outcome.visits.are_all:
        done, asked = outcome.visits.done, outcome.visits.asked
        lines.append(Row("cut short", f"{done} of {asked} visits", ""))
    if unsettled := verdict["unsettled_points"]:
        lines.append(Row("never settled", f"{unsettled} of {len(found)} points", ""))
    refused = [key for key, check in outcome.checks.items() if not check.passed]
    if refused:
        lines.append(Row("refused by the gate", f"{len(refused)} curves", refused[0]))
    if outcome.skipped:
        key, reason = next(iter(outcome.skipped.items()))
        count = f"{len(outcome.skipped)} points"
        lines.append(Row("left out", count, f"{key}: {reason}"))
    return lines
