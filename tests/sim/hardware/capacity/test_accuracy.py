from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.hardware.capacity import constants, estimate_capacity
from sim.hardware.gpus import GIB, load_gpu
from tests.sim.hardware.capacity.points import (
    CAUSES,
    CAUSES_COUNTED,
    ERRATA,
    NOT_JUDGED,
    architecture,
    estimate_row,
    gpu_of,
    group_errors,
    group_table,
    judge_all,
    judge_left_out,
    median_and_p90,
    rows_of_quality_a,
    table,
)

# What engines printed, as facts that need no file: model, GPU, release, utilisation,
# tensor parallelism, blocks, and the error that is known. Source: llm-d-planner, logs
# of pull request 205 (H100 80 GB), and LLMServingSim's meta.json (RTX 4090).
PUBLISHED = [
    ("meta-llama/Llama-3.1-8B-Instruct", "h100_sxm", "0.19.0", 0.95, 1, 29751, 0.001),
    ("meta-llama/Llama-3.1-8B-Instruct", "h100_sxm", "0.19.0", 0.95, 4, 138112, 0.001),
    ("Qwen/Qwen2.5-7B-Instruct", "h100_sxm", "0.19.0", 0.95, 2, 149412, 0.001),
    ("Qwen/Qwen3-14B", "h100_sxm", "0.15.0", 0.95, 1, 17178, 0.001),
    ("Qwen/Qwen3-14B", "h100_sxm", "0.17.0", 0.95, 1, 18572, 0.001),
    ("google/gemma-2-9b-it", "h100_sxm", "0.19.0", 0.95, 1, 21110, 0.001),
    ("deepseek-ai/DeepSeek-V2-Lite-Chat", "h100_sxm", "0.19.0", 0.95, 1, 94097, 0.001),
    (
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "h100_sxm",
        "0.19.0",
        0.95,
        2,
        29121,
        0.002,
    ),
    ("moonshotai/Kimi-Dev-72B", "h100_sxm", "0.19.0", 0.95, 2, 1236, 0.015),
    ("meta-llama/Llama-3.1-8B", "rtx_4090", "0.19.0", 0.9, 1, 2588, 0.002),
]


@pytest.mark.parametrize("point", PUBLISHED, ids=str)
def test_published_points(
    point: tuple[str, str, str, float, int, int, float],
) -> None:
    model, gpu, version, utilization, tp, blocks, known_error = point
    result = estimate_capacity(
        model,
        gpu,
        engine_version=version,
        gpu_memory_utilization=utilization,
        tensor_parallel_size=tp,
    )
    assert result.num_gpu_blocks == pytest.approx(blocks, rel=known_error)
    assert result.num_gpu_blocks_low <= blocks <= result.num_gpu_blocks_high


def test_a_published_log_of_v0() -> None:
    """vLLM 0.7.2 on a T4 that trains beside it: 5,519 blocks, 2.02 GiB activations."""
    result = estimate_capacity(
        "Qwen/Qwen2.5-1.5B-Instruct",
        replace(load_gpu("t4"), memory_bytes=round(14.56 * GIB)),
        engine_version="0.7.2",
        gpu_memory_utilization=0.5,
        max_model_len=32_768,
        dtype="float16",
    )
    assert result.num_gpu_blocks == pytest.approx(5519, rel=0.015)
    assert result.activation_peak_bytes / GIB == pytest.approx(2.02, abs=0.02)
    assert result.num_gpu_blocks_low <= 5519 <= result.num_gpu_blocks_high


@pytest.mark.parametrize(
    ("weights_given", "median_limit", "p90_limit", "num_rows", "num_groups"),
    [(True, 0.003, 0.03, 53, 37), (False, 0.01, 0.04, 51, 35)],
    ids=["weights given", "weights counted"],
)
def test_accuracy_on_engine_logs(
    weights_given: bool,
    median_limit: float,
    p90_limit: float,
    num_rows: int,
    num_groups: int,
) -> None:
    judged, skipped = judge_all(weights_given=weights_given)
    causes = CAUSES if weights_given else CAUSES_COUNTED
    print(f"\n{table(judged, causes)}")
    print(group_table(judged))
    print("not judged:", *skipped, sep="\n  ")
    print("odd: named, with a cause; all constants were fitted to rows in this file")
    uncorrected = [point for point in judged if point.row_id not in ERRATA]
    assert (len(judged), len(group_errors(judged))) == (num_rows, num_groups)
    assert len(uncorrected) == num_rows - len(ERRATA)
    for what, points in (("all", judged), ("without corrected rows", uncorrected)):
        middle, p90 = median_and_p90(points)
        print(f"{what}: median {middle:.3%}, 90th percentile {p90:.3%}")
        assert middle <= median_limit
        assert p90 <= p90_limit


@pytest.mark.parametrize("weights_given", [True, False])
def test_rows_beyond_five_percent_are_exactly_those_with_a_known_cause(
    weights_given: bool,
) -> None:
    judged, _ = judge_all(weights_given=weights_given)
    odd = {point.row_id for point in judged if abs(point.error) > 0.05}
    assert odd == set(CAUSES if weights_given else CAUSES_COUNTED)


@pytest.mark.slow
def test_what_is_fitted_without_a_model_predicts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eras = constants.ERAS

    def swap(fitted: tuple[constants.EngineEra, ...]) -> None:
        monkeypatch.setattr(constants, "ERAS", fitted)

    judged = judge_left_out(swap)
    monkeypatch.setattr(constants, "ERAS", eras)
    middle, p90 = median_and_p90(judged)
    print(f"\neach model left out: median {middle:.3%}, 90th percentile {p90:.3%}")
    assert middle <= 0.003
    assert p90 <= 0.03


@pytest.mark.parametrize("weights_given", [True, False])
def test_the_interval_holds_the_engines_number(weights_given: bool) -> None:
    judged, _ = judge_all(weights_given=weights_given)
    outside = set()
    for point in judged:
        bytes_held = point.measured * point.estimate.block_bytes
        if point.measured < 1000:  # rows that print GiB only
            bytes_held = point.measured * GIB
        low = point.estimate.num_gpu_blocks_low * point.estimate.block_bytes
        high = (point.estimate.num_gpu_blocks_high + 1) * point.estimate.block_bytes
        if not low <= bytes_held <= high:
            outside.add(point.row_id)
    assert not outside


def test_tokens_and_concurrency_follow_from_the_blocks() -> None:
    """Hybrid pools included: the engine's own numbers, from its own blocks."""
    checked = 0
    for row in rows_of_quality_a():
        if int(row["id"]) in NOT_JUDGED or not row["max_concurrency"]:
            continue
        model = architecture(row)
        assert model is not None
        version = row["vllm_version"].rstrip("~")
        result = estimate_capacity(
            model,
            gpu_of(row),
            tensor_parallel_size=int(row["tp"]),
            block_size=int(row["block_size"]),
            max_model_len=int(row["max_model_len"]),
            engine_version=version,
            num_gpu_blocks_override=int(row["num_gpu_blocks"]),
        )
        assert result.kv_cache_tokens == int(row["kv_cache_tokens"]), row["id"]
        concurrency = float(row["max_concurrency"])
        assert result.max_concurrency == pytest.approx(concurrency, abs=0.011)
        checked += 1
    assert checked >= 40


def test_the_start_that_the_engine_refused_is_refused() -> None:
    row = next(row for row in rows_of_quality_a() if row["id"] == "84")
    blocks = estimate_row(row, weights_given=True).num_gpu_blocks
    assert blocks * 16 < int(row["max_model_len"])


@pytest.mark.parametrize(
    ("model", "gpu", "release", "settings", "num_blocks"),
    [
        # logs of rows 80, 81 and 99: the extra memory of any two predicts the third
        ("Llama-2-7b-hf", "rtx_a6000", "0.4.1", {"quantization": "gptq"}, 4_877),
        ("zephyr-7b-beta", "rtx_a6000", "0.4.1", {"quantization": "awq"}, 17_641),
        ("Llama-3-8B", "h100_sxm", "0.5.3", {"max_model_len": 8_192}, 27_793),
    ],
)
def test_early_engines_count_what_the_allocator_keeps(
    model: str, gpu: str, release: str, settings: dict[str, Any], num_blocks: int
) -> None:
    found = estimate_capacity(model, gpu, engine_version=release, **settings)
    assert found.num_gpu_blocks == pytest.approx(num_blocks, rel=0.005)
    later = estimate_capacity(model, gpu, engine_version="0.6.6", **settings)
    assert later.num_gpu_blocks > 1.01 * found.num_gpu_blocks
