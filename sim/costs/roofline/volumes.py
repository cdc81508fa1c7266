"""Bytes that the layers of a model move, and FLOPs that they compute."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from sim.costs.roofline.mixture import LayerGroup, Mixture, StateLayers
from sim.hardware.models.architecture import dtype_bytes
from sim.hardware.models.layers import LayerKind, Mamba2Shape
from sim.hardware.models.weights import TensorRole, is_quantised, scheme_of

if TYPE_CHECKING:
    from sim.costs.roofline.parameters import RooflineParameters
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.hardware.models.layers import StateShape
    from sim.hardware.models.quantization import QuantizationScheme
    from sim.hardware.models.weights import WeightTensor

NO_GEMM: Final = frozenset({TensorRole.EMBEDDING, TensorRole.SMALL, TensorRole.DERIVED})
"""Tensors that are no linear layer of a transformer layer; the head is its own part."""


def own_flops_per_s(scheme: QuantizationScheme | None, gpu: GpuSpec) -> float | None:
    """Return the peak of the units that a scheme has to itself; None of 16 bits."""
    if scheme is not None and scheme.multiplies_fp4:
        return gpu.fp4_flops_per_s
    if scheme is not None and scheme.quantized_activation:
        return gpu.fp8_flops_per_s
    return None


def multiplies_fp8(scheme: QuantizationScheme | None, gpu: GpuSpec) -> bool:
    """Whether the GPU has FP8 units, and multiplies by such weights there."""
    return (
        scheme is not None
        and scheme.quantized_activation
        and not scheme.multiplies_fp4
        and gpu.fp8_flops_per_s is not None
    )


class Volume:
    """Weights and activations in the GEMMs of some tensors, on one rank."""

    __slots__ = (
        "activations",
        "bytes",
        "plain_elements",
        "quantised_bytes",
        "quantised_elements",
    )

    def __init__(self) -> None:
        self.quantised_elements = 0.0
        self.plain_elements = 0.0
        """Those that a scheme leaves in the model's precision."""
        self.bytes = self.quantised_bytes = 0.0
        self.activations = 0
        """Elements that a token reads and writes."""

    @property
    def elements(self) -> float:
        return self.quantised_elements + self.plain_elements

    def add(
        self,
        tensor: WeightTensor,
        model: ModelArchitecture,
        scheme: QuantizationScheme | None,
    ) -> None:
        elements = tensor.num_elements * tensor.count
        num_bytes = elements * itemsize_bytes(model, tensor, scheme)
        if scheme is not None and is_quantised(tensor, scheme):
            self.quantised_elements += elements
            self.quantised_bytes += num_bytes
        else:
            self.plain_elements += elements
        self.bytes += num_bytes
        width = (tensor.rows + tensor.columns) * tensor.num_groups
        self.activations += width * tensor.count

    def read_s(self, bandwidth: float, unpacked_bytes_per_s: float) -> float:
        """Return seconds to read the weights, those to be unpacked no quicker."""
        if unpacked_bytes_per_s >= bandwidth:
            return self.bytes / bandwidth
        plain_s = (self.bytes - self.quantised_bytes) / bandwidth
        return plain_s + self.quantised_bytes / unpacked_bytes_per_s

    def scale_elements(self, share: float) -> None:
        """Take the share of them that a token is multiplied with."""
        self.quantised_elements *= share
        self.plain_elements *= share


def itemsize_bytes(
    model: ModelArchitecture, tensor: WeightTensor, scheme: QuantizationScheme | None
) -> float:
    """Return bytes of an element of a linear layer, scales included."""
    scheme = scheme_of(tensor, scheme)
    if scheme is None:
        return dtype_bytes(model.dtype)
    scales = scheme.scale_bytes / (scheme.group_size or tensor.columns)
    return scheme.weight_bits / 8 + scales / scheme.group_rows


def pair_flops(
    model: ModelArchitecture,
    tensor_parallel_size: int,
    kind: LayerKind = LayerKind.FULL_ATTENTION,
) -> float:
    """Return FLOPs of a query-key pair in one layer on one rank."""
    heads = model.num_attention_heads / tensor_parallel_size
    if model.kv_lora_rank:
        key_width = model.qk_nope_head_dim + model.qk_rope_head_dim
        return 2.0 * heads * (key_width + model.v_head_dim)
    of_kind = model.attention_heads(kind)
    heads = of_kind.num_attention_heads / tensor_parallel_size
    return 2.0 * heads * (of_kind.head_dim + of_kind.v_head_dim)


def decode_key_flops(model: ModelArchitecture, tensor_parallel_size: int) -> float:
    """Return FLOPs of a key of a decode: MLA attends to the latent itself."""
    if not model.kv_lora_rank:
        return pair_flops(model, tensor_parallel_size)
    heads = model.num_attention_heads / tensor_parallel_size
    return 2.0 * heads * (2 * model.kv_lora_rank + model.qk_rope_head_dim)


def elementwise_elements(model: ModelArchitecture, tensor_parallel_size: int) -> float:
    """Return elements that a token reads and writes outside GEMM and attention.

    In one layer on one rank: two residual norms (two reads and two writes each),
    rotary embedding in place, the norm of queries and keys where a layer has one, the
    write of the KV cache, the gated activation (two reads, one write).
    """
    tp = tensor_parallel_size
    query = model.num_attention_heads / tp * model.head_dim
    key = model.kv_heads_per_rank(tp) * model.head_dim
    inner: float = model.intermediate_size
    if model.num_experts:
        inner = model.num_experts_per_tok * model.expert_size
    passes = 2.0 * (1.0 + model.num_qk_norms / model.num_hidden_layers)
    moved = passes * (query + key)
    return 8.0 * model.hidden_size + moved + 4.0 * key + 3.0 * inner / tp


# -- layers of several kinds -----------------------------------------------------------

_SCAN_EFFICIENCY: Final = 0.33
"""Share of peak that the scan of a prompt reaches where all of the GPU works: gated
delta nets of 16 heads and more, 16 sequences and more, aiconfigurator tables of h100
and h200 (0.31 to 0.34; b200 0.19, whose tensor units are not used)."""
_SCAN_TOKENS: Final = {LayerKind.GATED_DELTA_NET: 64, LayerKind.MAMBA2: 256}
"""Tokens that the scan multiplies together. Source: vLLM ``fla/ops/chunk.py``,
``mamba_chunk_size`` of the models' ``config.json``."""
_NUM_SMS: Final = 132
"""Streaming multiprocessors of an H100, each of which scans one head of a chunk."""
_CONVOLUTION_BYTES: Final = 8
"""Memory traffic of the convolution, an element of a channel; the same tables."""


def is_mixture(model: ModelArchitecture) -> bool:
    """Return whether the layers of a model read tokens in unlike ways."""
    if model.index_num_heads:  # the indexer reads all, attention what that chooses
        return True
    kinds = set(model.layer_kinds) - {LayerKind.MLP}
    chunked = LayerKind.CHUNKED_ATTENTION in kinds
    return len(kinds) != 1 or chunked or any(kind.has_state for kind in kinds)


def mixed_layers(
    parameters: RooflineParameters,
    states: StateLayers,
    bandwidth: float,
    peak: float,
) -> Mixture:
    """Return attention of a model whose layers are of several kinds.

    `bandwidth` is that at which decodes read, `peak` that of chunks.
    """
    model, tp = parameters.model, parameters.tensor_parallel_size
    itemsize = parameters.kv_itemsize_bytes()
    kinds = Counter(kind for kind in model.layer_kinds if kind.is_attention)
    num_heads = sum(
        layers * _kv_heads_read(model, kind, tp) for kind, layers in kinds.items()
    )
    if model.index_num_heads:
        groups, times = _chosen_layers(parameters, bandwidth, peak), 0.0
    else:
        groups = [
            LayerGroup(
                layers * model.kv_bytes_per_layer(tp, itemsize, kind) / bandwidth,
                layers * pair_flops(model, tp, kind) / peak,
                _window_of(model, kind),
                kind is LayerKind.CHUNKED_ATTENTION,
            )
            for kind, layers in kinds.items()
        ]
        # MLA multiplies a decode with the latent itself
        wider = decode_key_flops(model, tp) / pair_flops(model, tp)
        times = max((g.pair_s / g.kv_token_s for g in groups), default=0.0) * wider
    return Mixture(
        groups,
        states,
        num_heads * parameters.decode_sequence_head_s,
        parameters.prefill_tile_tokens,
        times,
        times * max(1, parameters.mixed_tile_tokens()),
    )


def _kv_heads_read(model: ModelArchitecture, kind: LayerKind, tp: int) -> int:
    """Return the heads whose keys a decode reads on one rank; MLA has one latent."""
    if kind is LayerKind.LATENT_ATTENTION:
        return 1
    return model.attention_heads(kind).kv_heads_per_rank(tp)


_LOGITS_BYTES: Final = 8
"""Traffic of an indexer's logit: written and read again in float32."""


def _chosen_layers(
    parameters: RooflineParameters, bandwidth: float, peak: float
) -> list[LayerGroup]:
    """Return sparse latent attention: what the indexer reads, and what it chooses.

    The indexer multiplies all its heads in FP8 on every rank with each key before a
    query, and reads its own cache alone. Attention reads the chosen latents; chunks
    whose keys are few, or in number no fewer, are computed as if all were chosen.

    Notes
    -----
    Source: vLLM 0.33.0, ``layers/sparse_attn_indexer.py`` (float32 logits of all keys,
    then the top k), ``layers/attention/sparse_mla_attention.py``
    (`_use_dense_mha_prefill`) and ``mla_attention.py`` (`_use_masked_mha`). Its
    thresholds are for a few shapes; here the quicker way is taken.
    """
    model, tp = parameters.model, parameters.tensor_parallel_size
    gpu, layers = parameters.gpu, model.num_attention_layers
    fp8 = (gpu.fp8_flops_per_s or gpu.bf16_flops_per_s) / gpu.bf16_flops_per_s
    flops = 2.0 * model.index_num_heads * model.index_head_dim
    indexers = model.num_index_layers
    logits_s = indexers * _LOGITS_BYTES / bandwidth
    index_pair_s = indexers * flops / (fp8 * peak)
    index_token_s = indexers * model.index_bytes_per_layer / bandwidth
    key_bytes = model.kv_bytes_per_layer(tp, parameters.kv_itemsize_bytes())
    latent_s = layers * (key_bytes - model.index_bytes_per_layer) / bandwidth
    chosen_s = layers * decode_key_flops(model, tp) / peak
    # a decode multiplies while it reads: the longer of both is the price of a key
    index_s = max(index_token_s, index_pair_s) + logits_s
    return [
        LayerGroup(index_s, index_pair_s + logits_s),
        LayerGroup(
            max(latent_s, chosen_s),
            chosen_s,
            model.index_topk,
            dense_pair_s=layers * pair_flops(model, tp) / peak,
        ),
    ]


def _window_of(model: ModelArchitecture, kind: LayerKind) -> int:
    """Return the keys that a layer sees at most, or those of a chunk; 0 for all."""
    if kind in {LayerKind.SLIDING_ATTENTION, LayerKind.CHUNKED_ATTENTION}:
        return model.sliding_window or 0
    return 0


def state_layers(
    model: ModelArchitecture, tp: int, *, bandwidth: float, peak: float
) -> StateLayers:
    """Return seconds of all layers with a state, from bytes and FLOPs a second."""
    shape, layers = model.state_shape, model.num_state_layers
    if shape is None or not layers:
        return StateLayers()
    convolution, matrices = (math.prod(part) for part in shape.state_shapes(tp))
    itemsize = dtype_bytes(model.conv_state_dtype or model.dtype)
    state_itemsize = dtype_bytes(model.state_dtype or model.dtype)
    state_bytes = convolution * itemsize + matrices * state_itemsize
    heads = max(1, shape.num_heads // tp)
    channels = convolution // (shape.conv_kernel - 1)
    flops = heads * _scan_flops(shape)
    return StateLayers(
        sequence_s=layers * 2.0 * state_bytes / bandwidth,
        token_s=layers * flops / (_SCAN_EFFICIENCY * peak),
        token_memory_s=layers * channels * _CONVOLUTION_BYTES / bandwidth,
        full_count=_NUM_SMS / heads,
    )


def _scan_flops(shape: StateShape) -> float:
    """Return FLOPs of a head and a token of a prompt.

    Within as many tokens as are multiplied together, each attends to all; between
    those the state is read and written.
    """
    if isinstance(shape, Mamba2Shape):
        together = _SCAN_TOKENS[LayerKind.MAMBA2]
        groups = shape.num_groups / shape.num_heads
        within = together * (shape.head_dim + groups * shape.state_size)
        return within + 4.0 * shape.head_dim * shape.state_size
    together = _SCAN_TOKENS[LayerKind.GATED_DELTA_NET]
    key, value = shape.key_head_dim, shape.value_head_dim
    return 6.0 * key * value + together * (3.0 * key + 2.0 * value)
