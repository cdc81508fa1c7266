"""What the tables of a model depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.hardware.models.quantization import quantization_scheme
from sim.hardware.models.weights import TensorRole, weight_tensors

if TYPE_CHECKING:
    from sim.hardware.models.architecture import ModelArchitecture


def weight_bits_of(model: ModelArchitecture) -> int:
    """Return the bits of a weight of the linear layers: 16, 8 or 4."""
    scheme = quantization_scheme(model.quantization)
    if scheme is None or scheme.only_experts:
        return 16
    return 8 if scheme.weight_bits > 4.5 else 4


def geometry_of(
    model: ModelArchitecture, tensor_parallel_size: int, kv_itemsize_bytes: int
) -> dict[str, int]:
    """Return what a table depends on; two models that agree on it share tables."""
    tp = tensor_parallel_size
    return {
        "tensor_parallel_size": tp,
        "kv_itemsize_bytes": kv_itemsize_bytes,
        "weight_bits": weight_bits_of(model),
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_heads": model.num_attention_heads // tp,
        "num_kv_heads": model.kv_heads_per_rank(tp),
        "head_dim": model.head_dim,
        "window": model.sliding_window or 0,
        "linear_elements": linear_elements(model, tp),
    }


def linear_elements(model: ModelArchitecture, tensor_parallel_size: int) -> int:
    """Return elements of the dense linear layers of one rank."""
    return sum(
        tensor.num_elements * tensor.count
        for tensor in weight_tensors(model, tensor_parallel_size)
        if tensor.role is TensorRole.LINEAR and tensor.columns > 1
    )
