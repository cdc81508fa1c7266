"""Memory of the profiled sampler, by release: logs that no constant was fitted to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.hardware.capacity import CapacityEstimate, estimate_capacity
from sim.hardware.gpus import GIB, load_gpu

QWEN2 = {"model": "Qwen/Qwen2.5-7B-Instruct", "max_model_len": 16_384}
"""The sizes of Qwen2-7B-Instruct."""


def a100(
    utilization: float, ranks: int, version: str = "0.10.1.1", **more: Any
) -> CapacityEstimate:
    return estimate_capacity(
        **{"gpu": "a100_sxm"} | QWEN2 | more,
        gpu_memory_utilization=utilization,
        tensor_parallel_size=ranks,
        engine_version=version,
    )


# github.com/dennislee22/vLLM-benchmarking: start-up logs of vLLM 0.10.1.1. They say
# that FlashInfer samples, but for the last, where it was not installed.
@pytest.mark.parametrize(
    ("utilization", "ranks", "more", "num_blocks"),
    [
        (0.5, 1, {}, 29_053),
        (0.25, 1, {}, 5_867),
        (0.5, 2, {}, 74_510),
        (0.25, 2, {}, 28_137),
        (0.5, 2, {"gpu": "a100_sxm_40gb", "use_flashinfer_sampler": False}, 25_809),
    ],
)
def test_logs_of_an_a100(
    utilization: float, ranks: int, more: dict[str, Any], num_blocks: int
) -> None:
    found = a100(utilization, ranks, **more)
    assert found.num_gpu_blocks == pytest.approx(num_blocks, rel=0.01)
    assert found.num_gpu_blocks_low <= num_blocks <= found.num_gpu_blocks_high


def test_a_log_of_v0_with_one_sequence() -> None:
    """vLLM 0.8.5 (V0), RTX 2060 of 12 GB, Qwen3-4B, prompts of 10,000: 1,394 blocks."""
    found = estimate_capacity(
        "Qwen/Qwen3-4B",
        replace(load_gpu("t4"), memory_bytes=12 * GIB),
        engine_version="0.7.3",
        gpu_memory_utilization=0.95,
        max_model_len=10_000,
        max_num_seqs=1,
        dtype="float16",
    )
    assert found.num_gpu_blocks == pytest.approx(1_394, rel=0.003)


def held_gib(version: str, **more: Any) -> float:
    found = estimate_capacity(
        "meta-llama/Llama-3.1-8B", "h100_sxm", engine_version=version, **more
    )
    return found.activation_peak_bytes / GIB


@pytest.mark.parametrize(
    ("version", "num_copies"),
    [
        ("0.10", 3),  # FlashInfer, in vLLM's images
        ("0.11.0", 3),
        ("0.11", 9),  # its last: PyTorch sorts
        ("0.16", 9),
        ("0.17", 3 + 132 / 1024),  # Triton, and its buffer
        ("0.25", 1),  # second model runner
    ],
)
def test_copies_of_the_logits_by_release(version: str, num_copies: float) -> None:
    row = 128_256 * 4 / GIB  # one more sequence is a row of all copies
    batch = {"max_num_batched_tokens": 2_048}
    held = held_gib(version, max_num_seqs=1_024, **batch)
    logits = held - 1_024 * row / 2
    rest = (2_048 + 2 * 1_024) * 4_096 * 2 / GIB + 0.0025 + 1 / 32
    assert (logits - rest) / (1_024 * row) == pytest.approx(num_copies, abs=0.002)


def test_the_second_model_runner_profiles_logits_alone() -> None:
    """0.26 to 0.32 work on them in place: the forward pass is left."""
    few = held_gib("0.29", max_num_seqs=8)
    assert held_gib("0.29", max_num_seqs=1_024) == few
    experts = {"max_num_seqs": 1_024, "engine_version": "0.29"}
    first = estimate_capacity("Qwen/Qwen3-30B-A3B", "h100_sxm", **experts)
    assert first.activation_peak_bytes / GIB > few + 1


def test_fewer_than_128_rows_are_sorted_as_one() -> None:
    """Three copies more each: 127 hold more than 128."""
    batch = {"max_num_batched_tokens": 256}
    rows = [held_gib("0.16", max_num_seqs=rows, **batch) for rows in (127, 128)]
    assert rows[0] > rows[1] + 0.1


def test_that_a_release_may_sort_is_told() -> None:
    said = "use_flashinfer_sampler: false) sorting takes up to 0.87 GiB more"
    assert any(said in reason for reason in a100(0.5, 1).extrapolated)
    for chosen in (True, False):
        told = a100(0.5, 1, use_flashinfer_sampler=chosen).extrapolated
        assert not any("sorting" in reason for reason in told)
    assert not any("sorting" in r for r in a100(0.5, 1, "0.12").extrapolated)
