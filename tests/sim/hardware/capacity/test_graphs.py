"""Graphs by release and number: what engines printed, which no constant rests on."""

from __future__ import annotations

from typing import Any

import pytest

from sim.hardware.capacity import estimate_capacity
from sim.hardware.gpus import GIB
from sim.hardware.graph_sizes import strided_sizes


def graphs_gib(model: str, gpu: str, version: str, **more: Any) -> float:
    given: dict[str, Any] = {"max_model_len": 2_048, "weights_gib": 1.0}
    found = estimate_capacity(model, gpu, engine_version=version, **given | more)
    return found.cuda_graph_bytes / GIB


# "Estimated CUDA graph memory" of start-up logs in public repositories and issues: of
# 0.23 to 0.31, one GPU, 86 graphs or 102; of 0.22 54 and 86 of the one model. From 0.29
# on it is the second model runner's; the 27B says 0.3, the most that is off.
@pytest.mark.parametrize(
    ("engine", "num_seqs", "gib", "most_off"),
    [
        (("Qwen/Qwen2.5-VL-7B-Instruct", "a100_sxm", "0.23"), 256, 0.53, 0.06),
        (("Qwen/Qwen2.5-7B-Instruct", "rtx_5090", "0.24"), 256, 0.63, 0.17),
        (("Qwen/Qwen3-30B-A3B", "h100_sxm", "0.26"), 1_024, 0.49, 0.15),
        (("Qwen/Qwen2.5-7B-Instruct", "l40s", "0.22"), 128, 0.37, 0.08),
        (("Qwen/Qwen3.5-4B", "rtx_a6000", "0.22"), 128, 0.40, 0.09),
        (("Qwen/Qwen3.5-4B", "rtx_a6000", "0.22"), 256, 0.64, 0.14),
        (("Qwen/Qwen3-4B", "rtx_5090", "0.29"), 256, 0.38, 0.16),
        (("Qwen/Qwen3.5-27B", "rtx_pro_6000_server", "0.29"), 1_024, 0.3, 0.47),
        (("meta-llama/Llama-3.1-8B-Instruct", "a100_sxm", "0.31"), 256, 0.45, 0.06),
    ],
)
def test_what_engines_set_aside(
    engine: tuple[str, str, str], num_seqs: int, gib: float, most_off: float
) -> None:
    found = graphs_gib(*engine, max_num_seqs=num_seqs)
    print(f"{engine}: {found:.2f} GiB, the engine {gib:.2f}")
    assert found == pytest.approx(gib, abs=most_off)


# The sizes of vLLM 0.17 to 0.26 as logs tell them: in pieces, and of decodes alone.
@pytest.mark.parametrize(
    ("num_seqs", "in_pieces", "of_decodes"),
    [(32, 11, 7), (40, 13, 8), (128, 35, 19), (256, 51, 35), (1_024, 51, 51)],
)
def test_how_many_are_captured(num_seqs: int, in_pieces: int, of_decodes: int) -> None:
    sizes = strided_sizes(min(2 * num_seqs, 512))
    assert len(sizes) == in_pieces
    assert sum(size <= num_seqs for size in sizes) == of_decodes


def test_flashinfer_works_in_more_where_batches_are_longer() -> None:
    """vLLM 52872, 64 layers on an RTX 5090: 0.89 GiB with 8,192 tokens, else 0.52."""
    given: dict[str, Any] = {"kv_cache_dtype": "fp8", "max_num_seqs": 16}
    by_batch = {
        tokens: graphs_gib(
            "Qwen/Qwen3.5-27B",
            "rtx_5090",
            "0.27",
            max_num_batched_tokens=tokens,
            **given,
        )
        for tokens in (8_192, 4_096, 3_072, 2_048)
    }
    assert by_batch[8_192] - by_batch[4_096] == pytest.approx(0.89 - 0.52, abs=0.01)
    assert by_batch[4_096] == by_batch[3_072] == by_batch[2_048]


@pytest.mark.parametrize(
    ("gpu", "dtype", "works_in_more"),
    [
        ("rtx_5090", "fp8", True),
        ("rtx_3090", "fp8", True),
        ("rtx_5090", "auto", False),
        ("h100_sxm", "fp8", False),
        ("b200_sxm", "auto", True),
        ("t4", "fp8", False),
        ("mi300x", "fp8", False),
    ],
)
def test_where_attention_is_flashinfers(
    gpu: str, dtype: str, works_in_more: bool
) -> None:
    plain = graphs_gib("Qwen/Qwen3-8B", "h100_sxm", "0.22", max_num_seqs=64)
    more = {"kv_cache_dtype": dtype, "max_num_seqs": 64}
    found = graphs_gib("Qwen/Qwen3-8B", gpu, "0.22", **more)
    assert found - plain == pytest.approx(works_in_more * 394 / 1_024, abs=1e-6)


@pytest.mark.parametrize("version", ["0.29", "0.33"])
def test_the_second_runner_keeps_as_much_as_the_first(version: str) -> None:
    """Qwen3-30B-A3B has the first in 0.28, by its experts: rules are one."""
    model = ("Qwen/Qwen3-30B-A3B", "h100_sxm")
    for num_seqs in (1, 32, 128, 1_024):
        given = {"max_num_seqs": num_seqs}
        first = graphs_gib(*model, "0.28", **given)
        assert graphs_gib(*model, version, **given) == first
    assert graphs_gib(*model, version, enforce_eager=True) == 0
    few = graphs_gib(*model, version, max_num_batched_tokens=64)
    assert few < graphs_gib(*model, version) / 2  # none has more tokens than a step


def test_sizes_that_are_given_are_those_that_count() -> None:
    model = ("Qwen/Qwen3-30B-A3B", "h100_sxm", "0.33")
    whole, four = graphs_gib(*model), [1, 2, 4, 8]
    eight = graphs_gib(*model, cudagraph_capture_sizes=four)
    assert eight == pytest.approx(whole * 8 / 86)  # four whole, four in pieces
    assert graphs_gib(*model, cudagraph_capture_sizes=[8, *four]) == eight
    seven = graphs_gib(*model, cudagraph_capture_sizes=four, max_num_seqs=4)
    assert seven == pytest.approx(whole * 7 / 86)  # no eight decode
    six = graphs_gib(*model, cudagraph_capture_sizes=four, max_num_batched_tokens=4)
    assert six == pytest.approx(whole * 6 / 86)
