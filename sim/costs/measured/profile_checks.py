"""Rules that a profile must obey to be believed: physics, order, and provenance."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from sim.costs.measured.profile import DRY_RUN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sim.costs.measured.profile import OpTable, Profile

_BOOST: Final = 1.1
"""Over the datasheet's peak by so much is still believed: clocks boost."""
_FASTER: Final = 0.95
"""More work may look this much faster: noise."""

_ALWAYS: Final = ("date", "tool", "device")
_DEVICE: Final = ("name", "bandwidth_bytes_per_s", "flops_per_s", "l2_bytes")
_IMPORTED: Final = ("source",)
_MEASURED: Final = ("preset", "seed", "host", "backends", "correctness", "stability")
_MEASURED_DEVICE: Final = ("num_sms", "memory_bytes", "driver", "cuda", "clocks")

_MONOTONIC: Final[dict[str, tuple[str, ...]]] = {
    "decode_attention": ("batch", "context"),
    "prefill_attention": ("batch", "query", "past"),
    "mixed_attention": ("query", "past", "num_decodes", "decode_context"),
    "gemm": ("m",),
    "moe": ("activated_experts",),
    "swap": ("num_blocks",),
    "copy": ("num_blocks",),
    "allreduce": ("bytes",),
}
"""Axes along which an operation has more to do."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a profile."""

    rule: str
    """``kind``, ``provenance``, ``floor`` or ``order``."""
    message: str
    fatal: bool = True
    """Whether the profile must not be used."""


def validate_profile(profile: Profile) -> list[Problem]:
    """Return the problems of a profile, worst first; none for a good one.

    Points in the wrong order are fatal where the profile was measured and can be
    measured again; in an import they are facts of the published table.
    """
    problems = [
        *_kind(profile),
        *_provenance(profile),
        *_floors(profile),
        *_orders(profile),
    ]
    return sorted(problems, key=lambda problem: not problem.fatal)


def _kind(profile: Profile) -> Iterator[Problem]:
    if profile.kind == DRY_RUN:
        yield Problem(
            "kind",
            "the times are of a dry run, made up: no cost model takes them; measure on "
            "a GPU, or import",
        )


def _provenance(profile: Profile) -> Iterator[Problem]:
    imported = profile.kind == "imported"
    wanted = [("", key) for key in _ALWAYS + (_IMPORTED if imported else _MEASURED)]
    device = _DEVICE if imported else _DEVICE + _MEASURED_DEVICE
    wanted += [("device.", key) for key in device]
    for prefix, key in wanted:
        holder = profile.device if prefix else profile.provenance
        if holder.get(key) in (None, "", [], {}):
            yield Problem(
                "provenance",
                f"provenance.{prefix}{key} is missing: a time without it cannot be "
                "judged",
            )


def _floors(profile: Profile) -> Iterator[Problem]:
    for table in profile.ops:
        worst: tuple[float, int, float] | None = None
        for place, seconds in enumerate(table.quantiles["p50_s"]):
            floor_s = floor_seconds(table, place, profile.device)
            if seconds < floor_s and (worst is None or seconds / floor_s < worst[0]):
                worst = seconds / floor_s, place, floor_s
        if worst is not None:
            _, place, floor_s = worst
            yield Problem(
                "floor",
                f"{_name(table)} {_point(table, place)}: "
                f"{table.quantiles['p50_s'][place]:.3g} s is faster than the device "
                f"can be ({floor_s:.3g} s); measure it again",
            )


def floor_seconds(table: OpTable, place: int, device: Mapping[str, Any]) -> float:
    """Return the seconds that the device needs at best for a point; 0 if not known.

    Bytes that fit the L2 cache may come from there and cost no bus time.
    """
    work = _work(table, place)
    if work is None:
        return 0.0
    num_bytes, flops, bits = work
    seconds = 0.0
    if table.operation == "swap":
        seconds = num_bytes / _rate(device, "host_bytes_per_s")
    elif num_bytes > (device.get("l2_bytes") or 0):
        seconds = num_bytes / _rate(device, "bandwidth_bytes_per_s")
    peak = _rate(device, "flops_per_s")
    if bits < 16 and device.get("flops_8bit_per_s"):
        peak = max(peak, _rate(device, "flops_8bit_per_s"))
    if bits < 8:
        peak *= 2
    return float(max(seconds, flops / peak) / _BOOST)


def _rate(device: Mapping[str, Any], key: str) -> float:
    """Return a rate of the datasheet; without it nothing is too fast."""
    return float(device.get(key) or "inf")


def _work(table: OpTable, place: int) -> tuple[float, float, int] | None:
    """Return bytes, FLOPs and bits an element of a point; None where not known."""
    point = dict(table.constants) | {k: v[place] for k, v in table.axes.items()}
    try:
        return _WORK[table.operation](point)
    except (KeyError, TypeError):
        return None


def _decode(point: Mapping[str, Any]) -> tuple[float, float, int]:
    seen = min(point["context"], point.get("window") or point["context"])
    keys = point["batch"] * seen
    size = point["head_dim"] * point["kv_itemsize"]
    flops = 4 * keys * point["num_heads"] * point["head_dim"]
    return 2 * keys * point["num_kv_heads"] * size, flops, 16


def _prefill(point: Mapping[str, Any]) -> tuple[float, float, int]:
    query, past = point["query"], point.get("past", 0)
    pairs = query * past + query * (query + 1) / 2
    if point.get("window"):
        pairs = min(pairs, query * point["window"])
        if past == 0:
            ramp = min(query, point["window"])
            pairs = ramp * (ramp + 1) / 2 + (query - ramp) * point["window"]
        else:
            pairs = 0.0
    flops = 4 * point["batch"] * pairs * point["num_heads"] * point["head_dim"]
    return 0.0, flops, 16


def _gemm(point: Mapping[str, Any]) -> tuple[float, float, int]:
    m, n, k, bits = (point[key] for key in ("m", "n", "k", "weight_bits"))
    return n * k * bits / 8, 2 * m * n * k, bits


def _experts(point: Mapping[str, Any]) -> tuple[float, float, int]:
    weights, bits = 3 * point["hidden_size"] * point["inter_size"], point["weight_bits"]
    rows = point["tokens"] * point["top_k"]
    return point["activated_experts"] * weights * bits / 8, 2 * rows * weights, bits


def _moved(point: Mapping[str, Any]) -> tuple[float, float, int]:
    return point["num_blocks"] * point["block_bytes"], 0.0, 16


def _copied(point: Mapping[str, Any]) -> tuple[float, float, int]:
    return 2.0 * point["num_blocks"] * point["block_bytes"], 0.0, 16


_WORK: Final[dict[str, Callable[[Mapping[str, Any]], tuple[float, float, int]]]] = {
    "decode_attention": _decode,
    "prefill_attention": _prefill,
    "gemm": _gemm,
    "moe": _experts,
    "swap": _moved,
    "copy": _copied,
}


def _orders(profile: Profile) -> Iterator[Problem]:
    fatal = profile.kind != "imported"
    for table in profile.ops:
        for axis in _MONOTONIC.get(table.operation, ()):
            if axis in table.axes:
                yield from _order(table, axis, fatal)


def _order(table: OpTable, axis: str, fatal: bool) -> Iterator[Problem]:
    others = [name for name in table.axes if name != axis]
    lines: dict[tuple[int, ...], list[tuple[int, float, int]]] = {}
    for place, seconds in enumerate(table.quantiles["p50_s"]):
        key = tuple(table.axes[name][place] for name in others)
        lines.setdefault(key, []).append((table.axes[axis][place], seconds, place))
    wrong = 0
    worst = 1.0, 0, 0.0
    for line in lines.values():
        line.sort()
        for (low, before_s, _), (high, after_s, place) in pairwise(line):
            if high > low and after_s < _FASTER * before_s:
                wrong += 1
                worst = min(worst, (after_s / before_s, place, before_s))
    if wrong:
        _, place, before_s = worst
        yield Problem(
            "order",
            f"{_name(table)}: {wrong} points with more {axis} are over 5 % faster than "
            f"the one before, the worst {_point(table, place)}: "
            f"{table.quantiles['p50_s'][place]:.3g} s after {before_s:.3g} s",
            fatal,
        )


def _name(table: OpTable) -> str:
    return f"{table.operation} ({table.variant}, {table.dtype})"


def _point(table: OpTable, place: int) -> str:
    return ", ".join(f"{key} {values[place]}" for key, values in table.axes.items())
