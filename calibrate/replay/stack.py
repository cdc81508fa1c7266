"""A Llama-shaped stack of random weights over a paged pool.

::

    ids -> embedding -> [ norm, qkv, rope, cache write, attention, o,
                          norm, gate and up, activation, down ] x layers
        -> norm -> head, for the last token of each query -> sampler

The operations are those of `calibrate.kernels.torch_ops` and plain matrix products, the
same that are calibrated. Weights are drawn so that every operation keeps its input's
scale, and the branches of all layers together do too: nothing overflows in 16 bits.
Biases, norms of queries and keys, routed experts and tensor parallelism are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from calibrate.kernels import torch_ops

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch import Tensor

    from calibrate.harness.geometry import Geometry

Attend = Callable[[int, "Tensor"], "Tensor"]
"""``(layer, query)`` to attention's output, both (num_tokens, num_heads, head_dim)."""
Write = Callable[[int, "Tensor", "Tensor"], None]
"""``(layer, keys, values)``, each (num_tokens, num_kv_heads, head_dim)."""
Pieces = Generator["Tensor", "Tensor", None]
"""A pass cut at each attention: yields each layer's queries and is sent what they
attend to, both (num_tokens, num_heads, head_dim); last yields hidden states,
(num_tokens, hidden_size)."""
ROPE_BASE = 500_000.0


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a layer, each turned to (k, n) of what `Geometry.gemms` names."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of a step, on the device."""

    tokens: Tensor
    """(num_tokens,), int64."""
    positions: Tensor
    """(num_tokens,), int64."""
    slots: Tensor
    """(num_tokens,), int64."""
    last_rows: Tensor
    """(num_queries,), int64."""


def into_caches(
    ops: ModuleType, caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor
) -> Write:
    """Return a function that writes keys and values into (num_tokens,) slots."""

    def write(layer: int, keys: Tensor, values: Tensor) -> None:
        ops.write_cache(keys, values, caches[layer], slots)

    return write


def weight_bytes(geometry: Geometry, itemsize: int | None = None) -> int:
    shapes = geometry.gemms
    layer = sum(n * k for name, (n, k) in shapes.items() if name != "head")
    head = shapes["head"][0] * shapes["head"][1]
    return (geometry.num_layers * layer + 2 * head) * (itemsize or geometry.itemsize)


class Stack:
    """The weights of one rank that is all there is, and one forward pass.

    `ops` are the operations around attention: `calibrate.kernels.torch_ops`, or another
    module with the same functions.
    """

    def __init__(
        self,
        geometry: Geometry,
        max_positions: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        device: torch.device,
        *,
        ops: ModuleType = torch_ops,
    ) -> None:
        self.geometry = geometry
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self._generator = generator
        branches = (2 * geometry.num_layers) ** -0.5
        self.layers = [self._layer(branches) for _ in range(geometry.num_layers)]
        self.norm = self._ones()
        vocab, hidden = geometry.gemms["head"]
        self.embedding = self._weight(vocab, hidden, 1.0)
        self.head = self._weight(vocab, hidden, hidden**-0.5).t()
        half = torch.arange(0, geometry.head_dim, 2, device=device)
        rates = ROPE_BASE ** (-half.double() / geometry.head_dim)
        angles = torch.arange(max_positions, device=device)[:, None] * rates
        self.turns = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)

    def _weight(self, n: int, k: int, scale: float) -> Tensor:
        drawn = torch.empty((n, k), dtype=self.dtype, device=self.device)
        return drawn.normal_(std=scale, generator=self._generator)

    def _ones(self) -> Tensor:
        width = self.geometry.hidden_size
        return torch.ones(width, dtype=self.dtype, device=self.device)

    def _layer(self, branches: float) -> Layer:
        shapes = self.geometry.gemms
        scales = {"qkv": 1.0, "gate_up": 1.0, "o": branches, "down": branches}
        weights = {
            name: self._weight(*shapes[name], scale * shapes[name][1] ** -0.5).t()
            for name, scale in scales.items()
        }
        return Layer(**weights, attention_norm=self._ones(), mlp_norm=self._ones())

    def forward(self, inputs: Inputs, write: Write, attend: Attend) -> Tensor:
        """Return the logits of each query's last token, (num_queries, vocabulary)."""
        return self.logits(self.hidden(inputs, write, attend), inputs.last_rows)

    def hidden(self, inputs: Inputs, write: Write, attend: Attend) -> Tensor:
        """Return the hidden states of all tokens, (num_tokens, hidden_size)."""
        pieces = self.pieces(inputs, write)
        found = next(pieces)
        for layer in range(len(self.layers)):
            found = pieces.send(attend(layer, found))
        return found

    def logits(self, hidden: Tensor, last_rows: Tensor) -> Tensor:
        """Return (num_queries, vocabulary) of the rows of hidden states."""
        return torch.mm(hidden[last_rows], self.head)

    def pieces(self, inputs: Inputs, write: Write, qkv: Tensor | None = None) -> Pieces:
        """Run all layers, up to their attention and on from it.

        Queries are views of `qkv`, (num_tokens, width of the product), where it is
        given: in one place for all layers.
        """
        hidden = functional.embedding(inputs.tokens, self.embedding)
        residual = torch.zeros_like(hidden)
        for number, layer in enumerate(self.layers):
            normed = self.ops.rms_norm_add(hidden, residual, layer.attention_norm)
            query, key, value = self._heads(torch.mm(normed, layer.qkv, out=qkv))
            self.ops.rotary(query, key, inputs.positions, self.turns)
            write(number, key, value)
            attended = yield query
            hidden = self._finish(layer, attended, residual)
        yield self.ops.rms_norm_add(hidden, residual, self.norm)

    def queries(self, qkv: Tensor) -> Tensor:
        """Return the queries in a layer's product, as a view."""
        return self._heads(qkv)[0]

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, (num_tokens, heads, head_dim) each, as views."""
        geometry = self.geometry
        heads = (geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads)
        widths = [count * geometry.head_dim for count in heads]
        query, key, value = (
            part.unflatten(-1, (count, geometry.head_dim))
            for part, count in zip(qkv.split(widths, dim=-1), heads, strict=True)
        )
        return query, key, value

    def _finish(self, layer: Layer, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the sum that the second half of a layer adds to the residual."""
        hidden = torch.mm(attended.flatten(1), layer.o)
        normed = self.ops.rms_norm_add(hidden, residual, layer.mlp_norm)
        gated = self.ops.silu_and_mul(torch.mm(normed, layer.gate_up))
        return torch.mm(gated, layer.down)
