"""The changes that may help a run, by the resource that binds it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.hardware.gpus import GPUS, load_gpu
from sim.scheduler.v1.dialect import dialect_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sim.config.engine import EngineConfig

_FACTORS = (0.5, 2, 4)
_WATERMARK = 0.01
_MORE_MEMORY = 0.95
_ROOM = frozenset({"kv_capacity", "swap_bandwidth"})
_TIME = frozenset({"compute", "memory_bandwidth", "interconnect", "host"})
_LARGER = 1.2
"""A GPU is larger with so many times the memory."""
_MOST_RANKS = 8
"""GPUs of a node."""
_HOST_GIB = 256
"""Host memory that servers with such GPUs have to spare."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to an engine.

    Parameters
    ----------
    key
        The engine argument that it changes.
    name
        What it does, in few words.
    changes
        Values by engine argument.
    flags
        Options of ``vllm serve``; empty where it has none.
    needs
        What it takes besides an option, such as more GPUs.
    """

    key: str
    name: str
    changes: Mapping[str, Any]
    flags: str = ""
    needs: str = ""
    helps: frozenset[str] = field(default=_ROOM | _TIME)

    def apply(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration with the change."""
        return {**run, "engine": {**run["engine"], **self.changes}}


def remedies_for(
    engine: EngineConfig, facts: Mapping[str, float], resource: str
) -> list[Remedy]:
    """Return the changes that fit the resource that binds, the free ones first.

    `facts` are those of `sim.studies.planning.search.binding.facts_of`, the share of
    GPU memory in use (``gpu_memory_utilization``), and ``loses_prefixes``: the share of
    runs that evict what later prompts may begin with.
    """
    return [
        each
        for each in (*_settings(engine, facts), *_hardware(engine))
        if resource in each.helps
    ]


def _settings(engine: EngineConfig, facts: Mapping[str, float]) -> Iterator[Remedy]:
    yield from _more_blocks(engine, facts)
    yield from _limits(facts)
    yield from _fewer_at_once(engine, facts)
    has_cache = engine.generation.enable_prefix_caching is not None
    if has_cache and not engine.prefix_caching:
        yield _option("enable_prefix_caching", "prefix caching", value=True)
    yield from _host_memory(engine, facts)
    if engine.enforce_eager:
        yield Remedy(
            "enforce_eager",
            "CUDA graphs",
            {"enforce_eager": False},
            "(leave out --enforce-eager)",
            helps=_TIME,
        )
    is_alone = engine.pipeline_parallel_size == engine.data_parallel_size == 1
    if engine.generation.has_batch_queue and is_alone and not engine.schedules_ahead:
        yield _option(
            "async_scheduling", "asynchronous scheduling", value=True, helps=_TIME
        )
    if engine.generation.has_cpu_tier:
        other = "recompute" if engine.preemption_mode == "swap" else "swap"
        yield _option("preemption_mode", f"preempt by {other}", value=other)


def _option(
    key: str, name: str, *, value: Any, helps: frozenset[str] = _ROOM | _TIME
) -> Remedy:
    option = f"--{key.replace('_', '-')}"
    flags = option if value is True else f"{option} {shlex.quote(f'{value}')}"
    return Remedy(key, name, {key: value}, flags, helps=helps)


def _more_blocks(engine: EngineConfig, facts: Mapping[str, float]) -> Iterator[Remedy]:
    is_sized = (
        engine.num_gpu_blocks_override is None and engine.kv_cache_memory_bytes is None
    )
    if engine.kv_cache_dtype == "auto" and engine.num_gpu_blocks_override is None:
        key = "kv_cache_dtype"
        yield _option(key, "KV cache in fp8", value="fp8")
    if is_sized and facts["gpu_memory_utilization"] < _MORE_MEMORY:
        key = "gpu_memory_utilization"
        name = f"{_MORE_MEMORY:.0%} of the GPU's memory"
        yield _option(key, name, value=_MORE_MEMORY, helps=_ROOM | {"max_num_seqs"})


def _host_memory(engine: EngineConfig, facts: Mapping[str, float]) -> Iterator[Remedy]:
    """Yield a tier behind the pool, where prompts lose what they might have found."""
    has_tier = engine.kv_offloading_size or engine.kv_transfer_config
    is_alone = engine.pipeline_parallel_size == engine.data_parallel_size == 1
    if facts["loses_prefixes"] and is_alone and not has_tier:
        own = engine.generation
        if own.has_kv_connectors and dialect_of(engine.version).knows_offloading:
            yield Remedy(
                "kv_offloading_size",
                f"{_HOST_GIB} GiB of host memory behind the cache",
                {"kv_offloading_size": float(_HOST_GIB)},
                f"--kv-offloading-size {_HOST_GIB}",
                "host memory",
                _ROOM | _TIME | {"max_num_batched_tokens"},
            )


def _limits(facts: Mapping[str, float]) -> Iterator[Remedy]:
    """Yield other limits of a step; a tighter one may spare those that run."""
    of = {
        "max_num_seqs": frozenset({"max_num_seqs"}),
        "max_num_batched_tokens": frozenset({"max_num_batched_tokens"}) | _TIME,
    }
    for key, helps in of.items():
        now = int(facts[key])
        for factor in _FACTORS:
            value = int(now * factor)
            if factor > 1:
                suits = helps
            else:
                suits = _TIME | (_ROOM if key == "max_num_batched_tokens" else set())
            if value >= 1:
                name = f"{key} {value:,} for {now:,}"
                yield _option(key, name, value=value, helps=suits)


def _fewer_at_once(
    engine: EngineConfig, facts: Mapping[str, float]
) -> Iterator[Remedy]:
    """Yield remedies that let fewer requests in, so that those inside keep blocks."""
    value = int(0.8 * facts["num_running_mean"])
    if 0 < value < facts["max_num_seqs"]:
        name = f"at most {value:,} requests at a time"
        yield _option("max_num_seqs", name, value=value, helps=_ROOM)
    if "watermark" in engine.generation.keys and not engine.watermark:
        flags = f"--watermark {_WATERMARK}" if engine.generation.name == "v1" else ""
        name = f"{_WATERMARK:.0%} of the blocks kept from newcomers"
        yield Remedy("watermark", name, {"watermark": _WATERMARK}, flags, helps=_ROOM)
    if "admission" in engine.generation.keys and engine.admission is None:
        kind = "past_future"
        yield Remedy(
            "admission", f"admission by {kind}", {"admission": kind}, helps=_ROOM
        )


def _hardware(engine: EngineConfig) -> Iterator[Remedy]:
    ranks = 2 * engine.tensor_parallel_size
    any_resource = _ROOM | _TIME | {"max_num_batched_tokens", "max_num_seqs"}
    if ranks <= _MOST_RANKS:
        yield Remedy(
            "tensor_parallel_size",
            f"tensor parallel on {ranks} GPUs",
            {"tensor_parallel_size": ranks},
            f"--tensor-parallel-size {ranks}",
            "twice the GPUs",
            any_resource,
        )
    if (larger := _larger_gpu(engine.gpu)) is not None:
        yield Remedy(
            "gpu",
            f"{larger} for {engine.gpu}",
            {"gpu": larger},
            "",
            "another GPU",
            any_resource,
        )


def _larger_gpu(name: str) -> str | None:
    """Return the bundled GPU with the least more memory that is nowhere slower."""
    now = load_gpu(name)
    better = [
        each
        for each in GPUS.values()
        if each.memory_bytes >= _LARGER * now.memory_bytes
        and each.memory_bandwidth_bytes_per_s >= now.memory_bandwidth_bytes_per_s
        and each.bf16_flops_per_s >= now.bf16_flops_per_s
        and each.is_judged
    ]
    best = min(better, key=lambda each: each.memory_bytes, default=None)
    return None if best is None else best.name
