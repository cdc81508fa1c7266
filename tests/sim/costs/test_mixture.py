"""Attention of models whose layers differ: what each kind reads and multiplies."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs import RooflineCost
from sim.costs.pricing import steady_of
from sim.costs.rates.collectives import all_reduce_s
from sim.costs.roofline.launches import num_launches
from sim.costs.roofline.mixture import LayerGroup
from sim.hardware.gpus import load_gpu
from sim.hardware.interconnects import link_of
from sim.hardware.models.bundled import load_model
from sim.hardware.models.layers import GatedDeltaNetShape, LayerKind, Mamba2Shape
from sim.scheduler.batch import BatchShape
from tests.sim.costs.test_costs import BARE, ROUND, TINY, bare, decodes

FULL, SLIDING, CHUNKED = (
    LayerKind.FULL_ATTENTION,
    LayerKind.SLIDING_ATTENTION,
    LayerKind.CHUNKED_ATTENTION,
)


def seen_by(position, window, is_chunked):
    """Return the keys that the query at a position sees, itself included."""
    return position % window + 1 if is_chunked else min(position + 1, window)


@given(st.integers(1, 300), st.integers(0, 500), st.integers(1, 200), st.booleans())
def test_one_chunk_is_exact(query, past, window, is_chunked):
    group = LayerGroup(1.0, 1.0, window, is_chunked)
    end = past + query
    all_pairs = query * past + query * (query + 1) // 2
    keys, pairs = group.seen(1, query, end, all_pairs)
    expected = sum(seen_by(p, window, is_chunked) for p in range(past, end))
    assert pairs == pytest.approx(expected)
    first = past - seen_by(past, window, is_chunked) + 1
    assert keys == end - first
    # several chunks that are alike see as many times as much
    assert group.seen(3, 3 * query, 3 * end, 3 * all_pairs) == pytest.approx(
        (3 * keys, 3 * pairs)
    )


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(1, 500))
def test_uneven_decodes_are_never_too_short(contexts, window):
    kinds = (SLIDING, SLIDING, SLIDING, FULL)
    model = replace(
        TINY, num_hidden_layers=4, sliding_window=window, mixed_layer_kinds=kinds
    )
    cost, count, total = bare(model), len(contexts), sum(contexts)
    full_s = 2 * 2 * 64 * 2 / 1e12 * total  # of the layer that reads everything
    read = 3 * sum(min(context, window) for context in contexts)
    exact_s = full_s * (1 + read / total)
    seconds = cost.step(BatchShape(count, total, 0, 0, 0, 0)).decode_attention_s
    # three layers with a window to a full one
    assert exact_s * (1 - 1e-9) <= seconds <= (exact_s + 3 * full_s) * (1 + 1e-9)


def test_a_decode_reads_each_kind_of_layer_as_far_as_it_sees():
    model = replace(
        TINY,
        num_hidden_layers=4,
        sliding_window=100,
        mixed_layer_kinds=(SLIDING, SLIDING, SLIDING, FULL),
    )
    token_s = 2 * 2 * 64 * 2 / 1e12  # keys and values of a layer, two KV heads of 64
    cost = bare(model)
    for context, read in ((50, 4 * 50), (100, 400), (1000, 3 * 100 + 1000)):
        step = cost.step(decodes(2, context))
        assert step.decode_attention_s == pytest.approx(2 * read * token_s)
    chunked = bare(replace(model, mixed_layer_kinds=(CHUNKED, CHUNKED, CHUNKED, FULL)))
    # half a chunk: where a decode stands in it is not known
    step = chunked.step(decodes(2, 1000))
    assert step.decode_attention_s == pytest.approx(2 * (3 * 50 + 1000) * token_s)


SPARSE = replace(
    TINY,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_num_heads=2,
    index_head_dim=128,
    index_topk=100,
)


def test_an_indexer_reads_all_and_attention_what_it_chose():
    cost, layers = bare(SPARSE), SPARSE.num_hidden_layers
    index_s = 132 / 1e12 + 8 / 1e12  # keys in FP8 with a scale, logits out and in
    latent_s = max(576 * 2 / 1e12, 2 * SPARSE.num_attention_heads * 1088 / 1e14)
    for context, read in ((50, 50), (100, 100), (1000, 100)):
        step = cost.step(decodes(3, context))
        expected = 3 * layers * (context * index_s + read * latent_s)
        assert step.decode_attention_s == pytest.approx(expected)
    # lines of a stretch are the same prices
    steady = cost.steady_decodes(3)
    assert [line.first for line in steady.lines] == [0, 300]


def test_a_prompt_reads_all_where_that_is_quicker():
    cost, layers = bare(SPARSE), SPARSE.num_hidden_layers
    heads = SPARSE.num_attention_heads
    dense_s, chosen_s = (2 * heads * width / 1e14 for width in (192 + 128, 1088))
    index_s = 2 * 2 * 128 / 2e14 + 8 / 1e12  # in FP8
    for query, past in ((80, 0), (1000, 0), (1000, 9000)):
        pairs = query * past + query * (query + 1) // 2
        chosen = sum(min(at + 1, 100) for at in range(past, past + query))
        own_s = min(dense_s * pairs, chosen_s * chosen)
        step = cost.step(BatchShape(0, 0, 1, query, past + query, pairs))
        expected = layers * (index_s * pairs + own_s)
        assert step.prefill_attention_s == pytest.approx(expected)
    assert own_s == chosen_s * 1000 * 100


def test_prompts_slide_too():
    cost = bare(replace(TINY, sliding_window=100, mixed_layer_kinds=(SLIDING, FULL)))
    pairs = 1000 * 1001 // 2
    step = cost.step(BatchShape(0, 0, 1, 1000, 1000, pairs))
    windowed = 100 * 101 // 2 + 900 * 100
    pair_s = 4 * TINY.num_attention_heads * 64 / 1e14
    assert step.prefill_attention_s == pytest.approx((pairs + windowed) * pair_s)


@pytest.mark.parametrize(
    ("shape", "kind", "elements", "flops"),
    [
        (
            GatedDeltaNetShape(2, 4, 64, 32, 4),
            LayerKind.GATED_DELTA_NET,
            3 * (2 * 2 * 64 + 4 * 32) + 4 * 32 * 64,
            4 * (6 * 64 * 32 + 64 * (3 * 64 + 2 * 32)),
        ),
        (
            Mamba2Shape(8, 16, 32, 2, 4),
            LayerKind.MAMBA2,
            3 * (8 * 16 + 2 * 2 * 32) + 8 * 16 * 32,
            8 * (256 * (16 + 2 / 8 * 32) + 4 * 16 * 32),
        ),
    ],
)
def test_a_state_is_read_and_written_whatever_the_context(shape, kind, elements, flops):
    cost = bare(replace(TINY, state_shape=shape, mixed_layer_kinds=(kind, FULL)))
    short, long = (cost.step(decodes(2, context)) for context in (10, 1010))
    state_s = 2 * 2 * elements * 2 / 1e12  # two sequences, in and out, two bytes
    token_s = 2 * 2 * 64 * 2 / 1e12
    read_s = short.decode_attention_s - 20 * token_s
    assert read_s == pytest.approx(state_s)
    grown_s = long.decode_attention_s - short.decode_attention_s
    assert grown_s == pytest.approx(2000 * token_s)
    # prompts scan, with all of the GPU if there are enough heads
    count, tokens = 132, 132 * 512
    prompts = BatchShape(0, 0, count, tokens, tokens, 1)
    scan_s = tokens * flops / (0.33 * 1e14)
    convolution_s = tokens * shape.conv_channels * 8 / 1e12
    found = cost.step(prompts).prefill_attention_s - tokens * token_s
    states_s = count / 2 * state_s
    assert found == pytest.approx(scan_s + convolution_s + states_s, rel=1e-6)


def test_one_prompt_alone_scans_on_as_many_units_as_it_has_heads():
    shape = GatedDeltaNetShape(2, 4, 64, 32, 4)
    model = replace(
        TINY,
        state_shape=shape,
        mixed_layer_kinds=(LayerKind.GATED_DELTA_NET,) * 2,
    )
    one = bare(model).step(BatchShape(0, 0, 1, 4096, 4096, 0)).prefill_attention_s
    many = bare(model).step(BatchShape(0, 0, 33, 33 * 4096, 33 * 4096, 0))
    assert many.prefill_attention_s < 3 * one


@pytest.mark.parametrize(
    "name",
    [
        *(
            "openai/gpt-oss-120b",
            "google/gemma-3-27b-it",
            "ibm-granite/granite-4.0-h-small",
        ),
        *("Qwen/Qwen3-Next-80B-A3B-Instruct", "meta-llama/Llama-4-Scout-17B-16E"),
        *("nvidia/Nemotron-H-8B-Base-8K", "XiaomiMiMo/MiMo-V2-Flash"),
    ],
)
def test_todays_models_have_quick_decodes(name):
    cost = RooflineCost(model=load_model(name), gpu=load_gpu("h200_sxm"))
    steady = steady_of(cost, 16)
    assert steady is not None
    for context in (16, 16 * 100, 16 * 1000, 16 * 5000, 16 * 100_000):
        line = [one for one in steady.lines if one.first <= context][-1]
        attention_s = line.value_s + line.slope_s * (context - line.start)
        step = cost.step(BatchShape(16, context, 0, 0, 0, 0))
        assert step.decode_attention_s == attention_s


def test_experts_of_four_bit_floats_are_unpacked_where_the_kernel_does_so():
    model = load_model("openai/gpt-oss-120b")
    reached = {
        gpu: RooflineCost(model=model, gpu=load_gpu(gpu)).reached()
        for gpu in ("h200_sxm", "l40s")
    }
    key = "moe_bandwidth_efficiency"
    assert reached["h200_sxm"][key] < 0.8 * reached["l40s"][key]


def test_kernels_of_experts_take_their_start_beyond_a_dense_mlps():
    model, gpu = load_model("openai/gpt-oss-120b"), load_gpu("h100_sxm")
    ours = RooflineCost(model=model, gpu=gpu)
    none = RooflineCost(model=model, gpu=gpu, moe_layer_latency_s=0.0)
    latency_s = ours.reached()["moe_layer_latency_s"]
    assert 25e-6 < latency_s < 35e-6
    told = ours.describe()["parameters"]["moe_layer_latency_s"]
    assert told["value"] == latency_s
    assert told["interval"][0] <= latency_s <= told["interval"][1]
    for shape in (decodes(1, 100), BatchShape(0, 0, 1, 8192, 8192, 1)):
        added_s = ours.step(shape).gemm_s - none.step(shape).gemm_s
        assert added_s == pytest.approx(model.num_moe_layers * latency_s)


@pytest.mark.parametrize(
    ("name", "num_norms"),
    [
        ("Qwen/Qwen3-32B", 64),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 12),  # of 48; the others keep states
        ("google/gemma-3-27b-it", 62),
        ("allenai/OLMo-2-0325-32B", 64),
        ("MiniMaxAI/MiniMax-M2", 62),
        ("zai-org/GLM-4.5", 92),
        ("zai-org/GLM-4.5-Air", 0),  # its file says no
        ("deepseek-ai/DeepSeek-V3", 0),
        ("meta-llama/Llama-3.1-8B", 0),
    ],
)
def test_a_norm_of_queries_and_keys_is_started_where_attention_is(name, num_norms):
    model, gpu = load_model(name), load_gpu("h200_sxm")
    ours = RooflineCost(model=model, gpu=gpu)
    none = RooflineCost(model=model, gpu=gpu, qk_norm_latency_s=0.0)
    added_s = ours.step(decodes(1, 100)).total_s - none.step(decodes(1, 100)).total_s
    assert added_s == pytest.approx(num_norms * 2e-6, abs=1e-9)
    told = ours.describe()["parameters"]["qk_norm_latency_s"]
    assert told["interval"][0] <= told["value"] <= told["interval"][1]
    plain = replace(model, qk_norm=False)
    assert num_launches(model, 1) - num_launches(plain, 1) == num_norms


@pytest.mark.parametrize(
    ("name", "num_launched"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", 32 * 15 + 4),
        ("Qwen/Qwen3-30B-A3B", 48 * 16 + 4),  # with a norm of queries and keys
        ("meta-llama/Llama-3.1-8B", 32 * 10 + 4),
        ("deepseek-ai/DeepSeek-V3", 61 * 10 + 58 * (5 + 3) + 4),  # three are dense
    ],
)
def test_experts_are_more_kernels_than_an_mlp(name: str, num_launched: int) -> None:
    assert num_launches(load_model(name), 1) == num_launched


def test_layers_without_a_mixer_have_one_collective():
    model = replace(
        TINY,
        num_hidden_layers=3,
        state_shape=Mamba2Shape(8, 16, 32, 2, 4),
        mixed_layer_kinds=(LayerKind.MAMBA2, LayerKind.MLP, FULL),
    )
    cost = RooflineCost(model=model, gpu=ROUND, tensor_parallel_size=2, **BARE)
    one_s = all_reduce_s(link_of(ROUND), 2, model.hidden_size * 2)
    assert cost.step(decodes(1, 10)).allreduce_s == pytest.approx(3 * one_s)
