"""Which shapes of a table belong to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sim.hardware.models.layers import GatedDeltaNetShape
from sim.hardware.models.weights import TensorRole, weight_tensors

if TYPE_CHECKING:
    from sim.hardware.models.architecture import ModelArchitecture

RANKS: Final = (1, 2, 4, 8)
"""Tensor-parallel sizes that an import keeps shapes for."""

_NO_GEMM: Final = frozenset(
    {TensorRole.EMBEDDING, TensorRole.SMALL, TensorRole.DERIVED}
)
LATENT_SIZES: Final = (
    "hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
"""What decides, beside the heads, how long a layer of latent attention takes."""


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Shapes of a model's kernels on one rank, for every way to divide it."""

    name: str
    heads: frozenset[tuple[int, int]]
    """(query heads, KV heads)."""
    head_dim: int
    windows: frozenset[int]
    """Keys that a layer sees at most; 0 for all."""
    weights: frozenset[tuple[int, int]]
    """(n, k) of the linear layers."""
    ranks: frozenset[int]
    experts: frozenset[tuple[int, int, int, int]]
    """(hidden size, width, experts a token, experts), of all ranks together."""
    deltas: frozenset[tuple[int, int]]
    """(key heads, value heads) of gated delta nets on one rank."""
    latent: tuple[int, ...] | None
    """Sizes of latent attention as `LATENT_SIZES` names them; None without."""


def model_shapes(model: ModelArchitecture) -> ModelShapes:
    """Return the shapes of `model` on 1, 2, 4 and 8 ranks, as far as it divides."""
    ranks = [tp for tp in RANKS if model.num_attention_heads % tp == 0]
    shape = model.state_shape
    windows = {0}
    if model.sliding_window and model.num_sliding_layers:
        windows.add(model.sliding_window)
        if model.num_sliding_layers >= model.num_hidden_layers:
            windows.discard(0)
    weights = {
        (tensor.rows, tensor.columns)
        for tp in ranks
        for tensor in weight_tensors(model, tp)
        if tensor.role not in _NO_GEMM and tensor.columns > 1
    }
    return ModelShapes(
        name=model.name,
        heads=frozenset(
            (model.num_attention_heads // tp, model.kv_heads_per_rank(tp))
            for tp in ranks
        ),
        head_dim=model.head_dim,
        windows=frozenset(windows),
        weights=frozenset(weights),
        ranks=frozenset(ranks),
        experts=frozenset({expert_shape(model)} if model.num_experts else ()),
        deltas=frozenset(
            (max(1, shape.num_key_heads // tp), shape.num_value_heads // tp)
            for tp in ranks
        )
        if isinstance(shape, GatedDeltaNetShape)
        else frozenset(),
        latent=latent_sizes(model),
    )


def expert_shape(model: ModelArchitecture) -> tuple[int, int, int, int]:
    return (
        model.hidden_size,
        model.expert_size,
        model.num_experts_per_tok,
        model.num_experts,
    )


def latent_sizes(model: ModelArchitecture) -> tuple[int, ...] | None:
    if not model.kv_lora_rank:
        return None
    return tuple(getattr(model, key) or 0 for key in LATENT_SIZES)
