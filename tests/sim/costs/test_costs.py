import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sim.config.plug import build
from sim.costs import COST_MODELS, ConstantCost, LinearCost, RooflineCost
from sim.costs.base import STEP_PARTS, StepCost
from sim.costs.parts import step_cost
from sim.costs.rates.collectives import all_reduce_s
from sim.costs.rates.efficiencies import soft_maximum
from sim.costs.roofline.graphs import rule_of
from sim.costs.roofline.launches import LaunchedRooflineCost
from sim.costs.steps.slowed import Slowed
from sim.errors import ConfigError
from sim.hardware.capacity import estimate_capacity
from sim.hardware.gpus import GpuSpec, load_gpu
from sim.hardware.interconnects import link_of
from sim.hardware.models.architecture import KV_CACHE_DTYPE_BYTES, ModelArchitecture
from sim.hardware.models.bundled import load_model, resolved_model
from sim.hardware.models.layers import LayerKind
from sim.scheduler.batch import BatchShape
from sim.scheduler.v1 import V1

EMPTY = BatchShape(0, 0, 0, 0, 0, 0)

TINY = ModelArchitecture(
    name="tiny",
    num_hidden_layers=2,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=1024,
    max_position_embeddings=4096,
)
LLAMA_8B = ModelArchitecture(
    name="Llama-3.1-8B",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
)
MOE = replace(
    TINY,
    name="moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=512,
)
ROUND = GpuSpec(
    name="round",
    memory_bytes=10**10,
    memory_bandwidth_bytes_per_s=1e12,
    bf16_flops_per_s=1e14,
    fp8_flops_per_s=2e14,
    interconnect_bytes_per_s=1e11,
    host_bytes_per_s=1e10,
)
H200 = GpuSpec(
    name="h200_sxm",
    memory_bytes=141 * 10**9,
    memory_bandwidth_bytes_per_s=4.8e12,
    bf16_flops_per_s=989e12,
    fp8_flops_per_s=1979e12,
    interconnect_bytes_per_s=450e9,
    host_bytes_per_s=64e9,
)
BARE = {
    # the datasheet itself: every efficiency 1, every overhead 0
    "gemm_compute_efficiency": 1.0,
    "gemm_bandwidth_efficiency": 1.0,
    "fp8_gemm_compute_efficiency": 1.0,
    "moe_bandwidth_efficiency": 1.0,
    "moe_compute_efficiency": 1.0,
    "moe_layer_latency_s": 0.0,
    "moe_routing_correlation": 0.0,
    "decode_bandwidth_efficiency": 1.0,
    "fp8_decode_bandwidth_efficiency": 1.0,
    "decode_sequence_head_s": 0.0,
    "prefill_attention_efficiency": 1.0,
    "prefill_tile_tokens": 0.0,
    "mixed_decode_tile_tokens": 0,
    "elementwise_bandwidth_efficiency": 1.0,
    "sampler_bytes_per_logit": 0.0,
    "swap_efficiency": 1.0,
    "swap_kernel_efficiency": 1.0,
    "swap_fixed_s": 0.0,
    "swap_call_s": 0.0,
    "swap_descriptor_s": 0.0,
    "swap_dma_s": 0.0,
    "copy_efficiency": 1.0,
    "copy_fixed_s": 0.0,
    "layer_latency_s": 0.0,
    "qk_norm_latency_s": 0.0,
    "step_overhead_s": 1e-6,
    "request_overhead_s": 0.0,
}
COEFFICIENTS = {
    "decode_s": 2e-5,
    "prefill_s": 3e-5,
    "prefill_token_s": 4e-5,
    "decode_context_token_s": 5e-9,
    "prefill_context_token_s": 6e-9,
    "prefill_attention_pair_s": 7e-11,
    "swapped_block_s": 8e-6,
    "copied_block_s": 9e-7,
}
MODELS = {
    "constant": ConstantCost(0.02),
    "linear": LinearCost(1e-3, **COEFFICIENTS),
    "roofline": RooflineCost(model=LLAMA_8B, gpu=H200),
    "roofline tp": RooflineCost(model=LLAMA_8B, gpu=H200, tensor_parallel_size=2),
    "roofline fa2": RooflineCost(model=LLAMA_8B, gpu=ROUND, kv_cache_dtype="fp8"),
    "roofline moe": RooflineCost(model=MOE, gpu=ROUND),
    "roofline sliding": RooflineCost(
        model=replace(
            TINY,
            sliding_window=128,
            mixed_layer_kinds=(LayerKind.SLIDING_ATTENTION, LayerKind.FULL_ATTENTION),
        ),
        gpu=ROUND,
    ),
    "roofline mla": RooflineCost(
        model=replace(
            TINY,
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
        ),
        gpu=ROUND,
    ),
    "launched": LaunchedRooflineCost(
        model=LLAMA_8B, gpu=H200, graph_rule=V1.graphs, launch_s=8e-5
    ),
    "launched decodes": LaunchedRooflineCost(
        model=LLAMA_8B, gpu=H200, graph_rule=rule_of(V1.graphs, "0.10"), launch_s=8e-5
    ),
}
every_model = pytest.mark.parametrize("kind", MODELS)


def bare(model=TINY, gpu=ROUND, **keywords):
    return RooflineCost(model=model, gpu=gpu, **{**BARE, **keywords})


def decodes(num, context):
    return BatchShape(num, num * context, 0, 0, 0, 0)


def chunk(num_tokens, past=0):
    pairs = num_tokens * past + num_tokens * (num_tokens + 1) // 2
    return BatchShape(0, 0, 1, num_tokens, past + num_tokens, pairs)


@st.composite
def shapes(draw):
    counts = st.integers(0, 512)
    num_decodes, num_prefills = draw(counts), draw(st.integers(0, 8))
    context = num_decodes + draw(st.integers(0, 131072)) * num_decodes
    num_tokens = 2 * num_prefills + draw(st.integers(0, 16384)) * bool(num_prefills)
    past = draw(st.integers(0, 131072)) * bool(num_prefills)
    return BatchShape(
        num_decodes,
        context,
        num_prefills,
        num_tokens,
        num_tokens + past,
        num_tokens * past + num_tokens * (num_tokens + 1) // 2,
        draw(counts),
        draw(counts),
        draw(counts),
    )


# -- what holds for every model ---------------------------------------------------


@every_model
@given(shape=shapes())
def test_parts_are_finite_and_add_up_exactly(kind, shape):
    cost = MODELS[kind].step(shape)
    parts = cost.parts
    assert all(math.isfinite(part) and part >= 0.0 for part in parts)
    total = 0.0
    for part in parts:
        total += part
    assert cost.total_s == total > 0.0
    assert cost.extrapolated is False
    assert cost.lo_s == cost.hi_s == cost.total_s  # they know no bounds
    assert MODELS[kind].describe()["bounds"] is False


@every_model
def test_an_empty_step_costs_host_time_only(kind):
    cost = MODELS[kind].step(EMPTY)
    assert cost.total_s == cost.host_s > 0.0


ROUNDING = 1e-15
"""Of a step that waits for its launches: what remains of them is one of the parts, the
sum of which may come out a last bit smaller."""


@every_model
@given(shape=shapes(), field=st.sampled_from(BatchShape._fields), more=st.integers(1))
@example(BatchShape(2, 2, 1, 2, 3, 5, 0, 0, 0), "num_decode_context_tokens", 1)
def test_more_work_never_costs_less(kind, shape, field, more):
    more = more % 10_000 + 1
    grown = shape._replace(**{field: getattr(shape, field) + more})
    if field == "num_prefill_tokens":  # they stand in a context, and read it
        context = shape.num_prefill_context_tokens
        pairs = more * context + more * (more + 1) // 2
        grown = grown._replace(
            num_prefill_context_tokens=context + more,
            num_prefill_attention_pairs=shape.num_prefill_attention_pairs + pairs,
        )
    rounding = ROUNDING if kind.startswith("launched") else 0.0
    least_s = MODELS[kind].step(shape).total_s * (1 - rounding)
    assert MODELS[kind].step(grown).total_s >= least_s


@every_model
@given(shape=shapes())
def test_the_same_shape_always_costs_the_same(kind, shape):
    assert MODELS[kind].step(shape) == MODELS[kind].step(BatchShape(*shape))


@every_model
def test_descriptions_are_json_with_units_and_sources(kind):
    description = json.loads(json.dumps(MODELS[kind].describe(), allow_nan=False))
    assert description["kind"] in COST_MODELS
    for entry in description["parameters"].values():
        assert isinstance(entry["value"], int | float)
        assert entry["unit"]
        assert entry["source"]


def test_the_sum_is_taken_in_the_order_of_the_fields():
    parts = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    cost = step_cost(*parts)
    assert cost.parts == parts
    assert STEP_PARTS == (
        "gemm_s",
        "prefill_attention_s",
        "decode_attention_s",
        "head_s",
        "allreduce_s",
        "swap_s",
        "copy_s",
        "host_s",
    )
    assert cost.total_s == ((((((0.1 + 0.2) + 0.3) + 0.4) + 0.5) + 0.6) + 0.7) + 0.8
    assert step_cost(host_s=1.0) == StepCost(1.0, host_s=1.0, lo_s=1.0, hi_s=1.0)
    cost = step_cost(host_s=1.0, squares=(0.25, 4.0))
    assert (cost.lo_s, cost.hi_s) == (0.5, 3.0)


# -- constant and linear ----------------------------------------------------------


def test_constant_ignores_the_shape():
    cost = ConstantCost(0.02)
    assert cost.step(decodes(8, 100)) == cost.step(EMPTY) == step_cost(host_s=0.02)


@pytest.mark.parametrize("step_s", [0, -1.0, math.nan, math.inf, "1", True, None])
def test_constant_refuses(step_s):
    with pytest.raises(ConfigError, match=r"step_s must be a finite number > 0; got"):
        ConstantCost(step_s)


def test_linear_puts_each_term_where_it_belongs():
    cost = LinearCost(1e-3, **COEFFICIENTS).step(
        BatchShape(10, 1000, 2, 100, 300, 5000, 3, 4, 5)
    )
    assert cost.gemm_s == pytest.approx(10 * 2e-5 + 2 * 3e-5 + 100 * 4e-5)
    assert cost.prefill_attention_s == pytest.approx(300 * 6e-9 + 5000 * 7e-11)
    assert cost.decode_attention_s == pytest.approx(1000 * 5e-9)
    assert cost.swap_s == pytest.approx(7 * 8e-6)
    assert cost.copy_s == pytest.approx(5 * 9e-7)
    assert cost.host_s == 1e-3
    assert cost.head_s == cost.allreduce_s == 0.0


@pytest.mark.parametrize("key", COEFFICIENTS)
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "fast", False])
def test_linear_refuses(key, value):
    with pytest.raises(ConfigError, match=f"^{key} must be a finite number >= 0; got"):
        LinearCost(1e-3, **{key: value})


def test_linear_needs_a_base():
    with pytest.raises(ConfigError, match=r"^base_s must be a finite number > 0"):
        LinearCost(0.0, decode_s=1e-5)


# -- roofline: literals -----------------------------------------------------------


def test_gemm_of_one_token_by_hand():
    # qkv 512 x 256, o 256 x 256, gate_up 1024 x 256, down 256 x 512
    elements = 2 * (512 * 256 + 256 * 256 + 1024 * 256 + 256 * 512)
    widths = 2 * ((512 + 256) + (256 + 256) + (1024 + 256) + (256 + 512))
    memory_s = (elements + widths) * 2 / 1e12
    compute_s = 2 * elements / 1e14
    cost = bare().step(decodes(1, 1))
    assert cost.gemm_s == pytest.approx(math.hypot(memory_s, compute_s))


def chip(name: str, **given: Any) -> RooflineCost:
    model = load_model("meta-llama/Llama-3.1-8B")
    return RooflineCost(model=model, gpu=load_gpu(name), **given)


def test_a_chip_has_its_own_efficiencies():
    told = chip("h100_sxm").describe()
    assert told["efficiencies"]["of"] == "h100"
    values = {key: each["value"] for key, each in told["parameters"].items()}
    assert values["gemm_bandwidth_efficiency"] == 0.88
    assert values["gemm_compute_efficiency"] == 0.82
    assert values["decode_bandwidth_efficiency"] == 0.93


def test_what_is_given_beats_the_chip():
    told = chip("h100_sxm", gemm_bandwidth_efficiency=0.5).describe()["parameters"]
    assert told["gemm_bandwidth_efficiency"]["value"] == 0.5
    assert told["gemm_compute_efficiency"]["value"] == 0.82


def test_a_chip_without_tables_has_the_efficiencies_of_all():
    unknown = chip("rtx_4090")
    common = chip("rtx_4090", efficiencies="common")
    assert unknown.step(decodes(64, 1000)) == common.step(decodes(64, 1000))
    assert unknown.describe()["efficiencies"]["of"] == "common"
    assert "efficiencies" not in common.describe()


def test_sharp_limits_add_less_where_both_bind():
    assert soft_maximum(3.0, 4.0, 2) == 5.0
    assert soft_maximum(3.0, 4.0, 4) == pytest.approx((3**4 + 4**4) ** 0.25)
    assert soft_maximum(0.0, 4.0, 4) == 4.0


def test_efficiencies_are_of_all_or_of_the_chip():
    model = load_model("meta-llama/Llama-3.1-8B")
    with pytest.raises(ConfigError, match=r"^efficiencies must be one of common, chip"):
        RooflineCost(model=model, gpu=load_gpu("h100"), efficiencies="own")  # type: ignore[arg-type]


def test_attention_by_hand():
    kv_token_bytes = 2 * 2 * 2 * 64 * 2  # K and V, 2 layers, 2 heads of 64, bf16
    decode = bare().step(decodes(3, 1000))
    assert decode.decode_attention_s == pytest.approx(3000 * kv_token_bytes / 1e12)
    prefill = bare().step(chunk(1000))
    assert prefill.prefill_attention_s == pytest.approx(4 * 4 * 64 * 500500 * 2 / 1e14)
    # a short chunk over a long context reads the cache for a few queries
    short = bare().step(chunk(2, past=100_000))
    assert short.prefill_attention_s == pytest.approx(100_002 * kv_token_bytes / 1e12)


def test_tiles_charge_every_chunk_with_its_context():
    plain, tiled = bare(), bare(prefill_tile_tokens=128.0)
    extra_s = (
        tiled.step(chunk(512, past=1024)).prefill_attention_s
        - plain.step(chunk(512, past=1024)).prefill_attention_s
    )
    assert extra_s == pytest.approx(128 * 1536 * 4 * 4 * 64 * 2 / 1e14)


def test_head_by_hand():
    cost = bare(sampler_bytes_per_logit=6.0).step(BatchShape(3, 30, 2, 64, 64, 600))
    memory_s = (1024 * 256 + 5 * (1024 + 256)) * 2 / 1e12
    compute_s = 2 * 5 * 1024 * 256 / 1e14
    sampler_s = 5 * 1024 * 6 / 1e12
    assert cost.head_s == pytest.approx(math.hypot(memory_s, compute_s) + sampler_s)


def test_swap_and_copy_by_hand():
    block_bytes = 16 * 2 * 2 * 2 * 64 * 2
    moved = EMPTY._replace(num_swapped_in_blocks=3, num_swapped_out_blocks=4)
    cost = bare().step(moved._replace(num_copied_blocks=5))
    assert cost.swap_s == pytest.approx(7 * block_bytes / 1e10)
    assert cost.copy_s == pytest.approx(5 * 2 * block_bytes / 1e12)
    # one copy each of K and V in each layer: here the calls take longer than the bytes
    calls = bare(swap_call_s=1e-5).step(moved)
    assert calls.swap_s == pytest.approx(7 * 2 * 2 * 1e-5)


def test_host_by_hand():
    cost = bare(step_overhead_s=1e-3, request_overhead_s=1e-5, layer_latency_s=1e-4)
    elements = 8 * 256 + 2 * (256 + 128) + 4 * 128 + 3 * 512
    expected_s = 1e-3 + 3e-5 + 2e-4 + 3 * 2 * elements * 2 / 1e12
    assert cost.step(decodes(3, 10)).host_s == pytest.approx(expected_s)
    assert cost.step(EMPTY).host_s == 1e-3


def test_a_norm_of_queries_and_keys_starts_once_and_moves_both():
    normed = replace(TINY, qk_norm=True)
    # 2 layers of 4 heads and 2 of keys, each read and written, 64 wide, in bf16
    for num_tokens in (1, 1000):
        shape = decodes(num_tokens, 10)
        expected_s = 2 * (3e-6 + num_tokens * 2 * (4 + 2) * 64 * 2 / 1e12)
        without, with_norm = (
            bare(model, qk_norm_latency_s=3e-6).step(shape).host_s
            for model in (TINY, normed)
        )
        assert with_norm - without == pytest.approx(expected_s, rel=1e-6)


def test_experts_are_read_as_often_as_they_are_touched():
    expert_bytes = 2 * 3 * 256 * 512 * 2  # 2 layers, gate, up and down
    cost = bare(MOE, replace(ROUND, bf16_flops_per_s=1e30))
    attention = 2 * (512 * 256 + 256 * 256) * 2

    def expert_bytes_read(num_tokens):
        # a token passes attention once, and gate_up and down of two experts
        widths = 2 * ((512 + 256) + (256 + 256) + 2 * ((1024 + 256) + (256 + 512)))
        gemm_bytes = cost.step(decodes(num_tokens, 1)).gemm_s * 1e12
        return gemm_bytes - attention - num_tokens * widths * 2

    assert expert_bytes_read(1) == pytest.approx(2 * expert_bytes)
    # 8 (1 - (6/8)^2) experts on average
    assert expert_bytes_read(2) == pytest.approx(3.5 * expert_bytes)
    assert expert_bytes_read(1000) == pytest.approx(8 * expert_bytes, rel=1e-6)


def test_a_window_bounds_the_layers_that_slide():
    half = bare(
        replace(
            TINY,
            sliding_window=100,
            mixed_layer_kinds=(LayerKind.SLIDING_ATTENTION, LayerKind.FULL_ATTENTION),
        )
    )
    full = bare()
    long, short = decodes(4, 1000), decodes(4, 100)
    expected_s = (
        full.step(long).decode_attention_s + full.step(short).decode_attention_s
    ) / 2
    assert half.step(long).decode_attention_s == pytest.approx(expected_s)
    assert half.step(short) == full.step(short)
    assert (
        half.step(chunk(1000)).prefill_attention_s
        < full.step(chunk(1000)).prefill_attention_s
    )


def test_a_window_bounds_the_context_of_chunks():
    window, past, tokens = 100, 10_000, 64
    all_slide = bare(
        replace(
            TINY,
            sliding_window=window,
            mixed_layer_kinds=(LayerKind.SLIDING_ATTENTION,) * 2,
        ),
        prefill_tile_tokens=32.0,
    )
    cost = all_slide.step(chunk(tokens, past=past))
    pair_s = 4 * 4 * 64 * 2 / 1e14
    # each query sees the window; the tiles see it and the chunk itself
    seen = tokens * window + 32 * (window + tokens)
    assert cost.prefill_attention_s == pytest.approx(pair_s * seen)
    # two chunks reach back twice
    one = chunk(tokens, past=past)
    two = BatchShape(*(2 * field for field in one))
    twice_s = all_slide.step(two).prefill_attention_s
    assert twice_s == pytest.approx(2 * cost.prefill_attention_s)
    # few queries: what is read is the window, not the context
    short = bare(
        replace(
            TINY,
            sliding_window=window,
            mixed_layer_kinds=(LayerKind.SLIDING_ATTENTION,) * 2,
        )
    )
    read_s = (window + 1) * 2 * 2 * 2 * 64 * 2 / 1e12
    assert short.step(chunk(1, past=past)).prefill_attention_s == pytest.approx(read_s)


def test_llama_8b_on_h200_reads_its_weights_once_a_step():
    cost = RooflineCost(model=LLAMA_8B, gpu=H200).step(decodes(1, 128))
    linear_bytes = 2 * 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
    head_bytes = 2 * 128256 * 4096
    assert (linear_bytes + head_bytes) / 2**30 == pytest.approx(13.98, abs=0.01)
    floor_s = (linear_bytes + head_bytes) / (4.8e12 * 0.86)
    assert cost.gemm_s + cost.head_s == pytest.approx(floor_s, rel=0.01)
    # attention over 128 tokens is nothing beside them; the rest is launches and host
    assert cost.total_s == pytest.approx(floor_s + cost.host_s, rel=0.01)


# -- roofline: relations ----------------------------------------------------------


def test_twice_the_bandwidth_halves_what_memory_bounds():
    fast = replace(H200, memory_bandwidth_bytes_per_s=9.6e12)
    slow_cost = bare(LLAMA_8B, H200).step(decodes(4, 8000))
    fast_cost = bare(LLAMA_8B, fast).step(decodes(4, 8000))
    assert slow_cost.decode_attention_s == 2 * fast_cost.decode_attention_s
    assert slow_cost.gemm_s == pytest.approx(2 * fast_cost.gemm_s, rel=0.01)
    assert slow_cost.head_s == pytest.approx(2 * fast_cost.head_s, rel=0.01)


def test_twice_the_flops_halves_what_compute_bounds():
    fast = replace(H200, bf16_flops_per_s=2 * 989e12)
    slow_cost = bare(LLAMA_8B, H200).step(chunk(16384))
    fast_cost = bare(LLAMA_8B, fast).step(chunk(16384))
    assert slow_cost.prefill_attention_s == 2 * fast_cost.prefill_attention_s
    assert slow_cost.gemm_s == pytest.approx(2 * fast_cost.gemm_s, rel=0.01)


def test_two_ranks_halve_the_work_and_add_collectives():
    shape = BatchShape(64, 64 * 2000, 1, 1024, 4096, 1024 * 3072 + 1024 * 1025 // 2)
    one = RooflineCost(model=LLAMA_8B, gpu=H200).step(shape)
    two = RooflineCost(model=LLAMA_8B, gpu=H200, tensor_parallel_size=2).step(shape)
    assert two.gemm_s == pytest.approx(one.gemm_s / 2, rel=0.02)
    assert two.decode_attention_s == pytest.approx(one.decode_attention_s / 2)
    assert two.prefill_attention_s == pytest.approx(one.prefill_attention_s / 2)
    assert one.allreduce_s == 0.0
    one_s = all_reduce_s(link_of(H200), 2, 1088 * 4096 * 2)
    assert two.allreduce_s == pytest.approx(64 * one_s)


def test_kv_heads_are_replicated_beyond_their_number():
    two = bare(tensor_parallel_size=2).step(decodes(8, 1000))
    four = bare(tensor_parallel_size=4).step(decodes(8, 1000))
    assert four.decode_attention_s == two.decode_attention_s


def test_fp8_kv_halves_the_bytes_of_decodes():
    shape = decodes(16, 4000)._replace(num_swapped_out_blocks=8)
    wide, narrow = bare().step(shape), bare(kv_cache_dtype="fp8").step(shape)
    assert narrow.decode_attention_s == wide.decode_attention_s / 2
    assert narrow.swap_s == wide.swap_s / 2
    assert narrow.gemm_s == wide.gemm_s
    # measured kernels read fp8 at a lower rate, which eats part of the gain
    plain = RooflineCost(model=LLAMA_8B, gpu=H200).step(shape)
    fp8 = RooflineCost(model=LLAMA_8B, gpu=H200, kv_cache_dtype="fp8").step(shape)
    assert 0.5 < fp8.decode_attention_s / plain.decode_attention_s < 0.7


def test_quantised_weights_are_read_faster():
    plain = bare(LLAMA_8B, H200).step(decodes(1, 100)).gemm_s
    fp8_model = replace(LLAMA_8B, quantization="fp8")
    awq_model = replace(LLAMA_8B, quantization="awq")
    assert bare(fp8_model, H200).step(decodes(1, 100)).gemm_s == pytest.approx(
        plain / 2, rel=0.01
    )
    assert 0.25 < bare(awq_model, H200).step(decodes(1, 100)).gemm_s / plain < 0.28
    # FP8 units double the rate of long prefills; 4-bit weights are multiplied in bf16
    long = bare(LLAMA_8B, H200).step(chunk(16384)).gemm_s
    assert bare(fp8_model, H200).step(chunk(16384)).gemm_s < 0.52 * long
    assert bare(awq_model, H200).step(chunk(16384)).gemm_s > 0.99 * long
    no_fp8 = replace(H200, fp8_flops_per_s=None)
    assert bare(fp8_model, no_fp8).step(chunk(16384)).gemm_s > 0.99 * long
    # FP4 units double it again; blocks share their scales
    fp4_model = replace(LLAMA_8B, quantization="nvfp4")
    assert bare(fp4_model, H200).step(chunk(16384)).gemm_s > 0.99 * long
    fp4_gpu = replace(H200, fp4_flops_per_s=4 * H200.bf16_flops_per_s)
    assert bare(fp4_model, fp4_gpu).step(chunk(16384)).gemm_s < 0.27 * long
    block_model = replace(LLAMA_8B, quantization="fp8-block128")
    block_s = bare(block_model, H200).step(decodes(1, 100)).gemm_s
    assert block_s == pytest.approx(plain / 2, rel=0.01)
    assert bare(block_model, H200).step(chunk(16384)).gemm_s < 0.52 * long


def test_what_a_scheme_leaves_alone_is_multiplied_as_before():
    model = replace(MOE, quantization="fp8-experts")
    long = chunk(16384)
    found, plain, whole = (
        bare(replace(model, quantization=name), H200).step(long).gemm_s
        for name in ("fp8-experts", None, "fp8")
    )
    assert whole < 0.99 * found < 0.99 * plain


def test_the_engines_precision_is_priced():
    shape = decodes(1, 100)

    def gemm_s(*arguments):
        return bare(resolved_model(LLAMA_8B, *arguments), H200).step(shape).gemm_s

    plain = gemm_s()
    assert gemm_s("auto", "fp8") == pytest.approx(plain / 2, rel=0.01)
    assert gemm_s("float32") == pytest.approx(2 * plain, rel=0.01)
    long = chunk(8192)
    wide = RooflineCost(model=resolved_model(LLAMA_8B, "float32"), gpu=H200)
    fp8 = RooflineCost(model=resolved_model(LLAMA_8B, "auto", "fp8"), gpu=H200)
    base = RooflineCost(model=resolved_model(LLAMA_8B), gpu=H200)
    totals = [cost.step(long).total_s for cost in (fp8, base, wide)]
    assert totals == sorted(totals)
    assert totals[0] < 0.9 * totals[1] < 0.6 * totals[2]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *KV_CACHE_DTYPE_BYTES])
def test_roofline_and_capacity_agree_on_the_kv_cache(kv_cache_dtype):
    cost = RooflineCost(model=TINY, gpu=ROUND, kv_cache_dtype=kv_cache_dtype)
    held = estimate_capacity(TINY, ROUND, kv_cache_dtype=kv_cache_dtype)
    assert held.block_bytes == 16 * TINY.kv_bytes_per_token(1, cost.kv_itemsize_bytes())


def test_decodes_of_mixed_batches_cost_more_without_packing():
    alone, mixed = decodes(32, 2000), BatchShape(32, 64000, 1, 512, 512, 131328)
    packed = RooflineCost(model=LLAMA_8B, gpu=H200)
    fa2 = RooflineCost(model=LLAMA_8B, gpu=replace(H200, name="a100_sxm"))
    assert fa2.step(alone) == packed.step(alone)
    assert (
        packed.step(mixed).decode_attention_s == packed.step(alone).decode_attention_s
    )
    assert fa2.step(mixed).decode_attention_s > fa2.step(alone).decode_attention_s
    off = replace(fa2, mixed_decode_tile_tokens=0)
    assert off.step(mixed) == packed.step(mixed)


# -- roofline: refusals and construction ------------------------------------------

SHARES = [key for key in BARE if key.endswith("efficiency")]


@pytest.mark.parametrize("key", SHARES)
@pytest.mark.parametrize("value", [0.0, 1.01, -0.5, math.nan, math.inf, "high", True])
def test_an_efficiency_is_a_share(key, value):
    with pytest.raises(ConfigError, match=f"^{key} "):
        RooflineCost(model=TINY, gpu=ROUND, **{key: value})


@pytest.mark.parametrize("key", [key for key in BARE if key not in SHARES])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "much", True])
def test_an_overhead_is_finite_and_not_negative(key, value):
    with pytest.raises(ConfigError, match=f"^{key} must be a finite number >= 0"):
        RooflineCost(model=TINY, gpu=ROUND, **{key: value})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"step_overhead_s": 0.0}, "step_overhead_s must be > 0"),
        ({"tensor_parallel_size": 3}, "must divide the 4 attention heads of tiny"),
        ({"tensor_parallel_size": 0}, "must divide the 4 attention heads of tiny"),
        ({"block_size": 0}, "block_size must be >= 1; got 0"),
        ({"kv_cache_dtype": "int3"}, "unknown kv_cache_dtype: 'int3'; use 'auto'"),
    ],
)
def test_roofline_refuses(keywords, message):
    with pytest.raises(ConfigError, match=message):
        RooflineCost(model=TINY, gpu=ROUND, **keywords)


def test_models_are_built_from_a_configuration_table():
    context = {
        "model": TINY,
        "gpu": ROUND,
        "tensor_parallel_size": 2,
        "block_size": 32,
        "kv_cache_dtype": "fp8",
    }
    table = {"kind": "roofline", "swap_efficiency": 0.5, "mixed_decode_tile_tokens": 0}
    cost = build(COST_MODELS, table, "cost", context)
    assert isinstance(cost, RooflineCost)
    assert (cost.tensor_parallel_size, cost.block_size) == (2, 32)
    assert cost.describe()["parameters"]["swap_efficiency"]["value"] == 0.5
    constant = build(COST_MODELS, {"kind": "constant", "step_s": 1}, "cost", context)
    assert constant.step(EMPTY).total_s == 1.0
    with pytest.raises(ConfigError, match="swap_efficiency"):
        build(COST_MODELS, {**table, "swap_efficiency": "fast"}, "cost", context)
    with pytest.raises(ConfigError, match="did you mean 'base_s'"):
        build(COST_MODELS, {"kind": "linear", "bas_s": 1e-3}, "cost", context)


def test_a_slow_engine_takes_longer_in_every_part():
    well = bare(LLAMA_8B)
    slow = Slowed(well)
    slow.factor = 1.5
    cost, usual = slow.step(decodes(8, 1000)), well.step(decodes(8, 1000))
    assert cost.total_s == usual.total_s * 1.5
    assert list(cost.parts) == [part * 1.5 for part in usual.parts]
    assert (cost.lo_s, cost.hi_s) == (usual.lo_s * 1.5, usual.hi_s * 1.5)
    assert slow.stage_times(decodes(8, 1000)) == [(0.0, usual.total_s * 1.5)]
