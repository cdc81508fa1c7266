"""The torch fallbacks against high precision; all of them on the CPU."""

from __future__ import annotations

import pytest

from tests.calibrate.missing import torch_only

torch_only()

# ruff: noqa: E402
import torch

from calibrate.kernels import reference, torch_ops
from calibrate.kernels.paged import paged_batch
from tests.calibrate.paged import Shape, poisoned_out, random_batch, tolerance

SHAPES = [
    Shape(1, 2, 64, 8, torch.float32),
    Shape(4, 2, 128, 16, torch.bfloat16),
    Shape(7, 1, 64, 32, torch.float16),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [([1, 1, 1], [33, 0, 1]), ([20, 0, 7, 1], [20, 9, 64, 50])],
)
def test_attention(
    shape: Shape, query_lens: list[int], context_lens: list[int]
) -> None:
    batch = random_batch(shape, query_lens, context_lens)
    out = poisoned_out(batch)
    torch_ops.attention(out, batch)
    expected = reference.paged_attention(batch)
    assert reference.worst_row_error(out, expected) < tolerance(shape.dtype)


def test_the_reference_on_a_case_by_hand() -> None:
    """Two keys of equal score weigh the same; a causal query sees the first alone."""
    cache = torch.zeros(2, 1, 1, 2)
    values = torch.tensor([[[[1.0, 2.0]]], [[[3.0, 6.0]]]])
    tables = torch.tensor([[1, 0]], dtype=torch.int32)
    batch = paged_batch(torch.ones(2, 1, 2), (cache, values), tables, [2], [2])
    out = reference.paged_attention(batch)
    assert out.tolist() == [[[3.0, 6.0]], [[2.0, 4.0]]]


def test_errors_are_relative_and_never_hidden() -> None:
    two = torch.tensor([3.0, 4.0])
    assert reference.relative_error(two, two) == 0.0
    assert reference.relative_error(two * 1.5, two) == pytest.approx(0.5)
    poisoned = torch.tensor([3.0, float("nan")])
    assert reference.relative_error(poisoned, two) == float("inf")
    assert reference.relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert reference.relative_error(two, torch.zeros(2)) == pytest.approx(5.0)
    small = torch.tensor([[300.0, 400.0], [0.3, 0.4], [0.0, 0.0]])
    off = small + torch.tensor([[0.0, 0.0], [0.03, 0.04], [0.0, 0.0]])
    assert reference.relative_error(off, small) < 2e-4
    assert reference.worst_row_error(off, small) == pytest.approx(0.1, rel=1e-3)
    assert reference.worst_row_error(off / 0, small) == float("inf")
    assert reference.worst_row_error(off[:0], small[:0]) == 0.0


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "rule"),
    [([2], [5], "add up"), ([3], [5, 5], "one context length"), ([3], [99], "cover")],
)
def test_a_batch_that_does_not_go_together_is_refused(
    query_lens: list[int], context_lens: list[int], rule: str
) -> None:
    cache = torch.zeros(4, 8, 1, 64)
    tables = torch.zeros(1, 4, dtype=torch.int32)
    query = torch.zeros(3, 2, 64)
    with pytest.raises(ValueError, match=rule):
        paged_batch(query, (cache, cache), tables, query_lens, context_lens)


def test_blocks_move_in_every_layer() -> None:
    rng = torch.Generator().manual_seed(3)
    source, target = (torch.randn(2, 2, 6, 8, 1, 4, generator=rng) for _ in range(2))
    expected = target.clone()
    expected[:, :, [5, 0]] = source[:, :, [1, 4]]
    torch_ops.swap_blocks(source, target, [(1, 5), (4, 0)])
    assert torch.equal(target, expected)
    expected[:, :, [2, 3]] = target[:, :, [5, 5]]
    torch_ops.copy_blocks(target, [(5, 2), (5, 3)])
    assert torch.equal(target, expected)


def test_tokens_are_written_to_their_slots() -> None:
    keys, values = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    caches = (torch.zeros(4, 8, 2, 4), torch.zeros(4, 8, 2, 4))
    torch_ops.write_cache(keys, values, caches, torch.tensor([9, 0, 31]))
    assert torch.equal(caches[0][1, 1], keys[0])
    assert torch.equal(caches[1][3, 7], values[2])
    assert int((caches[0] != 0).sum()) == keys.numel()


def test_the_rest_of_a_layer() -> None:
    rng = torch.Generator().manual_seed(4)
    hidden, residual = torch.randn(3, 8, generator=rng), torch.ones(3, 8)
    normed = torch_ops.rms_norm_add(hidden, residual, torch.full((8,), 2.0))
    assert torch.equal(residual, hidden + 1)
    assert normed.pow(2).mean(-1) == pytest.approx(torch.full((3,), 4.0), rel=1e-4)
    query, key = torch.randn(2, 3, 4, generator=rng), torch.randn(2, 1, 4)
    before = query.clone()
    turns = torch.tensor([0.0, torch.pi / 2])[:, None].expand(2, 2)
    table = torch.cat((turns.cos(), turns.sin()), -1)
    torch_ops.rotary(query, key, torch.tensor([1, 1]), table)
    expected = torch.cat((-before[..., 2:], before[..., :2]), -1)
    assert torch.allclose(query, expected, atol=1e-6)
    gated = torch_ops.silu_and_mul(torch.tensor([[0.0, 2.0, 5.0, 3.0]]))
    assert gated == pytest.approx(torch.tensor([[0.0, 3 * 2 / (1 + 2.718281828**-2)]]))


def test_sampling_follows_the_probabilities() -> None:
    torch.manual_seed(5)
    logits = torch.tensor([[0.0, 1.0986123]]).repeat(4000, 1)  # 1 : 3
    drawn = torch_ops.sample(logits, torch.empty(4000, 2))
    assert 0.72 < float(drawn.float().mean()) < 0.78
