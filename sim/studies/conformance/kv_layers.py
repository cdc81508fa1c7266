"""Layers that a workload spells out: a few kinds, repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from cache.v1.specs import (
    AttentionSpec,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MLAAttentionSpec,
)
from sim.hardware.models.kv_layers import (
    KVCacheOptions,
    attention_spec,
    element_type,
    vector_bytes,
)
from sim.hardware.models.layers import AttentionHeads, LayerKind
from sim.studies.conformance.fields import Positive, Table

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_LAYERS = 1 << 10


class DraftLayer(Table):
    """A layer of a drafter, as ``[kind, num_kv_heads, head_size]``, and its window."""

    kind: Literal["full", "window"]
    num_kv_heads: Positive
    head_size: Positive
    sliding_window: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        return dict(zip(cls.model_fields, data, strict=False))

    @model_validator(mode="after")
    def _consistent(self) -> DraftLayer:
        if (self.kind == "window") != (self.sliding_window is not None):
            raise ValueError("a draft layer of kind window has one, and no other kind")
        return self

    def spec(self, options: KVCacheOptions) -> KVCacheSpec:
        """Return the cache of the layer."""
        own = SpelledLayer.model_validate(self.model_dump(exclude={"kind"}))
        return own.spec(options, LocalOverride())


class LocalOverride(Table):
    """A smaller window or chunk than the model's."""

    swa: Positive | None = None
    chunk: Positive | None = None


class SpelledLayer(Table):
    """A layer by its cache: keys and values, one latent vector a token, or a state."""

    num_kv_heads: Positive | None = None
    head_size: Positive | None = None
    sliding_window: Positive | None = None
    attention_chunk_size: Positive | None = None
    latent: bool = False
    state_shapes: list[list[Positive]] | None = None
    state_dtypes: list[Literal["bfloat16", "float16", "float32"]] | None = None
    checkpoint_alignment: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> SpelledLayer:
        heads = (self.num_kv_heads, self.head_size)
        if self.state_shapes is None:
            if None in heads:
                raise ValueError(
                    "a layer has num_kv_heads and head_size, or state_shapes"
                )
            if self.sliding_window and self.attention_chunk_size:
                raise ValueError("a layer has a window or chunks; leave one out")
            return self
        if heads != (None, None):
            raise ValueError("a layer with state_shapes has no heads; leave them out")
        dtypes = self.state_dtypes
        if dtypes is not None and len(dtypes) != len(self.state_shapes):
            raise ValueError(
                f"state_dtypes names one type a shape, {len(self.state_shapes)}, got "
                f"{len(dtypes)}"
            )
        return self

    def spec(self, options: KVCacheOptions, override: LocalOverride) -> KVCacheSpec:
        """Return the cache of the layer, in blocks of the size that is asked for."""
        if self.state_shapes is not None:
            return self._state(options, self.state_shapes)
        num_kv_heads, head_size = self.num_kv_heads, self.head_size
        assert num_kv_heads is not None
        assert head_size is not None
        dtype = options.kv_cache_dtype
        dtype = "bfloat16" if dtype == "auto" else dtype
        if self.latent:
            return MLAAttentionSpec(
                block_size=options.block_size,
                page_size_bytes=options.block_size * vector_bytes(head_size, dtype),
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                dtype=element_type(dtype),
            )
        kind, local = LayerKind.FULL_ATTENTION, 0
        if self.sliding_window:
            kind = LayerKind.SLIDING_ATTENTION
            local = override.swa or self.sliding_window
        elif self.attention_chunk_size:
            kind = LayerKind.CHUNKED_ATTENTION
            local = override.chunk or self.attention_chunk_size
        heads = AttentionHeads(num_kv_heads, num_kv_heads, head_size, head_size)
        return attention_spec(kind, heads, options, dtype, local)

    def _state(self, options: KVCacheOptions, shapes: list[list[int]]) -> MambaSpec:
        keeps_ends = options.enable_prefix_caching
        alignment = self.checkpoint_alignment
        drafts = options.num_speculative_tokens
        tail, *others = shapes  # of the convolution: a row for each draft
        shapes = [[tail[0] + drafts, *tail[1:]], *others]
        return MambaSpec(
            block_size=0,
            page_size_bytes=0,
            shapes=tuple(tuple(shape) for shape in shapes),
            dtypes=tuple(self.state_dtypes or ["bfloat16"] * len(shapes)),
            mamba_cache_mode=(
                MambaCacheMode.ALIGN if keeps_ends else MambaCacheMode.NONE
            ),
            num_checkpoint_blocks=int(alignment is not None),
            checkpoint_alignment=alignment,
            num_speculative_blocks=drafts,
        )

    @classmethod
    def of(cls, spec: KVCacheSpec) -> SpelledLayer:
        """Return a layer with the cache of a spec, in blocks of any size."""
        if isinstance(spec, MambaSpec):
            dtypes: Any = list(spec.dtypes)
            return cls(
                state_shapes=[list(shape) for shape in spec.shapes],
                state_dtypes=dtypes,
                checkpoint_alignment=spec.checkpoint_alignment,
            )
        assert isinstance(spec, AttentionSpec)
        more: dict[str, Any] = {
            name: getattr(spec, name, None)
            for name in ("sliding_window", "attention_chunk_size")
        }
        return cls(
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            latent=isinstance(spec, MLAAttentionSpec),
            **more,
        )


class SpelledLayers(Table):
    """Layers of a model that is none: a few, repeated in their order."""

    num_layers: Positive = Field(le=_MOST_LAYERS)
    repeated: list[SpelledLayer] = Field(min_length=1)

    @classmethod
    def of(cls, specs: Iterable[KVCacheSpec]) -> SpelledLayers:
        """Return layers with the caches of `specs`."""
        layers = [SpelledLayer.of(spec) for spec in specs]
        return cls(num_layers=len(layers), repeated=layers)

    def specs(
        self, options: KVCacheOptions, override: LocalOverride
    ) -> dict[str, KVCacheSpec]:
        """Return the cache of each layer, under names as a release gives them."""
        layers = {}
        for index in range(self.num_layers):
            layer = self.repeated[index % len(self.repeated)]
            ending = "attn" if layer.state_shapes is None else "mixer"
            layers[f"model.layers.{index}.{ending}"] = layer.spec(options, override)
        return layers
