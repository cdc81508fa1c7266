"""Weights, tensor by tensor: how many parameters, and how many bytes a rank holds.

The tensors are those that vLLM allocates (``qkv_proj`` and ``gate_up_proj`` merged,
experts stacked), because PyTorch's allocator rounds each of them up: for Qwen2.5-7B
the rounding is 56 MiB of the 14.2487 GiB that the engine reports.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING

from sim.hardware.models.layers import GatedDeltaNetShape, LayerKind, Mamba2Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.hardware.models.architecture import ModelArchitecture
    from sim.hardware.models.quantization import QuantizationScheme

MIB = 1 << 20
VOCAB_PADDING = 64
"""Rows of embedding and head are padded to this multiple. Source: vLLM
``VocabParallelEmbedding``, ``DEFAULT_VOCAB_PADDING_SIZE``."""


class TensorRole(Enum):
    """The role of a tensor, which decides its precision."""

    EMBEDDING = "embedding"
    """Input embedding and output head: never quantised."""
    LINEAR = "linear"
    """Projections of attention and MLP: quantised by every scheme."""
    EXPERT = "expert"
    """Stacked projections of routed experts: quantised by every scheme."""
    SMALL = "small"
    """Norms, biases, routers, encoders: kept in the model's precision."""
    DERIVED = "derived"
    """Copies and tables that the engine makes: bytes, but no parameters."""


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """`count` identical tensors of shape `num_groups` x `rows` x `columns`.

    `columns` is the input dimension, along which group scales run.
    """

    role: TensorRole
    rows: int
    columns: int = 1
    num_groups: int = 1
    count: int = 1
    is_mlp: bool = True
    """Whether the tensor belongs to an MLP or its experts, not to a mixer of tokens."""
    part: str = ""
    """``attention`` (with what leads to experts of another width) or ``states``."""

    @property
    def num_elements(self) -> int:
        return self.num_groups * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """How routed experts are divided over the GPUs of data-parallel ranks.

    Source: vLLM 0.33.0, ``model_executor/layers/fused_moe/config.py``
    (`FusedMoEParallelConfig.make`).
    """

    data_parallel_size: int = 1
    """Ranks with an attention of their own, which divide the experts between them."""
    enable_expert_parallel: bool = False
    """Whether a GPU holds some experts whole, not a part of each."""

    def of(self, model: ModelArchitecture, tp: int) -> tuple[int, int]:
        """Return how many experts a GPU of ranks of `tp` holds, and their width."""
        ranks = tp * self.data_parallel_size
        if self.enable_expert_parallel:
            return _divide(model.num_experts, ranks), model.expert_size
        return model.num_experts, _divide(model.expert_size, ranks)


WITHIN_TENSOR_RANKS = ExpertRanks()


def weight_tensors(
    model: ModelArchitecture,
    tensor_parallel_size: int = 1,
    *,
    padded: bool = True,
    experts: ExpertRanks = WITHIN_TENSOR_RANKS,
) -> Iterator[WeightTensor]:
    """Yield the tensors that one rank holds.

    Column- and row-parallel projections, embedding and head are divided by
    `tensor_parallel_size`, experts as `experts` says; norms, routers and MLA's
    down-projections are replicated.
    """
    tp = tensor_parallel_size
    multiple = VOCAB_PADDING if padded else 1
    vocab_rows = _divide(_padded(model.vocab_size, multiple), tp)
    yield WeightTensor(
        TensorRole.EMBEDDING,
        vocab_rows,
        model.hidden_size,
        count=1 if model.tie_word_embeddings else 2,
    )
    yield from _norms(model)
    yield from _mixers(model, tp)
    yield from _mlp(model, tp, experts)
    if model.num_joined_states:
        width = model.hidden_size
        yield WeightTensor(TensorRole.LINEAR, width, model.num_joined_states * width)
    if model.num_multimodal_parameters:
        yield WeightTensor(
            TensorRole.SMALL, _divide(model.num_multimodal_parameters, tp)
        )


def count_parameters(model: ModelArchitecture) -> int:
    """Return the number of parameters of the checkpoint, the encoder's included."""
    return sum(
        tensor.num_elements * tensor.count
        for tensor in weight_tensors(model, padded=False)
        if tensor.role is not TensorRole.DERIVED
    )


def count_active_parameters(model: ModelArchitecture) -> int:
    """Return the parameters that one token meets: of its own experts only.

    The input embedding is left out, of which a token meets one row.
    """
    active: float = 0
    for tensor in weight_tensors(model, padded=False):
        share = 1.0
        if tensor.role is TensorRole.DERIVED:
            share = 0.0
        elif tensor.role is TensorRole.EXPERT:
            share = model.num_experts_per_tok / model.num_experts
        active += share * tensor.num_elements * tensor.count
    tied = model.tie_word_embeddings
    embedding = 0 if tied else model.vocab_size * model.hidden_size
    return round(active) - embedding - model.num_multimodal_parameters


def weight_bytes(
    model: ModelArchitecture,
    tensor_parallel_size: int,
    itemsize_bytes: int,
    scheme: QuantizationScheme | None,
    experts: ExpertRanks = WITHIN_TENSOR_RANKS,
) -> int:
    """Return the bytes that loading the model takes on one rank."""
    total = 0
    tensors = weight_tensors(model, tensor_parallel_size, experts=experts)
    if scheme is not None and scheme.has_head and not model.tie_word_embeddings:
        embedding = next(tensors)
        head = replace(embedding, role=TensorRole.LINEAR, is_mlp=True, count=1)
        tensors = chain([replace(embedding, count=1), head], tensors)
    for tensor in tensors:
        one = tensor_bytes(tensor, itemsize_bytes, scheme)
        total += tensor.count * allocated_bytes(one)
    positions = model.num_rotary_positions or model.max_position_embeddings
    # The tables of cosines and sines are buffers of the model, in its precision.
    return total + allocated_bytes(positions * model.rotary_dim * itemsize_bytes)


def allocated_bytes(num_bytes: int) -> int:
    """Return the bytes that PyTorch's caching allocator counts for a tensor.

    A tensor of 10 MiB or more gets a segment of its own, a multiple of 2 MiB, and the
    remainder is split off only where it exceeds 1 MiB. Source: PyTorch
    ``CUDACachingAllocator`` (``kMinLargeAlloc``, ``kRoundLarge``, ``kSmallSize``).
    """
    rounded = -(-num_bytes // 512) * 512
    if rounded < 10 * MIB:
        return rounded
    segment = -(-rounded // (2 * MIB)) * 2 * MIB
    return segment if segment - rounded <= MIB else rounded


def _divide(amount: int, parts: int) -> int:
    return -(-amount // parts)


def _padded(amount: int, multiple: int) -> int:
    return _divide(amount, multiple) * multiple


def tensor_bytes(
    tensor: WeightTensor, itemsize_bytes: int, scheme: QuantizationScheme | None
) -> int:
    """Return the bytes of one of such tensors, scales included."""
    scheme = scheme_of(tensor, scheme)
    if scheme is None:
        return tensor.num_elements * itemsize_bytes
    rows, columns = tensor.num_groups * tensor.rows, tensor.columns
    scales_per_row = 1 if scheme.group_size is None else columns / scheme.group_size
    packed = rows * columns * scheme.weight_bits / 8
    scales = rows * scales_per_row / scheme.group_rows
    return int(packed + scales * scheme.scale_bytes)


def scheme_of(
    tensor: WeightTensor, scheme: QuantizationScheme | None
) -> QuantizationScheme | None:
    """Return the scheme that stores the tensor; None for the model's precision."""
    if scheme is None or is_quantised(tensor, scheme):
        return scheme
    return scheme.others if tensor.role is TensorRole.LINEAR else None


def is_quantised(tensor: WeightTensor, scheme: QuantizationScheme) -> bool:
    """Return whether a scheme stores the tensor in its own precision."""
    if tensor.role is TensorRole.EXPERT:
        return True
    if tensor.role is not TensorRole.LINEAR or scheme.only_experts:
        return False
    if tensor.part and tensor.part in scheme.left_part:
        return False
    return tensor.is_mlp or not scheme.only_mlps


def _norms(model: ModelArchitecture) -> Iterator[WeightTensor]:
    layers = model.num_hidden_layers
    small = TensorRole.SMALL
    norms = (1 + layers * model.num_norms_per_layer) * (1 + model.norm_bias)
    yield WeightTensor(small, model.hidden_size, count=norms)
    if model.head_bias:
        yield WeightTensor(small, model.vocab_size)
    if model.qk_norm:
        heads = (1, 1)
        if model.qk_norm_spans_heads:
            heads = (model.num_attention_heads, model.num_key_value_heads)
        for num in heads:
            width = num * model.head_dim
            yield WeightTensor(small, width, count=model.num_qk_norms)


def _mixers(model: ModelArchitecture, tp: int) -> Iterator[WeightTensor]:
    """Yield the tensors of attention and of layers with a state, kind by kind."""
    for kind, layers in Counter(model.layer_kinds).items():
        part = "attention" if kind.is_attention else "states"
        for tensor in _of_kind(model, kind, tp, layers):
            yield replace(tensor, is_mlp=False, part=part)


def _of_kind(
    model: ModelArchitecture, kind: LayerKind, tp: int, layers: int
) -> Iterator[WeightTensor]:
    if kind is LayerKind.LATENT_ATTENTION:
        yield from _latent_attention(model, tp, layers)
    elif kind.is_attention:
        yield from _attention(model, kind, tp, layers)
    elif kind is LayerKind.MAMBA2:
        yield from _mamba2(model, tp, layers)
    elif kind is LayerKind.GATED_DELTA_NET:
        yield from _gated_delta_net(model, tp, layers)


def _attention(
    model: ModelArchitecture, kind: LayerKind, tp: int, layers: int
) -> Iterator[WeightTensor]:
    hidden, heads = model.hidden_size, model.attention_heads(kind)
    query = heads.num_attention_heads // tp * heads.head_dim
    output = heads.num_attention_heads // tp * heads.v_head_dim
    kv_heads = heads.kv_heads_per_rank(tp)
    projected = query + kv_heads * (heads.head_dim + heads.v_head_dim)
    if model.attention_output_gate:
        projected += output
    if model.shares_key_and_value and kind is LayerKind.FULL_ATTENTION:
        shared = kv_heads * heads.head_dim
        projected -= shared
        # vLLM loads the weights of keys a second time, for values.
        yield WeightTensor(TensorRole.DERIVED, shared, hidden, count=layers)
    yield WeightTensor(TensorRole.LINEAR, projected, hidden, count=layers)
    yield WeightTensor(TensorRole.LINEAR, hidden, output, count=layers)
    if model.qkv_bias:
        yield WeightTensor(TensorRole.SMALL, projected, count=layers)
    if model.attention_output_bias:
        yield WeightTensor(TensorRole.SMALL, hidden, count=layers)
    if model.attention_sinks:
        sinks = heads.num_attention_heads // tp
        yield WeightTensor(TensorRole.SMALL, sinks, count=layers)


def _mamba2(model: ModelArchitecture, tp: int, layers: int) -> Iterator[WeightTensor]:
    shape, hidden = model.state_shape, model.hidden_size
    assert isinstance(shape, Mamba2Shape)
    inner, heads = shape.inner_size // tp, shape.num_heads // tp
    channels = shape.state_shapes(tp)[0][1]
    small, linear = TensorRole.SMALL, TensorRole.LINEAR
    yield WeightTensor(linear, inner + channels + heads, hidden, count=layers)
    yield WeightTensor(linear, hidden, inner, count=layers)
    yield WeightTensor(small, channels, shape.conv_kernel + 1, count=layers)
    yield WeightTensor(small, heads, count=3 * layers)
    yield WeightTensor(small, inner, count=layers)


def _gated_delta_net(
    model: ModelArchitecture, tp: int, layers: int
) -> Iterator[WeightTensor]:
    shape, hidden = model.state_shape, model.hidden_size
    assert isinstance(shape, GatedDeltaNetShape)
    value, heads = shape.value_size // tp, shape.num_value_heads // tp
    channels = shape.conv_channels // tp
    small, linear = TensorRole.SMALL, TensorRole.LINEAR
    yield WeightTensor(linear, channels + value, hidden, count=layers)
    yield WeightTensor(linear, 2 * heads, hidden, count=layers)
    yield WeightTensor(linear, hidden, value, count=layers)
    yield WeightTensor(small, channels, shape.conv_kernel, count=layers)
    yield WeightTensor(small, heads, count=2 * layers)
    yield WeightTensor(small, shape.value_head_dim, count=layers)


def _latent_attention(
    model: ModelArchitecture, tp: int, layers: int
) -> Iterator[WeightTensor]:
    hidden, role = model.hidden_size, TensorRole.LINEAR
    heads = model.num_attention_heads // tp
    latent, rope = model.kv_lora_rank or 0, model.qk_rope_head_dim
    query = heads * (model.qk_nope_head_dim + rope)
    up = heads * (model.qk_nope_head_dim + model.v_head_dim)
    if model.q_lora_rank:
        yield WeightTensor(role, model.q_lora_rank, hidden, count=layers)
        yield WeightTensor(TensorRole.SMALL, model.q_lora_rank, count=layers)
        yield WeightTensor(role, query, model.q_lora_rank, count=layers)
    else:
        yield WeightTensor(role, query, hidden, count=layers)
    yield WeightTensor(role, latent + rope, hidden, count=layers)
    yield WeightTensor(TensorRole.SMALL, latent, count=layers)
    yield WeightTensor(role, up, latent, count=layers)
    yield WeightTensor(role, hidden, heads * model.v_head_dim, count=layers)
    # vLLM keeps the up-projection a second time, absorbed into query and output.
    yield WeightTensor(TensorRole.DERIVED, up, latent, count=layers)
    if model.index_num_heads:
        yield from _indexer(model, model.num_index_layers)


def _indexer(model: ModelArchitecture, layers: int) -> Iterator[WeightTensor]:
    """Yield the projections that choose which tokens are read, on every rank alike."""
    heads, width = model.index_num_heads, model.index_head_dim
    low_rank = model.q_lora_rank or model.hidden_size
    hidden, role = model.hidden_size, TensorRole.LINEAR
    yield WeightTensor(role, heads * width, low_rank, count=layers)
    yield WeightTensor(role, width, hidden, count=layers)
    yield WeightTensor(TensorRole.SMALL, heads, hidden, count=layers)
    yield WeightTensor(TensorRole.SMALL, width, count=2 * layers)


def _mlp(
    model: ModelArchitecture, tp: int, ranks: ExpertRanks
) -> Iterator[WeightTensor]:
    sparse = model.num_moe_layers
    yield from _dense_mlp(
        model, _divide(model.intermediate_size, tp), model.num_dense_mlps
    )
    if not sparse:
        return
    hidden, small = model.hidden_size, TensorRole.SMALL
    (experts, inner), width = ranks.of(model, tp), model.moe_latent_size or hidden
    up = inner * (1 + model.mlp_has_gate)
    yield WeightTensor(TensorRole.EXPERT, up, width, experts, sparse)
    yield WeightTensor(TensorRole.EXPERT, width, inner, experts, sparse)
    yield WeightTensor(small, model.num_experts, hidden, count=sparse)
    if model.moe_latent_size:
        yield WeightTensor(
            TensorRole.LINEAR, width, hidden, count=2 * sparse, part="attention"
        )
    if model.expert_bias:
        yield WeightTensor(small, up + hidden, 1, experts, sparse)
    if model.router_bias:
        yield WeightTensor(small, model.num_experts, count=sparse)
    yield from _dense_mlp(model, _divide(model.shared_expert_size, tp), sparse)
    if model.shared_expert_gate:
        yield WeightTensor(small, 1, hidden, count=sparse)


def _dense_mlp(
    model: ModelArchitecture, inner: int, layers: int
) -> Iterator[WeightTensor]:
    if not inner or not layers:
        return
    hidden, up = model.hidden_size, inner * (1 + model.mlp_has_gate)
    yield WeightTensor(TensorRole.LINEAR, up, hidden, count=layers)
    yield WeightTensor(TensorRole.LINEAR, hidden, inner, count=layers)
    if model.mlp_bias:
        yield WeightTensor(TensorRole.SMALL, up + hidden, count=layers)
