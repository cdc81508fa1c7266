"""The profile of a finished calibration, `kvprofile/1`: tables and provenance.

No host names, no paths; the id is a hash of everything else. A profile names axes as
the cost model's estimators do; `calibrate.measurement` names them as the harness counts
them::

    decode_attention    batch, context; skewed batches are a table of their own
    prefill_attention   batch, query, past
    mixed_attention     query, past, num_decodes, decode_context
    gemm                m
    moe                 tokens, activated_experts
    swap, copy          num_blocks, block_bytes, num_descriptors
    layer               tokens; the constant `layer` says which, `per` what they are

The leading metric is the operation itself; others are tables beside it, named
``decode_attention.host``, say.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from calibrate.harness.plan import UNSTABLE
from calibrate.measurement import CHOSEN, canonical, leading_metric, quantile
from calibrate.precisions import weight_bits
from sim.hardware.models.architecture import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from calibrate.harness.device import Device
    from calibrate.harness.outcome import Outcome, Settings
    from calibrate.measurement import Curve, Measurement, Point

_Named = tuple[str, dict[str, int | str], dict[str, int]]
"""Operation, constants and axes in the names of a profile."""
LAYERS = ("norm", "rope", "activation", "cache_write", "router", "sampler")
"""Operations that cost by tokens and are one table kind."""
QUANTILES = ("p10_s", "p50_s", "p90_s", "p99_s", "mean_s")
FORMAT = "kvprofile/1"
FEWEST_SENTINELS = 3
"""Blocks below which nothing can be said about stability."""


def tables(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return the tables of a profile, in the order in which curves first appear."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    leads = _leads(measurements)
    for item in measurements:
        lead = leads[item.point.curve]
        operation, constants, axes = _named(item.point)
        for metric, times in item.metrics.items():
            name = operation if metric == lead else f"{operation}.{metric}"
            table = found.setdefault(
                (name, operation, item.point.curve),
                {
                    "operation": name,
                    "variant": item.point.curve.variant,
                    "dtype": item.point.curve.dtype,
                    "metric": metric,
                    "constants": constants,
                    "axes": {axis: [] for axis in axes},
                    "quantiles": {quantile: [] for quantile in QUANTILES},
                    "n": [],
                },
            )
            for axis, value in axes.items():
                table["axes"][axis].append(value)
            for share in QUANTILES:
                table["quantiles"][share].append(getattr(times, share))
            table["n"].append(times.n)
    return list(found.values())


def _leads(measurements: Sequence[Measurement]) -> dict[Curve, str]:
    """Return the metric that stands for each curve: one for all of its points."""
    seen: dict[Curve, set[str]] = {}
    for item in measurements:
        seen.setdefault(item.point.curve, set()).update(item.metrics)
    return {at: leading_metric(dict.fromkeys(names)) for at, names in seen.items()}


def _named(point: Point) -> _Named:
    """Return operation, constants and axes of a point in the profile's names."""
    at, axes = point.curve, point.axes
    constants = dict(at.constants)
    if at.operation.endswith("_attention"):
        more = {"kv_itemsize": DTYPE_BYTES[at.dtype], "window": 0}
        name, shape = _attention(point)
        return name, constants | more, shape
    if at.operation in LAYERS:
        per = "sequences" if at.operation == "sampler" else "tokens"
        named = constants | {"layer": at.operation, "per": per}
        return "layer", named, {"tokens": point.values[0]}
    if at.operation in _NAMED:
        return _NAMED[at.operation](at, axes)
    return at.operation, constants, axes


def _gemm(at: Curve, axes: Mapping[str, int]) -> _Named:
    constants = dict(at.constants) | {"weight_bits": weight_bits(at.dtype)}
    return "gemm", constants, {"m": axes["num_tokens"]}


def _swap(at: Curve, axes: Mapping[str, int]) -> _Named:
    moved = {
        "num_blocks": axes["num_pages"],
        "block_bytes": axes["page_bytes"],
        "num_descriptors": axes["num_pages"],
    }
    return "swap", dict(at.constants), moved


def _copy(at: Curve, axes: Mapping[str, int]) -> _Named:
    planes = 2 * at.constant("num_layers")
    copied = {
        "num_blocks": axes["num_blocks"],
        "block_bytes": planes * at.constant("page_bytes"),
        "num_descriptors": planes * axes["num_blocks"],
    }
    return "copy", dict(at.constants), copied


def _experts(at: Curve, axes: Mapping[str, int]) -> _Named:
    constants: dict[str, int | str] = {
        "hidden_size": at.constant("hidden_size"),
        "inter_size": at.constant("intermediate_size"),
        "num_experts": at.constant("num_experts"),
        "top_k": at.constant("experts_per_token"),
        "num_ranks": 1,
        "weight_bits": weight_bits(at.dtype),
        "routing": CHOSEN,
    }
    touched = axes["num_touched"]
    return (
        "moe",
        constants,
        {"tokens": axes["num_tokens"], "activated_experts": touched},
    )


_NAMED: Mapping[str, Callable[[Curve, Mapping[str, int]], _Named]] = {
    "gemm": _gemm,
    "swap": _swap,
    "copy_blocks": _copy,
    "routed_experts": _experts,
}


def _attention(point: Point) -> tuple[str, dict[str, int]]:
    axes = point.axes
    if point.curve.operation == "prefill_attention":
        query, past = point.values
        return "prefill_attention", {"batch": 1, "query": query, "past": past}
    if point.curve.operation == "mixed_attention":
        query, past, num_decodes, total = point.values
        return "mixed_attention", {
            "query": query,
            "past": past,
            "num_decodes": num_decodes,
            "decode_context": total // num_decodes,
        }
    batch, total, longest = point.values
    if total == batch * longest:
        return "decode_attention", {"batch": batch, "context": longest}
    return "decode_attention_skewed", axes


def profile_of(outcome: Outcome, settings: Settings, device: Device) -> dict[str, Any]:
    facts = device.facts()
    physics = device.physics
    rates = {
        "bandwidth_bytes_per_s": physics.memory_bytes_per_s,
        "flops_per_s": physics.flops_per_s,
        "flops_8bit_per_s": physics.flops_8bit_per_s,
        "host_bytes_per_s": physics.host_bytes_per_s,
        "link_bytes_per_s": physics.link_bytes_per_s,
    }
    geometry = settings.geometry
    provenance = {
        **{name: found for name, found in facts.items() if name != "kind"},
        "device": {**rates, **facts["device"], "clocks": _clocks(outcome.clocks)},
        "tool": f"kvsim {_version()}",
        "date": outcome.started,
        "duration_s": outcome.duration_s,
        "preset": settings.preset,
        "seed": settings.seed,
        "model": {name: getattr(geometry, name) for name in geometry.__slots__},
        "backends": outcome.backends,
        "correctness": {
            key: {"error": check.error, "tolerance": check.tolerance}
            for key, check in outcome.checks.items()
            if not check.reason
        },
        "refused": {
            key: check.reason or f"error {check.error:.3g} above {check.tolerance:.3g}"
            for key, check in outcome.checks.items()
            if not check.passed
        },
        "skipped": outcome.skipped,
        "stability": stability(outcome),
    }
    if not outcome.visits.are_all:
        visits = outcome.visits
        provenance["cut_short"] = {"visits": visits.done, "asked": visits.asked}
    profile = {
        "format": FORMAT,
        "kind": facts["kind"],
        "units": {"size": "byte", "time": "s"},
        "provenance": provenance,
        "ops": tables(outcome.measurements),
        "interference": {"points": outcome.interference},
        "steps": [],
        "fit": {},
    }
    digest = hashlib.sha256(canonical(profile).encode()).hexdigest()
    return profile | {"id": f"sha256:{digest}"}


def _version() -> str:
    """Return the tool's version; run from a folder of sources, it has none."""
    try:
        return version("kvsim")
    except PackageNotFoundError:
        return "not installed"


def stability(outcome: Outcome) -> dict[str, Any]:
    """Return how far the sentinels wandered: p95 over p5, and the verdict.

    `stable` is None where there were too few blocks to tell.
    """
    ratios = {
        name: quantile(sorted(times), 0.95) / quantile(sorted(times), 0.05)
        for name, times in outcome.sentinels.items()
    }
    counts = [len(times) for times in outcome.sentinels.values()]
    known = bool(counts) and min(counts) >= FEWEST_SENTINELS
    return {
        "ratios": ratios,
        "stable": max(ratios.values()) <= UNSTABLE if known else None,
        "threshold": UNSTABLE,
        "num_blocks": max(counts, default=0),
        "unsettled_points": sum(not found.settled for found in outcome.measurements),
    }


def _clocks(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the range of each reading, and every reason to throttle that was seen."""
    ranges: dict[str, Any] = {}
    for name in sorted({name for reading in readings for name in reading}):
        values = [reading[name] for reading in readings if name in reading]
        if all(isinstance(value, int | float) for value in values):
            ranges[name] = [min(values), max(values)]
        else:
            ranges[name] = sorted({str(value) for value in values})
    return ranges
