"""Routed experts and latent attention: published layers become prices of steps."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from calibrate.importers.aiconfigurator import import_aiconfigurator
from calibrate.importers.llmservingsim import import_llmservingsim
from calibrate.precisions import dtypes_of, expert_dtypes
from calibrate.tabulate import tabulated, with_tables
from calibrate.writing import build_profile, op_table, write_profile
from sim.costs import MeasuredCost, RooflineCost
from sim.costs.experts.routed import touched_experts
from sim.costs.measured.geometry import weight_bits_of
from sim.errors import UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.hardware.models.layers import GatedDeltaNetShape, LayerKind
from sim.hardware.models.weights import TensorRole, weight_tensors
from sim.scheduler.batch import BatchShape
from tests.calibrate.synthetic import DEVICE, columns, grid
from tests.calibrate.test_importers import SHEET
from tests.calibrate.test_tabulate import decode_table, prefill_table
from tests.shared import shared

H200 = load_gpu("h200_sxm")
MOE = replace(
    load_model("meta-llama/Llama-3.1-8B"),
    name="moe",
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=2048,
)
LATENT = replace(
    MOE,
    name="latent",
    num_hidden_layers=4,
    hidden_size=7168,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=0,
    num_experts_per_tok=0,
)
TOKENS = 2 ** np.arange(14)


def experts_s(tokens):
    return 2e-5 + 4e-6 * touched_experts(16, 4, tokens) + 1e-7 * tokens


def layer_s(tokens, pairs):
    """Projections that are read once, and attention."""
    return 1e-4 + 1e-6 * tokens + 1e-9 * pairs


def products_table(model):
    shapes = sorted(
        {
            (tensor.rows, tensor.columns)
            for tp in (1, 2, 4, 8)
            for tensor in weight_tensors(model, tp)
            if tensor.role is TensorRole.LINEAR and tensor.columns > 1
        }
    )
    m, which = grid(TOKENS[::3], np.arange(len(shapes)))
    n, k = np.array(shapes)[which].T
    seconds = 4e-6 + 2.0 * n * k / 4e12 + 2.0 * m * n * k / 7e14
    axes = {"m": m, "n": n, "k": k}
    return op_table("gemm", "bfloat16", axes, seconds, constants={"weight_bits": 16})


def experts_table(routing="power_law_1.01"):
    tokens, ranks = grid(TOKENS, [1, 2])
    axes = columns(
        tokens=tokens,
        hidden_size=4096,
        inter_size=2048 // ranks,
        num_experts=16,
        top_k=4,
        num_ranks=1,
    )
    seconds = experts_s(tokens) / ranks
    constants = {"weight_bits": 16, "routing": routing}
    return op_table("moe", "bfloat16", axes, seconds, constants=constants)


def latent_tables():
    constants = {
        key: getattr(LATENT, key)
        for key in (
            *("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
            *("qk_rope_head_dim", "v_head_dim"),
        )
    } | {"kv_itemsize": 2, "weight_bits": 16}
    batch, context = grid(2 ** np.arange(8), 2 ** np.arange(0, 16, 3))
    axes = columns(num_heads=128, batch=batch, context=context)
    decode_s = layer_s(batch, batch * context)
    decode = op_table("latent_decode", "bfloat16", axes, decode_s, constants=constants)
    batch, query = grid([1, 4, 16, 64], [16, 64, 256, 1024, 4096])
    axes = columns(num_heads=128, batch=batch, query=query)
    pairs = batch * query * (query + 1) / 2
    prefill_s = layer_s(batch * query, pairs / 10)
    prefill = op_table(
        "latent_prefill", "bfloat16", axes, prefill_s, constants=constants
    )
    return decode, prefill


def profile_of(*ops):
    provenance = {"date": "2026-01-01", "device": DEVICE.to_json(), "source": "a test"}
    return build_profile("imported", provenance, list(ops))


def measured(folder, model, *ops, **parameters):
    whole = profile_of(*ops)
    path = folder / f"{model.name}.json"
    write_profile(with_tables(whole, whole, model), path)
    return MeasuredCost(str(path), model=model, gpu=H200, **parameters)


def decodes(count, context=2048):
    return BatchShape(count, count * context, 0, 0, 0, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_are_a_table_of_their_own(tmp_path, ranks):
    kernels = decode_table(), prefill_table(), products_table(MOE)
    cost = measured(
        tmp_path, MOE, *kernels, experts_table(), tensor_parallel_size=ranks
    )
    bare = replace(MOE, num_experts=0, num_experts_per_tok=0, intermediate_size=1)
    dense = [
        (tensor.rows, tensor.columns)
        for tensor in weight_tensors(bare, ranks)
        if tensor.role is TensorRole.LINEAR and tensor.rows > 2 and tensor.columns > 1
    ]
    for count in (1, 16, 256):
        step = cost.step(decodes(count))
        products_s = sum(
            4e-6 + 2 * n * k / 4e12 + 2 * count * n * k / 7e14 for n, k in dense
        )
        expected = 32 * (products_s + experts_s(count) / ranks)
        assert step.gemm_s == pytest.approx(expected, rel=0.02)
        # the heads of two ranks were not measured
        assert step.extrapolated is (ranks == 2)
        assert step.lo_s < step.total_s < step.hi_s
    assert "experts" in cost.describe()["rest"]["measured"]


def test_ranks_take_their_share_of_a_table_of_experts(tmp_path):
    kernels = decode_table(), prefill_table(), products_table(MOE)
    tables = *kernels, experts_table()
    alone, ranks = (
        measured(tmp_path, MOE, *tables, data_parallel_size=size) for size in (1, 4)
    )
    one, own = (cost.step(decodes(16)) for cost in (alone, ranks))
    # a rank's own step has no experts: they are those of the tokens of all
    experts_s_of_16 = 32 * experts_s(16)
    assert one.gemm_s - own.gemm_s == pytest.approx(experts_s_of_16, rel=0.02)
    assert own.decode_attention_s == one.decode_attention_s
    together_s, exchange_s = ranks.together([decodes(16)] * 4)
    divided, undivided = (
        RooflineCost(model=MOE, gpu=H200, data_parallel_size=size).experts.seconds(64)
        for size in (4, 1)
    )
    share = divided / undivided
    assert 0.2 < share < 0.5
    assert together_s == pytest.approx(32 * experts_s(64) * share, rel=0.02)
    assert exchange_s > 0.0
    assert own.extrapolated


def test_experts_of_other_sizes_are_the_datasheets(tmp_path):
    kernels = decode_table(), prefill_table(), products_table(MOE), experts_table()
    other = replace(MOE, name="other", num_experts=64)
    cost = measured(tmp_path, other, *kernels)
    assert cost.step(decodes(16)).extrapolated
    assert "experts" not in cost.describe()["rest"]["measured"]
    entry = cost.profile.fit["models"][0]
    assert "experts" not in entry
    assert entry["estimated"] == ["gemm"]


def test_a_mild_power_law_is_taken_before_balanced_tokens():
    slow = experts_table("balanced")
    slow["quantiles"]["p50_s"] = [3 * s for s in slow["quantiles"]["p50_s"]]
    tables = decode_table(), prefill_table(), products_table(MOE)
    both = tabulated(profile_of(*tables, slow, experts_table()), MOE, [1])
    one = tabulated(profile_of(*tables, experts_table()), MOE, [1])
    own, alone = (fit["models"][0]["experts"]["time_s"] for fit in (both, one))
    at = both["models"][0]["experts"]["tokens"].index(64)
    assert own[at] == alone[at] == pytest.approx(32 * experts_s(64), rel=1e-5)


def test_a_layer_of_latent_attention_is_taken_apart(tmp_path):
    cost = measured(tmp_path, LATENT, products_table(LATENT), *latent_tables())
    few = cost.step(decodes(16, 1))
    many = cost.step(decodes(16, 4096))
    assert few.gemm_s == many.gemm_s
    long_s = 4 * (layer_s(16, 16 * 4096) - layer_s(16, 16))
    assert many.decode_attention_s == pytest.approx(long_s, rel=0.01)
    chunk = BatchShape(0, 0, 1, 1024, 1024, 1024 * 1025 // 2)
    prefill = cost.step(chunk)
    expected = 4 * (layer_s(1024, 1024 * 1025 / 20) - layer_s(1024, 64 * 16 * 17 / 20))
    assert prefill.prefill_attention_s == pytest.approx(expected, rel=0.02)
    # both read the projections once
    both = cost.step(BatchShape(16, 16 * 4096, *chunk[2:6]))
    assert both.decode_attention_s == pytest.approx(many.decode_attention_s)
    assert both.gemm_s < prefill.gemm_s + 0.5 * many.gemm_s
    assert not both.extrapolated


def test_latents_that_are_chosen_are_read_as_far(tmp_path):
    tables = products_table(LATENT), *latent_tables()
    indexer = {"index_num_heads": 4, "index_head_dim": 128, "index_topk": 1024}
    model = replace(LATENT, **indexer)
    all_read, chosen = (measured(tmp_path, each, *tables) for each in (LATENT, model))
    assert chosen.step(decodes(16, 512)).decode_attention_s == pytest.approx(
        all_read.step(decodes(16, 512)).decode_attention_s, rel=0.05
    )
    index_s = 4 * 16 * 3072 * (132 + 8) / 4.8e12
    short, long = (chosen.step(decodes(16, context)) for context in (1024, 4096))
    more_s = long.decode_attention_s - short.decode_attention_s
    assert index_s <= more_s <= 1.5 * index_s
    # no table tells of prompts: they are the datasheet's, and say so
    chunk = BatchShape(0, 0, 1, 4096, 4096, 4096 * 4097 // 2)
    step = chosen.step(chunk)
    alone = RooflineCost(model=model, gpu=H200).step(chunk)
    assert step.prefill_attention_s == alone.prefill_attention_s
    assert step.extrapolated


def delta_tables():
    heads = {"num_key_heads": 16, "num_value_heads": 32}
    constants = {"key_head_dim": 128, "value_head_dim": 128, "conv_kernel": 4}
    batch = 2 ** np.arange(11)
    decode = op_table(
        "delta_decode",
        "bfloat16",
        columns(batch=batch, **heads),
        1e-5 + 1e-6 * batch,
        constants=constants,
    )
    batch, query = grid([1, 4, 16, 64], [16, 64, 256, 1024, 4096])
    prefill = op_table(
        "delta_prefill",
        "bfloat16",
        columns(batch=batch, query=query, **heads),
        1e-5 + 1e-8 * batch * query,
        constants=constants,
    )
    return decode, prefill


@pytest.mark.slow
def test_states_of_delta_nets_are_looked_up(tmp_path):
    kinds = (LayerKind.GATED_DELTA_NET,) * 24 + (LayerKind.FULL_ATTENTION,) * 8
    model = replace(
        load_model("meta-llama/Llama-3.1-8B"),
        name="deltas",
        state_shape=GatedDeltaNetShape(16, 32, 128, 128, 4),
        mixed_layer_kinds=kinds,
    )
    plain = replace(model, name="plain", num_hidden_layers=8, mixed_layer_kinds=())
    kernels = decode_table(), prefill_table(), products_table(model)
    cost = measured(tmp_path, model, *kernels, *delta_tables())
    few = measured(tmp_path, plain, *kernels)
    shape = decodes(64)
    found, bare = cost.step(shape), few.step(shape)
    states_s = found.decode_attention_s - bare.decode_attention_s
    assert states_s == pytest.approx(24 * (1e-5 + 64e-6), rel=1e-3)
    chunk = BatchShape(0, 0, 4, 4096, 4096, 4 * 1024 * 1025 // 2)
    states_s = (
        cost.step(chunk).prefill_attention_s - few.step(chunk).prefill_attention_s
    )
    assert states_s == pytest.approx(24 * (1e-5 + 4096e-8), rel=1e-3)
    # what was not timed of this shape is the datasheet's
    other = replace(model, state_shape=GatedDeltaNetShape(16, 32, 64, 128, 4))
    assert "states" not in measured(tmp_path, other, *kernels).profile.fit["models"][0]


def test_latent_attention_of_other_sizes_is_refused():
    whole = profile_of(products_table(LATENT), *latent_tables())
    with pytest.raises(UserError, match="attends to a latent"):
        tabulated(whole, replace(LATENT, kv_lora_rank=256))


def write(root, family, name, frame):
    place = root / "my_gpu" / family / "vllm-0.24.0"
    place.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(place / f"{name}_perf.parquet")


def test_layers_are_read_in_seconds_and_on_one_rank(tmp_path):
    sizes = {"hidden_size": 4096, "inter_size": 2048, "topk": 4, "num_experts": 16}
    rows = pd.DataFrame({"num_tokens": [1, 2], "moe_tp_size": [1, 2], "latency": 0.05})
    rows = rows.assign(**sizes, moe_ep_size=1, moe_dtype="bfloat16")
    write(tmp_path, "moe", "moe", rows.assign(distribution="balanced"))
    rows = pd.DataFrame({"batch_size": [1, 4], "isl": 1, "step": [7, 63]})
    rows = rows.assign(model="deepseek-ai/DeepSeek-V3", kv_cache_dtype="fp8")
    rows = rows.assign(gemm_type="fp8_block", num_heads=16, latency=0.1)
    write(tmp_path, "mla", "mla_generation_module", rows)
    other = rows.assign(model="somebody/Else")
    write(tmp_path, "mla", "mla_context_module", other)
    (tmp_path / "my_gpu/attention").mkdir()
    (tmp_path / "my_gpu/system.yaml").write_text(SHEET)
    profile = import_aiconfigurator("my_gpu", tmp_path)
    (moe,) = profile.tables("moe")
    assert moe.axes["inter_size"] == (2048, 1024)
    assert moe.constants == {"weight_bits": 16, "routing": "balanced"}
    assert moe.quantiles["p50_s"] == (5e-5, 5e-5)
    (latent,) = profile.tables("latent_decode")
    assert latent.axes["context"] == (8, 64)
    assert latent.constants["kv_lora_rank"] == 512
    assert (latent.constants["kv_itemsize"], latent.constants["weight_bits"]) == (1, 8)
    # a layer of sizes that are not known teaches nothing
    assert not profile.tables("latent_prefill")
    assert not import_aiconfigurator("my_gpu", tmp_path, MOE).tables("latent_decode")
    assert import_aiconfigurator("my_gpu", tmp_path, MOE).tables("moe")


def test_kernels_of_a_delta_net_are_added_up(tmp_path):
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128}
    rows = pd.DataFrame({"kernel_source": ["conv", "state", "conv", "state"]})
    rows = rows.assign(latency=[0.01, 0.02, 0.03, 0.04], batch_size=[8, 8, 16, 16])
    rows = rows.assign(seq_len=1, phase="generation", d_conv=4, **sizes)
    # one kernel alone is no layer
    lone = rows[:1].assign(phase="context", seq_len=64)
    write(tmp_path, "linear_attention", "gdn", pd.concat([rows, rows, lone]))
    (tmp_path / "my_gpu/attention").mkdir()
    (tmp_path / "my_gpu/system.yaml").write_text(SHEET)
    (table,) = import_aiconfigurator("my_gpu", tmp_path).ops
    assert table.operation == "delta_decode"
    assert table.axes["batch"] == (8, 16)
    assert table.quantiles["p50_s"] == pytest.approx((3e-5, 7e-5))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = shared("profiles/llmservingsim/RTXPRO6000/Qwen3-30B-A3B-Instruct-2507")
    pytest.importorskip("sklearn")
    model = load_model("Qwen/Qwen3-30B-A3B")
    gpu = load_gpu("rtx_pro_6000_server")
    profile = import_llmservingsim(folder, model)
    path = tmp_path_factory.mktemp("qwen") / "p.json"
    write_profile(with_tables(profile, profile, model, gpu=gpu), path)
    cost = MeasuredCost(
        str(path), model=model, gpu=gpu, step_overhead_s=1e-9, request_overhead_s=0.0
    )
    return folder / "tp1", cost


def along(frame, key, axis):
    rows = frame[frame["layer"] == key]
    return lambda amount: np.interp(amount, rows[axis], rows["time_us"])


@pytest.mark.slow
def test_a_step_with_experts_is_the_sum_of_its_published_layers(qwen):
    folder, cost = qwen
    dense, rows, experts, attention = (
        pd.read_csv(folder / f"{name}.csv")
        for name in ("dense", "per_sequence", "moe", "attention")
    )
    each = {"qkv_proj": 1, "o_proj": 1, "layernorm": 2, "rotary_emb": 1, "qk_norm": 1}
    errors = []
    for row in attention.sample(300, random_state=1).itertuples():
        query, past = row.prefill_chunk, row.kv_prefill
        count, context = row.n_decode, row.kv_decode
        tokens, sequences = query + count, count + (query > 0)
        if not 0 < tokens <= 2048:
            continue
        touched = touched_experts(128, 8, tokens)
        by_tokens = [
            np.interp(touched, rows_of["activated_experts"], rows_of["time_us"])
            for _, rows_of in experts.groupby("tokens")
        ]
        layer_us = np.interp(tokens, sorted(set(experts["tokens"])), by_tokens)
        layer_us += row.time_us
        for name, times in each.items():
            layer_us += times * along(dense, name, "tokens")(tokens)
        once_us = sum(
            along(dense, name, "tokens")(tokens)
            for name in ("embedding", "final_layernorm")
        ) + sum(
            along(rows, name, "sequences")(sequences) for name in ("lm_head", "sampler")
        )
        pairs = query * past + query * (query + 1) // 2
        shape = BatchShape(
            count,
            count * context,
            int(query > 0),
            query,
            (query + past) * (query > 0),
            pairs,
        )
        errors.append(cost.step(shape).total_s / (48 * layer_us + once_us) / 1e-6 - 1.0)
    assert len(errors) > 250
    assert np.abs(errors).mean() < 0.015
    assert np.quantile(np.abs(errors), 0.9) < 0.03


@pytest.mark.parametrize(
    ("scheme", "experts", "products"),
    [
        (None, "bfloat16", "bfloat16"),
        ("fp8", "fp8", "fp8"),
        ("fp8-block128", "fp8_block", "fp8"),
        ("nvfp4", "nvfp4", "nvfp4"),
        ("w4a16", "int4_wo", "int4_wo"),
        ("mxfp4", "w4a16_mxfp4", "bfloat16"),
    ],
)
def test_which_rows_are_of_a_models_precision(scheme, experts, products):
    model = replace(MOE, quantization=scheme)
    assert expert_dtypes(model)[0] == experts
    assert dtypes_of(model, weight_bits_of(model))[0] == products
