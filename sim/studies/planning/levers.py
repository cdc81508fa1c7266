"""What can be changed about a configuration, as configuration keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.costs.roofline_parameters import RooflineParameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sim.config.tables import EngineConfig
    from sim.studies.planning.candidates import Candidate

_RELAXED = 1.1
"""Resources are made a tenth larger, all alike, so that gains can be compared."""

_RATES = {
    "compute": (
        "gemm_compute_efficiency",
        "fp8_gemm_compute_efficiency",
        "moe_compute_efficiency",
        "prefill_attention_efficiency",
    ),
    "memory_bandwidth": (
        "gemm_bandwidth_efficiency",
        "decode_bandwidth_efficiency",
        "fp8_decode_bandwidth_efficiency",
        "elementwise_bandwidth_efficiency",
        "copy_efficiency",
    ),
    "interconnect": ("allreduce_efficiency",),
    "swap_bandwidth": ("swap_efficiency",),
}
_TIMES = {
    "interconnect": ("allreduce_latency_s",),
    "swap_bandwidth": ("swap_call_s",),
    "host": ("step_overhead_s", "request_overhead_s", "layer_latency_s"),
}
RESOURCE_WORDS = {
    "kv_capacity": "KV blocks",
    "compute": "compute",
    "memory_bandwidth": "memory bandwidth",
    "interconnect": "interconnect",
    "swap_bandwidth": "swap bandwidth",
    "host": "host",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}


@dataclass(frozen=True, slots=True)
class Lever:
    """One change.

    Parameters
    ----------
    name
        What is changed, in words.
    change
        How, in words: ``x 1.1``, ``32``, ``off``.
    overrides
        Configuration keys with dots, and their new values.
    resource
        The resource that it makes a tenth larger; empty for other changes.
    """

    name: str
    change: str
    overrides: Mapping[str, Any]
    resource: str = ""

    def apply(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration with the change."""
        changed = {**run}
        for key, value in self.overrides.items():
            table, _, name = key.partition(".")
            changed[table] = {**changed[table], name: value}
        return changed


def levers_of(
    candidate: Candidate, settings: Mapping[str, list[Any]]
) -> Iterator[Lever]:
    """Yield all changes that the candidate's generation has.

    Parameters
    ----------
    candidate
        Whose configuration is changed.
    settings
        Values of engine keys that the user wants to see as well.
    """
    engine = parse_config(dict(candidate.run)).engine
    yield from _resources(candidate)
    yield from _limits(candidate)
    yield from _cache(candidate, engine)
    yield from _preemption(engine)
    for key, values in settings.items():
        for value in values:
            if value != getattr(engine, key):
                yield _engine(key, value)


def _engine(key: str, value: Any, change: str = "", resource: str = "") -> Lever:
    word = str(value)
    if isinstance(value, bool):
        word = "on" if value else "off"
    said = change or word
    return Lever(key, said, {f"engine.{key}": value}, resource)


def _resources(candidate: Candidate) -> Iterator[Lever]:
    """Yield each resource of time a tenth larger, where the cost model lets it be."""
    cost = candidate.run["cost"]
    if cost["kind"] != "roofline":
        return
    for resource in (*_RATES, "host"):
        if resource == "interconnect" and candidate.num_gpus == 1:
            continue
        if resource == "swap_bandwidth" and not _swaps(candidate):
            continue
        overrides = {
            f"cost.{key}": min(1.0, _value(cost, key) * _RELAXED)
            for key in _RATES.get(resource, ())
        } | {
            f"cost.{key}": _value(cost, key) / _RELAXED
            for key in _TIMES.get(resource, ())
        }
        yield Lever(RESOURCE_WORDS[resource], "+10 %", overrides, resource)


def _value(cost: Mapping[str, Any], key: str) -> float:
    default = RooflineParameters.__dataclass_fields__[key].default
    return float(cost.get(key, default))


def _limits(candidate: Candidate) -> Iterator[Lever]:
    capacity = candidate.capacity
    assert capacity is not None
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(capacity, key)
        yield _engine(key, round(value * _RELAXED), "+10 %", key)
        yield _engine(key, max(1, value // 2), f"x 0.5 ({max(1, value // 2):,})")
        yield _engine(key, value * 2, f"x 2 ({value * 2:,})")


def _cache(candidate: Candidate, engine: EngineConfig) -> Iterator[Lever]:
    capacity = candidate.capacity
    assert capacity is not None
    for factor, resource in ((_RELAXED, "kv_capacity"), (0.5, ""), (2.0, "")):
        number = max(2, round(capacity.num_gpu_blocks * factor))
        said = "+10 %" if resource else f"x {factor:g} ({number:,})"
        key = "engine.num_gpu_blocks_override"
        yield Lever("KV blocks", said, {key: number}, resource)
    pool = engine.num_gpu_blocks_override
    for size in {engine.block_size // 2 or 1, engine.block_size * 2}:
        overrides: dict[str, Any] = {"engine.block_size": size}
        if pool is not None:  # as many tokens as before
            overrides["engine.num_gpu_blocks_override"] = max(
                2, pool * engine.block_size // size
            )
        yield Lever("block_size", str(size), overrides)
    if "watermark" in engine.generation.keys:
        for share in (0.0, 0.05):
            if share != engine.watermark:
                yield _engine("watermark", share)
    if engine.generation.enable_prefix_caching is not None:
        yield _engine("enable_prefix_caching", not engine.prefix_caching)


def _swaps(candidate: Candidate) -> bool:
    return parse_config(dict(candidate.run)).engine.generation.has_cpu_tier


def _preemption(engine: EngineConfig) -> Iterator[Lever]:
    if not engine.generation.has_cpu_tier:
        return
    for mode in ("recompute", "swap"):
        if mode != engine.preemption_mode:
            yield _engine("preemption_mode", mode)
    for factor in (0.5, 2.0):
        value = engine.swap_space * factor
        yield _engine("swap_space", value, f"x {factor:g} ({value:g} GiB)")
