"""A transformer's shape: the facts that cost memory and time."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import CapacityError

DTYPE_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float": 4,
    "float32": 4,
}
"""Bytes of an element by vLLM's ``dtype`` name."""

KV_CACHE_DTYPE_BYTES: dict[str, int] = {
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}
"""Bytes of an element by vLLM's ``kv_cache_dtype``, but for "auto", which is the
precision of the model."""


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A transformer's shape, in the names of its ``config.json``."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    """Tokens of the longest request, stretched as the rope scaling says."""
    dtype: str = "bfloat16"
    tie_word_embeddings: bool = False
    quantization: str | None = None
    """Scheme of the checkpoint, as `quantization_scheme` reads it,
    or the checkpoint's method where that is not modelled."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys pass a norm with weights (one per head dimension)."""
    num_norms_per_layer: int = 2
    attention_sinks: bool = False
    """Whether every head has a learned sink."""
    sliding_window: int | None = None
    """Keys that a sliding (or chunked) layer sees; None where no layer slides."""
    num_sliding_layers: int = 0
    chunked_attention: bool = False
    """Whether the sliding layers see fixed chunks instead (Llama 4)."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    """Layers of a mixture of experts whose MLP is dense."""
    expert_bias: bool = False
    kv_lora_rank: int | None = None
    """Width of MLA's latent; None for ordinary attention."""
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_rotary_positions: int | None = None
    """Positions in the rotary tables; None for `max_position_embeddings`."""
    num_multimodal_parameters: int = 0
    """Parameters of the encoder and its projector; 0 where there is none, or where
    ``config.json`` does not say (see `has_encoder`)."""
    has_encoder: bool = False
    """Whether the model has an encoder for images or sound."""
    doubts: tuple[str, ...] = ()
    """Why the shape may be counted wrongly, in words; empty for known models."""

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary table covers."""
        return self.qk_rope_head_dim or self.head_dim

    def kv_heads_per_rank(self, tensor_parallel_size: int = 1) -> int:
        """Return KV heads on one rank: at least one, replicated beyond that."""
        return max(1, self.num_key_value_heads // tensor_parallel_size)

    def kv_bytes_per_layer(
        self, tensor_parallel_size: int = 1, kv_itemsize_bytes: int | None = None
    ) -> int:
        """Return the bytes that one token takes in one layer on one rank.

        MLA stores one latent with the rotary key and replicates it over the ranks.
        """
        itemsize = kv_itemsize_bytes or dtype_bytes(self.dtype)
        if self.kv_lora_rank:
            return (self.kv_lora_rank + self.qk_rope_head_dim) * itemsize
        heads = self.kv_heads_per_rank(tensor_parallel_size)
        return 2 * heads * self.head_dim * itemsize

    def kv_bytes_per_token(
        self, tensor_parallel_size: int = 1, kv_itemsize_bytes: int | None = None
    ) -> int:
        """Return the KV bytes of one token over all layers, on one rank."""
        per_layer = self.kv_bytes_per_layer(tensor_parallel_size, kv_itemsize_bytes)
        return self.num_hidden_layers * per_layer


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of an element of vLLM's `dtype`."""
    if dtype not in DTYPE_BYTES:
        raise CapacityError(
            f"unknown dtype: {dtype!r}; use 'auto' or one of {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]
