"""The KV cache that each layer of a model needs on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cache.v1.specs import (
    ELEMENT_BYTES,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from sim.hardware.models.layers import LayerKind

if TYPE_CHECKING:
    from collections.abc import Container

    from sim.hardware.models.architecture import ModelArchitecture
    from sim.hardware.models.layers import AttentionHeads

PACKED_KV_CACHE_DTYPES = (
    "nvfp4",
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
    "fp8_ds_mla",
)
"""Caches whose vectors carry scales of their own, by vLLM's ``kv_cache_dtype``."""
DELTA_NET_CHECKPOINT_ALIGNMENT = 64
"""Tokens between states that the prefill of FlashInfer's delta net can write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheOptions:
    """Arguments of an engine that the cache of a layer depends on.

    Parameters
    ----------
    block_size
        Tokens of an attention block, before it may grow to cover a state.
    tensor_parallel_size
        Ranks, among which heads are divided; latent attention is not.
    kv_cache_dtype
        Precision of keys and values; "auto" is the model's.
    mamba_cache_dtype, mamba_ssm_cache_dtype
        Precisions of states, as `state_dtypes` takes them.
    enable_prefix_caching
        Whether states are kept at the ends of blocks, and not one a request.
    prefill_checkpoint
        Whether the kernel of gated delta nets can write a state inside a prefill.
    mamba2_checkpoint
        Whether that of Mamba2 can.
    num_speculative_tokens
        Draft tokens a step, each with a state of its own.
    """

    block_size: int
    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    prefill_checkpoint: bool = False
    mamba2_checkpoint: bool = True
    num_speculative_tokens: int = 0


def kv_cache_layers(
    model: ModelArchitecture,
    options: KVCacheOptions,
    drafter: ModelArchitecture | None = None,
) -> dict[str, KVCacheSpec]:
    """Return the cache of each layer of one rank, under the release's names.

    Parameters
    ----------
    model
        The target.
    options
        What the cache of a layer depends on.
    drafter
        Layers behind those of the target, or None.

    Notes
    -----
    Source: vLLM 0.33, ``get_kv_cache_spec`` of ``model_executor/layers/attention``,
    ``layers/mamba`` and ``models/deepseek_v2.py``. A spec of states has no block size
    yet: `cache.v1.planning.align_states` gives it one.
    """
    layers = _layers(model, options, 0)
    if drafter is not None:
        own = _layers(drafter, options, model.num_hidden_layers)
        layers |= {name: replace(spec, is_draft=True) for name, spec in own.items()}
    return layers


def _layers(
    model: ModelArchitecture, options: KVCacheOptions, first: int
) -> dict[str, KVCacheSpec]:
    """Return the caches of a model's layers, the first of which has this number."""
    specs: dict[LayerKind, KVCacheSpec] = {}
    for kind in set(model.layer_kinds):
        if kind.is_attention:
            specs[kind] = _attention(model, kind, options)
        elif kind.has_state:
            specs[kind] = _state(model, kind, options)
    layers: dict[str, KVCacheSpec] = {}
    with_indexer: Container[int] = model.index_layers
    if model.num_index_layers == model.num_attention_layers:
        with_indexer = range(model.num_hidden_layers)
    for index, kind in enumerate(model.layer_kinds, first):
        if kind in specs:
            ending = "mixer" if kind.has_state else "attn"
            layers[f"model.layers.{index}.{ending}"] = specs[kind]
        if index - first in with_indexer and kind.is_attention:
            layers[f"model.layers.{index}.indexer"] = _indexer(model, options)
    return layers


def _attention(
    model: ModelArchitecture, kind: LayerKind, options: KVCacheOptions
) -> AttentionSpec:
    dtype = options.kv_cache_dtype
    dtype = model.dtype if dtype == "auto" else dtype
    if kind is not LayerKind.LATENT_ATTENTION:
        heads, window = model.attention_heads(kind), model.sliding_window or 0
        return attention_spec(kind, heads, options, dtype, window)
    latent, rope = model.kv_lora_rank or 0, model.qk_rope_head_dim
    width = vector_bytes(latent + rope, dtype)
    if dtype == "fp8_ds_mla":  # FP8 with a scale for every 128, the rotary key in BF16
        width = latent + latent // 128 * 4 + rope * 2
    return MLAAttentionSpec(
        block_size=options.block_size,
        page_size_bytes=options.block_size * width,
        num_kv_heads=1,
        head_size=latent + rope,
        dtype=element_type(dtype),
    )


def attention_spec(
    kind: LayerKind,
    heads: AttentionHeads,
    options: KVCacheOptions,
    dtype: str,
    window: int = 0,
) -> AttentionSpec:
    """Return the cache of a layer with keys and values of each head.

    Parameters
    ----------
    kind
        Full, sliding or chunked.
    heads
        Of the whole model; each rank has one KV head at least.
    options
        Blocks and ranks.
    dtype
        Precision of the cache.
    window
        Tokens of the window, or of the chunk.
    """
    num_kv_heads = heads.kv_heads_per_rank(options.tensor_parallel_size)
    widths = (
        vector_bytes(heads.head_dim, dtype),
        vector_bytes(heads.v_head_dim, dtype),
    )
    shape: dict[str, Any] = {
        "block_size": options.block_size,
        "page_size_bytes": options.block_size * num_kv_heads * sum(widths),
        "num_kv_heads": num_kv_heads,
        "head_size": heads.head_dim,
    }
    element = element_type(dtype)
    if kind is LayerKind.SLIDING_ATTENTION:
        return SlidingWindowSpec(**shape, dtype=element, sliding_window=window)
    if kind is LayerKind.CHUNKED_ATTENTION:
        return ChunkedLocalAttentionSpec(
            **shape, dtype=element, attention_chunk_size=window
        )
    return FullAttentionSpec(**shape, dtype=element)


def _state(
    model: ModelArchitecture, kind: LayerKind, options: KVCacheOptions
) -> MambaSpec:
    assert model.state_shape is not None
    keeps_ends = options.enable_prefix_caching
    alignment = 1 if options.mamba2_checkpoint else None
    if kind is LayerKind.GATED_DELTA_NET:
        checkpoints = options.prefill_checkpoint and keeps_ends
        alignment = DELTA_NET_CHECKPOINT_ALIGNMENT if checkpoints else None
    dtypes = state_dtypes(
        model, options.mamba_cache_dtype, options.mamba_ssm_cache_dtype
    )
    drafts = options.num_speculative_tokens
    return MambaSpec(
        block_size=0,
        page_size_bytes=0,
        shapes=model.state_shape.state_shapes(options.tensor_parallel_size, drafts),
        dtypes=(element_type(dtypes[0]), element_type(dtypes[1])),
        mamba_cache_mode=MambaCacheMode.ALIGN if keeps_ends else MambaCacheMode.NONE,
        num_checkpoint_blocks=int(alignment is not None),
        checkpoint_alignment=alignment,
        num_speculative_blocks=drafts,
    )


def state_dtypes(
    model: ModelArchitecture, mamba_cache_dtype: str, mamba_ssm_cache_dtype: str
) -> tuple[str, str]:
    """Return the precisions of a state: of its convolution's tail, of its matrices.

    Parameters
    ----------
    model
        With its states' own precision, where its file gives one.
    mamba_cache_dtype
        Of both; "auto" is the model's.
    mamba_ssm_cache_dtype
        Of the matrices; "auto" is the file's, or else that of the tail.

    Notes
    -----
    Source: vLLM 0.33, ``layers/mamba/mamba_utils.py`` (`_mamba_state_dtype`) and
    ``models/config.py``, where the file's precision stands in for "auto".
    """
    tail = model.dtype if mamba_cache_dtype == "auto" else mamba_cache_dtype
    if mamba_ssm_cache_dtype == "auto":
        return tail, model.state_dtype or tail
    return tail, mamba_ssm_cache_dtype


def _indexer(model: ModelArchitecture, options: KVCacheOptions) -> MLAAttentionSpec:
    """Return the cache of the indexer's own keys, FP8 with scales, on every rank."""
    width = model.index_bytes_per_layer
    return MLAAttentionSpec(
        block_size=options.block_size,
        page_size_bytes=options.block_size * width,
        num_kv_heads=1,
        head_size=width,
        dtype="uint8",
    )


def vector_bytes(width: int, dtype: str) -> int:
    """Return the bytes of a cached vector of `width` elements, scales included.

    Source: vLLM 0.33, ``customize_spec`` of ``v1/attention/backends/triton_attn.py``
    (a float a head) and ``flashinfer.py`` (a byte for every 16 elements).
    """
    if dtype == "nvfp4":
        return width // 2 + width // 16
    if dtype.endswith("_per_token_head"):
        return (width // 2 if dtype.startswith("int4") else width) + 4
    return width * ELEMENT_BYTES[element_type(dtype)]


def element_type(dtype: str) -> str:
    """Return the type of an element of a cache in a precision of vLLM's name."""
    if dtype.startswith(("fp8", "nvfp4", "int4")):
        return "uint8"
    if dtype.startswith("int8"):
        return "int8"
    return {"half": "float16", "float": "float32"}.get(dtype, dtype)
