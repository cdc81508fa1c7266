"""Grid, order, refinement, warm-up and quantiles: the parts of a calibration."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.harness import session
from calibrate.harness.dry_run import DryRunDevice
from calibrate.harness.geometry import geometry_of
from calibrate.harness.grid import GIB, MIB, PRESETS, Limits, build_grid
from calibrate.harness.plan import BLOCK, ordered_blocks, refine, sentinels
from calibrate.harness.work import floor_s, least_bytes, least_flops
from calibrate.measurement import OPERATIONS, Point, curve, median, quantiles
from sim.errors import UserError
from sim.hardware.models.bundled import load_model
from tests.calibrate.runs import geometry

QWEN = load_model("Qwen/Qwen3-30B-A3B")
OF_EXPERTS = {"router", "routed_experts"}
DEVICE = DryRunDevice()
CHOICES = DEVICE.choices("auto", OPERATIONS)
DECODE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_point_is_there_once_and_fits(preset: str) -> None:
    limits = Limits(kv_tokens_bytes=GIB, transfer_bytes=64 * MIB, pool_bytes=2 * GIB)
    points = build_grid(PRESETS[preset], geometry(), limits, CHOICES)
    assert max(Counter(points).values()) == 1
    timed = {point.curve.operation for point in points}
    assert timed == set(OPERATIONS) - OF_EXPERTS
    mixture = build_grid(PRESETS[preset], geometry_of(QWEN, 16, 1), limits, CHOICES)
    assert {point.curve.operation for point in mixture} == set(OPERATIONS)
    for point in points:
        assert all(value >= (0 if "past" in name else 1)
                   for name, value in point.axes.items())  # fmt: skip
        if point.curve.operation.endswith("attention"):
            assert least_bytes(point) <= limits.kv_tokens_bytes
        if point.curve.operation == "swap":
            assert least_bytes(point) <= limits.transfer_bytes
        if point.curve.operation == "copy_blocks":
            assert least_bytes(point) <= limits.pool_bytes


def test_the_far_corner_is_pulled_in() -> None:
    points = build_grid(PRESETS["default"], geometry(), DEVICE.limits, CHOICES)
    most = DEVICE.limits.kv_tokens_bytes // geometry().token_bytes
    values = {p.values for p in points if p.curve.variant == "split_kv"}
    assert (512, 512 * (most // 512), most // 512) in values
    assert (1, 131072, 131072) in values
    assert (8, 2 * 7 * 1024, 7 * 1024) in values  # one long, seven of 1024


def test_rounds_visit_every_point_in_orders_of_their_own() -> None:
    points = build_grid(PRESETS["quick"], geometry(), DEVICE.limits, CHOICES)
    blocks = list(ordered_blocks("grid", points, 3, seed=5))
    assert max(len(block.points) for block in blocks) == BLOCK
    rounds = [
        [point for block in blocks if block.round == number for point in block.points]
        for number in range(3)
    ]
    assert all(Counter(order) == Counter(points) for order in rounds)
    assert rounds[0] != rounds[1] != rounds[2] != points
    again = list(ordered_blocks("grid", points, 3, seed=5))
    assert blocks == again
    assert len({block.name for block in blocks}) == len(blocks)


def gemm_line(times_s: dict[int, float]) -> dict[Point, float]:
    at = curve("gemm", "torch", "bfloat16", {"layer": "o", "n": 64, "k": 64})
    return {Point(at, (tokens,)): time_s for tokens, time_s in times_s.items()}


def test_a_straight_line_asks_for_nothing() -> None:
    assert refine(gemm_line({9: 1.0, 99: 10.0, 999: 100.0}), 10) == []


def test_a_bend_asks_for_both_gaps() -> None:
    added = refine(gemm_line({15: 1.0, 255: 1.0, 4095: 16.0}), 10)
    assert sorted(point.values for point in added) == [(63,), (1023,)]
    assert len(refine(gemm_line({15: 1.0, 255: 1.0, 4095: 16.0}), 1)) == 1


def test_there_is_nothing_between_neighbours() -> None:
    assert refine(gemm_line({1: 1.0, 2: 9.0, 3: 1.0}), 10) == []


def test_a_decode_is_refined_with_even_contexts() -> None:
    at = curve("decode_attention", "split_kv", "bfloat16", DECODE)
    times = {
        Point(at, (4, 4 * context, context)): time_s
        for context, time_s in ((15, 1.0), (255, 1.0), (4095, 16.0))
    }
    skewed = Point(at, (4, 5000, 4000))
    added = refine({**times, skewed: 3.0}, 10)
    assert sorted(point.values for point in added) == [(4, 252, 63), (4, 4092, 1023)]


@given(
    st.dictionaries(
        st.integers(1, 5000), st.floats(1e-7, 1e-1), min_size=1, max_size=12
    ),
    st.integers(0, 8),
)
def test_refinement_adds_new_points_inside(times: dict[int, float], most: int) -> None:
    line = gemm_line(times)
    added = refine(line, most)
    assert len(added) == len(set(added)) <= most
    assert not set(added) & set(line)
    assert all(min(times) < point.values[0] < max(times) for point in added)


def test_sentinels_are_what_the_device_can_do() -> None:
    found = sentinels(geometry(), DEVICE.limits, CHOICES)
    assert list(found) == ["gemm", "decode_attention", "swap"]
    transfer = found["swap"][0]
    assert least_bytes(transfer) == 64 * MIB
    only = [choice for choice in CHOICES if choice.operation == "gemm"]
    assert list(sentinels(geometry(), DEVICE.limits, only)) == ["gemm"]


class Settling:
    """A task that gets faster until it stands still."""

    metrics = ("device",)

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.taken = 0

    def repeats(self, metric: str) -> int:
        return 1

    def sample(self, metric: str, count: int) -> list[float]:
        self.taken += count
        return [self.times.pop(0) if len(self.times) > 1 else self.times[0]] * count

    def close(self) -> None:
        pass


def test_a_warm_up_ends_when_three_medians_agree() -> None:
    task = Settling([9e-6, 8e-6, 4e-6, 2e-6, 2.03e-6, 2.02e-6, 1e-6])
    assert session.warm_up(task)
    assert task.times == [1e-6]


def test_a_warm_up_gives_up() -> None:
    task = Settling([1e-6 * 1.1**n for n in range(40)])
    assert not session.warm_up(task)
    assert not session.visit(task, 10).settled


def test_slow_calls_are_sampled_less() -> None:
    fast, slow = (session.visit(Settling([t]), 10) for t in (1e-6, 0.3))
    assert len(fast.samples["device"]) == 10
    assert len(slow.samples["device"]) == session.MIN_SAMPLES


def test_quantiles_are_those_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    samples = [float(x) for x in (5, 1, 4, 2, 3, 9)]
    got = quantiles(samples)
    expected = numpy.quantile(samples, [0.1, 0.5, 0.9, 0.99])
    assert [got.p10_s, got.p50_s, got.p90_s, got.p99_s] == pytest.approx(expected)
    assert (got.mean_s, got.n) == (4.0, 6)
    assert median(samples) == 3.5


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, math.inf], [math.nan]])
def test_samples_that_are_no_times_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="sample"):
        quantiles(samples)


def test_floors_by_hand() -> None:
    at = curve("decode_attention", "split_kv", "bfloat16", DECODE)
    decode = Point(at, (2, 300, 200))
    assert least_bytes(decode) == 300 * 2 * 8 * 128 * 2
    assert least_flops(decode) == 4 * 32 * 128 * 300
    prefill = Point(curve("prefill_attention", "mixed", "bfloat16", DECODE), (3, 10))
    assert least_flops(prefill) == 4 * 32 * 128 * (11 + 12 + 13)
    both = {"direction": "both", "memory": "pinned"}
    swap = Point(curve("swap", "loop", "bytes", both), (4, 1000))
    assert floor_s(swap, DEVICE.physics) == 4000 / (2 * 64e9)
    copies = {"num_layers": 3, "page_bytes": 100}
    copy = Point(curve("copy_blocks", "kernel", "bfloat16", copies), (5,))
    assert least_bytes(copy) == 2 * 2 * 3 * 100 * 5


def test_the_fake_device_obeys_physics() -> None:
    points = build_grid(PRESETS["extended"], geometry(), DEVICE.limits, CHOICES)
    for point in points:
        task = DEVICE.prepare(point, "dry-run", 0)
        assert task.sample("device", 1)[0] > floor_s(point, DEVICE.physics), point.key


def test_longer_never_costs_less_on_the_fake_device() -> None:
    at = curve("decode_attention", "split_kv", "bfloat16", DECODE)
    times = [
        DEVICE.prepare(Point(at, (1, n, n)), "dry-run", 0).sample("device", 1)[0]
        for n in (10**3, 10**5, 10**7)
    ]
    assert all(one < two for one, two in pairwise(times))


@pytest.mark.parametrize(
    ("model", "rule"), [("deepseek-ai/DeepSeek-V2-Lite", "latent attention")]
)
def test_models_that_are_not_timed(model: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        geometry_of(load_model(model), 16, 1)


def test_what_is_not_timed_is_named() -> None:
    assert geometry().omissions == ()
    experts = geometry_of(QWEN, 16, 2)
    assert experts.omissions == ("all-reduce among 2 GPUs",)
    assert experts.gemms.keys() == {"qkv", "o", "head"}
    packed = geometry_of(replace(QWEN, quantization="nvfp4"), 16, 1)
    assert packed.omissions == ("128 routed experts a layer, of nvfp4",)
    sliding = geometry_of(load_model("google/gemma-2-9b"), 16, 1)
    assert sliding.omissions == ("attention in a window of 4096 keys",)


def test_a_rank_of_a_model() -> None:
    rank = geometry_of(load_model("meta-llama/Llama-3.1-70B"), 16, 4)
    assert (rank.num_heads, rank.num_kv_heads, rank.head_dim) == (16, 2, 128)
    assert rank.gemms["qkv"] == ((16 + 4) * 128, 8192)
    assert rank.gemms["down"] == (8192, 7168)
    assert rank.page_bytes == 16 * 2 * 128 * 2


def test_experts_are_timed_by_tokens_and_by_how_many_they_touch() -> None:
    points = [
        point
        for point in build_grid(
            PRESETS["brief"], geometry_of(QWEN, 16, 2), DEVICE.limits, CHOICES
        )
        if point.curve.operation == "routed_experts"
    ]
    (at,) = {point.curve for point in points}
    assert (at.variant, at.dtype) == ("fused_moe", "bfloat16")
    assert dict(at.constants) == {
        "hidden_size": 2048,
        "num_experts": 128,
        "experts_per_token": 8,
        "intermediate_size": 384,  # half of an expert: a rank's share
    }
    touched: dict[int, set[int]] = {}
    for point in points:
        tokens, experts = point.values
        assert 8 <= experts <= min(128, 8 * tokens)
        touched.setdefault(tokens, set()).add(experts)
    assert list(touched) == list(PRESETS["brief"].tokens)
    # 128 (1 - (1 - 8 / 128) ** n), as few as there can be, and the middle
    assert touched[1] == {8}
    assert touched[16] == {82}
    assert touched[32] == {112, 60, 8}
    assert touched[8192] == {128, 68}
    assert least_bytes(Point(at, (32, 60))) == 60 * 3 * 2048 * 384 * 2 + 32 * 2048 * 4
    assert least_flops(Point(at, (32, 60))) == 2 * 32 * 8 * 3 * 2048 * 384


@pytest.mark.parametrize(
    ("model", "dtype", "variants"),
    [
        ("openai/gpt-oss-20b", "w4a16_mxfp4", {"matmul_ogs", "marlin"}),
        ("Qwen/Qwen3-30B-A3B-FP8", "fp8_block", {"fused_moe"}),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "bfloat16", {"fused_moe"}),
    ],
)
def test_experts_are_timed_in_their_precision(
    model: str, dtype: str, variants: set[str]
) -> None:
    here = geometry_of(load_model(model), 16, 1)
    points = build_grid(PRESETS["quick"], here, DEVICE.limits, CHOICES)
    curves = {p.curve for p in points if p.curve.operation == "routed_experts"}
    assert {(at.variant, at.dtype) for at in curves} == {
        (variant, dtype) for variant in variants
    }


def test_weights_of_fp8_are_multiplied_in_eight_bits() -> None:
    constants = {"hidden_size": 2048, "intermediate_size": 768}
    constants |= {"num_experts": 128, "experts_per_token": 8}
    floors = [
        floor_s(
            Point(curve("routed_experts", "fused_moe", dtype, constants), (8192, 128)),
            DEVICE.physics,
        )
        for dtype in ("bfloat16", "fp8_block")
    ]
    assert floors[0] / floors[1] == pytest.approx(2.0, rel=1e-3)
