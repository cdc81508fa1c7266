"""Kernels of routed experts against published times, by chip and precision.

The shares and starts of `sim.costs.experts.kernels` are fitted to tables of
aiconfigurator-core; what vLLM's own benchmark says had no part in them, and of
LLMServingSim's table only the compute of its GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np
import pandas as pd
import pytest

from sim.costs.experts.kernels import expert_kernels, precision_of
from sim.costs.experts.routed import touched_experts
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


def distance(found: Iterable[float]) -> float:
    """Return the median distance from 1."""
    return median(abs(ratio - 1.0) for ratio in found)


def test_experts_of_mixtral_take_what_vllms_benchmark_says() -> None:
    """Nothing jumps between 64 and 128 tokens, either."""
    measured = H100_MIXTRAL_TP2.items()
    found = ratios(layer(MIXTRAL, "h100_sxm", 2), measured)
    assert distance(found) <= 0.035
    assert all(0.95 <= ratio <= 1.05 for ratio in found[:13])
    assert max(found) <= 1.2
    bare = ratios(layer(MIXTRAL, "h100_sxm", 2, start=False), measured)
    assert bare[0] < 0.85


def test_experts_in_fp8_take_what_vllms_benchmark_says() -> None:
    measured = H100_QWEN_FP8.items()
    found = ratios(layer(QWEN_FP8, "h100_sxm"), measured)
    bare = ratios(layer(QWEN_FP8, "h100_sxm", start=False), measured)
    assert distance(found) <= 0.06
    assert max(found) <= 1.35
    assert distance(bare) >= 0.14
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
        found.append(1e6 * experts.seconds_of(touched, tokens) / us)
    assert len(found) >= 25
    assert low <= median(found) <= high
    assert (distance(found) <= 0.055) == start


def published(gpu: str, kind: str) -> pd.DataFrame:
    """Return the times of experts under vLLM, in us, by their tokens' choice."""
    core = pytest.importorskip("aiconfigurator_core", reason="an extra: tables")
    folder = Path(core.__path__[0]) / "systems" / "data" / gpu / "moe" / "vllm"
    table = pd.read_parquet(sorted(folder.glob("*/moe_perf.parquet"))[-1])
    table = table[(table["moe_dtype"] == kind) & (table["moe_ep_size"] == 1)]
    width = table["inter_size"] // table["moe_tp_size"]
    table = table[(width >= 128) & table["distribution"].isin(DISTRIBUTIONS)]
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
DISTRIBUTIONS: Final = ("balanced", "power_law_1.01", "power_law_1.2")


@cache
def touched_in_tables(
    distribution: str, num_experts: int, top_k: int, num_tokens: int
) -> float:
    """Return how many experts the tokens of a row choose, by the table's generator.

    Balanced tokens leave none out that they could reach. Else each expert's share of
    the rows is drawn from a power law, its rows rounded and limited to one a token, and
    the difference given to the experts that have fewest or taken from those with most.
    """
    rows = num_tokens * top_k
    if distribution == "balanced":
        return float(min(num_experts, rows))
    power = 1.0 - float(distribution.rpartition("_")[2])
    low, high = (1.0, 0.8 * num_tokens) if rows > num_experts else (0.01, 2.0)
    draws = np.random.default_rng(0)
    found = []
    for _ in range(8):
        uniform = draws.random(num_experts)
        spread = (high**power - low**power) * uniform + low**power
        shares = spread ** (1.0 / power)
        counts = np.round(rows * shares / shares.sum()).astype(int)
        counts = np.minimum(counts, num_tokens)
        while rows != counts.sum():
            missing = rows - counts.sum()
            end = counts.min() if missing > 0 else counts.max()
            counts[np.flatnonzero(counts == end)[: abs(missing)]] += np.sign(missing)
        found.append(np.count_nonzero(counts))
    return float(np.mean(found))


def test_tokens_of_tables_leave_experts_out() -> None:
    """Free choice, with which the shares were fitted, has a quarter more."""
    free = touched_experts(128, 8, 16)
    assert touched_in_tables("balanced", 128, 8, 16) == 128.0
    assert 1.2 < free / touched_in_tables("power_law_1.01", 128, 8, 16) < 2.0
    assert touched_in_tables("power_law_1.01", 8, 2, 4096) == 8.0


def table_ratios(
    experts: RoutedExperts, rows: pd.DataFrame, *, is_free: bool = False
) -> list[float]:
    """Return predicted over measured, for the experts that a row's tokens choose."""
    total, chosen = experts.num_experts, experts.experts_per_token
    columns = zip(rows["distribution"], rows["num_tokens"], rows["us"], strict=True)
    found = []
    for distribution, tokens, us in columns:
        touched = touched_in_tables(distribution, total, chosen, tokens)
        touched = touched_experts(total, chosen, tokens) if is_free else touched
        found.append(1e6 * experts.seconds_of(touched, tokens) / us)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "kind"), TABLES)
def test_shares_and_starts_are_those_of_the_tables(gpu: str, kind: str) -> None:
    """With the start points of up to 8 tokens are right, without they are too short.

    Time follows the experts that tokens choose: with the formula of a free choice in
    their place, by which the shares were fitted, errors grow.
    """
    shape = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size"]
    errors, free, few, bare = [], [], [], []
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
        experts = layer(model, gpu, int(ranks))
        errors += table_ratios(experts, rows)
        free += table_ratios(experts, rows, is_free=True)
        shortest = rows[rows["num_tokens"] <= 8]
        few += table_ratios(experts, shortest)
        bare += table_ratios(layer(model, gpu, int(ranks), start=False), shortest)
    assert distance(errors) <= 0.16
    assert 0.92 <= median(few) <= 1.14
    assert distance(few) <= 0.2
    if not gpu.startswith("l40s"):
        assert median(bare) <= 0.9
    if (gpu, kind) != ("b200_sxm", "w4a16_mxfp4"):
        assert distance(errors) < 0.95 * distance(free)
