"""From published tables to the price of a step: import, fit, tabulate, look up."""

import json

import numpy as np
import pandas as pd
import pytest

from calibrate.tables.fits import ESTIMATED
from calibrate.tabulate import tabulated, with_tables
from calibrate.writing import build_profile, op_table, write_profile
from sim.cli.main import run
from sim.costs import MeasuredCost, RooflineCost
from sim.costs.measured.geometry import linear_elements
from sim.errors import UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import BatchShape
from tests.calibrate.synthetic import DEVICE, decode_columns, decode_seconds, grid
from tests.shared import shared

LLAMA_8B = load_model("meta-llama/Llama-3.1-8B")
H200 = load_gpu("h200_sxm")
WEIGHTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
DECODES = decode_columns(*grid([16, 64, 256], [2048, 8192, 32768]))


def gemm_s(m, n, k):
    return 4e-6 + 2 * n * k / 4e12 + 2 * m * n * k / 7e14


def prefill_s(batch, query):
    return 1.2e-5 + 4 * 32 * 128 * batch * query * (query + 1) / 2 / 6e14


def decode_table():
    axes = ("num_heads", "num_kv_heads", "batch", "context")
    return op_table(
        "decode_attention",
        "bfloat16",
        {key: DECODES[key] for key in axes},
        decode_seconds(DECODES),
        constants={"head_dim": 128, "kv_itemsize": 2, "window": 0, "launch_s": 1e-5},
    )


def prefill_table():
    batch, query = grid([1, 4, 16], [64, 512, 2048, 8192])
    axes = {
        "num_heads": np.full(12, 32),
        "num_kv_heads": np.full(12, 8),
        "batch": batch,
        "query": query,
        "past": np.zeros(12, int),
    }
    constants = {"head_dim": 128, "kv_itemsize": 2, "window": 0}
    seconds = prefill_s(batch, query)
    return op_table("prefill_attention", "bfloat16", axes, seconds, constants=constants)


def gemm_table():
    m, which = grid([1, 8, 64, 512, 4096], [0, 1, 2, 3])
    n, k = np.array(WEIGHTS)[which].T
    seconds = gemm_s(m.astype(float), n, k)
    axes = {"m": m, "n": n, "k": k}
    return op_table("gemm", "bfloat16", axes, seconds, constants={"weight_bits": 16})


def synthetic(*ops):
    provenance = {"date": "2026-01-01", "device": DEVICE.to_json(), "source": "a test"}
    return build_profile("imported", provenance, list(ops))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    whole = synthetic(decode_table(), prefill_table(), gemm_table())
    path = tmp_path_factory.mktemp("profiles") / "p.json"
    write_profile(with_tables(whole, whole, LLAMA_8B), path)
    return path


def test_a_step_costs_what_its_kernels_cost(file):
    cost = MeasuredCost(str(file), model=LLAMA_8B, gpu=H200)
    step = cost.step(BatchShape(64, 64 * 8192, 0, 0, 0, 0))
    one = decode_columns([64], [8192])
    expected = 32 * decode_seconds(one)[0]
    assert step.decode_attention_s == pytest.approx(expected, rel=0.05)
    layer_s = sum(gemm_s(64.0, n, k) for n, k in WEIGHTS)
    assert step.gemm_s == pytest.approx(32 * layer_s, rel=0.05)
    assert not step.extrapolated
    step = cost.step(BatchShape(0, 0, 1, 2048, 2048, 2048 * 2049 // 2))
    assert step.prefill_attention_s == pytest.approx(32 * prefill_s(1, 2048), rel=0.1)
    assert 0.0 < step.lo_s < step.total_s < step.hi_s


def test_tables_are_never_faster_than_the_device(file):
    fit = json.loads(file.read_text())["fit"]
    for entry in fit["models"]:
        geometry = entry["geometry"]
        table = entry["decode"]["0"]
        keys = np.outer(table["counts"], table["amounts"])
        key_bytes = 2 * geometry["num_kv_heads"] * 128 * geometry["kv_itemsize_bytes"]
        floor = keys * key_bytes / DEVICE.bandwidth_bytes_per_s / 1.1
        assert (np.array(table["time_s"]) >= floor * (1 - 1e-5)).all()
        weights = 2 * linear_elements(LLAMA_8B, geometry["tensor_parallel_size"])
        floor_s = weights / DEVICE.bandwidth_bytes_per_s / 1.1
        assert min(entry["tokens"]["gemm_s"]) >= floor_s * (1 - 1e-5)


def test_every_way_to_divide_the_model_is_tabulated(file):
    fit = json.loads(file.read_text())["fit"]
    found = {
        (e["geometry"]["tensor_parallel_size"], e["geometry"]["kv_itemsize_bytes"])
        for e in fit["models"]
    }
    assert found == {(tp, size) for tp in (1, 2, 4, 8) for size in (1, 2)}
    table = fit["models"][0]["decode"]["0"]
    assert table["counts"][-1] == 4096
    assert table["amounts"][-1] == 1 << 20
    assert all(row[-1] for row in table["beyond"])


def test_what_cannot_be_tabulated_is_said():
    whole = synthetic(decode_table(), prefill_table())
    with pytest.raises(UserError, match=r"no products of meta-llama/Llama-3\.1-8B"):
        tabulated(whole, LLAMA_8B)
    with pytest.raises(UserError, match="attends to a latent"):
        tabulated(whole, load_model("deepseek-ai/DeepSeek-V2-Lite"))


def test_what_was_not_measured_comes_from_the_datasheet(tmp_path):
    whole = synthetic(decode_table(), gemm_table())
    found = with_tables(whole, whole, LLAMA_8B)
    entry = found.fit["models"][0]
    assert entry["estimated"] == ["prefill_attention"]
    assert found.fit["intervals"]["prefill_attention"] == list(ESTIMATED)
    write_profile(found, tmp_path / "p.json")
    cost = MeasuredCost(str(tmp_path / "p.json"), model=LLAMA_8B, gpu=H200)
    shape = BatchShape(0, 0, 1, 2048, 2048, 2048 * 2049 // 2)
    step, rest = cost.step(shape), RooflineCost(model=LLAMA_8B, gpu=H200).step(shape)
    assert step.prefill_attention_s == pytest.approx(rest.prefill_attention_s, rel=1e-3)
    assert step.extrapolated
    assert not cost.step(BatchShape(64, 64 * 8192, 0, 0, 0, 0)).extrapolated


@pytest.mark.slow
def test_layers_of_vidur_price_a_step(tmp_path):
    out = tmp_path / "p.json"
    folder = str(shared("profiles/vidur"))
    name = ["--system", "a100", "--model", "Llama-2-7b-hf"]
    command = ["profile", "import", "vidur", "--path", folder, *name]
    assert run([*command, "--out", str(out), "--quiet"]) == 0
    model = load_model("meta-llama/Llama-2-7b-hf")
    cost = MeasuredCost(str(out), model=model, gpu=load_gpu("a100_sxm"))
    step = cost.step(BatchShape(64, 64 * 1024, 0, 0, 0, 0))
    # 13 GB of weights at 2 TB/s are 6.5 ms
    assert 6.5e-3 < step.gemm_s < 13e-3
    assert step.extrapolated


def test_a_run_is_priced_by_a_profile(file, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        "workload:\n"
        "  synthetic:\n"
        "    num_requests: 40\n"
        "    arrivals: {kind: poisson, rate: 8.0}\n"
        "    prompt_tokens: {kind: fixed, tokens: 700}\n"
        "    output_tokens: {kind: fixed, tokens: 30}\n"
        "engine: {model: meta-llama/Llama-3.1-8B, gpu: h200_sxm}\n"
        f"cost: {{kind: measured, profile: {file.name}}}\n"
    )
    (tmp_path / file.name).write_text(file.read_text())
    out = tmp_path / "out"
    assert run(["run", str(config), "--out", str(out), "--quiet", "--no-figures"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["completed"] == 40
    text = (out / "summary.json").read_text()
    assert json.loads(file.read_text())["id"] in text
    steps = pd.read_parquet(out / "steps.parquet")
    assert (steps["latency_s"] > 0).all()


def test_fit_writes_tables_for_a_model(tmp_path, capsys):
    whole = tmp_path / "whole.json"
    out = tmp_path / "fitted.json"
    write_profile(synthetic(decode_table(), prefill_table(), gemm_table()), whole)
    command = ["profile", "fit", str(whole), "--model", "meta-llama/Llama-3.1-8B"]
    assert run([*command, "--out", str(out), "--quiet"]) == 0
    assert MeasuredCost(str(out), model=LLAMA_8B, gpu=H200)
    assert run(command) == 2
    assert "--model and --out go together" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_8b_model_on_an_h200(tmp_path):
    pytest.importorskip("sklearn")
    out = tmp_path / "h200.json"
    arguments = ["--path", str(shared("profiles/aiconfigurator")), "--out", str(out)]
    arguments += ["--system", "h200_sxm", "--model", "meta-llama/Llama-3.1-8B"]
    assert run(["profile", "import", "aiconfigurator", *arguments, "--quiet"]) == 0
    cost = MeasuredCost(str(out), model=LLAMA_8B, gpu=H200)
    step = cost.step(BatchShape(64, 64 * 2048, 0, 0, 0, 0))
    # published: 140 us of attention a layer, and about 9 ms without the host
    assert step.decode_attention_s / 32 == pytest.approx(140e-6, rel=0.05)
    assert 8e-3 < step.total_s - 1.5e-3 < 10e-3
    # the floor of a decode of one short sequence: 10 to 12 us a layer
    step = cost.step(BatchShape(1, 1000, 0, 0, 0, 0))
    assert 9e-6 < step.decode_attention_s / 32 < 14e-6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mixed_steps_inside_vllm_are_met(tmp_path):
    pytest.importorskip("sklearn")
    out = tmp_path / "p.json"
    folder = shared("profiles/llmservingsim/RTXPRO6000/Llama-3.1-8B")
    command = ["profile", "import", "llmservingsim", "--path", str(folder)]
    assert run([*command, "--out", str(out), "--quiet"]) == 0
    gpu = load_gpu("rtx_pro_6000_server")
    cost = MeasuredCost(str(out), model=LLAMA_8B, gpu=gpu)
    table = pd.read_csv(folder / "tp1" / "attention.csv")
    query, past, count, context, time_us = table.to_numpy().T
    chunk = query > 0
    pairs = query * past + query * (query + 1) // 2
    ends = np.where(chunk, query + past, 0)
    rows = np.zeros((len(table), 9), dtype=np.int64)
    rows[:, :6] = np.stack([count, count * context, chunk, query, ends, pairs]).T
    priced = cost.columns(rows)
    attention_s = (priced[:, 2] + priced[:, 3]) / LLAMA_8B.num_hidden_layers
    errors = np.abs(attention_s / time_us * 1e6 - 1.0)
    assert errors.mean() < 0.02
    assert np.quantile(errors, 0.9) < 0.05
