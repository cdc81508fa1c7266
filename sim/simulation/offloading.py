"""The tier behind a run's pool, made from its configuration."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING, Any

from cache.errors import CacheError
from cache.tiers import SECONDARY_TIERS, SecondaryTier, chunk_bytes_of, num_chunks_of
from cache.tiers.access import SessionHint
from sim.config.offloading import KVTransferTable, OffloadingLinkTable
from sim.config.plug import build
from sim.costs.transfers import (
    KERNEL_BOTH_WAYS_SHARE,
    KERNEL_STEP_FACTOR,
    GroupTransfer,
    LinkTransfer,
    OneGroupTransfer,
    Swapping,
    pages_by_offloaded_group,
)
from sim.engine.links import LinkRules
from sim.engine.offloading import OffloadedSteps, Worker
from sim.engine.offloading_ahead import AheadOffloadedSteps
from sim.errors import ConfigError
from sim.results.recording.transfers import TransferLog
from sim.scheduler.v1.connectors.settings import OffloadSettings
from workloads.draws.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.config.engine import EngineConfig
    from sim.config.offloading import ConnectorExtraTable
    from sim.config.tables import RunConfig
    from sim.costs.base import CostModel
    from sim.costs.transfers import JobTransfer, Transfer
    from sim.hardware.capacity import CapacityEstimate
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.results.recording.transfers import OffloadRecorder
    from workloads.spec import RequestSpec

_GIB = 2**30
_SESSION_POLICIES = ("pin_shared", "session_end", "next_use")
_EXTRA = "kv_transfer_config.kv_connector_extra_config"

SharedTiers = dict[str, SecondaryTier]
"""Tiers that engines of a fleet have together, by what they were made from."""


def offload_settings(
    engine: EngineConfig,
    capacity: CapacityEstimate,
    model: ModelArchitecture,
    shared: SharedTiers | None = None,
) -> OffloadSettings | None:
    """Return the settings of the tier for schedulers; None for none.

    Tiers that a fleet shares are taken from `shared`, or put there.

    Raises
    ------
    ConfigError
        If the tier holds no chunk, or chunks are no whole blocks.
    """
    if not engine.has_tier:
        return None
    table = engine.kv_transfer_config or KVTransferTable()
    extra = table.extra
    size = _blocks_per_chunk(engine, extra.blocks_per_chunk, extra.block_size)
    num_bytes = extra.cpu_bytes_to_use or int((engine.kv_offloading_size or 0) * _GIB)
    block_bytes = copied_bytes(engine, capacity, model)
    num_chunks = num_chunks_of(num_bytes, block_bytes, size)
    if not num_chunks:
        key = "kv_offloading_size"
        if engine.kv_offloading_size is None:
            key = f"{_EXTRA}.cpu_bytes_to_use"
        raise ConfigError(
            f"engine.{key}: the tier must hold a chunk, which takes "
            f"{block_bytes * size / _GIB:.3g} GiB over all GPUs, got "
            f"{num_bytes / _GIB:.3g} GiB; raise it"
        )
    sizes = _group_bytes(engine, capacity)
    token_bytes = max(sum(own // size for own, size in sizes), 1)
    return OffloadSettings(
        num_chunks=num_chunks,
        blocks_per_chunk=size,
        eviction_policy=extra.eviction_policy,
        offload_prompt_only=extra.offload_prompt_only,
        store_threshold=extra.store_threshold,
        max_tracker_size=extra.max_tracker_size,
        sync_load_budget_tokens=extra.sync_load_budget_bytes // token_bytes,
        kv_load_failure_policy=table.kv_load_failure_policy,
        write_policy=extra.write_policy,
        eviction_ttl_s=extra.eviction_ttl_s,
        stores=_rate(engine, "store") != 0 and _rate(engine, "load") != 0,
        secondary_tiers=_tiers_behind(
            extra, chunk_bytes_of(block_bytes, size), {} if shared is None else shared
        ),
    )


def _tiers_behind(
    extra: ConnectorExtraTable, chunk_bytes: int, shared: SharedTiers
) -> dict[str, SecondaryTier]:
    """Return the tiers behind the host by their type, or class, in order."""
    tiers: dict[str, SecondaryTier] = {}
    for place, table in enumerate(extra.secondary_tiers):
        where = f"engine.{_EXTRA}.secondary_tiers[{place}]"
        given = {key: value for key, value in table.items() if key != "type"}
        if "type" not in table or "kind" in table:
            raise ConfigError(
                f"{where}.type: must name one of {', '.join(SECONDARY_TIERS)}, or "
                f"file.py:Class"
            )
        kind = table["type"]
        context = {"chunk_bytes": chunk_bytes}
        made_from = f"{place} {chunk_bytes} {json.dumps(table, sort_keys=True)}"
        try:
            tier = shared.get(made_from)
            if tier is None:
                tier = build(SECONDARY_TIERS, {"kind": kind} | given, where, context)
        except CacheError as error:
            raise ConfigError(f"{where}: {error}") from error
        except ConfigError as error:  # the release's key for a kind
            message = str(error).replace(f"{where}.kind:", f"{where}.type:")
            raise ConfigError(message) from error
        if not isinstance(tier, SecondaryTier):
            raise ConfigError(
                f"{where}.type: a tier is a class with cache.tiers.SecondaryTier as "
                f"its base, got {kind!r}"
            )
        if tier.is_shared:
            shared[made_from] = tier
        name = str(kind).rpartition(":")[2]
        tiers[name if name not in tiers else f"{name}_{place}"] = tier
    return tiers


def wants_hints(engine: EngineConfig) -> bool:
    """Whether the tier's policy asks what clients know of their sessions."""
    table = engine.kv_transfer_config or KVTransferTable()
    return table.extra.eviction_policy in _SESSION_POLICIES


def session_hints(specs: Sequence[RequestSpec]) -> dict[int, SessionHint]:
    """Return the hints that clients could give of their sessions, by request."""
    returns_s: dict[int, float] = {}
    for spec in specs:
        if spec.previous_id is not None:
            known_s = returns_s.get(spec.previous_id, inf)
            returns_s[spec.previous_id] = min(known_s, spec.delay_s)
    return {
        spec.request_id: SessionHint(
            spec.session_id, returns_s.get(spec.request_id, inf)
        )
        for spec in specs
        if spec.session_id is not None
    }


def _blocks_per_chunk(
    engine: EngineConfig, num_blocks: int | None, num_tokens: int | None
) -> int:
    if num_tokens is None:
        return num_blocks or 1
    if num_tokens % engine.block_size:
        raise ConfigError(
            f"engine.{_EXTRA}.block_size: a chunk is whole blocks of "
            f"{engine.block_size} tokens, got {num_tokens}; give a multiple"
        )
    return num_tokens // engine.block_size


def copied_bytes(
    engine: EngineConfig, capacity: CapacityEstimate, model: ModelArchitecture
) -> int:
    """Return the bytes of a block over all GPUs that keep a copy of their own.

    A latent (MLA) is the same on all of them, and kept once.

    Notes
    -----
    Source: vLLM 0.33,
    ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/config.py``.
    """
    num_copies = 1 if model.kv_lora_rank else engine.tensor_parallel_size
    return capacity.block_bytes * num_copies


def _group_bytes(
    engine: EngineConfig, capacity: CapacityEstimate
) -> list[tuple[int, int]]:
    """Return the bytes of a block of each KV cache group on a GPU, and its tokens."""
    if capacity.plan is None or len(capacity.plan.layout.groups) == 1:
        return [(capacity.block_bytes, engine.block_size)]
    return [
        (group.bytes_per_block, group.spec.block_size)
        for group in capacity.plan.layout.groups
    ]


def _rate(engine: EngineConfig, way: str) -> float | None:
    link = engine.kv_offloading_link or OffloadingLinkTable()
    rate: float | None = getattr(link, f"{way}_bytes_per_s")
    return rate


def make_worker(
    config: RunConfig,
    cost_model: CostModel,
    capacity: CapacityEstimate,
    place: int = 0,
) -> Worker:
    """Construct what copies, of an engine at a place of a fleet, if it is one.

    Raises
    ------
    ConfigError
        If neither the cost model nor the configuration says how long copies take.
    """
    engine = config.engine
    link = engine.kv_offloading_link or OffloadingLinkTable()
    swapping = _swapping_of(cost_model)

    layout = None if capacity.plan is None else capacity.plan.layout

    def way(name: str) -> JobTransfer:
        whole = way_of_blocks(name)
        if layout is None or len(layout.groups) == 1:
            return OneGroupTransfer(whole)
        return GroupTransfer(whole, pages_by_offloaded_group(layout))

    def way_of_blocks(name: str) -> Transfer:
        rate = _rate(engine, name)
        if rate:
            return LinkTransfer(capacity.block_bytes, rate, link.latency_s)
        if swapping is None:
            raise ConfigError(
                f"engine.kv_offloading_link.{name}_bytes_per_s: cost model "
                f"'{config.cost['kind']}' does not know how long copies take; give it"
            )
        found: Transfer = getattr(swapping, name)
        return found

    rules = LinkRules(
        both_ways_share=link.both_ways_share,
        step_factor=1.0 if swapping is None else swapping.step_factor,
        transfer_factor=1.0 if swapping is None else swapping.transfer_factor,
        kernel_both_ways_share=KERNEL_BOTH_WAYS_SHARE,
        kernel_step_factor=KERNEL_STEP_FACTOR,
    )
    rate = link.load_failure_rate
    if rate and layout is not None and len(layout.groups) > 1:
        raise ConfigError(
            f"engine.kv_offloading_link.load_failure_rate: vLLM 0.33 ends where a load "
            f"of a model with several KV cache groups fails (_handle_invalid_blocks in "
            f"vllm/v1/core/sched/scheduler.py), got {rate}; leave it out"
        )
    fails = _Failures(config.seed, rate, place) if rate else None
    return Worker(way("load"), way("store"), rules, fails)


def _swapping_of(cost_model: CostModel) -> Swapping | None:
    """Return the times of moving blocks, of a model or the one that it stands for."""
    given: Any = cost_model
    while not hasattr(given, "swapping"):
        given = getattr(given, "model", None)
        if given is None:
            return None
    found: Swapping = given.swapping()
    return found


class _Failures:
    """Lets a share of the loads fail, each at a block of its own."""

    def __init__(self, seed: int, rate: float, place: int) -> None:
        own = f" {place}" if place else ""  # a fleet's first draws as an engine alone
        self._generator = Streams(seed).generator(f"offloading failures{own}")
        self._rate = rate

    def __call__(self, num_blocks: int) -> int | None:
        chance, place = self._generator.random(2)
        return int(place * num_blocks) if chance < self._rate else None


def offloaded_steps(  # noqa: PLR0917 - the parts of a run
    config: RunConfig,
    scheduler: Any,
    cost_model: CostModel,
    capacity: CapacityEstimate,
    recorder: OffloadRecorder,
    specs: Sequence[RequestSpec],
    place: int = 0,
) -> OffloadedSteps:
    """Return the copies beside the steps of an engine; see `make_worker`."""
    if wants_hints(config.engine):
        scheduler.connector.offloading.hints = session_hints(specs)
    worker = make_worker(config, cost_model, capacity, place)
    is_ahead = config.engine.schedules_ahead
    return (AheadOffloadedSteps if is_ahead else OffloadedSteps)(
        *(scheduler, worker, cost_model, recorder.steps, recorder.transfers)
    )


def transfer_log(
    engine: EngineConfig, capacity: CapacityEstimate, scheduler: Any
) -> TransferLog:
    """Return the log of copies."""
    tier = scheduler.connector.offloading.tier
    num_gpus = engine.tensor_parallel_size
    sizes = _group_bytes(engine, capacity)
    table = engine.kv_transfer_config or KVTransferTable()
    extra, behind = table.extra, scheduler.connector.offloading.behind
    return TransferLog(
        tier.num_chunks,
        [num_bytes * num_gpus for num_bytes, _ in sizes],
        [num_tokens for _, num_tokens in sizes],
        _blocks_per_chunk(engine, extra.blocks_per_chunk, extra.block_size),
        None if behind is None else behind.tiers,
    )
