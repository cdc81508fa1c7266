"""Our plans of pools beside those of the installed vLLM, over random layers."""

from __future__ import annotations

import random
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from cache.errors import CacheError, KVCacheTooSmallError
from cache.v1.planning import align_states, plan_kv_cache
from cache.v1.specs import (
    ELEMENT_BYTES,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from sim.scheduler.hosted.api import load_api
from sim.scheduler.hosted.kv_caches import hosted_spec
from tests.hosted.test_conform import minor, pytestmark, why_missing

__all__ = ["pytestmark"]

PLANS_A_TEST = 500
REFUSED = "refused"


def attention(
    kind: type[Any], block_size: int, heads: int, size: int, dtype: str
) -> Any:
    vectors = 1 if kind is MLAAttentionSpec else 2
    token_bytes = heads * size * vectors * ELEMENT_BYTES[dtype]
    more: dict[str, Any] = {}
    if kind is SlidingWindowSpec:
        more = {"sliding_window": random_window(size, heads)}
    if kind is ChunkedLocalAttentionSpec:
        more = {"attention_chunk_size": 8192}
    return kind(
        block_size=block_size,
        page_size_bytes=block_size * token_bytes,
        num_kv_heads=heads,
        head_size=size,
        dtype=dtype,
        **more,
    )


def random_window(*seed: int) -> int:
    return (64, 128, 1000)[sum(seed) % 3]


def random_layers(
    rng: random.Random, block_size: int, *, caching: bool
) -> dict[str, KVCacheSpec]:
    """Return layers of a few kinds, repeated or not, with or without states."""
    dtype, size = rng.choice(["bfloat16", "uint8"]), rng.choice([64, 128, 256])
    choice = [FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec]
    kinds: list[Any] = [
        attention(
            rng.choice(choice), block_size, rng.choice([4, 4, 4, 8, 1, 3]), size, dtype
        )
        for _ in range(rng.randint(1, 3))
    ]
    style = rng.choice(["attention", "attention", "latent", "states"])
    if style == "latent":
        kinds.append(attention(MLAAttentionSpec, block_size, 1, 576, dtype))
    if style == "states":
        alignment = rng.choice([None, 1, 64] if caching else [None, 1])
        kinds = [
            kinds[0],
            MambaSpec(
                block_size=0,
                page_size_bytes=0,
                shapes=((3, rng.choice([1024, 8448])), (rng.choice([4, 32]), 128, 128)),
                dtypes=("bfloat16", rng.choice(["bfloat16", "float32"])),
                mamba_cache_mode=MambaCacheMode.ALIGN
                if caching
                else MambaCacheMode.NONE,
                num_checkpoint_blocks=int(alignment is not None),
                checkpoint_alignment=alignment,
                num_speculative_blocks=rng.choice([0, 0, 3]),
            ),
        ]
    period = [rng.choice(kinds) for _ in range(rng.randint(1, 6))]
    count, first = rng.randint(1, 40), [kinds[0]]
    specs = first + [period[index % len(period)] for index in range(count)]
    return {f"layers.{index}": spec for index, spec in enumerate(specs)}


def random_arguments(seed: int) -> tuple[dict[str, KVCacheSpec], dict[str, Any]]:
    rng = random.Random(seed)
    block_size, caching = rng.choice([16, 32, 64, 128]), rng.random() < 0.6
    return random_layers(rng, block_size, caching=caching), {
        "block_size": block_size,
        "available_bytes": int(10 ** rng.uniform(7, 11)),
        "max_model_len": rng.choice([500, 4096, 40_000, 131_072]),
        "max_in_flight_tokens": rng.choice([256, 2048, 16_384]),
        "fit_max_model_len": rng.random() < 0.2,
        "num_gpu_blocks_override": rng.choice([None] * 6 + [500, 3000]),
        "enable_prefix_caching": caching,
        "prefix_match_unit": rng.choice([None] * 5 + [16, 32]),
        "disable_hybrid_kv_cache_manager": rng.random() < 0.15,
    }


def ours(layers: dict[str, KVCacheSpec], arguments: dict[str, Any]) -> Any:
    try:
        plan = plan_kv_cache(layers, **arguments)
    except KVCacheTooSmallError as error:
        return str(error)
    except CacheError:
        return REFUSED
    layout = plan.layout
    return (
        [(group.layer_names, group.spec.block_size) for group in layout.groups],
        layout.num_blocks,
        plan.max_model_len,
        plan.kv_cache_size_tokens,
        plan.max_concurrency,
        layout.scheduler_block_size,
        layout.hash_block_size,
        layout.cache_hit_alignment,
    )


class Hosted:
    """The installed release's own planning, asked without an engine."""

    def __init__(self) -> None:
        self.planning = import_module("vllm.v1.core.kv_cache_planning")
        self.utils = import_module("vllm.v1.core.kv_cache_utils")
        self.layout = import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC

    def plan(self, layers: dict[str, KVCacheSpec], arguments: dict[str, Any]) -> Any:
        caching = arguments["enable_prefix_caching"]
        unit = arguments["prefix_match_unit"]
        aligned = align_states(
            layers,
            block_size=arguments["block_size"],
            max_model_len=arguments["max_model_len"],
            prefix_match_unit=unit if caching else None,
        )
        specs = {name: hosted_spec(load_api(), spec) for name, spec in aligned.items()}
        config = self._config(arguments)
        try:
            groups = self.planning.get_global_kv_cache_groups(config, [specs])
            available = [arguments["available_bytes"]]
            pool, *_ = self.planning.get_kv_cache_configs(
                config, [specs], available, groups
            )
            sizes = [group.kv_cache_spec.block_size for group in pool.kv_cache_groups]
            config.cache_config.block_size = min(sizes)
            own = self.utils.resolve_kv_cache_block_sizes(pool, config)
        except (ValueError, NotImplementedError) as error:
            said = str(error).split("Try increasing")[0].rstrip(" .")
            memory = said.startswith(("To serve at least one", "No available memory"))
            return said if memory else REFUSED
        return (
            [
                (tuple(group.layer_names), group.kv_cache_spec.block_size)
                for group in pool.kv_cache_groups
            ],
            pool.num_blocks,
            config.model_config.max_model_len,
            *self.utils.get_kv_cache_capacity(config, pool),
            *own,
            self.utils.resolve_cache_hit_alignment_tokens(pool, config, *own),
        )

    def _config(self, arguments: dict[str, Any]) -> Any:
        """Return the few facts of a configuration that the planning reads."""
        caching = arguments["enable_prefix_caching"]
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(
                disable_hybrid_kv_cache_manager=arguments[
                    "disable_hybrid_kv_cache_manager"
                ]
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=SimpleNamespace(
                num_gpu_blocks_override=arguments["num_gpu_blocks_override"],
                get_resolved_kv_cache_layout=lambda: self.layout,
                enable_prefix_caching=caching,
                prefix_match_unit=arguments["prefix_match_unit"],
                block_size=arguments["block_size"],
                mamba_cache_mode="align" if caching else "none",
                prefix_cache_retention_interval=0,
            ),
            model_config=SimpleNamespace(
                max_model_len=arguments["max_model_len"],
                original_max_model_len=-1 if arguments["fit_max_model_len"] else None,
                supports_kv_cache_grouping=False,
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, tensor_parallel_size=1
            ),
            max_in_flight_tokens=arguments["max_in_flight_tokens"],
            speculative_config=None,
            num_prefill_lookahead_tokens=0,
            kv_transfer_config=None,
            device_config=SimpleNamespace(device_type="cuda"),
        )


@pytest.mark.skipif(
    not why_missing() and minor() != "0.33", reason="the plan is that of 0.33"
)
@pytest.mark.parametrize("first", range(0, 4 * PLANS_A_TEST, PLANS_A_TEST))
def test_random_layers_are_planned_alike(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = Hosted()
    builder = import_module("vllm.v1.core.kv_cache_config_builder")
    default = hosted.planning.DefaultKVCacheConfigBuilder()
    monkeypatch.setattr(builder, "get_kv_cache_config_builder", lambda _: default)
    planned = 0
    for seed in range(first, first + PLANS_A_TEST):
        layers, arguments = random_arguments(seed)
        mine, theirs = ours(layers, arguments), hosted.plan(layers, arguments)
        assert mine == theirs, (seed, arguments)
        planned += isinstance(mine, tuple)
    assert planned > PLANS_A_TEST // 2
