"""A device that is none: a fake clock and made-up times.

Times follow a soft roofline of an H200's datasheet, with noise that depends on the
point, the visit and the metric only. Every path of the harness but the kernels thus
runs anywhere, and gives the same file each time. Nothing here was measured: a profile
of such a run says so in its provenance.
"""

from __future__ import annotations

import datetime
import math
import random
from typing import TYPE_CHECKING, Any

from calibrate.harness.device import Check, MissingError, Physics, Task
from calibrate.harness.grid import GIB, Choice, Limits
from calibrate.harness.plan import seed_of
from calibrate.harness.work import least_bytes, least_flops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibrate.harness.geometry import Geometry
    from calibrate.measurement import Curve, Point

_VARIANTS = {
    "decode_attention": ("split_kv", "paged_v2"),
    "prefill_attention": ("mixed",),
    "mixed_attention": ("mixed",),
    "swap": ("loop", "batch", "kernel"),
    "copy_blocks": ("kernel",),
    "routed_experts": ("fused_moe", "matmul_ogs", "marlin"),
}
_PHYSICS = Physics(
    memory_bytes_per_s=4.8e12,
    flops_per_s=989.4e12,
    flops_8bit_per_s=1978.9e12,
    host_bytes_per_s=64e9,
    link_bytes_per_s=450e9,
)
_ITEMSIZE = 2


class FakeClock:
    """Seconds since an epoch of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def date(self) -> str:
        """Return the time in UTC; the epoch is that of Unix."""
        epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        now = epoch + datetime.timedelta(seconds=int(self.now_s))
        return now.strftime("%Y-%m-%dT%H:%M:%SZ")


class DryTask:
    """A point whose times come from a formula."""

    def __init__(self, point: Point, seed: int, clock: FakeClock) -> None:
        self._point = point
        self._clock = clock
        self._random = random.Random(seed)
        self._base_s = ideal_s(point)
        transfer = point.curve.operation == "swap"
        self.metrics = ("device", "host") if transfer else ("device", "eager", "host")

    def repeats(self, metric: str) -> int:
        return 8 if metric == "device" and self._point.curve.operation != "swap" else 1

    def sample(self, metric: str, count: int) -> list[float]:
        """Return samples with one per cent of noise, and move the clock."""
        base_s = {
            "device": self._base_s,
            "eager": self._base_s * 1.15 + 1e-6,
            "host": _host_s(self._point),
        }[metric]
        samples = [
            base_s * self._random.lognormvariate(0.0, 0.01) for _ in range(count)
        ]
        self._clock.now_s += math.fsum(samples) * self.repeats(metric)
        return samples

    def close(self) -> None: ...


def ideal_s(point: Point) -> float:
    """Return a made-up time in seconds: floor, bytes and arithmetic, softly added."""
    axes, at = point.axes, point.curve
    if at.operation == "swap":
        moved_s = axes["num_pages"] * axes["page_bytes"] / _PHYSICS.host_bytes_per_s
        calls_s = _host_s(point)
        return 5e-6 + math.hypot(moved_s / 0.85, calls_s)
    num_bytes, flops = _work(point)
    memory_s = num_bytes / (0.88 * _PHYSICS.memory_bytes_per_s)
    compute_s = flops / (0.7 * _PHYSICS.flops_per_s)
    return 4e-6 + math.hypot(memory_s, compute_s)


def _work(point: Point) -> tuple[float, float]:
    axes, at = point.axes, point.curve
    if at.operation == "launch":
        return axes["num_launches"] * 5e6, 0.0
    if at.operation in {"router", "routed_experts"}:
        return least_bytes(point), least_flops(point)
    if at.operation.endswith("_attention"):
        return _attention_work(axes, at)
    if at.operation == "copy_blocks":
        page_bytes = at.constant("page_bytes") * at.constant("num_layers")
        return 4.0 * page_bytes * axes["num_blocks"], 0.0
    if at.operation == "gemm":
        n, k, m = at.constant("n"), at.constant("k"), axes["num_tokens"]
        return _ITEMSIZE * (n * k + m * (n + k)), 2.0 * m * n * k
    width = 1
    for _, value in at.constants:
        width *= value if isinstance(value, int) else 1
    return 4.0 * _ITEMSIZE * width * next(iter(axes.values())), 0.0


def _attention_work(axes: Mapping[str, int], at: Curve) -> tuple[float, float]:
    query = axes.get("query_tokens", 0)
    keys = axes.get("past_tokens", 0) + query + axes.get("context_tokens", 0)
    wide = at.constant("head_dim") * _ITEMSIZE
    pairs = query * axes.get("past_tokens", 0) + query * query / 2
    flops = 4.0 * at.constant("num_heads") * at.constant("head_dim") * pairs
    return 2.0 * keys * at.constant("num_kv_heads") * wide, flops


def _host_s(point: Point) -> float:
    if point.curve.operation == "swap":
        per_page = {"loop": 2.5e-6, "batch": 0.5e-6, "kernel": 0.0}
        return 6e-6 + per_page[point.curve.variant] * point.axes["num_pages"]
    return 6e-6 * point.axes.get("num_launches", 1)


class DryRunDevice:
    """The device on a fake clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.physics = _PHYSICS
        self.limits = Limits(
            kv_tokens_bytes=13 * GIB, transfer_bytes=GIB, pool_bytes=16 * GIB
        )

    def facts(self) -> dict[str, Any]:
        return {
            "kind": "dry-run",
            "device": {
                "name": "dry run (nothing was measured)",
                "num_sms": 132,
                "l2_bytes": 50 << 20,
                "memory_bytes": 141 * 10**9,
                "driver": "none",
                "cuda": "none",
            },
            "host": {"cpu": "any"},
            "versions": {},
        }

    def clocks(self) -> dict[str, Any]:
        return {"clocks.sm": 0.0}

    def now_s(self) -> float:
        return self.clock.now_s

    def date(self) -> str:
        return self.clock.date()

    def choices(self, backend: str, operations: Sequence[str]) -> list[Choice]:
        if backend not in {"auto", "dry-run"}:
            raise MissingError(
                f"--dry-run runs no kernels and takes no --backend; got {backend!r}"
            )
        return [
            Choice(operation, variant, "dry-run")
            for operation in operations
            for variant in _VARIANTS.get(operation, ("torch",))
        ]

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        del geometry, at, backend
        return Check(error=0.0, tolerance=0.0)

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        del backend
        return DryTask(point, seed_of(seed, point.key), self.clock)

    def overlap(
        self, points: Mapping[str, Point], backends: Mapping[str, str], seed: int
    ) -> dict[str, list[float]]:
        """Return made-up times: a step 6 % slower, a transfer 3 %."""
        del backends
        noise = random.Random(seed)
        slower = {"step": 1.06, "transfer": 1.03}
        times: dict[str, list[float]] = {}
        for name, point in points.items():
            for suffix, factor in (("alone", 1.0), ("with", slower[name])):
                times[f"{name}_{suffix}"] = [
                    ideal_s(point) * factor * noise.lognormvariate(0.0, 0.01)
                    for _ in range(10)
                ]
        self.clock.now_s += math.fsum(map(math.fsum, times.values()))
        return times
