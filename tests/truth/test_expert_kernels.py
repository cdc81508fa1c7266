"""Kernels of routed experts against published times, by chip and precision.

The shares and starts of `sim.costs.experts.kernels` are fitted to tables of
aiconfigurator-core; what vLLM's own benchmark says had no part in them, and of
LLMServingSim's table only the compute of its GPU.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import pandas as pd
import pytest

from sim.costs.experts.kernels import expert_kernels, precision_of
from sim.costs.roofline import RooflineCost
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from tests.shared import shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sim.costs.experts.routed import RoutedExperts
    from sim.hardware.models.architecture import ModelArchitecture

MIXTRAL = replace(load_model("mistralai/Mixtral-8x7B-v0.1"), num_hidden_layers=1)
QWEN = replace(load_model("Qwen/Qwen3-30B-A3B"), num_hidden_layers=1)
QWEN_FP8 = replace(QWEN, quantization="fp8")
H100_MIXTRAL_TP2: Final[Mapping[int, float]] = {
    **{1: 144.03, 2: 229.28, 4: 351.10, 8: 434.98, 16: 471.49, 24: 478.27},
    **{32: 487.35, 48: 487.85, 64: 483.14, 96: 494.42, 128: 491.39, 256: 536.77},
    **{512: 662.33, 1024: 833.72, 1536: 1122.93},
}
"""In bf16, as vLLM's ``benchmark_moe.py`` times them with the release's own tiles (pull
request 24700): tokens choose their experts uniformly."""
H100_QWEN_FP8: Final[Mapping[int, float]] = {
    **{1: 40.44, 2: 56.15, 4: 78.10, 8: 118.64, 16: 164.64, 24: 193.48, 32: 210.07},
    **{48: 230.59, 64: 237.26, 96: 244.33, 128: 247.67, 256: 262.38, 512: 286.24},
}
"""In FP8, the faster of the two columns there."""


def layer(
    model: ModelArchitecture, gpu: str, num_ranks: int = 1, *, start: bool = True
) -> RoutedExperts:
    """Return the experts of a layer, whose kernels take all of their start or none."""
    spec = load_gpu(gpu)
    own = expert_kernels(spec, precision_of(model, spec), "chip")
    latency_s = 1e-6 * own.kernels_us if start else 0.0
    cost = RooflineCost(
        model=model,
        gpu=spec,
        tensor_parallel_size=num_ranks,
        moe_layer_latency_s=latency_s,
    )
    assert cost.experts is not None
    return cost.experts


def ratios(
    experts: RoutedExperts, measured_us: Iterable[tuple[int, float]]
) -> list[float]:
    """Return predicted over measured, by tokens."""
    return [1e6 * experts.seconds(tokens) / us for tokens, us in measured_us]


def test_experts_of_mixtral_take_what_vllms_benchmark_says() -> None:
    """Nothing jumps between 64 and 128 tokens, either."""
    measured = H100_MIXTRAL_TP2.items()
    found = ratios(layer(MIXTRAL, "h100_sxm", 2), measured)
    assert median(abs(ratio - 1.0) for ratio in found) <= 0.035
    assert all(0.95 <= ratio <= 1.05 for ratio in found[:13])
    assert max(found) <= 1.2
    bare = ratios(layer(MIXTRAL, "h100_sxm", 2, start=False), measured)
    assert bare[0] < 0.85


def test_experts_in_fp8_take_what_vllms_benchmark_says() -> None:
    measured = H100_QWEN_FP8.items()
    found = ratios(layer(QWEN_FP8, "h100_sxm"), measured)
    bare = ratios(layer(QWEN_FP8, "h100_sxm", start=False), measured)
    assert median(abs(ratio - 1.0) for ratio in found) <= 0.06
    assert max(found) <= 1.35
    assert median(abs(ratio - 1.0) for ratio in bare) >= 0.14
    assert bare[0] < 0.4


@pytest.mark.parametrize(("start", "low", "high"), [(True, 0.9, 1.1), (False, 0.7, 1)])
def test_experts_of_llmservingsims_table(start: bool, low: float, high: float) -> None:
    """Points whose experts exceed the L2 cache and wait for the memory."""
    folder = "profiles/llmservingsim/RTXPRO6000/Qwen3-30B-A3B-Instruct-2507/tp1"
    experts = layer(QWEN, "rtx_pro_6000_server", start=start)
    table = pd.read_csv(shared(f"{folder}/moe.csv"))
    table = table[(table["activated_experts"] >= 16) & (table["tokens"] <= 256)]
    found = []
    for tokens, touched, us in table.itertuples(index=False):
        memory_s = experts.expert_s * touched + experts.token_memory_s * tokens
        compute_s = experts.token_compute_s * tokens
        limits_s = sqrt(memory_s * memory_s + compute_s * compute_s)
        found.append(1e6 * (experts.start_s + limits_s) / us)
    assert len(found) >= 25
    assert low <= median(found) <= high
    assert (median(abs(ratio - 1.0) for ratio in found) <= 0.055) == start


def published(gpu: str, kind: str) -> pd.DataFrame:
    """Return the times of experts under vLLM with a mild power law, in us."""
    core = pytest.importorskip("aiconfigurator_core", reason="an extra: tables")
    folder = Path(core.__path__[0]) / "systems" / "data" / gpu / "moe" / "vllm"
    table = pd.read_parquet(sorted(folder.glob("*/moe_perf.parquet"))[-1])
    table = table[(table["moe_dtype"] == kind) & (table["moe_ep_size"] == 1)]
    width = table["inter_size"] // table["moe_tp_size"]
    table = table[(width >= 128) & (table["distribution"] == "power_law_1.01")]
    table = table[(table["moe_tp_size"] <= 8) & (table["num_tokens"] <= 8192)]
    usual = table["kernel_source"].value_counts().index[0]
    return table[table["kernel_source"] == usual].assign(us=1e3 * table["latency"])


SCHEMES: Final[Mapping[str, str | None]] = {
    "bfloat16": None,
    "fp8_block": "fp8-block128",
    "w4a16_mxfp4": "mxfp4",
}
"""Quantization of a model by the precision that a table names; None for bfloat16."""


TABLES: Final = (
    *(("a100_sxm", "bfloat16"), ("b200_sxm", "bfloat16"), ("l40s", "bfloat16")),
    *(("h100_sxm", kind) for kind in SCHEMES),
    *(("h200_sxm", kind) for kind in SCHEMES),
    *(("b200_sxm", "fp8_block"), ("l40s", "fp8_block")),
    *(("b200_sxm", "w4a16_mxfp4"), ("l40s", "w4a16_mxfp4")),
    *(("rtx_pro_6000_server", kind) for kind in ("bfloat16", "w4a16_mxfp4")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "kind"), TABLES)
def test_shares_and_starts_are_those_of_the_tables(gpu: str, kind: str) -> None:
    """With the start points of up to 8 tokens are right, without they are too short."""
    shape = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size"]
    errors, few, bare = [], [], []
    for (hidden, inter, top_k, num_experts, ranks), rows in published(
        gpu, kind
    ).groupby(shape):
        model = replace(
            QWEN,
            hidden_size=int(hidden),
            moe_intermediate_size=int(inter),
            num_experts=int(num_experts),
            num_experts_per_tok=int(top_k),
            quantization=SCHEMES[kind],
        )
        measured = [*zip(rows["num_tokens"], rows["us"], strict=True)]
        found = ratios(layer(model, gpu, int(ranks)), measured)
        errors += [abs(ratio - 1.0) for ratio in found]
        shortest = [item for item in measured if item[0] <= 8]
        few += ratios(layer(model, gpu, int(ranks)), shortest)
        bare += ratios(layer(model, gpu, int(ranks), start=False), shortest)
    assert median(errors) <= 0.17
    assert 0.92 <= median(few) <= 1.14
    if not gpu.startswith("l40s"):
        assert median(bare) <= 0.9
