"""Rules of pools at their bounds, which no published log met: faults went unnoticed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace as Told
from typing import Any

import pytest

from sim.hardware.capacity import estimate_capacity, format_capacity
from sim.hardware.capacity.activations import _mlp_outputs, sorting_bytes
from sim.hardware.capacity.experts import _memory_of
from sim.hardware.capacity.parts import _quantization_terms
from sim.hardware.capacity.sglang import MARGIN_GIB, defaults_of
from sim.hardware.capacity.transformers import _peaks
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    ("release", "gpu", "ranks", "width", "memory"),
    [
        # DeepGEMM takes an expert wider than 512 until its scales are powers of two
        ((11, 0), "h100_sxm", 1, 512, "each call"),
        ((11, 0), "h100_sxm", 1, 513, "aligned buffers"),
        ((11, 0), "b200_sxm", 1, 512, "aligned buffers"),
        ((11, 1), "h100_sxm", 1, 512, "aligned buffers"),
        ((10, 2), "h100_sxm", 1, 2048, "each call"),
        ((11, 1), "a100_sxm", 1, 2048, "each call"),
        # and up to seven ranks from 0.13 on
        ((12, 0), "h100_sxm", 8, 2048, "aligned buffers"),
        ((13, 0), "h100_sxm", 7, 2048, "aligned buffers"),
        ((13, 0), "h100_sxm", 8, 2048, "each call"),
        ((15, 0), "h100_sxm", 8, 2048, "two buffers"),
        # FlashInfer's come first in 0.16, on Hopper in that release alone
        ((16, 0), "h100_sxm", 1, 2048, "output"),
        ((17, 0), "h100_sxm", 1, 2048, "two buffers"),
        ((17, 0), "b200_sxm", 1, 2048, "each call"),
    ],
)
def test_the_kernel_of_block_scaled_experts(
    release: tuple[int, int], gpu: str, ranks: int, width: int, memory: str
) -> None:
    minor, patch = release
    arguments: Any = Told(
        quantization="fp8-block",
        engine_minor=minor,
        engine_patch=patch,
        gpu=load_gpu(gpu),
        tensor_parallel_size=ranks,
        experts=Told(data_parallel_size=1, enable_expert_parallel=False),
    )
    assert _memory_of(arguments, width).value == memory


def test_experts_over_ranks_keep_hoppers_kernel() -> None:
    arguments: Any = Told(
        quantization="fp8-block",
        engine_minor=17,
        gpu=load_gpu("h100_sxm"),
        tensor_parallel_size=2,
        experts=Told(data_parallel_size=1, enable_expert_parallel=True),
    )
    assert _memory_of(arguments, 2048).value == "output"


@pytest.mark.parametrize(
    ("minor", "gpu", "engines", "memory"),
    [
        (13, "h100_sxm", 1, "each call"),
        (14, "h100_sxm", 1, "two buffers"),
        (19, "h100_sxm", 1, "two buffers"),
        (20, "h100_sxm", 1, "output"),  # FlashInfer's, on Hopper until 0.22
        (22, "h100_sxm", 1, "output"),
        (23, "h100_sxm", 1, "two buffers"),
        (23, "rtx_5090", 1, "output"),
        (23, "a100_sxm", 1, "two buffers"),
        (20, "h100_sxm", 2, "two buffers"),
    ],
)
def test_the_kernel_of_unquantised_experts(
    minor: int, gpu: str, engines: int, memory: str
) -> None:
    arguments: Any = Told(
        quantization=None,
        engine_minor=minor,
        gpu=load_gpu(gpu),
        experts=Told(data_parallel_size=engines),
    )
    assert _memory_of(arguments, 768).value == memory


@pytest.mark.parametrize(
    ("model", "inner"),
    [
        (LLAMA, 14_336),
        ("Qwen/Qwen3-30B-A3B", 0),  # experts alone, in all layers
        ("deepseek-ai/DeepSeek-V3", 18_432),  # dense in the first three
    ],
)
def test_the_widest_dense_layer_is_held(model: str, inner: int) -> None:
    """Gate, up and what is activated, of a rank's share."""
    arguments: Any = Told(
        model=load_model(model),
        itemsize_bytes=2,
        gpu=load_gpu("h100_sxm"),
        tensor_parallel_size=2,
        max_num_batched_tokens=100,
    )
    assert _mlp_outputs(arguments, None) == 100 * inner / 2 * 3 * 2


def test_what_attention_takes_in_transformers() -> None:
    """Of Llama-3.1-8B: keys and values of 8 heads of 128, beside 32 queries' heads."""
    arguments: Any = Told(
        model=load_model(LLAMA), itemsize_bytes=2, kv_itemsize_bytes=2
    )
    logits, attention = _peaks(arguments)
    assert logits.cached_token_bytes == 2 * 32 * 1024 * 2 + 8
    assert attention.cached_token_bytes - logits.cached_token_bytes == 2 * 1024 * 2
    assert attention.batch_token_bytes - logits.batch_token_bytes == (
        2 * (4096 + 4096 + 2 * 1024) - (2 * 4096 + 4 * 128_256)
    )


@pytest.mark.parametrize(("rows", "copies"), [(127, 12), (128, 9)])
def test_sorting_takes_copies_of_the_logits(rows: int, copies: int) -> None:
    """Three there are without a sort, in four bytes each."""
    arguments: Any = Told(max_num_seqs=rows, model=Told(vocab_size=1_000))
    assert sorting_bytes(arguments) == (copies - 3) * rows * 1_000 * 4


def test_the_doubts_of_quantised_weights_are_shares_of_them() -> None:
    arguments: Any = Told(
        quantization="fp8",
        weights_gib=None,
        model=Told(num_state_layers=36),
        gpu=load_gpu("a100_sxm"),
    )
    assert [gib for gib, _ in _quantization_terms(arguments, 19.0)] == [
        pytest.approx(0.38),  # some layers keep their precision
        pytest.approx(0.19),  # a GPU without FP8
    ]
    arguments.quantization = "awq"
    ((gib, _),) = _quantization_terms(arguments, 19.0)
    assert gib == pytest.approx(0.19)
    arguments.weights_gib = 19.0  # measured
    assert not [*_quantization_terms(arguments, 19.0)]


@pytest.mark.parametrize(("ranks", "largest"), [(3, 256), (4, 512)])
def test_sglang_captures_larger_batches_from_four_ranks_on(
    ranks: int, largest: int
) -> None:
    assert defaults_of(81_559, ranks, "0.5.9").cuda_graph_max_bs == largest


def test_the_interval_of_sglang_is_a_margin_to_either_side() -> None:
    found = estimate_capacity(
        LLAMA,
        "h100_sxm",
        engine_version="0.5.9",
        block_size=1,
        gpu_memory_utilization=0.8,
    )
    margin = MARGIN_GIB * 2**30 * 0.8 / found.block_bytes
    num, low, high = (
        getattr(found, f"num_gpu_blocks{side}") for side in ("", "_low", "_high")
    )
    assert (num - low, high - num) == pytest.approx((margin, margin), abs=1)


def test_another_name_of_a_precision_is_as_many_bytes() -> None:
    blocks = {
        name: estimate_capacity(LLAMA, "h100_sxm", dtype=name).block_bytes
        for name in ("bfloat16", "half", "float32")
    }
    assert blocks["half"] == blocks["bfloat16"] == blocks["float32"] // 2


def test_measured_weights_hold_those_of_the_drafter() -> None:
    drafts: Any = {
        "speculative_method": "draft_model",
        "draft_model": "meta-llama/Llama-3.2-1B",
        "num_speculative_tokens": 3,
    }
    counted = estimate_capacity(LLAMA, "h100_sxm", **drafts)
    assert counted.draft_bytes > 2**31
    drafter, target = 16 * 8 * 64, 32 * 8 * 128
    assert counted.draft_kv_share == drafter / (drafter + target)
    measured = estimate_capacity(LLAMA, "h100_sxm", weights_gib=18.0, **drafts)
    assert (measured.draft_bytes, measured.weights_bytes) == (0, 18 * 2**30)


def test_only_engines_that_there_are_several_of_are_told() -> None:
    model = "Qwen/Qwen3-30B-A3B"
    shown = [
        format_capacity(
            estimate_capacity(
                model,
                "h100_sxm",
                data_parallel_size=engines,
                enable_expert_parallel=engines > 1,
            )
        )
        for engines in (1, 2)
    ]
    assert [f"{model}, bfloat16, TP 1, DP 2" in text for text in shown] == [False, True]
    assert "DP" not in shown[0]


def test_features_that_are_not_simulated_are_told_where_there_are_any() -> None:
    plain = load_model(LLAMA)
    more = replace(plain, not_simulated=("what it does besides",))
    told = [estimate_capacity(each, "h100_sxm").to_dict() for each in (plain, more)]
    assert "not_simulated" not in told[0]
    assert told[1]["not_simulated"] == ["what it does besides"]
