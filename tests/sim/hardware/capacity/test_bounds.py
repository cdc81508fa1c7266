"""Rules of pools at their bounds, which no published log met: faults went unnoticed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace as Told
from typing import Any

import pytest

from sim.hardware.capacity import estimate_capacity
from sim.hardware.capacity.activations import sorting_bytes
from sim.hardware.capacity.experts import _memory_of
from sim.hardware.capacity.parts import _quantization_terms
from sim.hardware.capacity.sglang import defaults_of
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
    measured = estimate_capacity(LLAMA, "h100_sxm", weights_gib=18.0, **drafts)
    assert (measured.draft_bytes, measured.weights_bytes) == (0, 18 * 2**30)


def test_features_that_are_not_simulated_are_told_where_there_are_any() -> None:
    plain = load_model(LLAMA)
    more = replace(plain, not_simulated=("what it does besides",))
    told = [estimate_capacity(each, "h100_sxm").to_dict() for each in (plain, more)]
    assert "not_simulated" not in told[0]
    assert told[1]["not_simulated"] == ["what it does besides"]
