"""Which shapes of a table belong to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sim.hardware.models.weights import TensorRole, weight_tensors

if TYPE_CHECKING:
    from sim.hardware.models.architecture import ModelArchitecture

RANKS: Final = (1, 2, 4, 8)
"""Tensor-parallel sizes that an import keeps shapes for."""

_NO_GEMM: Final = frozenset(
    {TensorRole.EMBEDDING, TensorRole.SMALL, TensorRole.DERIVED}
)


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


def model_shapes(model: ModelArchitecture) -> ModelShapes:
    """Return the shapes of `model` on 1, 2, 4 and 8 ranks, as far as it divides."""
    ranks = [tp for tp in RANKS if model.num_attention_heads % tp == 0]
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
    )
