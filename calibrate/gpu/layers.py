"""Everything of a layer but attention: matrices, norm, rotation, cache, sampler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from calibrate.kernels import torch_ops

if TYPE_CHECKING:
    from types import ModuleType

    from calibrate.measurement import Point

Call = Callable[[], Tensor]


class Inputs:
    """Draws the tensors of an operation."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.generator = generator

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.empty(shape, dtype=self.dtype, device=self.device)
        return drawn.normal_(std=scale, generator=self.generator)

    def slots(self, count: int, most: int) -> Tensor:
        """Return `count` different integers below `most`."""
        order = torch.randperm(most, generator=self.generator, device=self.device)
        return order[:count]


def layer_inputs(point: Point, draw: Inputs) -> tuple[Tensor, ...]:
    return _INPUTS[point.curve.operation](point, draw)


def _gemm_inputs(point: Point, draw: Inputs) -> tuple[Tensor, ...]:
    n, k = point.curve.constant("n"), point.curve.constant("k")
    return draw.normal(point.values[0], k), draw.normal(n, k, scale=k**-0.5)


def _norm_inputs(point: Point, draw: Inputs) -> tuple[Tensor, ...]:
    tokens = (point.values[0], point.curve.constant("hidden_size"))
    return draw.normal(*tokens), draw.normal(*tokens), draw.normal(tokens[1])


def _activation_inputs(point: Point, draw: Inputs) -> tuple[Tensor, ...]:
    width = 2 * point.curve.constant("intermediate_size")
    return (draw.normal(point.values[0], width),)


def _sampler_inputs(point: Point, draw: Inputs) -> tuple[Tensor, ...]:
    shape = (point.values[0], point.curve.constant("vocab_size"))
    noise = torch.empty(shape, dtype=torch.float32, device=draw.device)
    return draw.normal(*shape), noise


def _router_inputs(point: Point, draw: Inputs) -> tuple[Tensor, ...]:
    at = point.curve
    width = at.constant("hidden_size")
    gate = draw.normal(at.constant("num_experts"), width, scale=width**-0.5)
    return draw.normal(point.values[0], width), gate


def _rope_inputs(point: Point, draw: Inputs) -> tuple[Tensor, ...]:
    at, count = point.curve, point.values[0]
    width = at.constant("head_dim")
    angle = draw.normal(count, width // 2)
    query = draw.normal(count, at.constant("num_heads"), width)
    key = draw.normal(count, at.constant("num_kv_heads"), width)
    table = torch.cat((angle.cos(), angle.sin()), dim=-1)
    return query, key, draw.slots(count, count), table


def _write_inputs(point: Point, draw: Inputs) -> tuple[Tensor, ...]:
    """Return new tokens, caches of four times as many slots, and random slots."""
    at, count = point.curve, point.values[0]
    size, kv_heads = at.constant("block_size"), at.constant("num_kv_heads")
    width = at.constant("head_dim")
    num_blocks = -(-4 * count // size)
    cache = (num_blocks, size, kv_heads, width)
    keys, values = (draw.normal(count, kv_heads, width) for _ in range(2))
    slots = draw.slots(count, num_blocks * size)
    return keys, values, draw.normal(*cache), draw.normal(*cache), slots


_INPUTS: dict[str, Callable[[Point, Inputs], tuple[Tensor, ...]]] = {
    "gemm": _gemm_inputs,
    "norm": _norm_inputs,
    "activation": _activation_inputs,
    "sampler": _sampler_inputs,
    "launch": lambda _, draw: (draw.normal(1),),
    "rope": _rope_inputs,
    "router": _router_inputs,
    "cache_write": _write_inputs,
}


def layer_call(
    point: Point, inputs: tuple[Tensor, ...], variant: str | None = None
) -> Call:
    """Return a function that enqueues a call; `variant` is the point's by default."""
    operation, ops = point.curve.operation, layer_ops(variant or point.curve.variant)
    if operation == "launch":
        return _launches(inputs[0], point.values[0])
    if operation == "router":
        return functools.partial(
            ops.route, *inputs, point.curve.constant("experts_per_token")
        )
    makers: dict[str, Callable[..., Call]] = {
        "gemm": _gemm,
        "rope": functools.partial(_rotary, ops),
        "cache_write": functools.partial(_write, ops),
    }
    if operation in makers:
        return makers[operation](*inputs)
    plain: dict[str, Callable[..., Tensor]] = {
        "norm": ops.rms_norm_add,
        "activation": ops.silu_and_mul,
        "sampler": torch_ops.sample,
    }
    return functools.partial(plain[operation], *inputs)


def layer_ops(variant: str) -> ModuleType:
    """Return the module with the operations around attention."""
    if variant != "fused":
        return torch_ops
    from calibrate.kernels import vllm_ops  # noqa: PLC0415 - vllm may not be here

    return vllm_ops


def _gemm(tokens: Tensor, weight: Tensor) -> Call:
    out = torch.empty(
        (tokens.shape[0], weight.shape[0]), dtype=tokens.dtype, device=tokens.device
    )
    turned = weight.t()
    return lambda: torch.mm(tokens, turned, out=out)


def _rotary(
    ops: ModuleType, query: Tensor, key: Tensor, positions: Tensor, table: Tensor
) -> Call:
    def call() -> Tensor:
        ops.rotary(query, key, positions, table)
        return query

    return call


def _write(ops: ModuleType, keys: Tensor, values: Tensor, *into: Tensor) -> Call:
    key_cache, value_cache, slots = into

    def call() -> Tensor:
        ops.write_cache(keys, values, (key_cache, value_cache), slots)
        return value_cache

    return call


def _launches(number: Tensor, count: int) -> Call:
    def call() -> Tensor:
        for _ in range(count):
            number.neg_()
        return number

    return call


def precise(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return copies in double precision; integers stay as they are."""
    return tuple(
        tensor.double() if tensor.is_floating_point() else tensor.clone()
        for tensor in inputs
    )
