"""Routed experts: choices, weights of every precision, the gate, and their price."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calibrate.missing import torch_only

torch_only()

# ruff: noqa: E402
import torch

from calibrate.gpu import experts as gpu_experts
from calibrate.gpu.experts import ExpertLayers, bound, worst_error
from calibrate.gpu.layers import Inputs, layer_call, layer_inputs, precise
from calibrate.kernels.experts import (
    Experts,
    Routing,
    Sizes,
    by_expert,
    draw_experts,
    draw_routing,
    padded,
    plain_experts,
)
from calibrate.measurement import Point, curve
from tests.calibrate.bench_device import EXPERTS, TINY, cpu_device, small_points

if TYPE_CHECKING:
    from torch import Tensor

    from calibrate.gpu.layers import Call

DTYPES = ("bfloat16", "fp8", "fp8_block", "w4a16_mxfp4")
SIZES = Sizes(6, 2, 160, 96)
"""Sizes that blocks of 128 do not divide."""


def inputs(seed: int = 3) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return Inputs(torch.bfloat16, torch.device("cpu"), generator)


def tokens_of(count: int, touched: int) -> tuple[Tensor, Routing]:
    draw = inputs()
    hidden = draw.normal(count, SIZES.hidden_size)
    routing = draw_routing(count, touched, SIZES, torch.bfloat16, draw.generator)
    return hidden, routing


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_as_many_experts_are_touched_as_are_asked_for(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 40))
    each = data.draw(st.integers(1, min(total, 8)))
    count = data.draw(st.integers(1, 50))
    touched = data.draw(st.integers(each, min(total, count * each)))
    sizes = Sizes(total, each, 8, 8)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    routing = draw_routing(count, touched, sizes, torch.bfloat16, generator)
    assert len(routing.ids.unique()) == touched
    assert all(len(set(row)) == each for row in routing.ids.tolist())
    # a kernel that chooses from the logits takes the same ones, as heavily
    best = routing.logits.float().topk(each, dim=-1)
    assert torch.equal(best.indices.sort().values, routing.ids.long().sort().values)
    weights = best.values.softmax(-1).sort().values
    assert torch.allclose(weights, routing.weights.sort().values)


def test_more_than_can_be_touched_is_refused() -> None:
    with pytest.raises(ValueError, match="touch 2 to 4"):
        draw_routing(2, 5, SIZES, torch.bfloat16, torch.Generator())


def test_a_free_choice_is_uniform() -> None:
    sizes = Sizes(16, 2, 8, 8)
    generator = torch.Generator().manual_seed(0)
    routing = draw_routing(4096, 16, sizes, torch.bfloat16, generator)
    counts = torch.bincount(routing.ids.flatten().long(), minlength=16)
    # 512 each, with a standard deviation of 21
    assert 512 - 5 * 21 < int(counts.min()) <= int(counts.max()) < 512 + 5 * 21


def by_token(hidden: Tensor, experts: Experts, routing: Routing) -> Tensor:
    """Return sums as a model's own code has them, one token and expert at a time."""
    rows = []
    for token, ids, weights in zip(hidden, routing.ids, routing.weights, strict=True):
        total = torch.zeros_like(token)
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            up, down = experts.dense(expert, torch.float64)
            inner = up @ token
            if experts.gate_up_bias is None or experts.down_bias is None:
                half = len(inner) // 2
                gate, linear = inner[:half], inner[half:]
                result = down @ (gate / (1 + (-gate).exp()) * linear)
            else:
                inner = inner + experts.gate_up_bias[expert].double()
                gate = torch.minimum(inner[::2], torch.tensor(7.0))
                linear = inner[1::2].clamp(-7.0, 7.0)
                result = down @ (gate / (1 + (-1.702 * gate).exp()) * (linear + 1))
                result = result + experts.down_bias[expert].double()
            total += weight * result
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_by_expert_are_those_by_token(dtype: str) -> None:
    hidden, routing = tokens_of(7, 5)
    experts = draw_experts(dtype, SIZES, inputs(1))
    got = plain_experts(hidden.double(), experts, by_expert(routing))
    assert torch.allclose(got, by_token(hidden.double(), experts, routing))
    # weights are such that sums neither vanish nor explode
    assert 0.05 < float(got.std()) < 5.0


def test_weights_of_eight_bits_are_near_those_they_were_made_of() -> None:
    plain = draw_experts("bfloat16", SIZES, inputs(2))
    for dtype in ("fp8", "fp8_block"):
        stored = draw_experts(dtype, SIZES, inputs(2))
        assert stored.gate_up.dtype == torch.float8_e4m3fn
        for expert in range(SIZES.num_experts):
            pairs = zip(
                stored.dense(expert, torch.float64),
                plain.dense(expert, torch.float64),
                strict=True,
            )
            for got, exact in pairs:
                assert got.shape == exact.shape
                # half a step of three bits, and of the smallest number
                assert ((got - exact).abs() <= exact.abs() / 15 + 1e-4).all()


def test_numbers_of_four_bits_are_those_of_their_format() -> None:
    # the lower half of a byte comes first; the scales are 2, 1/4
    stored = torch.tensor([[0x10, 0xF7, *[0] * 14, 0x9A, *[0] * 15]]).to(torch.uint8)
    scales = torch.tensor([[128, 125]], dtype=torch.uint8)
    experts = Experts(
        "w4a16_mxfp4", stored[None], stored[None], scales[None], scales[None]
    )
    dense, _ = experts.dense(0, torch.float64)
    assert dense.shape == (1, 64)
    assert dense[0, :4].tolist() == [0.0, 1.0, 12.0, -12.0]
    assert dense[0, 32:34].tolist() == [-0.25, -0.125]


def test_padding_changes_no_sum() -> None:
    hidden, routing = tokens_of(9, 6)
    experts = draw_experts("w4a16_mxfp4", SIZES, inputs(1))
    wider = padded(experts, 256, 128)
    assert wider.gate_up.shape == (6, 2 * 128, 256 // 2)
    assert wider.down.shape == (6, 256, 128 // 2)
    assert wider.gate_up_scale is not None
    assert wider.gate_up_scale.shape == (6, 2 * 128, 256 // 32)
    parts = by_expert(routing)
    exact = plain_experts(hidden.double(), experts, parts)
    more = torch.nn.functional.pad(hidden.double(), (0, 256 - 160))
    got = plain_experts(more, wider, parts)
    assert torch.allclose(got[:, :160], exact)
    assert not got[:, 160:].any()
    assert padded(experts, 32, 32) is experts


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_tells_wrong_experts_from_right_ones(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rounding is coarse: what is wrong is one token's one expert."""
    (point, _) = small_points("routed_experts", "torch")
    at = replace(point.curve, dtype=dtype)
    device = cpu_device("torch")
    check = device.check(TINY, at, "torch")
    assert check.passed, check

    def swapped(variant: str, experts: Experts) -> gpu_experts.Bind:
        right = bound(variant, experts)

        def call(hidden: Tensor, routing: Routing) -> Call:
            ids = routing.ids.clone()
            ids[-1, 0] = next(e for e in range(8) if e not in ids[-1].tolist())
            return right(hidden, replace(routing, ids=ids))

        return call

    assert worst_error(at, device.timers.device, swapped) > check.tolerance
    monkeypatch.setattr(
        gpu_experts, "plain_experts", lambda hidden, *_: hidden * float("nan")
    )
    assert not device.check(TINY, at, "torch").passed


def test_a_kernel_that_is_not_here_is_refused_with_its_reason() -> None:
    (point, _) = small_points("routed_experts", "marlin")
    check = cpu_device("torch").check(TINY, point.curve, "vllm")
    assert not check.passed
    assert "vllm" in check.reason


def test_calls_go_from_layer_to_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are drawn once for a curve, choices for each call."""
    made: list[Experts] = []
    seen: list[tuple[int, Routing]] = []

    def spied(variant: str, experts: Experts) -> gpu_experts.Bind:
        del variant
        made.append(experts)
        number = len(made) - 1

        def call(hidden: Tensor, routing: Routing) -> Call:
            seen.append((number, routing))
            return lambda: hidden

        return call

    monkeypatch.setattr(gpu_experts, "bound", spied)
    at = curve("routed_experts", "torch", "bfloat16", EXPERTS)
    # a layer is 8 x 3 x 64 x 96 x 2 bytes: three of them are enough
    layers = ExpertLayers(torch.device("cpu"), 100_000)
    calls = layers.calls(Point(at, (3, 5)), seed=1)
    assert len(made) == 3
    # but of five experts a call more calls are needed
    assert len(calls) == 3
    assert [number for number, _ in seen] == [0, 1, 2]
    few = layers.calls(Point(at, (1, 2)), seed=1)
    assert len(made) == 3
    assert len(few) == 6
    assert [number for number, _ in seen[3:]] == [0, 1, 2, 0, 1, 2]
    assert not torch.equal(seen[3][1].ids, seen[4][1].ids) or not torch.equal(
        seen[4][1].ids, seen[5][1].ids
    )


def test_a_router_weighs_the_best() -> None:
    (point,) = small_points("router", "torch")
    hidden, gate = precise(layer_inputs(point, inputs()))
    weights = layer_call(point, (hidden, gate))()
    for token, found in zip(hidden @ gate.t(), weights, strict=True):
        first, second = sorted(token.tolist())[-1:-3:-1]
        ratio = float(found[1] / found[0])
        assert ratio == pytest.approx(float(torch.tensor(second - first).exp()))
        assert float(found.sum()) == pytest.approx(1.0)
