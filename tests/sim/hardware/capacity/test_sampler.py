"""Memory of the profiled sampler, by release: logs that no constant was fitted to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.errors import CapacityError
from sim.hardware.capacity import CapacityEstimate, estimate_capacity, format_capacity
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
        **{"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"} | more,
        engine_version=version,
        warm_compile_cache=True,
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
        ("0.21", 3 + 132 / 1024),  # the same, whatever samples
    ],
)
def test_copies_of_the_logits_by_release(version: str, num_copies: float) -> None:
    row = 128_256 * 4 / GIB  # one more sequence is a row of all copies
    batch = {"max_num_batched_tokens": 2_048}
    held = held_gib(version, max_num_seqs=1_024, **batch)
    logits = held - 1_024 * row / 2
    rest = (2_048 + 2 * 1_024) * 4_096 * 2 / GIB + 0.0025 + 1 / 32
    assert (logits - rest) / (1_024 * row) == pytest.approx(num_copies, abs=0.002)


@pytest.mark.parametrize(
    ("version", "num_copies", "keeps_counts"),
    [("0.25", 1, 0), ("0.26", 0, 0), ("0.27", 0, 1), ("0.32", 0, 1), ("0.33", 3, 1)],
)
def test_a_sequence_of_the_second_model_runner(
    version: str, num_copies: int, keeps_counts: int
) -> None:
    """Logits, copies of them, a hidden state, and the state of its sampler."""
    vocabulary, batch = 128_256, {"max_num_batched_tokens": 1_024}
    more = [held_gib(version, max_num_seqs=rows, **batch) for rows in (1_024, 512)]
    kept = 4 * (vocabulary + 2 * vocabulary // 32 + 4_481)
    one = vocabulary * (2 + 4 * num_copies) + 4_096 * 2 + keeps_counts * kept
    assert (more[0] - more[1]) * GIB == pytest.approx(512 * one, rel=1e-6)


def test_the_second_model_runner_without_flashinfer_masks_in_place() -> None:
    masked = held_gib("0.33", use_flashinfer_sampler=False)
    assert held_gib("0.33") - masked == pytest.approx(
        (2 * 1_024 - 132) * 128_256 * 4 / GIB, abs=1e-6
    )


def test_models_with_experts_have_the_second_model_runner_from_0_29_on() -> None:
    experts = {"model": "Qwen/Qwen3-30B-A3B"}
    assert held_gib("0.28", **experts) > held_gib("0.29", **experts) + 0.5
    drafts = experts | {"num_speculative_tokens": 3, "speculative_method": "ngram"}
    assert held_gib("0.31", **drafts) > held_gib("0.32", **drafts) + 0.5
    assert held_gib("0.32", **drafts) == held_gib("0.32", **experts)


# Start-up logs of 0.26 to 0.31 whose compiled code was cached or not, and the pool's
# GiB: notes and tests of public repositories, and a blog's "Running a single LLM across
# two GPUs with vLLM" (Qwen3-32B) and its sequel on four (Qwen3-235B). The utilisation
# is the releases' own default of 0.92 where none was given. Compiling, Qwen3-8B held
# 1.18 GiB and Qwen2.5-0.5B 0.25; with the code cached Qwen3-8B 0.19: their embeddings
# are 1.16 and 0.25 GiB.
QWEN3_8B = {"gpu": "rtx_4090", "model": "Qwen/Qwen3-8B", "max_model_len": 8_192}
QWEN3_8B_LONG = QWEN3_8B | {"max_model_len": 32_768, "use_flashinfer_sampler": False}
SMALL = {"gpu": "rtx_4090", "model": "Qwen/Qwen2.5-0.5B-Instruct"}
QWEN3_4B = {"gpu": "rtx_5090", "model": "Qwen/Qwen3-4B", "max_model_len": 8_192}
QWEN3_4B |= {"weights_gib": 7.64}


@pytest.mark.parametrize(
    ("release", "more", "pool_gib", "known_error"),
    [
        (("0.27.1", 23.516, 0.92), QWEN3_8B, 4.915, 0.003),
        (
            ("0.27.1", 23.516, 0.92),
            QWEN3_8B | {"warm_compile_cache": True},
            5.911,
            0.004,
        ),
        # 36,992 and 43,888 tokens of a card that keeps one sequence of 32,768: it
        # keeps nothing for graphs, as the second model runner does not
        (("0.24.0", 23.516, 0.92), QWEN3_8B_LONG, 5.08, 0.006),
        (
            ("0.24.0", 23.516, 0.92),
            QWEN3_8B_LONG | {"warm_compile_cache": True},
            6.027,
            0.006,
        ),
        (("0.27.1", 23.99, 0.85), SMALL, 18.65, 0.015),
        (
            ("0.27.1", 23.99, 0.92),
            SMALL | {"max_num_batched_tokens": 8_192},
            20.52,
            0.004,
        ),
        (
            ("0.26.0", 15.55, 0.9),
            SMALL | {"max_num_batched_tokens": 32_768, "warm_compile_cache": True},
            11.94,
            0.005,
        ),
        (
            ("0.27.1", 95.01, 0.426),
            {
                "model": "Qwen/Qwen3-32B",
                "gpu": "rtx_pro_6000_server",
                "tensor_parallel_size": 2,
                "max_model_len": 32_768,
            },
            8.22,
            0.004,
        ),
        (  # two of which nothing was known while the rules were found
            ("0.27.1", 23.99, 0.9),
            {
                "model": "Qwen/Qwen3-14B",
                "gpu": "rtx_4090",
                "quantization": "fp8-block128",
                "max_model_len": 8_192,
            },
            4.463,
            0.01,
        ),
        (
            ("0.27.1", 95.01, 0.9),
            {
                "model": "Qwen/Qwen3-235B-A22B-Instruct-2507",
                "gpu": "rtx_pro_6000_server",
                "quantization": "fp8-block128",
                "tensor_parallel_size": 4,
                "max_model_len": 32_768,
                "max_num_seqs": 32,
            },
            27.85,
            0.025,  # 18 graphs: with those of 256 sequences it would be 0.4 % short
        ),
        (
            ("0.31.0", 79.25, 0.92),
            {"model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "a100_sxm"},
            56.21,
            0.001,
        ),
        (  # 10,576 and 19,744 tokens of a card of 16 GB: 0.25 and 0.19 GiB less
            ("0.29.0", 15.93, 0.7),
            QWEN3_4B,
            1.452,
            0.175,
        ),
        (
            ("0.30.0", 15.93, 0.7),
            QWEN3_4B | {"warm_compile_cache": True},
            2.711,
            0.071,
        ),
    ],
)
def test_logs_of_later_releases(
    release: tuple[str, float, float],
    more: dict[str, Any],
    pool_gib: float,
    known_error: float,
) -> None:
    version, total_gib, utilization = release
    gpu = replace(load_gpu(more["gpu"]), memory_bytes=round(total_gib * GIB))
    found = estimate_capacity(
        **more | {"gpu": gpu},
        engine_version=version,
        gpu_memory_utilization=utilization,
    )
    error = found.available_kv_bytes / GIB / pool_gib - 1
    print(f"{found.model} {version}: {error:+.2%}")
    assert abs(error) <= known_error
    held = pool_gib * GIB / found.block_bytes
    assert found.num_gpu_blocks_low <= held <= found.num_gpu_blocks_high


@pytest.mark.parametrize(
    ("model", "quantization", "first"),
    [
        ("Qwen/Qwen3-8B", None, 23),
        ("meta-llama/Llama-3.1-8B-Instruct", None, 23),
        ("mistralai/Mistral-7B-Instruct-v0.3", None, 23),
        ("Qwen/Qwen3-8B", "fp8", 25),
        ("Qwen/Qwen2.5-7B-Instruct", None, 25),
        ("Qwen/Qwen3-30B-A3B", None, 29),
    ],
)
def test_the_second_model_runner_by_release_and_model(
    model: str, quantization: str | None, first: int
) -> None:
    """It takes graphs for nothing before 0.29, the first does not from 0.21 on."""
    kept = {
        minor: estimate_capacity(
            model, "h100_sxm", quantization=quantization, engine_version=f"0.{minor}"
        ).cuda_graph_bytes
        for minor in range(22, 29)
    }
    assert [minor for minor, held in kept.items() if not held] == list(range(first, 29))


def test_that_the_first_start_compiles_is_told() -> None:
    card = {"gpu": load_gpu("rtx_4090"), "model": "Qwen/Qwen3-8B"}
    said = [
        estimate_capacity(**card, engine_version=version, **more).extrapolated
        for version, more in (
            ("0.27", {}),
            ("0.31", {}),
            ("0.31", {"warm_compile_cache": True}),
            ("0.31", {"enforce_eager": True}),
        )
    ]
    told = [sum("compil" in reason for reason in reasons) for reasons in said]
    assert told == [2, 1, 0, 1]  # eager: that graphs were measured with compiled ones


def test_a_first_start_says_what_its_peak_is() -> None:
    card: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "gpu": "rtx_4090"}
    card |= {"engine_version": "0.27", "max_num_seqs": 16}
    first = format_capacity(estimate_capacity(**card))
    cached = format_capacity(estimate_capacity(**card, warm_compile_cache=True))
    assert "GiB  a first start: kernels are timed on a copy of the embedding" in first
    assert "GiB  2048 tokens, 16 sequences" in cached
    with pytest.raises(CapacityError, match=r"code cached \(warm_compile_cache\)"):
        estimate_capacity(**card, gpu_memory_utilization=0.69)


def a_card(
    model: str, total_gib: float, utilization: float, version: str, **more: Any
) -> float:
    """Return the GiB of a pool on a card of so much memory, and few tokens a batch."""
    found = estimate_capacity(
        model,
        replace(load_gpu("rtx_3090"), memory_bytes=round(total_gib * GIB)),
        gpu_memory_utilization=utilization,
        engine_version=version,
        max_num_batched_tokens=2_048,
        **more,
    )
    return found.available_kv_bytes / GIB


# Qwen2.5-3B in AWQ (1.95 GiB) on a card of 6 GB: 2.41 GiB of 0.79 of it with the code
# cached, 1.5 GiB of 0.80 without. Sequences are not told. The log is of 0.29 with the
# first model runner, whose graphs took 0.07 GiB.
@pytest.mark.parametrize("num_seqs", [16, 24, 32])
def test_an_allocator_keeps_a_copy_up_to_0_30(num_seqs: int) -> None:
    given: dict[str, Any] = {"weights_gib": 1.95, "max_num_seqs": num_seqs}
    given |= {"max_model_len": 2_048}
    model, embedding = "Qwen/Qwen2.5-3B-Instruct", 151_936 * 2_048 * 2 / GIB
    warm = a_card(model, 6, 0.79, "0.29", warm_compile_cache=True, **given)
    assert warm == pytest.approx(2.41, abs=0.035)
    cold = [a_card(model, 6, 0.80, f"0.{minor}", **given) for minor in range(28, 32)]
    assert cold[1] == pytest.approx(1.5, abs=0.085)
    graphs = cold[0] - cold[1]  # the second runner of 0.28 takes them for nothing
    assert graphs == pytest.approx(0.07, abs=0.045)
    assert cold[1] == cold[2]
    assert cold[3] - cold[2] == pytest.approx(embedding, abs=0.001)


def test_eight_billion_in_awq_have_an_embedding_more_from_0_31_on() -> None:
    """First starts on 16 GB: 3.25 GiB of 0.30, 4.34 of 0.31; their arguments are not
    told, so that the difference is what they say."""
    given: dict[str, Any] = {"weights_gib": 6.5, "max_num_seqs": 64}
    pools = [
        a_card("Qwen/Qwen3-8B", 15.5, 0.85, version, max_model_len=16_384, **given)
        for version in ("0.30", "0.31")
    ]
    assert pools[1] - pools[0] == pytest.approx(4.34 - 3.25, abs=0.08)
