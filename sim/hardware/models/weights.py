"""Weights, tensor by tensor: how many parameters, and how many bytes a rank holds.

The tensors are those that vLLM allocates (``qkv_proj`` and ``gate_up_proj`` merged,
experts stacked), because PyTorch's allocator rounds each of them up: for Qwen2.5-7B
the rounding is 56 MiB of the 14.2487 GiB that the engine reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.hardware.models.architecture import ModelArchitecture
    from sim.hardware.models.quantization import QuantizationScheme

MIB = 1 << 20
VOCAB_PADDING = 64
"""Rows of embedding and head are padded to this multiple. Source: vLLM
``VocabParallelEmbedding``, ``DEFAULT_VOCAB_PADDING_SIZE``."""


class TensorRole(Enum):
    """What a tensor is, which decides its precision."""

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

    @property
    def num_elements(self) -> int:
        return self.num_groups * self.rows * self.columns


def weight_tensors(
    model: ModelArchitecture, tensor_parallel_size: int = 1, *, padded: bool = True
) -> Iterator[WeightTensor]:
    """Yield the tensors that one rank holds.

    Column- and row-parallel projections, experts, embedding and head are divided by
    `tensor_parallel_size`; norms, routers and MLA's down-projections are replicated.
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
    if model.kv_lora_rank:
        yield from _latent_attention(model, tp)
    else:
        yield from _attention(model, tp)
    yield from _mlp(model, tp)
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


def weight_bytes(
    model: ModelArchitecture,
    tensor_parallel_size: int,
    itemsize_bytes: int,
    scheme: QuantizationScheme | None,
) -> int:
    """Return the bytes that loading the model takes on one rank."""
    total = 0
    for tensor in weight_tensors(model, tensor_parallel_size):
        one = _tensor_bytes(tensor, itemsize_bytes, scheme)
        total += tensor.count * allocated_bytes(one)
    positions = model.num_rotary_positions or model.max_position_embeddings
    # The tables of cosines and sines are buffers of the model, in its precision.
    return total + allocated_bytes(positions * model.rotary_dim * itemsize_bytes)


def allocated_bytes(num_bytes: int) -> int:
    """Return what PyTorch's caching allocator counts for a tensor, in bytes.

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


def _tensor_bytes(
    tensor: WeightTensor, itemsize_bytes: int, scheme: QuantizationScheme | None
) -> int:
    if scheme is None or not _is_quantised(tensor.role, scheme):
        return tensor.num_elements * itemsize_bytes
    rows, columns = tensor.num_groups * tensor.rows, tensor.columns
    scales_per_row = 1 if scheme.group_size is None else columns / scheme.group_size
    packed_rows = rows
    if tensor.role is TensorRole.EXPERT:
        columns = _padded(columns, scheme.expert_alignment)
        one = _padded(tensor.rows, scheme.expert_row_alignment)
        packed_rows = tensor.num_groups * one
    packed = packed_rows * columns * scheme.weight_bits / 8
    return int(packed + rows * scales_per_row * scheme.scale_bytes)


def _is_quantised(role: TensorRole, scheme: QuantizationScheme) -> bool:
    if role is TensorRole.EXPERT:
        return True
    return role is TensorRole.LINEAR and not scheme.only_experts


def _norms(model: ModelArchitecture) -> Iterator[WeightTensor]:
    layers = model.num_hidden_layers
    small = TensorRole.SMALL
    yield WeightTensor(
        small, model.hidden_size, count=1 + layers * model.num_norms_per_layer
    )
    if model.qk_norm:
        yield WeightTensor(small, model.head_dim, count=2 * layers)


def _attention(model: ModelArchitecture, tp: int) -> Iterator[WeightTensor]:
    layers, hidden = model.num_hidden_layers, model.hidden_size
    query = model.num_attention_heads // tp * model.head_dim
    both = 2 * model.kv_heads_per_rank(tp) * model.head_dim
    yield WeightTensor(TensorRole.LINEAR, query + both, hidden, count=layers)
    yield WeightTensor(TensorRole.LINEAR, hidden, query, count=layers)
    if model.qkv_bias:
        yield WeightTensor(TensorRole.SMALL, query + both, count=layers)
    if model.attention_output_bias:
        yield WeightTensor(TensorRole.SMALL, hidden, count=layers)
    if model.attention_sinks:
        heads = model.num_attention_heads // tp
        yield WeightTensor(TensorRole.SMALL, heads, count=layers)


def _latent_attention(model: ModelArchitecture, tp: int) -> Iterator[WeightTensor]:
    layers, hidden, role = model.num_hidden_layers, model.hidden_size, TensorRole.LINEAR
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


def _mlp(model: ModelArchitecture, tp: int) -> Iterator[WeightTensor]:
    sparse = model.num_moe_layers
    yield from _dense_mlp(
        model, _divide(model.intermediate_size, tp), model.num_hidden_layers - sparse
    )
    if not sparse:
        return
    inner, hidden = _divide(model.expert_size, tp), model.hidden_size
    experts, small = model.num_experts, TensorRole.SMALL
    yield WeightTensor(TensorRole.EXPERT, 2 * inner, hidden, experts, sparse)
    yield WeightTensor(TensorRole.EXPERT, hidden, inner, experts, sparse)
    yield WeightTensor(small, experts, hidden, count=sparse)
    if model.expert_bias:
        yield WeightTensor(small, 2 * inner + hidden, 1, experts, sparse)
        yield WeightTensor(small, experts, count=sparse)
    shared = _divide(model.num_shared_experts * model.expert_size, tp)
    yield from _dense_mlp(model, shared, sparse)


def _dense_mlp(
    model: ModelArchitecture, inner: int, layers: int
) -> Iterator[WeightTensor]:
    if not inner or not layers:
        return
    hidden = model.hidden_size
    yield WeightTensor(TensorRole.LINEAR, 2 * inner, hidden, count=layers)
    yield WeightTensor(TensorRole.LINEAR, hidden, inner, count=layers)
    if model.mlp_bias:
        yield WeightTensor(TensorRole.SMALL, 2 * inner + hidden, count=layers)
