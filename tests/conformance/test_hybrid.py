"""Our decisions for models with several KV cache groups, against the real engine's."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from cache.v1.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheLayout,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from sim.scheduler.settings import CacheConfig
from sim.scheduler.v1 import Scheduler, Settings
from sim.studies.conformance import DecisionDriver, first_difference
from sim.studies.conformance.workload import parse_workload
from tests.shared import SHARED, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDING = ".workload.json"
NAMES = [
    path.name.removesuffix(ENDING)
    for path in sorted((SHARED / "conformance/v1_hybrid").glob(f"*{ENDING}"))
]
KINDS: dict[str, tuple[type[Any], str]] = {
    "full_attention": (FullAttentionSpec, ""),
    "mla_attention": (MLAAttentionSpec, ""),
    "sliding_window": (SlidingWindowSpec, "sliding_window"),
    "chunked_local_attention": (ChunkedLocalAttentionSpec, "attention_chunk_size"),
}


def spec_of(raw: dict[str, Any]) -> KVCacheSpec:
    sizes = {"block_size": raw["block_size"], "page_size_bytes": raw["page"]}
    if raw["kind"] == "mamba":
        return MambaSpec(
            **sizes,
            shapes=tuple(map(tuple, raw["shapes"])),
            dtypes=tuple(raw["dtypes"]),
            mamba_cache_mode=MambaCacheMode(raw["mode"]),
            num_checkpoint_blocks=raw["checkpoint_blocks"],
            checkpoint_alignment=raw["checkpoint_alignment"],
        )
    kind, reach = KINDS[raw["kind"]]
    heads = {"num_kv_heads": raw["kv_heads"], "head_size": raw["head_size"]}
    more = {reach: raw[reach]} if reach else {}
    spec: KVCacheSpec = kind(**sizes, **heads, dtype=raw["dtype"], **more)
    return spec


def layout_of(header: dict[str, Any]) -> KVCacheLayout:
    groups = tuple(
        KVCacheGroup(tuple(raw["first"]), spec_of(raw["spec"]), 0)
        for raw in header["groups"]
    )
    return KVCacheLayout(
        groups,
        header["num_blocks"],
        header["bytes_per_block"],
        header["hash_block_size"],
        header["scheduler_block_size"],
        header["cache_hit_alignment"],
    )


def lines_of(name: str) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The header of a log, and its lines."""
    path = shared(f"conformance/v1_hybrid/{name}.golden.jsonl.gz")
    with gzip.open(path, "rt") as text:
        header, *lines = map(json.loads, text)
    return header["header"], iter(lines)


def driver_of(name: str, header: dict[str, Any], *, check: bool) -> DecisionDriver:
    raw = json.loads(shared(f"conformance/v1_hybrid/{name}{ENDING}").read_text())
    kv, config, layout = raw.pop("kv"), raw["config"], layout_of(header)
    sizes = {"block_size": layout.block_size, "num_gpu_blocks": layout.num_blocks}
    cache = CacheConfig(
        **sizes,
        enable_prefix_caching=config["enable_prefix_caching"],
        layout=layout,
        prefix_cache_retention_interval=kv.get("prefix_cache_retention_interval", 0),
    )
    written = {
        {
            "chunked_prefill": "enable_chunked_prefill",
            "policy": "scheduling_policy",
        }.get(key, key): value
        for key, value in config.items()
        if key != "enable_prefix_caching"
    }
    scheduler = Scheduler(Settings(**written, engine_version="0.33"), cache)
    config |= sizes
    workload = parse_workload(json.dumps(raw), name)
    return DecisionDriver(workload, check=check, scheduler=scheduler)


@pytest.mark.parametrize("name", NAMES or ["gptoss_evict_a"])
def test_decisions_equal_the_real_engines(name: str) -> None:
    header, expected = lines_of(name)
    driver = driver_of(name, header, check=True)
    difference = first_difference(expected, driver.lines())
    assert difference is None, difference.in_words(("real engine", "kvsim"))


def test_all_the_logs_are_compared() -> None:
    shared("conformance/v1_hybrid")
    assert len(NAMES) >= 37
