"""The ``kv`` table of a workload: which layers there are, and the pool they get."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from cache.v1.planning import plan_kv_cache
from cache.v1.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from sim.config.plug import did_you_mean
from sim.errors import ConfigError
from sim.hardware.models.bundled import bundled_models, load_model
from sim.hardware.models.kv_layers import KVCacheOptions, kv_cache_layers
from sim.studies.conformance.fields import MAX_BLOCKS, Count, Positive, Table
from sim.studies.conformance.kv_layers import (
    DraftLayer,
    LocalOverride,
    SpelledLayers,
)

if TYPE_CHECKING:
    from cache.v1.planning import KVCachePlan
    from cache.v1.specs import KVCacheGroup, KVCacheSpec


class KvCache(Table):
    """The facts from which the pool is planned."""

    model: str | None = None
    layers: SpelledLayers | None = None  # in place of a model's
    draft_layers: list[DraftLayer] = Field(default_factory=list)  # behind these
    block_size: Positive
    available_bytes: Count
    prefix_cache_retention_interval: Count | None = 0  # null keeps all of a window
    prefix_match_unit: Positive | None = None
    override: LocalOverride = LocalOverride()
    disable_hybrid_kv_cache_manager: bool = False
    num_gpu_blocks_override: Annotated[Positive, Field(le=MAX_BLOCKS)] | None = None
    prefill_checkpoint: bool = False
    cache_dtype: Literal[
        "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"
    ] = "auto"
    ssm_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    tp: Positive = 1
    original_max_model_len: Literal[-1] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> KvCache:
        if (self.model is None) == (self.layers is None):
            raise ValueError("give a model by name, or layers, one of the two")
        return self

    def plan(
        self,
        *,
        max_model_len: int,
        max_in_flight_tokens: int,
        enable_prefix_caching: bool,
        num_speculative_tokens: int = 0,
    ) -> KVCachePlan:
        """Plan the pool as the release does at its start.

        Raises
        ------
        ConfigError
            When there is no model of that name.
        KVCacheTooSmallError, CacheConfigError
            As `plan_kv_cache` does.
        """
        return plan_kv_cache(
            self._layers(
                enable_prefix_caching=enable_prefix_caching,
                num_speculative_tokens=num_speculative_tokens,
            ),
            block_size=self.block_size,
            available_bytes=self.available_bytes,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            fit_max_model_len=self.original_max_model_len == -1,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            enable_prefix_caching=enable_prefix_caching,
            prefix_match_unit=self.prefix_match_unit,
            disable_hybrid_kv_cache_manager=self.disable_hybrid_kv_cache_manager,
        )

    def _layers(
        self, *, enable_prefix_caching: bool, num_speculative_tokens: int
    ) -> dict[str, KVCacheSpec]:
        options = KVCacheOptions(
            block_size=self.block_size,
            tensor_parallel_size=self.tp,
            kv_cache_dtype=self.cache_dtype,
            mamba_ssm_cache_dtype=self.ssm_dtype,
            enable_prefix_caching=enable_prefix_caching,
            prefill_checkpoint=self.prefill_checkpoint,
            num_speculative_tokens=num_speculative_tokens,
        )
        layers = self._target_layers(options)
        for index, layer in enumerate(self.draft_layers, len(layers)):
            spec = layer.spec(options)
            layers[f"model.layers.{index}.attn"] = replace(spec, is_draft=True)
        return layers

    def _target_layers(self, options: KVCacheOptions) -> dict[str, KVCacheSpec]:
        named = self._named()
        if isinstance(named, SpelledLayers):
            return named.specs(options, self.override)
        model = load_model(named)
        local = self.override.chunk if model.chunked_attention else self.override.swa
        return kv_cache_layers(
            replace(model, sliding_window=local or model.sliding_window), options
        )

    def _named(self) -> str | SpelledLayers:
        """Return a bundled model's name, or layers that are spelled out."""
        if self.layers is not None:
            return self.layers
        assert self.model is not None
        known = _models()
        if self.model not in known and self.model not in bundled_models():
            raise ConfigError(
                f"kv.model must be one of {', '.join(known)}, or a bundled model; got"
                f" {self.model[:80]!r}{did_you_mean(self.model, list(known))}"
            )
        named = known.get(self.model, self.model)
        return named if isinstance(named, str) else SpelledLayers.model_validate(named)

    def spelled_out(self, *, enable_prefix_caching: bool) -> KvCache:
        """Return the same with its layers one by one, so that some can be left out."""
        layers = self.model_copy(update={"draft_layers": []})._layers(
            enable_prefix_caching=enable_prefix_caching, num_speculative_tokens=0
        )
        in_layers = ("model", "override", "prefill_checkpoint", "ssm_dtype", "tp")
        plain = {name: KvCache.model_fields[name].default for name in in_layers}
        return self.model_copy(
            update=plain | {"layers": SpelledLayers.of(layers.values())}
        )


def _models() -> dict[str, Any]:
    """Return bundled names, or the layers of made-up models, by name."""
    folder = resources.files("sim.studies.conformance")
    text = (folder / "kv_models.json").read_text(encoding="utf-8")
    models: dict[str, Any] = json.loads(text)
    return models


# -- the first line of a log ---------------------------------------------------------


def header_of(plan: KVCachePlan, available_bytes: int) -> dict[str, Any]:
    """Return the header of a log: groups, pages and blocks before the first step."""
    layout = plan.layout
    counted = Counter(plan.layers.values())
    return {
        "max_model_len": plan.max_model_len,
        "available_bytes": available_bytes,
        "layer_specs": [
            [count, dict(sorted(spec_fields(spec).items()))]
            for spec, count in counted.items()
        ],
        "groups": [
            _group_fields(group, blocks)
            for group, blocks in zip(
                layout.groups, plan.blocks_per_request, strict=True
            )
        ],
        "bytes_per_block": layout.bytes_per_block,
        "num_blocks": layout.num_blocks,
        "kv_cache_size_tokens": plan.kv_cache_size_tokens,
        "max_concurrency": round(plan.max_concurrency, 6),
        "printed": plan.printed,
        "block_size": plan.block_size,
        "scheduler_block_size": layout.scheduler_block_size,
        "hash_block_size": layout.hash_block_size,
        "cache_hit_alignment": layout.cache_hit_alignment,
        "max_in_flight_tokens": plan.max_in_flight_tokens,
    }


def coordinator_of(plan: KVCachePlan, *, enable_prefix_caching: bool) -> dict[str, Any]:
    """Return the facts of the coordinator in a schedule's log, beside the plan."""
    layout = plan.layout
    if not enable_prefix_caching:
        return {"coordinator": "KVCacheCoordinatorNoPrefixCache"}
    if len(layout.groups) == 1:
        return {"coordinator": "UnitaryKVCacheCoordinator"}
    return {"coordinator": "HybridKVCacheCoordinator"} | (
        {"partial_hash_hits": True} if layout.has_hits_inside_blocks else {}
    )


def _group_fields(group: KVCacheGroup, blocks_per_request: int) -> dict[str, Any]:
    return {
        "layers": len(group.layer_names),
        "first": list(group.layer_names[:2]),
        "spec": spec_fields(group.spec),
        "blocks_per_request": blocks_per_request,
    }


def spec_fields(spec: KVCacheSpec) -> dict[str, Any]:
    """Return a spec under the names of the log."""
    sizes = {"block_size": spec.block_size, "page": spec.page_size_bytes}
    if isinstance(spec, MambaSpec):
        return {
            "kind": "mamba",
            **sizes,
            "state_bytes": spec.state_bytes,
            "shapes": [list(shape) for shape in spec.shapes],
            "dtypes": list(spec.dtypes),
            "mode": spec.mamba_cache_mode.value,
            "checkpoint_blocks": spec.num_checkpoint_blocks,
            "checkpoint_alignment": spec.checkpoint_alignment,
        } | (
            {"speculative_blocks": spec.num_speculative_blocks}
            if spec.num_speculative_blocks
            else {}
        )
    assert isinstance(spec, AttentionSpec)
    kinds: dict[type[AttentionSpec], str] = {
        SlidingWindowSpec: "sliding_window",
        ChunkedLocalAttentionSpec: "chunked_local_attention",
        MLAAttentionSpec: "mla_attention",
    }
    fields = {
        "kind": kinds.get(type(spec), "full_attention"),
        **sizes,
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "dtype": spec.dtype,
    }
    for name in ("sliding_window", "attention_chunk_size"):
        if (tokens := getattr(spec, name, None)) is not None:
            fields[name] = tokens
    return fields
