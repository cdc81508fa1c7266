"""Pools of SGLang that were published, beside ours; docs/sglang.md has the table."""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.errors import CapacityError
from sim.hardware.capacity import (
    CapacityEstimate,
    estimate_capacity,
    format_capacity,
)
from sim.hardware.capacity.sglang import MAX_PREFILL_TOKENS, most_requests
from sim.hardware.gpus import GIB, load_gpu
from sim.hardware.models.bundled import load_model
from sim.simulation.assemble import make_capacity
from tests.sim.config.test_config import minimal

LLAMA, QWQ = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/QwQ-32B"


def estimate(model: str, gpu: str, tp: int, **more: Any) -> CapacityEstimate:
    return estimate_capacity(
        model,
        gpu,
        tensor_parallel_size=tp,
        **{"engine_version": "0.5.9", "block_size": 1} | more,
    )


def bytes_of_token(model: str, tp: int) -> int:
    return estimate(model, "h100_sxm", tp).block_bytes


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "more", "published"),
    [
        (LLAMA, "a100_sxm", 1, {"gpu_memory_utilization": 0.88}, 444_500),
        (LLAMA, "h100_sxm", 1, {"gpu_memory_utilization": 0.88}, 444_500),
        ("Qwen/Qwen3-0.6B", "h100_sxm", 1, {"gpu_memory_utilization": 0.3}, 208_651),
        (
            "zai-org/GLM-5",
            "b200_sxm",
            8,
            {
                "gpu_memory_utilization": 0.852,
                "quantization": "nvfp4",
                "kv_cache_dtype": "fp8",
            },
            1_961_024,
        ),
        # with nothing given but pages of 64, in April 2026
        (
            "Qwen/Qwen3-8B",
            "b200_sxm",
            1,
            {"engine_version": "0.5.10", "block_size": 64},
            992_896,
        ),
        # with nothing given at all, in August 2026
        (
            "Qwen/Qwen3-30B-A3B",
            "h100_sxm",
            1,
            {"engine_version": "0.5.23", "quantization": "fp8"},
            392_920,
        ),
        (
            "Qwen/Qwen3-32B",
            "h100_sxm",
            1,
            {"engine_version": "0.5.23", "gpu_memory_utilization": 0.9},
            39_078,
        ),
    ],
)
def test_pools_from_the_card_alone(
    model: str, gpu: str, tp: int, more: dict[str, Any], published: int
) -> None:
    found = estimate(model, gpu, tp, **more)
    assert found.kv_cache_tokens == pytest.approx(published, rel=0.01)
    low, high = found.num_gpu_blocks_low, found.num_gpu_blocks_high
    assert low < published / found.block_size < high


@pytest.mark.parametrize(
    ("model", "tp", "fraction", "free_gib", "published"),
    [
        (LLAMA, 1, 0.88, (78.81, 63.72), 444_500),
        (QWQ, 4, 0.85, (15.54 + 6.09, 6.09), 46_611),
        (LLAMA, 1, 0.88, (15.02 + 7.37, 7.37), 38_141),
    ],
)
def test_pools_from_the_free_memory_that_a_log_gives(
    model: str,
    tp: int,
    fraction: float,
    free_gib: tuple[float, float],
    published: int,
) -> None:
    before, after = free_gib  # the weights
    rest = after - before * (1 - fraction)
    found = int(rest * GIB) // bytes_of_token(model, tp)
    assert found == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("model", "tp", "published", "kv_gib"),
    [
        (LLAMA, 1, 444_500, 27.13 + 27.13),
        (LLAMA, 1, 38_141, 2.33 + 2.33),
        (QWQ, 4, 46_611, 1.42 + 1.42),
        ("Qwen/Qwen3-235B-A22B-FP8", 4, 367_404, 8.23 + 8.23),
    ],
)
def test_tokens_take_the_bytes_of_published_pools(
    model: str, tp: int, published: int, kv_gib: float
) -> None:
    size = published * bytes_of_token(model, tp) / GIB
    assert size == pytest.approx(kv_gib, abs=0.02)


@pytest.mark.parametrize(
    ("num_tokens", "context_len", "published"),
    [
        (208_651, 40_960, 2_608),
        (980_344, 163_840, 3_063),
        (903_439, 131_072, 3_529),
        (665_690, 65_536, 4_096),
        (325_376, 40_960, 4_067),
        (392_920, 40_960, 4_096),
    ],
)
def test_limits_of_requests(num_tokens: int, context_len: int, published: int) -> None:
    assert most_requests(num_tokens, context_len, None) == published


def test_the_share_of_memory_is_that_of_the_card_unless_it_is_given() -> None:
    for gpu, tp, tokens, share in (
        ("rtx_4090", 1, None, 0.847),
        ("h100_sxm", 1, None, 0.835),
        ("h100_sxm", 8, None, 0.818),
        ("h100_sxm", 1, MAX_PREFILL_TOKENS, 0.685),
    ):
        found = estimate(LLAMA, gpu, tp, max_num_batched_tokens=tokens)
        assert found.gpu_memory_utilization == share
        assert "gpu_memory_utilization" in found.defaults
    given = estimate(LLAMA, "h100_sxm", 1, gpu_memory_utilization=0.9)
    assert given.gpu_memory_utilization == 0.9
    assert "gpu_memory_utilization" not in given.defaults


@pytest.mark.parametrize(
    ("chunks", "share"),
    [
        ({}, 0.835),
        ({"engine_version": "0.5.23"}, 0.830),
        ({"engine_version": "0.5.23", "chunked_prefill_size": -1}, 0.685),
        ({"chunked_prefill_size": -1}, 0.685),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 4096}, 0.874),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 32_768}, 0.383),
        ({"tp_size": 8}, 0.818),
    ],
)
def test_configurations_take_the_share_of_the_card(
    chunks: dict[str, Any], share: float
) -> None:
    config = parse_config(
        minimal(model=LLAMA, scheduler="sglang", gpu="h100_sxm", **chunks)
    )
    for each in (config, parse_config(config.model_dump())):  # as results keep it
        found = make_capacity(each.engine, load_model(LLAMA), load_gpu("h100_sxm"))
        assert found.gpu_memory_utilization == share
        assert "gpu_memory_utilization" in found.defaults


@pytest.mark.parametrize(
    ("release", "model", "gpu", "more", "share"),
    [
        # prompts are graphs, too: 58 of up to 8,192 tokens, each of 8 MiB
        ("0.5.10", LLAMA, "h100_sxm", {}, 0.830),
        ("0.5.23", LLAMA, "h100_sxm", {}, 0.830),
        ("0.5.12", "Qwen/Qwen3-32B", "h100_sxm", {"tp": 2}, 0.828),  # as users saw it
        ("0.5.12", "Qwen/Qwen3-1.7B", "rtx_4090", {}, 0.833),
        ("0.5.23", "Qwen/Qwen3-1.7B", "rtx_4090", {}, 0.704),
        ("0.5.23", "meta-llama/Llama-2-7b-hf", "h100_sxm", {}, 0.830),
        # latents' take 1.5 GiB, with an indexer from 0.5.13 on only
        ("0.5.12", "deepseek-ai/DeepSeek-V3", "h200_sxm", {"tp": 8}, 0.886),
        ("0.5.23", "deepseek-ai/DeepSeek-V3", "h200_sxm", {"tp": 8}, 0.886),
        ("0.5.12", "deepseek-ai/DeepSeek-V3.2", "h200_sxm", {"tp": 8}, 0.897),
        ("0.5.23", "deepseek-ai/DeepSeek-V3.2", "h200_sxm", {"tp": 8}, 0.886),
        # none on AMD's, nor of whole prompts, nor where graphs are off
        ("0.5.23", LLAMA, "mi300x", {"tp": 8}, 0.862),
        ("0.5.12", LLAMA, "h100_sxm", {"enforce_eager": True}, 0.830),
        ("0.5.23", LLAMA, "h100_sxm", {"enforce_eager": True}, 0.841),
        # graphs of decodes are no larger than what runs
        ("0.5.12", LLAMA, "h100_sxm", {"max_num_seqs": 64}, 0.830),
        ("0.5.23", LLAMA, "h100_sxm", {"max_num_seqs": 64}, 0.834),
        ("0.5.23", LLAMA, "h100_sxm", {"max_num_seqs": 999}, 0.830),
    ],
)
def test_later_releases_leave_room_for_graphs_of_prompts(
    release: str, model: str, gpu: str, more: dict[str, Any], share: float
) -> None:
    found = estimate(model, gpu, **{"tp": 1, "engine_version": release} | more)
    assert found.gpu_memory_utilization == share
    assert found.num_gpu_blocks_low < found.num_gpu_blocks < found.num_gpu_blocks_high


def test_aiter_takes_a_share_where_it_attends_to_long_sequences() -> None:
    """On AMD's GPUs, of models with as many heads a rank as it knows latents of."""
    given = {"engine_version": "0.5.20", "gpu_memory_utilization": 0.6}
    found = estimate("Qwen/Qwen3-0.6B", "mi355x", 1, **given)
    assert found.kv_cache_tokens == pytest.approx(1_360_288, rel=0.01)  # of 0.5.17

    def left_gib(model: str, tp: int, max_model_len: int) -> float:
        found = estimate(model, "mi300x", tp, max_model_len=max_model_len)
        return (found.total_bytes - found.requested_bytes) / GIB

    for model, tp in ((LLAMA, 1), ("deepseek-ai/DeepSeek-V3", 8)):
        share = estimate(model, "mi300x", tp).gpu_memory_utilization
        short, long = (left_gib(model, tp, each) for each in (8192, 8193))
        free_gib = short / (1 - share)
        assert long == pytest.approx(free_gib * (1 - 0.85 * share))
    assert left_gib("deepseek-ai/DeepSeek-V3", 4, 8193) == pytest.approx(
        left_gib("deepseek-ai/DeepSeek-V3", 4, 8192)
    )
    told = format_capacity(estimate(LLAMA, "mi300x", 1))
    assert "0.263 of the rest (1 - 0.85 mem_fraction_static, the release's" in told


def test_an_encoder_is_told_to_take_of_the_default_share() -> None:
    model, said = "Qwen/Qwen3-VL-30B-A3B-Instruct", "a model with an encoder"
    for more, is_told in (
        ({}, True),
        ({"gpu_memory_utilization": 0.7}, False),
        ({"num_gpu_blocks_override": 4096}, False),
    ):
        told = " ".join(estimate(model, "h200_sxm", 1, **more).warnings)
        assert (said in told) == is_told
    assert said not in " ".join(estimate(LLAMA, "h100_sxm", 1).warnings)


def test_small_pools_and_limits_that_are_given() -> None:
    assert most_requests(100, 4096, None) == 50
    assert most_requests(100, 4096, 7) == 7


@pytest.mark.parametrize(("gpu", "tokens"), [("t4", 16_384), ("h100_sxm", 65_536)])
def test_a_batch_that_takes_all_memory_is_named(gpu: str, tokens: int) -> None:
    said = rf"^mem_fraction_static is -\d.*{tokens:,} prompt tokens .* {gpu}.*; give "
    with pytest.raises(CapacityError, match=said):
        estimate("Qwen/Qwen3-1.7B", gpu, 1, max_num_batched_tokens=tokens)


def test_a_given_pool_without_memory_for_the_batch_is_told() -> None:
    """The rule's share of memory is negative, and 91 GiB of 24 were "activations"."""
    found = estimate(
        LLAMA, "rtx_4090", 1, num_gpu_blocks_override=3000, max_num_batched_tokens=65536
    )
    told = format_capacity(found)
    assert found.gpu_memory_utilization < 0
    assert "more than there is, so that SGLang does not start" in told
    assert "of the rest (1 - mem_fraction_static" not in told
