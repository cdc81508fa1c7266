"""Published tables become profiles: units, layouts, and what is left out."""

import numpy as np
import pandas as pd
import pytest

from calibrate.importers.aiconfigurator import find_tables, import_aiconfigurator
from calibrate.importers.geometry import model_shapes
from calibrate.importers.llmservingsim import import_llmservingsim
from calibrate.importers.vidur import import_vidur
from sim.costs.measured.profile import canonical_json, parse_profile
from sim.costs.measured.profile_checks import validate_profile
from sim.errors import UserError
from sim.hardware.models.bundled import load_model
from tests.shared import shared

LLAMA_8B = load_model("meta-llama/Llama-3.1-8B")
SHEET = """
gpu: {mem_bw: 1.0e+12, bfloat16_tc_flops: 1.0e+14, fp8_tc_flops: 2.0e+14}
node: {intra_node_bw: 1.0e+11, pcie_bw: 3.0e+10}
"""


def generation_rows():
    rows = []
    for batch in (1, 64, 256):
        for step in (1023, 4095):
            for heads, kv in ((32, 8), (8, 0)):
                latency = 0.01 + batch * step * 1e-5
                rows.append((batch, 1, step, heads, kv, 128, "bfloat16", latency))
    names = ["batch_size", "isl", "step", "num_heads", "num_key_value_heads"]
    names += ["head_dim", "kv_cache_dtype", "latency"]
    return pd.DataFrame(rows, columns=names)


def gemm_rows():
    frame = pd.DataFrame({"m": [1, 16], "n": 4096, "k": 4096, "latency": [0.05, 0.06]})
    return pd.concat([frame.assign(gemm_dtype=d) for d in ("bfloat16", "nvfp4")])


def allreduce_rows():
    return pd.DataFrame(
        {
            "num_gpus": [2, 4],
            "message_size": [1024, 2048],
            "allreduce_dtype": "bfloat16",
            "latency": [0.005, 0.006],
        }
    )


def write_tables(root, layout):
    versions = ("0.9.2", "0.24.0")
    for family, name, frame in (
        ("attention", "generation_attention_perf", generation_rows()),
        ("gemm", "gemm_perf", gemm_rows()),
        ("comm", "custom_allreduce_perf", allreduce_rows()),
    ):
        for version in versions:
            if layout == "flat":
                place = root / "my_gpu" / family / f"vllm-{version}"
            else:
                place = root / "systems/data/my_gpu" / family / "vllm" / version
            place.mkdir(parents=True)
            # the older one is ten times slower
            slower = 10.0 if version == "0.9.2" else 1.0
            changed = frame.assign(latency=frame["latency"] * slower)
            changed.to_parquet(place / f"{name}.parquet")
    sheet = "my_gpu/system.yaml" if layout == "flat" else "systems/my_gpu.yaml"
    (root / sheet).write_text(SHEET)
    return root


@pytest.fixture(params=["flat", "package"])
def tables(request, tmp_path):
    return write_tables(tmp_path, request.param)


def test_both_layouts_give_the_newest_tables_in_seconds(tables):
    profile = import_aiconfigurator("my_gpu", tables)
    assert profile.kind == "imported"
    assert profile.provenance["source"]["tables"] == {
        "generation_attention": "0.24.0",
        "gemm": "0.24.0",
        "custom_allreduce": "0.24.0",
    }
    assert profile.device["bandwidth_bytes_per_s"] == 1e12
    bf16, fp4 = profile.tables("gemm")
    assert bf16.quantiles["p50_s"] == (5e-5, 6e-5)
    assert (bf16.dtype, bf16.constants) == ("bfloat16", {"weight_bits": 16})
    assert (fp4.dtype, fp4.constants) == ("nvfp4", {"weight_bits": 4})
    (reduce,) = profile.tables("allreduce")
    # upstream's sizes are elements of two bytes
    assert reduce.axes["bytes"] == (2048, 4096)
    assert reduce.quantiles["p50_s"] == (5e-6, 6e-6)
    assert {"swap", "copy"} <= set(profile.provenance["extrapolated"])


def test_decodes_that_ran_from_the_cache_are_left_out(tables):
    (decode,) = import_aiconfigurator("my_gpu", tables).tables("decode_attention")
    key_bytes = 2 * 128 * 2
    points = list(zip(*(decode.axes[a] for a in sorted(decode.axes)), strict=True))
    assert sorted(decode.axes) == ["batch", "context", "num_heads", "num_kv_heads"]
    for batch, context, _, kv_heads in points:
        assert batch * context * kv_heads * key_bytes > 50 << 20
    # 0 KV heads upstream means one for each query head
    assert {(heads, kv) for _, _, heads, kv in points} == {(32, 8), (8, 8)}
    assert {context for _, context, _, _ in points} == {1024, 4096}
    assert len(points) == 8


def test_a_model_keeps_its_own_shapes(tables):
    profile = import_aiconfigurator("my_gpu", tables, LLAMA_8B)
    (decode,) = profile.tables("decode_attention")
    assert set(decode.axes["num_heads"]) == {32}
    assert profile.provenance["model"] == "meta-llama/Llama-3.1-8B"
    assert all(set(t.axes["n"]) == {4096} for t in profile.tables("gemm"))


def test_shapes_of_a_model_on_each_number_of_ranks():
    shapes = model_shapes(LLAMA_8B)
    assert shapes.heads == {(32, 8), (16, 4), (8, 2), (4, 1)}
    assert {(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)} <= shapes.weights
    assert (3584, 4096) in shapes.weights  # gate and up on 8 ranks
    assert shapes.windows == {0}


def test_a_profile_is_the_same_however_often_it_is_made(tables):
    first, second = (import_aiconfigurator("my_gpu", tables) for _ in range(2))
    assert first.id == second.id
    assert str(tables) not in str(first.body)


def test_what_is_missing_is_named(tables, tmp_path):
    with pytest.raises(UserError, match="there are: my_gpu"):
        find_tables("your_gpu", tables)
    with pytest.raises(UserError, match="there is no folder"):
        find_tables("my_gpu", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there are: no system"):
        find_tables("my_gpu", tmp_path / "empty")
    for path in tables.rglob("gemm_perf.parquet"):
        gemm_rows().drop(columns="n").to_parquet(path)
    with pytest.raises(UserError, match="GEMM table has no column 'n'"):
        import_aiconfigurator("my_gpu", tables)
    for path in tables.rglob("gemm_perf.parquet"):
        path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match="Git LFS"):
        import_aiconfigurator("my_gpu", tables)


def test_published_tables_of_a_model():
    folder = shared("profiles/aiconfigurator")
    profile = import_aiconfigurator("h200_sxm", folder, LLAMA_8B)
    decodes = profile.tables("decode_attention")
    assert {table.dtype for table in decodes} == {"bfloat16", "fp8"}
    assert all(table.constants["head_dim"] == 128 for table in decodes)
    gemms = profile.tables("gemm")
    assert {t.dtype for t in gemms} == {"bfloat16", "fp8", "fp8_block"}
    assert not [p for p in validate_profile(profile) if p.fatal]
    # 64 sequences of 2,048 keys take 140 us a layer on an H200
    table = next(t for t in decodes if t.dtype == "bfloat16")
    row = {"batch": 64, "context": 2048, "num_heads": 32, "num_kv_heads": 8}
    (place,) = [
        place
        for place in range(table.num_points)
        if all(table.axes[key][place] == value for key, value in row.items())
    ]
    assert table.quantiles["p50_s"][place] == pytest.approx(140e-6, rel=0.05)


def test_layers_measured_inside_vllm():
    folder = shared("profiles/llmservingsim/RTXPRO6000/Llama-3.1-8B")
    profile = import_llmservingsim(folder)
    (mixed,) = profile.tables("mixed_attention")
    assert mixed.num_points == 19_364
    assert mixed.constants == {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "kv_itemsize": 2,
    }
    assert mixed.quantiles["p50_s"][0] == pytest.approx(8.35233e-6)
    layers = {table.constants["layer"] for table in profile.tables("layer")}
    assert {"qkv_proj", "lm_head", "sampler", "embedding"} <= layers
    assert profile.device["name"] == "rtx_pro_6000_server"
    assert import_llmservingsim(folder / "tp1").ops == profile.ops
    assert not [p for p in validate_profile(profile) if p.fatal]


def test_ranks_divide_the_heads():
    folder = shared("profiles/llmservingsim/RTXPRO6000/Qwen3-32B")
    (mixed,) = import_llmservingsim(folder).tables("mixed_attention")
    assert (mixed.variant, mixed.constants["num_heads"]) == ("tp2", 32)
    assert mixed.constants["num_kv_heads"] == 4
    folder = shared("profiles/llmservingsim/RTXPRO6000/Qwen3-30B-A3B-Instruct-2507")
    profile = import_llmservingsim(folder)
    assert profile.provenance["model"] == "Qwen/Qwen3-30B-A3B-Instruct-2507"
    (experts,) = profile.tables("moe")
    assert experts.num_points == 50


def test_a_folder_without_meta_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no meta\.yaml"):
        import_llmservingsim(tmp_path)


def test_layers_of_vidur():
    folder = shared("profiles/vidur")
    profile = import_vidur(folder, "a100", "meta-llama/Llama-2-7b-hf")
    rows = pd.read_csv(folder / "compute/a100/Llama-2-7b-hf/mlp.csv")
    table = next(
        table
        for table in profile.tables("layer")
        if (table.variant, table.constants["layer"]) == ("tp2", "mlp_up_proj")
    )
    own = rows[rows["num_tensor_parallel_workers"] == 2]
    assert table.axes["tokens"] == tuple(own["num_tokens"])
    expected = own["time_stats.mlp_up_proj.median"].to_numpy() * 1e-3
    assert np.allclose(table.quantiles["p50_s"], expected)
    (reduce,) = profile.tables("allreduce")
    assert set(reduce.axes["num_gpus"]) <= {2, 4, 8}
    assert import_vidur(folder, "a100_sxm", "Llama-2-7b-hf").ops == profile.ops
    with pytest.raises(UserError, match="--system must name one of a100, h100"):
        import_vidur(folder)
    with pytest.raises(UserError, match="--model must name one of CodeLlama"):
        import_vidur(folder, "h100", "gpt2")


def test_an_import_reads_back(tables):
    profile = import_aiconfigurator("my_gpu", tables)
    assert parse_profile(canonical_json(profile.body)).ops == profile.ops


def test_folders_above_a_model_are_taken_with_its_name():
    profiles = shared("profiles")
    gpu = profiles / "llmservingsim" / "RTXPRO6000"
    own = import_llmservingsim(gpu / "Llama-3.1-8B").ops
    name = "meta-llama/Llama-3.1-8B"
    for folder in (gpu, gpu.parent, profiles):
        assert import_llmservingsim(folder, LLAMA_8B, None, name).ops == own
    found = import_llmservingsim(gpu, None, None, "Qwen/Qwen3-30B-A3B-Instruct-2507")
    assert found.provenance["model"] == "Qwen/Qwen3-30B-A3B-Instruct-2507"
    message = "must choose one of Llama-3.1-8B, Qwen3-30B-A3B-Instruct-2507, Qwen3-32B"
    with pytest.raises(UserError, match=message):
        import_llmservingsim(gpu)
    with pytest.raises(UserError, match="no tables of 'gpt2'"):
        import_llmservingsim(gpu, None, None, "gpt2")


def test_folders_above_and_inside_are_taken():
    profiles = shared("profiles")
    vidur = profiles / "vidur"
    own = import_vidur(vidur, "a100", "Llama-2-7b-hf").ops
    place = vidur / "compute"
    for folder, gpu, model in (
        (profiles, "a100", "meta-llama/Llama-2-7b-hf"),
        (place, "a100", "Llama-2-7b-hf"),
        (place / "a100", None, "Llama-2-7b-hf"),
        (place / "a100" / "Llama-2-7b-hf", None, None),
    ):
        assert import_vidur(folder, gpu, model).ops == own
    tables = [
        find_tables("h200_sxm", folder).folder
        for folder in (
            profiles,
            profiles / "aiconfigurator",
            profiles / "aiconfigurator" / "h200_sxm",
        )
    ]
    assert len(set(tables)) == 1
