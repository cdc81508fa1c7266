"""The KV caches of a hosted engine: groups of layers under vLLM's names.

What a scheduler decides by is how layers keep blocks, and how long blocks are; bytes
only set specs apart from each other.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from cache.tiers.sizes import CHUNK_ALIGNMENT_BYTES
from cache.v1.specs import (
    AttentionSpec,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
)
from sim.errors import SchedulerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cache.v1.specs import KVCacheLayout, KVCacheSpec
    from sim.scheduler.hosted.api import VllmApi
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.connectors.settings import (
        KVTransferSettings,
        OffloadSettings,
    )
    from sim.scheduler.v1.settings import Settings

_INTERVAL = "prefix_cache_retention_interval"


def hash_block_size(settings: Settings, cache: CacheConfig) -> int:
    """Return the tokens of a hash: a tier has them where prefix caching is off, too."""
    layout = cache.groups
    if settings.offload is None or cache.enable_prefix_caching:
        return layout.hash_block_size
    return gcd(*(group.spec.block_size for group in layout.groups))


def cache_settings(api: VllmApi, settings: Settings, cache: CacheConfig) -> Any:
    """Return their cache configuration, as it is after the pool has been planned."""
    config = api.call("CacheConfig", {})
    # Set rather than given: releases know a few sizes of blocks only.
    config.block_size = cache.block_size
    config.num_gpu_blocks = cache.num_gpu_blocks
    config.enable_prefix_caching = cache.enable_prefix_caching
    if hasattr(config, _INTERVAL):
        setattr(config, _INTERVAL, cache.retention_interval)
    if settings.offload is not None and len(cache.groups.groups) > 1:
        config.prefix_match_unit = hash_block_size(settings, cache)
    for group in cache.groups.groups:
        if isinstance(group.spec, MambaSpec):
            config.mamba_cache_mode = group.spec.mamba_cache_mode.value
    return config


def kv_cache_config(api: VllmApi, cache: CacheConfig) -> Any:
    """Return their pool and its groups.

    Raises
    ------
    SchedulerError
        If the release cannot be told which windows and states stay cached.
    """
    groups = [
        api.call(
            "KVCacheGroupSpec",
            {
                "layer_names": list(group.layer_names),
                "kv_cache_spec": hosted_spec(api, group.spec),
            },
            {"is_eagle_group": group.is_eagle_group},
        )
        for group in cache.groups.groups
    ]
    needed: dict[str, Any] = {
        "num_blocks": cache.num_gpu_blocks,
        "kv_cache_tensors": [],
        "kv_cache_groups": groups,
    }
    interval = cache.prefix_cache_retention_interval
    if interval is not None and _retains(cache):
        if not api.takes("KVCacheConfig", _INTERVAL):
            raise SchedulerError(
                f"{_INTERVAL} is not known to vLLM {api.installed}, which keeps every "
                f"window and state: give 'dense' (null in a workload), or install "
                f"vllm==0.33.0"
            )
        needed[_INTERVAL] = interval
    return api.call("KVCacheConfig", needed)


def _retains(cache: CacheConfig) -> bool:
    """Whether groups of a layout may keep some windows or states for hits, not all."""
    layout = cache.layout
    return cache.enable_prefix_caching and any(
        isinstance(group.spec, SlidingWindowSpec | MambaSpec)
        for group in (() if layout is None else layout.groups)
    )


def hosted_spec(api: VllmApi, spec: KVCacheSpec) -> Any:
    """Return the KV cache spec of a group's layers, as an object of theirs."""
    if isinstance(spec, MambaSpec):
        return _state(api, spec)
    assert isinstance(spec, AttentionSpec)
    # One group of no layers in particular has no sizes.
    needed: dict[str, Any] = {
        "block_size": spec.block_size,
        "num_kv_heads": spec.num_kv_heads or 1,
        "head_size": spec.head_size or 1,
        "dtype": api.dtype(spec.dtype or "float16"),
    }
    for name in ("sliding_window", "attention_chunk_size"):
        if (num_tokens := getattr(spec, name, None)) is not None:
            needed[name] = num_tokens
    return api.call(type(spec).__name__, needed, {"use_mla": False})


def _state(api: VllmApi, spec: MambaSpec) -> Any:
    needed: dict[str, Any] = {
        "block_size": spec.block_size,
        "shapes": spec.shapes,
        "dtypes": tuple(api.dtype(name) for name in spec.dtypes),
    }
    if spec.mamba_cache_mode is not MambaCacheMode.NONE:  # which is their default
        needed["mamba_cache_mode"] = spec.mamba_cache_mode.value
    also = {
        "page_size_padded": spec.page_size_bytes,
        "num_prefill_checkpoint_blocks": spec.num_checkpoint_blocks,
        "prefill_checkpoint_alignment": spec.checkpoint_alignment,
        "num_speculative_blocks": spec.num_speculative_blocks,
    }
    return api.call("MambaSpec", needed, also)


def kv_transfer_config(api: VllmApi, settings: Settings, cache: CacheConfig) -> Any:
    """Return their configuration of the KV connector, or of the one of both."""
    transfer, offload = settings.kv_transfer, settings.offload
    given = transfer or offload
    assert given is not None
    parts = []
    if transfer is not None:
        parts.append(_side(transfer))
    if offload is not None:
        place = 0 if transfer is None or transfer.asks_tier_first else 1
        parts.insert(place, _tier(api, offload, cache))
    whole = parts[0]
    if len(parts) > 1:
        whole = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": parts},
        }
    return api.call(
        "KVTransferConfig",
        {"kv_load_failure_policy": given.kv_load_failure_policy, **whole},
        {"engine_id": "kvsim"},
    )


def _side(transfer: KVTransferSettings) -> dict[str, Any]:
    """Return their configuration of one side of a pair."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": transfer.kv_role.value,
        "kv_connector_extra_config": {"kv_lease_duration": transfer.kv_lease_duration},
    }


def _tier(api: VllmApi, offload: OffloadSettings, cache: CacheConfig) -> dict[str, Any]:
    """Return their configuration of the offloading connector and its CPU tier."""
    sizes = [
        (
            hosted_spec(api, group.spec).page_size_bytes * len(group.layer_names),
            group.spec.block_size,
        )
        for group in cache.groups.groups
    ]
    block_bytes = sum(num_bytes for num_bytes, _ in sizes)
    token_bytes = sum(num_bytes // num_tokens for num_bytes, num_tokens in sizes)
    pages = -(-block_bytes * offload.blocks_per_chunk // CHUNK_ALIGNMENT_BYTES)
    extra = {
        "spec_name": "CPUOffloadingSpec",
        "cpu_bytes_to_use": offload.num_chunks * pages * CHUNK_ALIGNMENT_BYTES,
        "blocks_per_chunk": offload.blocks_per_chunk,
        "eviction_policy": offload.eviction_policy,
        "offload_prompt_only": offload.offload_prompt_only,
        "store_threshold": offload.store_threshold,
        "max_tracker_size": offload.max_tracker_size,
        "sync_load_budget_bytes": token_bytes * offload.sync_load_budget_tokens,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class HostedTables:
    """Blocks in the tables of a hosted engine's running requests.

    Parameters
    ----------
    layout
        Of its pool.
    tables
        Returns the tables of each running request, by group.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        tables: Callable[[], Iterable[Sequence[Sequence[Any]]]],
    ) -> None:
        self._layout = layout
        self._tables = tables

    def held_by_group(self) -> list[list[int]]:
        """Return the ids in all tables of each group, the null block left out."""
        held: list[list[int]] = [[] for _ in self._layout.groups]
        for tables in self._tables():
            for ids, blocks in zip(held, tables, strict=True):
                ids += [block.block_id for block in blocks if not block.is_null]
        return held

    def num_used_blocks_by_group(self) -> list[int]:
        """Return how many blocks of the pool the tables of each group hold."""
        return [len(set(ids)) for ids in self.held_by_group()]

    def entries(self, num_tokens: int) -> tuple[int, int]:
        """Return the entries of all tables, and the slots in use, null blocks aside.

        Parameters
        ----------
        num_tokens
            That running requests have computed.

        Returns
        -------
        (int, int)
            See `cache.v1.block_tables.BlockTables.num_stored_tokens` for the slots.
        """
        num_held = [0] * len(self._layout.groups)
        num_null = num_held.copy()
        for tables in self._tables():
            for number, blocks in enumerate(tables):
                nulls = sum(block.is_null for block in blocks)
                num_null[number] += nulls
                num_held[number] += len(blocks) - nulls
        smallest = self._layout.block_size
        num_slots = 0
        for group, held, nulls in zip(
            self._layout.groups, num_held, num_null, strict=True
        ):
            size = group.spec.block_size
            if isinstance(group.spec, MambaSpec):
                num_slots += held * smallest
            else:
                num_slots += (num_tokens - nulls * size) * smallest // size
        return sum(num_held), num_slots
