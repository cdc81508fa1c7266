"""A transformer's shape: the facts that cost memory and time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sim.errors import CapacityError
from sim.hardware.models.layers import AttentionHeads, LayerKind, StateShape

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
    model_type: str = ""
    """Family, without ``_text``; empty where it is not said."""
    dtype: str = "bfloat16"
    tie_word_embeddings: bool = False
    quantization: str | None = None
    """Scheme of the checkpoint, as `quantization_scheme` reads it,
    or the checkpoint's method where that is not modelled."""
    kv_cache_dtype: str | None = None
    """Precision in which the checkpoint asks its cache to be kept; None for none."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys pass a norm with weights (one per head dimension)."""
    qk_norm_spans_heads: bool = False
    """Whether that norm has weights for all heads together."""
    num_norms_per_layer: int = 2
    norm_bias: bool = False
    head_bias: bool = False
    attention_sinks: bool = False
    """Whether every head has a learned sink."""
    sliding_window: int | None = None
    """Keys that a sliding (or chunked) layer sees; None where no layer slides."""
    mixed_layer_kinds: tuple[LayerKind, ...] = ()
    """Kinds of the layers in order of depth; empty where all are alike."""
    sliding_heads: AttentionHeads | None = None
    """Heads of sliding layers, where they differ from those of the others."""
    shares_key_and_value: bool = False
    """Whether full attention projects keys and values by the same weights."""
    attention_output_gate: bool = False
    """Whether a gate as wide as the queries scales the output of attention."""
    state_shape: StateShape | None = None
    """Shape of the state of layers that have one."""
    state_dtype: str | None = None
    """Precision of its matrices; None for the model's."""
    conv_state_dtype: str | None = None
    """Precision of its convolution's tail; None for the model's."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    num_shared_experts: int = 0
    shared_expert_intermediate_size: int | None = None
    """Of all shared experts together; None where each has the size of a routed one."""
    shared_expert_gate: bool = False
    moe_latent_size: int | None = None
    """Width that routed experts work in; None for the hidden size."""
    num_dense_layers: int = 0
    """Layers of a mixture of experts whose MLP is dense."""
    expert_bias: bool = False
    router_bias: bool = False
    mlp_has_gate: bool = True
    """Whether MLPs and experts have a gate beside their up-projection."""
    kv_lora_rank: int | None = None
    """Width of MLA's latent; None for ordinary attention."""
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    """Width of a value; 0 for `head_dim`."""
    index_num_heads: int = 0
    """Heads of the indexer that chooses which tokens attention reads; 0 for none."""
    index_head_dim: int = 0
    index_topk: int = 0
    """Tokens that it chooses for a query."""
    index_layers: tuple[int, ...] = ()
    """Numbers of the layers with an indexer, whose choice the layers behind share;
    empty where each has its own."""
    num_rotary_positions: int | None = None
    """Positions in the rotary tables; None for `max_position_embeddings`."""
    num_joined_states: int = 0
    """Vectors of the hidden size that are projected to one before the first layer, as
    draft heads do; 0 where none are."""
    num_multimodal_parameters: int = 0
    """Parameters of the encoder and its projector; 0 where there is none, or where
    ``config.json`` does not say (see `has_encoder`)."""
    has_encoder: bool = False
    """Whether the model has an encoder for images or sound."""
    doubts: tuple[str, ...] = ()
    """Why the shape may be counted wrongly, in words; empty for known models."""
    not_simulated: tuple[str, ...] = ()
    """Features of the model that a run does not show, a line each."""

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of all layers, in order of depth."""
        if self.mixed_layer_kinds:
            return self.mixed_layer_kinds
        latent = self.kv_lora_rank is not None
        kind = LayerKind.LATENT_ATTENTION if latent else LayerKind.FULL_ATTENTION
        return (kind,) * self.num_hidden_layers

    def num_layers_of(self, *kinds: LayerKind) -> int:
        """Return how many layers are of one of `kinds`."""
        count = Counter(self.layer_kinds)
        return sum(count[kind] for kind in kinds)

    @property
    def num_sliding_layers(self) -> int:
        """Layers that see a window, or a chunk, only."""
        return self.num_layers_of(
            LayerKind.SLIDING_ATTENTION, LayerKind.CHUNKED_ATTENTION
        )

    @property
    def chunked_attention(self) -> bool:
        """Whether the sliding layers see fixed chunks instead (Llama 4)."""
        return LayerKind.CHUNKED_ATTENTION in self.mixed_layer_kinds

    @property
    def num_attention_layers(self) -> int:
        return sum(kind.is_attention for kind in self.layer_kinds)

    @property
    def num_state_layers(self) -> int:
        return sum(kind.has_state for kind in self.layer_kinds)

    @property
    def num_qk_norms(self) -> int:
        """Layers whose queries and keys pass a norm."""
        return self.num_attention_layers if self.qk_norm else 0

    @property
    def num_mlps(self) -> int:
        """MLPs, dense or sparse: one a layer, unless some layers are MLPs alone."""
        alone = self.num_layers_of(LayerKind.MLP)
        return alone or self.num_hidden_layers

    @property
    def num_moe_layers(self) -> int:
        return self.num_mlps - self.num_dense_layers if self.num_experts else 0

    @property
    def num_dense_mlps(self) -> int:
        return self.num_mlps - self.num_moe_layers

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def shared_expert_size(self) -> int:
        """Inner size of all shared experts together; 0 where there is none."""
        if self.shared_expert_intermediate_size is not None:
            return self.shared_expert_intermediate_size
        return self.num_shared_experts * self.expert_size

    def attention_heads(
        self, kind: LayerKind = LayerKind.FULL_ATTENTION
    ) -> AttentionHeads:
        """Return the heads of layers of `kind`; of MLA, before absorption."""
        if kind is LayerKind.SLIDING_ATTENTION and self.sliding_heads is not None:
            return self.sliding_heads
        return AttentionHeads(
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.v_head_dim or self.head_dim,
        )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary table covers."""
        return self.qk_rope_head_dim or self.head_dim

    def kv_heads_per_rank(self, tensor_parallel_size: int = 1) -> int:
        """Return KV heads on one rank: at least one, replicated beyond that."""
        return max(1, self.num_key_value_heads // tensor_parallel_size)

    def kv_bytes_per_layer(
        self,
        tensor_parallel_size: int = 1,
        kv_itemsize_bytes: int | None = None,
        kind: LayerKind = LayerKind.FULL_ATTENTION,
    ) -> int:
        """Return the bytes that one token takes in one attention layer on one rank.

        MLA stores one latent with the rotary key and replicates it over the ranks; an
        indexer beside it, its own keys in FP8 with a scale.
        """
        itemsize = kv_itemsize_bytes or dtype_bytes(self.dtype)
        if self.kv_lora_rank:
            latent = (self.kv_lora_rank + self.qk_rope_head_dim) * itemsize
            return latent + self.index_bytes_per_layer
        heads = self.attention_heads(kind)
        width = heads.head_dim + heads.v_head_dim
        return heads.kv_heads_per_rank(tensor_parallel_size) * width * itemsize

    @property
    def num_index_layers(self) -> int:
        """Layers with an indexer and a cache of its keys."""
        if not self.index_num_heads:
            return 0
        return len(self.index_layers) or self.num_attention_layers

    @property
    def index_bytes_per_layer(self) -> int:
        """Bytes of an indexer's key of one token: FP8, a scale for every 128."""
        return self.index_head_dim + self.index_head_dim // 128 * 4

    def kv_bytes_per_token(
        self, tensor_parallel_size: int = 1, kv_itemsize_bytes: int | None = None
    ) -> int:
        """Return the KV bytes of one token over all layers, on one rank."""
        whole = sum(
            self.kv_bytes_per_layer(tensor_parallel_size, kv_itemsize_bytes, kind)
            for kind in self.layer_kinds
            if kind.is_attention
        )
        num_sharing = self.num_attention_layers - self.num_index_layers
        return whole - num_sharing * self.index_bytes_per_layer


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of an element of vLLM's `dtype`."""
    if dtype not in DTYPE_BYTES:
        raise CapacityError(
            f"unknown dtype: {dtype!r}; use 'auto' or one of {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]
