"""A run's scheduler, made from its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cache.errors import CacheError
from sim.config.contracts import require_methods
from sim.config.plug import build
from sim.errors import ConfigError, SchedulerError, UserError
from sim.hardware.capacity.arguments import parse_engine_version, v0_chunks_by_itself
from sim.hardware.capacity.constants import V0_CHUNKED_BATCHED_TOKENS
from sim.scheduler.admission import ADMISSION_RULES
from sim.scheduler.generation import cache_of
from sim.scheduler.generations import (
    GENERATION_KEYS,
    GENERATIONS,
    SCHEDULERS,
    generation_behind,
)
from sim.scheduler.sglang.settings import WindowPool
from sim.scheduler.v0 import V0
from sim.scheduler.victims import VICTIMS
from sim.simulation.evictors import evictor_factory
from sim.simulation.layout import layout_of
from sim.simulation.offloading import offload_settings
from sim.simulation.own_scheduler import hold_to_contract
from sim.simulation.speculative import speculative_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sim.config.engine import EngineConfig
    from sim.hardware.capacity import CapacityEstimate
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.scheduler.base import Scheduler
    from sim.scheduler.generation import Generation
    from sim.scheduler.sglang.settings import Disaggregation
    from sim.scheduler.v1.connectors.settings import KVTransferSettings
    from sim.simulation.offloading import SharedTiers
    from workloads.spec import RequestSpec

    Arguments = dict[str, Any]

_WHERE = "engine.scheduler"

_ROLES: Mapping[str, tuple[Mapping[str, type], str, str]] = {
    "preemption_victim": (VICTIMS, "a victim policy", "choose(running, needs)"),
    "admission": (ADMISSION_RULES, "an admission rule", "admits(head, engine)"),
}


def make_scheduler(
    config: EngineConfig,
    capacity: CapacityEstimate,
    model: ModelArchitecture,
    specs: Sequence[RequestSpec] = (),
    *,
    on_clock: bool = False,
    kv_transfer: KVTransferSettings | Disaggregation | None = None,
    shared_tiers: SharedTiers | None = None,
) -> tuple[Scheduler, CapacityEstimate]:
    """Construct the scheduler, and with it the block pool.

    With `on_clock`, one that leaves decodes on a clock if there are several; with
    `kv_transfer`, one side of a pair; with `shared_tiers`, an engine of a fleet whose
    tiers these may be.
    """
    make_evictor = evictor_factory(config, capacity, specs)

    def construct(capacity: CapacityEstimate) -> Scheduler:
        arguments = _arguments(config, model, capacity, make_evictor, shared_tiers)
        if kv_transfer is not None:
            arguments["kv_transfer"] = kv_transfer
        layout = layout_of(config, model, capacity)
        interval = arguments.pop("prefix_cache_retention_interval", 0)
        if layout is not None:
            arguments |= {
                "layout": layout,
                "block_size": layout.block_size,
                "prefix_cache_retention_interval": (
                    None if interval == "dense" else interval
                ),
            }
        elif config.prefix_cache_retention_interval is not None:
            raise ConfigError(
                f"engine.prefix_cache_retention_interval says which windows and states "
                f"stay cached, and {model.name} keeps every block alike; leave it out"
            )
        scheduler = _construct(config, model, arguments, on_clock=on_clock)
        if layout is not None and not getattr(scheduler, "has_layout", False):
            raise ConfigError(
                f"{_WHERE}: {model.name} has layers of several kinds, which need a "
                f"scheduler that takes 'layout'; hand it on to V1Scheduler, or use a "
                f"model with one kind"
            )
        return scheduler

    scheduler = construct(capacity)
    most = getattr(scheduler, "max_servable_tokens", capacity.max_model_len)
    if not config.admission_check or most >= capacity.max_model_len:
        return scheduler, capacity
    if most < 1:
        raise ConfigError(
            f"engine: a cache of {capacity.num_gpu_blocks} blocks of "
            f"{config.block_size} tokens cannot serve a single token under the rules "
            f"of the {config.scheduler} scheduler; give it a larger cache"
        )
    capacity = replace(capacity, max_model_len=most)
    generation = config.generation
    if (
        config.max_num_batched_tokens is None
        and generation.budget_follows_length
        and not chunks_prefill(config, model, generation)
    ):
        # The release's budget for that length: a budget of the model's own length
        # would let prompts be padded without end.
        budget = max(most, V0_CHUNKED_BATCHED_TOKENS)
        capacity = replace(capacity, max_num_batched_tokens=budget)
    return construct(capacity), capacity


def chunks_prefill(
    engine: EngineConfig, model: ModelArchitecture, generation: Generation
) -> bool:
    """Whether an engine of a generation cuts prompts into chunks."""
    if engine.enable_chunked_prefill is not None:
        return engine.enable_chunked_prefill
    if generation.always_chunks:
        return True
    longest = engine.max_model_len or model.max_position_embeddings
    minor = parse_engine_version(engine.version)
    return engine.sliding_window is None and v0_chunks_by_itself(longest, minor)


def _arguments(
    config: EngineConfig,
    model: ModelArchitecture,
    capacity: CapacityEstimate,
    make_evictor: Callable[[], Any] | None,
    shared_tiers: SharedTiers | None,
) -> Arguments:
    """Return the engine's arguments by key, without those left to the generation."""
    keys = (*GENERATION_KEYS, "preemption_mode")
    optional = {key: getattr(config, key) for key in keys} | {
        "evictor": make_evictor,
        "speculative_config": speculative_settings(config),
        "offload": offload_settings(config, capacity, model, shared_tiers),
    }
    if config.schedules_ahead:
        optional["async_scheduling"] = True
    if capacity.swa_max_total_num_tokens:
        optional["swa"] = WindowPool(
            capacity.sliding_window_size, capacity.swa_max_total_num_tokens
        )
    return {
        "num_gpu_blocks": capacity.num_gpu_blocks,
        "num_cpu_blocks": capacity.num_cpu_blocks,
        "block_size": config.block_size,
        "max_num_batched_tokens": capacity.max_num_batched_tokens,
        "max_num_seqs": capacity.max_num_seqs,
        "max_model_len": capacity.max_model_len,
        "enable_prefix_caching": config.prefix_caching,
        "engine_version": config.version,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        **{key: value for key, value in optional.items() if value is not None},
        **_policies(config),
    }


def _construct(
    config: EngineConfig,
    model: ModelArchitecture,
    arguments: Arguments,
    *,
    on_clock: bool,
) -> Scheduler:
    """Construct a built-in scheduler, or the user's own."""

    def of(generation: Generation) -> Arguments:
        chunks = chunks_prefill(config, model, generation)
        return {
            "watermark": generation.watermark,
            "enable_chunked_prefill": chunks,
            **arguments,
        }

    kind = config.scheduler
    table = {"kind": kind} if isinstance(kind, str) else kind
    generation = GENERATIONS.get(config.scheduler_kind)
    try:
        if generation is not None:
            return _built_in(generation, table, of(generation), on_clock=on_clock)
        scheduler: Scheduler = build(
            SCHEDULERS, table, _WHERE, lambda cls: arguments | _values(cls, of)
        )
        hold_to_contract(scheduler, _WHERE)
    except ConfigError as error:
        cause = error.__cause__
        # Its message begins with the key, where one key is to blame.
        if isinstance(cause, SchedulerError) and str(cause).split()[0] in arguments:
            raise ConfigError(f"engine.{cause}") from error
        raise
    except CacheError as error:
        # A manager's own refusal: a window that no block divides, and the like.
        raise ConfigError(f"engine: {error}") from error
    return scheduler


def _built_in(
    generation: Generation,
    table: Arguments,
    arguments: Arguments,
    *,
    on_clock: bool,
) -> Scheduler:
    """Construct a generation's scheduler; what stands in the table are settings."""
    parts = generation.parts()
    known = parts.settings_of(arguments)
    settings = build({generation.name: parts.settings}, table, _WHERE, known)
    try:
        scheduler: Scheduler = parts.construct(
            settings, cache_of(arguments), on_clock=on_clock
        )
    except UserError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error
    return scheduler


def _values(cls: type, of: Callable[[Generation], Arguments]) -> Arguments:
    """Return the whole values that a user's class may name beside single arguments."""
    generation = generation_behind(cls)
    arguments = of(generation or V0)
    parts = (generation or V0).parts()
    try:
        settings = parts.settings(**parts.settings_of(arguments))
        cache = cache_of(arguments)
    except UserError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error
    values = {"scheduler_config": settings, "cache_config": cache}
    if generation is not None:
        values |= {"settings": settings, "cache": cache}
    return values


def _policies(config: EngineConfig) -> dict[str, Any]:
    """Construct the policies that are asked for, new ones each time: some learn."""
    return {
        key: _policy(key, getattr(config, key))
        for key in _ROLES
        if getattr(config, key) is not None
    }


def _policy(key: str, given: str | dict[str, Any]) -> Any:
    table = {"kind": given} if isinstance(given, str) else given
    kinds, role, method = _ROLES[key]
    policy = build(kinds, table, f"engine.{key}")
    if table["kind"] not in kinds:
        hears = ["finished(request)"] if hasattr(policy, "finished") else []
        require_methods(policy, f"engine.{key}", role, [method, *hears])
    return policy
