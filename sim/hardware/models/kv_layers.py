"""The KV cache that each layer of a model needs on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.hardware.models.layers import AttentionHeads

DELTA_NET_CHECKPOINT_ALIGNMENT = 64
"""Tokens between states that the prefill of FlashInfer's delta net can write."""
_INDEX_DTYPE = "uint8"


def kv_cache_layers(
    model: ModelArchitecture,
    *,
    block_size: int,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    mamba_ssm_cache_dtype: str = "auto",
    enable_prefix_caching: bool = True,
    prefill_checkpoint: bool = False,
) -> dict[str, KVCacheSpec]:
    """Return the cache of each layer of one rank, under the release's names.

    Parameters
    ----------
    model
        A transformer.
    block_size
        Tokens of an attention block, before it may grow to cover a state.
    tensor_parallel_size
        Ranks, among which heads are divided; latent attention is not.
    kv_cache_dtype, mamba_ssm_cache_dtype
        Precision of keys and values, and of states; "auto" is the model's.
    enable_prefix_caching
        Whether states are kept at the ends of blocks, and not one a request.
    prefill_checkpoint
        Whether the kernel of gated delta nets can write a state inside a prefill; that
        of Mamba2 always can.

    Notes
    -----
    Source: vLLM 0.33, ``get_kv_cache_spec`` of ``model_executor/layers/attention``,
    ``layers/mamba`` and ``models/deepseek_v2.py``. A spec of states has no block size
    yet: `cache.v1.planning.align_states` gives it one.
    """
    dtype = model.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    element = element_type(dtype)
    mode = MambaCacheMode.ALIGN if enable_prefix_caching else MambaCacheMode.NONE
    checkpoints = prefill_checkpoint and mode is MambaCacheMode.ALIGN
    specs: dict[LayerKind, KVCacheSpec] = {}
    for kind in set(model.layer_kinds):
        if kind.is_attention:
            specs[kind] = _attention(
                model, kind, block_size, tensor_parallel_size, element
            )
        elif kind.has_state:
            state_dtype = mamba_ssm_cache_dtype
            if state_dtype == "auto":
                state_dtype = model.state_dtype or model.dtype
            specs[kind] = _state(
                model,
                kind,
                tensor_parallel_size,
                element_type(state_dtype),
                mode,
                checkpoints=checkpoints,
            )
    layers: dict[str, KVCacheSpec] = {}
    for index, kind in enumerate(model.layer_kinds):
        if kind in specs:
            ending = "mixer" if kind.has_state else "attn"
            layers[f"model.layers.{index}.{ending}"] = specs[kind]
        if model.index_num_heads and kind.is_attention:
            layers[f"model.layers.{index}.indexer"] = _indexer(model, block_size)
    return layers


def _attention(
    model: ModelArchitecture, kind: LayerKind, block_size: int, tp: int, element: str
) -> KVCacheSpec:
    if kind is LayerKind.LATENT_ATTENTION:
        width = (model.kv_lora_rank or 0) + model.qk_rope_head_dim
        return MLAAttentionSpec(
            block_size=block_size,
            page_size_bytes=block_size * width * ELEMENT_BYTES[element],
            num_kv_heads=1,
            head_size=width,
            dtype=element,
        )
    return attention_spec(
        kind,
        model.attention_heads(kind),
        block_size=block_size,
        tensor_parallel_size=tp,
        element=element,
        window=model.sliding_window or 0,
    )


def attention_spec(
    kind: LayerKind,
    heads: AttentionHeads,
    *,
    block_size: int,
    tensor_parallel_size: int = 1,
    element: str = "bfloat16",
    window: int = 0,
) -> AttentionSpec:
    """Return the cache of a layer with keys and values of each head.

    Parameters
    ----------
    kind
        Full, sliding or chunked.
    heads
        Of the whole model; each rank has one KV head at least.
    block_size
        Tokens of a block.
    tensor_parallel_size
        Ranks.
    element
        Type of an element; FP8 is ``uint8``.
    window
        Tokens of the window, or of the chunk.
    """
    num_kv_heads = heads.kv_heads_per_rank(tensor_parallel_size)
    width = (heads.head_dim + heads.v_head_dim) * ELEMENT_BYTES[element]
    shape = {
        "block_size": block_size,
        "page_size_bytes": block_size * num_kv_heads * width,
        "num_kv_heads": num_kv_heads,
        "head_size": heads.head_dim,
    }
    if kind is LayerKind.SLIDING_ATTENTION:
        return SlidingWindowSpec(**shape, dtype=element, sliding_window=window)
    if kind is LayerKind.CHUNKED_ATTENTION:
        return ChunkedLocalAttentionSpec(
            **shape, dtype=element, attention_chunk_size=window
        )
    return FullAttentionSpec(**shape, dtype=element)


def _state(
    model: ModelArchitecture,
    kind: LayerKind,
    tp: int,
    state_dtype: str,
    mode: MambaCacheMode,
    *,
    checkpoints: bool,
) -> MambaSpec:
    assert model.state_shape is not None
    alignment: int | None = 1
    if kind is LayerKind.GATED_DELTA_NET:
        alignment = DELTA_NET_CHECKPOINT_ALIGNMENT if checkpoints else None
    return MambaSpec(
        block_size=0,
        page_size_bytes=0,
        shapes=model.state_shape.state_shapes(tp),
        dtypes=(element_type(model.dtype), state_dtype),
        mamba_cache_mode=mode,
        num_checkpoint_blocks=int(alignment is not None),
        checkpoint_alignment=alignment,
    )


def _indexer(model: ModelArchitecture, block_size: int) -> MLAAttentionSpec:
    """Return the cache of the indexer's own keys, FP8 with scales, on every rank."""
    width = model.index_bytes_per_layer
    return MLAAttentionSpec(
        block_size=block_size,
        page_size_bytes=block_size * width,
        num_kv_heads=1,
        head_size=width,
        dtype=_INDEX_DTYPE,
    )


def element_type(dtype: str) -> str:
    """Return the type of an element of a cache in a precision of vLLM's name."""
    if dtype.startswith("fp8"):
        return "uint8"
    return {"half": "float16", "float": "float32"}.get(dtype, dtype)
