"""Routed experts: layers of weights that calls rotate over, and their gate."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from calibrate.gpu.layers import Inputs
from calibrate.gpu.tasks import num_pools
from calibrate.harness.plan import seed_of
from calibrate.harness.work import least_bytes
from calibrate.kernels import reference
from calibrate.kernels.experts import (
    Sizes,
    by_expert,
    draw_experts,
    draw_routing,
    plain_experts,
)
from calibrate.measurement import Point
from sim.costs.experts.routed import touched_experts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from calibrate.gpu.layers import Call
    from calibrate.kernels.experts import Experts, Routing
    from calibrate.measurement import Curve

    Bind = Callable[[Tensor, Routing], Call]

CHECKED_TOKENS = (1, 24, 300)
"""One token, where kernels need not sort; a tile an expert; several of them."""
FP8_TOLERANCE = 0.12
"""Tokens are rounded to three bits of a fraction, twice, and weights are exact."""
_MOST = 16
"""Pools at most."""


class ExpertLayers:
    """Weights of experts on a device, drawn once for each curve and kept.

    A step reads each layer's experts once: calls go from layer to layer, so many that
    no cache holds them.
    """

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        self._device = device
        self._l2_bytes = l2_bytes
        self._layers: dict[Curve, list[Bind]] = {}

    def calls(self, point: Point, seed: int) -> list[Call]:
        """Return calls over different layers, each of other tokens and choices."""
        at = point.curve
        layers = self._of(at)
        wanted = num_pools(least_bytes(point), self._l2_bytes, _MOST)
        draw = self._inputs(at, seed)
        found = []
        for number in range(max(wanted, len(layers))):
            hidden, routing = drawn(point, draw)
            found.append(layers[number % len(layers)](hidden, routing))
        return found

    def _of(self, at: Curve) -> list[Bind]:
        if at not in self._layers:
            draw = self._inputs(at, seed_of("experts", at.key))
            whole = least_bytes(Point(at, (1, at.constant("num_experts"))))
            count = num_pools(whole, self._l2_bytes, _MOST)
            sizes = sizes_of(at)
            self._layers[at] = [
                bound(at.variant, draw_experts(at.dtype, sizes, draw))
                for _ in range(count)
            ]
        return self._layers[at]

    def _inputs(self, at: Curve, seed: int) -> Inputs:
        generator = torch.Generator(self._device).manual_seed(seed % 2**63)
        return Inputs(token_dtype(at), self._device, generator)


def sizes_of(at: Curve) -> Sizes:
    return Sizes(
        at.constant("num_experts"),
        at.constant("experts_per_token"),
        at.constant("hidden_size"),
        at.constant("intermediate_size"),
    )


def token_dtype(at: Curve) -> torch.dtype:
    """Return the precision of tokens and sums: 16 bits beside weights of fewer."""
    return torch.float16 if at.dtype == "float16" else torch.bfloat16


def drawn(point: Point, draw: Inputs) -> tuple[Tensor, Routing]:
    """Return the tokens of a point, and their choice."""
    num_tokens, num_touched = point.values
    sizes = sizes_of(point.curve)
    hidden = draw.normal(num_tokens, sizes.hidden_size)
    return hidden, draw_routing(
        num_tokens, num_touched, sizes, draw.dtype, draw.generator
    )


def bound(variant: str, experts: Experts) -> Bind:
    """Return what makes a call of tokens and their choice, by so many experts."""
    if variant == "torch":
        return lambda hidden, routing: functools.partial(
            plain_experts, hidden, experts, by_expert(routing)
        )
    from calibrate.kernels import vllm_experts  # noqa: PLC0415 - vllm may not be here

    layer = vllm_experts.KERNELS[variant](experts)
    return lambda hidden, routing: functools.partial(layer, hidden, routing)


def worst_error(
    at: Curve, device: torch.device, bind: Callable[[str, Experts], Bind] = bound
) -> float:
    """Return the largest error of a token, against experts in double precision."""
    generator = torch.Generator(device).manual_seed(7)
    draw = Inputs(token_dtype(at), device, generator)
    sizes = sizes_of(at)
    experts = draw_experts(at.dtype, sizes, draw)
    binding = bind(at.variant, experts)
    worst = 0.0
    for num_tokens in CHECKED_TOKENS:
        touched = round(
            touched_experts(sizes.num_experts, sizes.experts_per_token, num_tokens)
        )
        hidden, routing = drawn(Point(at, (num_tokens, touched)), draw)
        got = binding(hidden, routing)()
        exact = plain_experts(hidden.double(), experts, by_expert(routing))
        worst = max(worst, reference.worst_row_error(got, exact))
    return worst
