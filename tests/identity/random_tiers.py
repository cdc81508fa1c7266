"""Random small configurations of engines with a tier behind their pool, by seed."""

from __future__ import annotations

from random import Random
from typing import Any

from sim.config.tables import parse_config
from tests.identity.random_configs import Case, draw_case
from tests.identity.random_groups import draw_group_case

MODEL = "meta-llama/Llama-3.1-8B"
_TOKEN_BYTES = 2**17
"""Of `MODEL`."""
_GROUP_TOKEN_BYTES = 2**15
"""Of a group's layers, about, of the models of `tests.identity.random_groups`."""
_UNKNOWN = ("admission", "engine_version", "sliding_window")


def draw_tier_case(seed: int) -> Case:
    """Return `draw_case` of a seed with a tier, scheduled ahead three times in four."""
    config, look = draw_case(seed)
    rng = Random(f"tiers {seed}")
    engine = config.engine.model_dump(exclude_unset=True)
    for key in _UNKNOWN:
        engine.pop(key, None)
    engine["enable_prefix_caching"] = rng.random() < 0.85
    engine["async_scheduling"] = rng.random() < 0.75
    if engine["async_scheduling"]:
        engine.pop("prefill_schedule_interval", None)
    engine["model"] = MODEL
    engine |= draw_tier(rng, engine["block_size"], engine["num_gpu_blocks_override"])
    if seed % 4 == 1:
        engine["kv_transfer_config"]["kv_connector_extra_config"] |= _behind(seed)
        engine["kv_offloading_link"].pop("load_failure_rate", None)
    data = config.to_data()
    data["engine"] = engine
    data["workload"]["output_end"] = rng.choice(
        ["stop", "length", {"stop": 0.5, "length": 0.5}]
    )
    return Case(parse_config(data), look)


def draw_group_tier_case(seed: int) -> Case:
    """Return `draw_group_case` of a seed, without states, with a tier."""
    rng = Random(f"group tiers {seed}")
    config, look = draw_group_case(seed, has_states=False)
    engine = config.engine.model_dump(exclude_unset=True)
    engine.pop("admission", None)
    engine["enable_prefix_caching"] = rng.random() < 0.85
    engine["async_scheduling"] = rng.random() < 0.6
    if engine["async_scheduling"]:
        engine.pop("prefill_schedule_interval", None)
    if not engine["enable_prefix_caching"]:
        engine.pop("prefix_cache_retention_interval", None)
    elif rng.random() < 0.4:
        engine["prefix_cache_retention_interval"] = "dense"
    tier = draw_tier(
        *(rng, engine["block_size"], engine["num_gpu_blocks_override"]),
        token_bytes=_GROUP_TOKEN_BYTES,
    )
    tier["kv_offloading_link"].pop("load_failure_rate", None)
    if engine.get("prefix_cache_retention_interval") not in {None, "dense"}:
        extra = tier["kv_transfer_config"]["kv_connector_extra_config"]
        extra["blocks_per_chunk"] = 1
    data = config.to_data()
    data["engine"] = engine | tier
    return Case(parse_config(data), look)


def draw_tier(
    rng: Random,
    block_size: int,
    num_gpu_blocks: int,
    *,
    token_bytes: int = _TOKEN_BYTES,
) -> dict[str, Any]:
    """Return the keys of a tier behind a pool of `MODEL`, or of more or fewer bytes."""
    num_chunks = round(num_gpu_blocks * rng.choice([0.3, 1, 3, 10]))
    size = rng.choice([1, 1, 1, 2, 4])
    chunk_bytes = block_size * size * token_bytes
    return {
        "kv_offloading_size": (
            (max(num_chunks // size, 1) + 0.5) * max(chunk_bytes, 4096) / 2**30
        ),
        "kv_offloading_link": _link(rng),
        "kv_transfer_config": {
            "kv_load_failure_policy": rng.choice(["fail", "recompute"]),
            "kv_connector_extra_config": _extra(rng, block_size, size),
        },
    }


def _link(rng: Random) -> dict[str, Any]:
    """Return a link on which a block takes a part of a step, a step, or many."""
    rate = rng.choice([1e6, 3e7, 1e9, 5e10])
    link: dict[str, Any] = {
        "load_bytes_per_s": rate,
        "store_bytes_per_s": rate * rng.choice([0.5, 1.0, 1.0]),
        "latency_s": rng.choice([0.0, 0.0, 1e-4]),
    }
    if rng.random() < 0.1:
        link["load_failure_rate"] = 0.3
    return link


def _extra(rng: Random, block_size: int, size: int) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "blocks_per_chunk": size,
        "offload_prompt_only": rng.random() < 0.8,
        "eviction_policy": rng.choice(["lru", "lru", "lru", "arc"]),
    }
    if rng.random() < 0.2:
        extra["store_threshold"] = 2
    if rng.random() < 0.3:
        extra["sync_load_budget_bytes"] = block_size * _TOKEN_BYTES * rng.choice([2, 8])
    return extra


def _behind(seed: int) -> dict[str, Any]:
    """Return tiers behind the host, whose chunks take a part of a step, or many."""
    rng = Random(f"behind {seed}")
    tiers = []
    for kind in rng.choice([("fs",), ("pool",), ("pool", "fs")]):
        rate = rng.choice([3e7, 1e9, 5e10])
        tier: dict[str, Any] = {
            "type": kind,
            "capacity_bytes": rng.choice([1e8, 1e10]),
            "read_bytes_per_s": rate,
            "write_bytes_per_s": rate * rng.choice([0.5, 1.0]),
        }
        if kind == "pool" and rng.random() < 0.3:
            tier["ttl_s"] = rng.choice([0.5, 5.0])
        tiers.append(tier)
    policies = ("lru", "arc", "pin_shared", "session_end", "next_use", "keep_ttl")
    return {
        "spec_name": "TieringOffloadingSpec",
        "eviction_policy": rng.choice(policies),
        "secondary_tiers": tiers,
    }
