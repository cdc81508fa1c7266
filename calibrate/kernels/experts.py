"""Routed experts in plain torch: choices, weights in every precision, the reference.

Shapes, for E experts, a hidden size of H, a width of I, and k experts a token:

- *hidden* (tokens, H), 16 bits; the result has its shape and dtype.
- *gate_up* (E, 2 I, H) and *down* (E, H, I): gates before ups, but alternating where
  there are biases, as gpt-oss has them.
- ``fp8``: float8_e4m3fn, a float32 scale an expert; ``fp8_block``: one for each 128 x
  128 of it. A weight is the stored number times its scale.
- ``w4a16_mxfp4``: two E2M1 numbers a byte, the lower four bits first, and a byte of
  scale for 32 of them along the last axis, a power of two biased by 127.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
"""Rows and columns that share a scale of FP8 by blocks."""
GROUP = 32
"""Numbers that share a scale of MXFP4."""
_UNIT = 127
"""The scale of 1."""
_FP8_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ALPHA = 1.702
_LIMIT = 7.0
"""Of gpt-oss's activation: its sigmoid's slope, and where gate and up are cut off."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shape of one layer's experts."""

    num_experts: int
    experts_per_token: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class Routing:
    """To which experts each token is sent."""

    ids: Tensor
    """(tokens, k) int32, all of a row different."""
    weights: Tensor
    """(tokens, k) float32: softmax of the chosen logits."""
    logits: Tensor
    """(tokens, E), of which the chosen are the largest."""


def draw_routing(
    num_tokens: int,
    num_touched: int,
    sizes: Sizes,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Routing:
    """Return tokens that choose freely among so many experts, of which all are chosen.

    Which experts these are is drawn, too. With as many as a free choice among all
    touches on average, it is a free choice of all; with fewer, tokens choose alike.
    """
    device = generator.device
    total, each = sizes.num_experts, sizes.experts_per_token
    if not each <= num_touched <= min(total, num_tokens * each):
        raise ValueError(
            f"{num_tokens} tokens of {each} experts touch {each} to"
            f" {min(total, num_tokens * each)}; got {num_touched}"
        )
    scores = torch.rand(num_tokens, num_touched, generator=generator, device=device)
    # each expert has one token that must take it, in turns
    order = torch.arange(num_touched, device=device)
    scores[order % num_tokens, order] += 1.0
    places = scores.topk(each, dim=-1).indices
    names = torch.randperm(total, generator=generator, device=device)[:num_touched]
    ids = names[places]
    logits = torch.empty(num_tokens, total, device=device)
    logits.normal_(generator=generator)
    chosen = logits.gather(1, ids).clamp(-3.0, 3.0) + 16.0
    logits = logits.scatter(1, ids, chosen).to(dtype)
    weights = logits.gather(1, ids).float().softmax(-1)
    return Routing(ids.to(torch.int32), weights, logits)


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of one layer's experts as they are stored."""

    dtype: str
    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    gate_up_bias: Tensor | None = None
    """(E, 2 I); there are both biases or none."""
    down_bias: Tensor | None = None
    """(E, H)."""

    def dense(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return gate_up and down of one expert in another precision."""
        return (
            _dense(self.gate_up[expert], _of(self.gate_up_scale, expert), dtype),
            _dense(self.down[expert], _of(self.down_scale, expert), dtype),
        )


def _of(scale: Tensor | None, expert: int) -> Tensor | None:
    return None if scale is None else scale[expert]


def _dense(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return stored.to(dtype)
    if stored.dtype != torch.uint8:
        if scale.dim():
            scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            scale = scale[: stored.shape[0], : stored.shape[1]]
        return stored.to(dtype) * scale.to(dtype)
    halves = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).long()
    numbers = torch.tensor(_E2M1, dtype=dtype, device=stored.device)[halves & 7]
    numbers = torch.where(halves >= 8, -numbers, numbers)
    powers = torch.ldexp(torch.ones_like(scale, dtype=dtype), scale.int() - _UNIT)
    scales = powers.repeat_interleave(GROUP, dim=-1)
    return numbers * scales[:, : numbers.shape[1]]


class Draw(Protocol):
    """Where weights are drawn from; see `calibrate.gpu.layers.Inputs`."""

    device: torch.device
    generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normal numbers of 16 bits."""


def draw_experts(dtype: str, sizes: Sizes, draw: Draw) -> Experts:
    """Return random weights of a precision, such that sums keep their size."""
    total, hidden = sizes.num_experts, sizes.hidden_size
    width = sizes.intermediate_size
    shapes = ((total, 2 * width, hidden), (total, hidden, width))
    if dtype == "w4a16_mxfp4":
        parts = [_draw_mxfp4(shape, draw) for shape in shapes]
        biases = [draw.normal(total, n, scale=0.1) for n in (2 * width, hidden)]
        (up, up_scale), (down, down_scale) = parts
        return Experts(dtype, up, down, up_scale, down_scale, *biases)
    plain = [draw.normal(*shape, scale=shape[-1] ** -0.5) for shape in shapes]
    if not dtype.startswith("fp8"):
        return Experts(dtype, *plain)
    (up, up_scale), (down, down_scale) = (
        _stacked([_quantized(one, dtype == "fp8_block") for one in weights])
        for weights in plain
    )
    return Experts(dtype, up, down, up_scale, down_scale)


def _stacked(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    values, scales = zip(*parts, strict=True)
    return torch.stack(values), torch.stack(scales)


def _quantized(weights: Tensor, by_blocks: bool) -> tuple[Tensor, Tensor]:
    """Return one expert's weights of eight bits, and their scales."""
    rows, columns = weights.shape
    high, wide = (BLOCK, BLOCK) if by_blocks else (rows, columns)
    padded = functional.pad(weights, (0, -columns % wide, 0, -rows % high))
    blocks = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide))
    scales = blocks.abs().amax(dim=(1, 3)).float().clamp_min(1e-12) / _FP8_MAX
    numbers = (blocks.float() / scales[:, None, :, None]).clamp(-_FP8_MAX, _FP8_MAX)
    stored = numbers.to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
    return stored[:rows, :columns].contiguous(), scales if by_blocks else scales[0, 0]


def _draw_mxfp4(shape: tuple[int, ...], draw: Draw) -> tuple[Tensor, Tensor]:
    def bytes_of(low: int, high: int, last: int) -> Tensor:
        return torch.randint(
            low,
            high,
            (*shape[:-1], last),
            dtype=torch.uint8,
            device=draw.device,
            generator=draw.generator,
        )

    # numbers of E2M1 have a mean square of 8.6; 119 and 120 are 2**-8 and 2**-7
    stored = bytes_of(0, 256, shape[-1] // 2)
    return stored, bytes_of(119, 121, -(-shape[-1] // GROUP))


def padded(experts: Experts, hidden: int, width: int) -> Experts:
    """Return MXFP4 with both sizes rounded up to multiples, by weights of zero."""
    more = -experts.down.shape[1] % hidden
    wider = -(2 * experts.down.shape[2]) % width
    if not (more or wider):
        return experts

    def grown(stored: Tensor, rows: int, columns: int, value: int = 0) -> Tensor:
        return functional.pad(stored, (0, columns, 0, rows), value=value)

    return replace(
        experts,
        gate_up=grown(experts.gate_up, 2 * wider, more // 2),
        down=grown(experts.down, more, wider // 2),
        gate_up_scale=grown(
            given(experts.gate_up_scale), 2 * wider, more // GROUP, _UNIT
        ),
        down_scale=grown(given(experts.down_scale), more, wider // GROUP, _UNIT),
        gate_up_bias=functional.pad(given(experts.gate_up_bias), (0, 2 * wider)),
        down_bias=functional.pad(given(experts.down_bias), (0, more)),
    )


def given(tensor: Tensor | None) -> Tensor:
    """Return a scale or a bias of MXFP4, which has them."""
    if tensor is None:
        raise ValueError("MXFP4 has scales and biases; got weights without")
    return tensor


Parts = list[tuple[int, "Tensor", "Tensor"]]
"""Expert, rows of its tokens, their weights (rows, 1)."""


def by_expert(routing: Routing) -> Parts:
    """Return the rows of each expert; waits for the device."""
    found: Parts = []
    for expert in routing.ids.unique().tolist():
        rows, slots = (routing.ids == expert).nonzero(as_tuple=True)
        found.append((expert, rows, routing.weights[rows, slots][:, None]))
    return found


def plain_experts(hidden: Tensor, experts: Experts, parts: Parts) -> Tensor:
    """Return the sums (tokens, H) in the precision of `hidden`, expert by expert.

    The reference in double precision, and what an engine without a kernel would do in
    16 bits.
    """
    out = torch.zeros_like(hidden)
    for expert, rows, weights in parts:
        gate_up, down = experts.dense(expert, hidden.dtype)
        inner = hidden[rows] @ gate_up.t()
        if experts.gate_up_bias is None or experts.down_bias is None:
            gate, up = inner.chunk(2, dim=-1)
            result = (functional.silu(gate) * up) @ down.t()
        else:
            inner = inner + experts.gate_up_bias[expert].to(hidden.dtype)
            result = _clamped_swiglu(inner) @ down.t()
            result = result + experts.down_bias[expert].to(hidden.dtype)
        out.index_add_(0, rows, result * weights.to(hidden.dtype))
    return out


def _clamped_swiglu(inner: Tensor) -> Tensor:
    """Return gpt-oss's activation; source: its ``torch/model.py``, ``swiglu``."""
    gate, up = inner[..., ::2].clamp(max=_LIMIT), inner[..., 1::2]
    return gate * torch.sigmoid(_ALPHA * gate) * (up.clamp(-_LIMIT, _LIMIT) + 1.0)
