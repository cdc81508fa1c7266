"""Shapes and precisions of a model's rank, by which a profile keeps its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.hardware.models.quantization import quantization_scheme
from sim.hardware.models.weights import TensorRole, weight_tensors

if TYPE_CHECKING:
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.hardware.models.quantization import QuantizationScheme


def weight_bits_of(model: ModelArchitecture) -> int:
    """Return the bits of a weight of the linear layers: 16, 8 or 4."""
    scheme = quantization_scheme(model.quantization)
    return 16 if scheme is None or scheme.only_experts else _stored_bits(scheme)


def geometry_of(
    model: ModelArchitecture, tensor_parallel_size: int, kv_itemsize_bytes: int
) -> dict[str, int]:
    """Return the shape that a table depends on; models of one share tables."""
    tp = tensor_parallel_size
    found = {
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
    if model.kv_lora_rank:
        found["kv_lora_rank"] = model.kv_lora_rank
    return found


def expert_weight_bits(model: ModelArchitecture) -> int:
    """Return the bits of a weight of the routed experts: 16, 8 or 4."""
    scheme = quantization_scheme(model.quantization)
    return 16 if scheme is None else _stored_bits(scheme)


def _stored_bits(scheme: QuantizationScheme) -> int:
    return 8 if scheme.weight_bits > 4.5 else 4


def expert_geometry(
    model: ModelArchitecture, tensor_parallel_size: int
) -> dict[str, int]:
    """Return the shape that a table of routed experts depends on, as `geometry_of`."""
    return {
        "num_layers": model.num_moe_layers,
        "hidden_size": model.hidden_size,
        "inter_size": -(-model.expert_size // tensor_parallel_size),
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "weight_bits": expert_weight_bits(model),
    }


def state_geometry(
    model: ModelArchitecture, tensor_parallel_size: int
) -> dict[str, Any]:
    """Return the shape that tables of states depend on, as `geometry_of`."""
    shape = model.state_shape
    shapes = shape.state_shapes(tensor_parallel_size) if shape else ()
    return {"num_layers": model.num_state_layers, "shapes": [*map(list, shapes)]}


def linear_elements(model: ModelArchitecture, tensor_parallel_size: int) -> int:
    return sum(
        tensor.num_elements * tensor.count
        for tensor in weight_tensors(model, tensor_parallel_size)
        if tensor.role is TensorRole.LINEAR and tensor.columns > 1
    )
