"""Bounds of steps: as wide as the noise of what was measured."""

import json

import numpy as np
import pytest

from calibrate.tabulate import with_tables
from calibrate.writing import build_profile, op_table, write_profile
from sim.cli.main import run
from sim.costs import MeasuredCost
from sim.costs.rates.widths import read_widths
from sim.hardware.gpus import load_gpu
from sim.scheduler.batch import BatchShape
from tests.calibrate.synthetic import DEVICE, decode_columns, decode_seconds, grid
from tests.calibrate.test_tabulate import LLAMA_8B, gemm_table, prefill_table
from tests.shared import shared
from tests.sim.config.test_config import minimal, write

H200 = load_gpu("h200_sxm")
NOISE = 0.06
BATCHES = 2 ** np.arange(9)
CONTEXTS = 2 ** np.arange(8, 17)


def noisy_decodes(seed):
    """Decodes on a grid, times off by a factor of log-normal noise."""
    table = decode_columns(*grid(BATCHES, CONTEXTS))
    noise = np.random.default_rng(seed).normal(0.0, NOISE, len(table["batch"]))
    return table, decode_seconds(table) * np.exp(noise)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    table, seconds = noisy_decodes(0)
    axes = {
        key: table[key] for key in ("num_heads", "num_kv_heads", "batch", "context")
    }
    constants = {"head_dim": 128, "kv_itemsize": 2, "window": 0, "launch_s": 1e-5}
    decodes = op_table(
        "decode_attention", "bfloat16", axes, seconds, constants=constants
    )
    provenance = {"date": "2026-01-01", "device": DEVICE.to_json(), "source": "a test"}
    ops = [decodes, prefill_table(), gemm_table()]
    whole = build_profile("imported", provenance, ops)
    path = tmp_path_factory.mktemp("profiles") / "p.json"
    write_profile(with_tables(whole, whole, LLAMA_8B), path)
    return path


@pytest.fixture(scope="module")
def cost(profile):
    return MeasuredCost(str(profile), model=LLAMA_8B, gpu=H200)


def test_nine_of_ten_new_measurements_lie_within(cost):
    width = read_widths(cost.profile.fit, "decode_attention").inside
    hits = []
    for seed in range(1, 6):
        table, seconds = noisy_decodes(seed)
        counts = zip(table["batch"].tolist(), table["context"].tolist(), strict=True)
        for (batch, context), time_s in zip(counts, seconds, strict=True):
            step = cost.step(BatchShape(batch, batch * context, 0, 0, 0, 0))
            # the flag of the step speaks of products and the head, too
            if not cost.decode_table.at(batch, batch * context)[1]:
                predicted_s = step.decode_attention_s / 32
                lo_s = predicted_s * (1.0 - width.down)
                hits.append(lo_s <= time_s <= predicted_s * (1.0 + width.up))
    assert len(hits) > 300
    # one split of 81 points decides the width
    assert 0.8 <= np.mean(hits) <= 0.99


def test_more_noise_makes_wider_bounds(cost):
    inside = cost.profile.fit["intervals"]["decode_attention"][0]
    # the quantile of |N(0, s)| that nine of ten are below is 1.645 s
    assert 100 * NOISE < inside < 100 * np.expm1(3 * NOISE)


def test_real_traffic_from_a_fitted_profile_to_intervals(profile, tmp_path):
    """Azure's conversations on a made-up device, through the command line."""
    trace = {"kind": "azure", "path": str(shared("traces/azure_llm_2023_conv.csv"))}
    data = minimal() | {
        "workload": {"trace": trace | {"rate_scale": 3.0, "limit": 1500}},
        "cost": {"kind": "measured", "profile": str(profile)},
    }
    out = tmp_path / "out"
    options = ["--out", str(out), "--no-figures", "--quiet"]
    assert run(["run", str(write(tmp_path, data)), *options]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["profile"] == json.loads(profile.read_text())["id"]
    for name in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms"):
        lo, hi = summary[f"{name}_interval"]
        assert 0.5 * summary[name] < lo < summary[name] < hi < 2.0 * summary[name]
