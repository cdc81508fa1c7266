"""Experts divided over data-parallel ranks: what a GPU holds, and how it is told."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import CapacityError
from sim.hardware.capacity import estimate_capacity, format_capacity
from sim.hardware.models.bundled import load_model
from sim.hardware.models.weights import ExpertRanks, weight_tensors

DEEPSEEK = "deepseek-ai/DeepSeek-V3"
EXPERT_LAYERS = 58
EXPERT_PARAMETERS = 3 * 7168 * 2048
"""Gate, up and down of one expert."""


def expert_parameters(tp: int, ranks: ExpertRanks) -> int:
    tensors = weight_tensors(load_model(DEEPSEEK), tp, experts=ranks)
    return sum(
        tensor.num_elements * tensor.count
        for tensor in tensors
        if tensor.role.value == "expert"
    )


@pytest.mark.parametrize(
    ("tp", "dp", "whole", "num_experts"),
    [(1, 8, True, 32), (1, 16, True, 16), (8, 1, True, 32), (2, 3, True, 43)],
)
def test_a_gpu_holds_whole_experts_of_its_share(
    tp: int, dp: int, whole: bool, num_experts: int
) -> None:
    found = expert_parameters(tp, ExpertRanks(dp, whole))
    assert found == num_experts * EXPERT_LAYERS * EXPERT_PARAMETERS


def test_without_expert_parallelism_it_holds_a_share_of_each() -> None:
    found = expert_parameters(2, ExpertRanks(8, False))
    assert found == 256 * EXPERT_LAYERS * EXPERT_PARAMETERS // 16


def test_attention_is_replicated_and_experts_are_not() -> None:
    def estimate(tp: int, dp: int) -> tuple[int, int, int]:
        pool = estimate_capacity(
            DEEPSEEK,
            "h200_sxm",
            tensor_parallel_size=tp,
            data_parallel_size=dp,
            enable_expert_parallel=True,
            enforce_eager=True,  # whole graphs of 128 heads take 8 GiB, of 16 one
        )
        rest = pool.weights_bytes - pool.expert_bytes
        return pool.expert_bytes, rest, pool.num_gpu_blocks

    experts_8, rest_8, blocks_8 = estimate(1, 8)
    experts_16, rest_16, blocks_16 = estimate(1, 16)
    experts_tp, rest_tp, blocks_tp = estimate(8, 1)
    assert experts_8 == experts_tp == pytest.approx(2 * experts_16, rel=1e-3)
    assert rest_8 == rest_16 > 3 * rest_tp  # some of it is replicated by TP, too
    assert blocks_8 < blocks_tp < blocks_16
    assert 8 * blocks_8 > 4 * blocks_tp  # eight pools: TP replicates the latent


def test_the_explanation_names_the_ranks() -> None:
    given = {"data_parallel_size": 8, "enable_expert_parallel": True}
    pool = estimate_capacity(DEEPSEEK, "h200_sxm", **given)  # type: ignore[arg-type]
    told = format_capacity(pool)
    assert "of them experts     76.14 GiB  some of them whole, over 8 GPUs" in told
    assert "on each of 8 data-parallel ranks, a pool of its own" in told
    assert pool.to_dict()["data_parallel_size"] == 8
    plain = estimate_capacity(DEEPSEEK, "h200_sxm", tensor_parallel_size=8)
    keys = {"data_parallel_size", "enable_expert_parallel", "expert_bytes"}
    assert not keys & plain.to_dict().keys()


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(CapacityError, match="8B is none"):
        estimate_capacity(
            "meta-llama/Llama-3.1-8B", "h200_sxm", enable_expert_parallel=True
        )
    with pytest.raises(CapacityError, match="has 8; got 16 GPUs"):
        estimate_capacity(
            "mistralai/Mixtral-8x7B-v0.1",
            "h200_sxm",
            data_parallel_size=16,
            enable_expert_parallel=True,
        )


def test_experts_are_divided_at_whole_blocks_of_scales_in_older_releases() -> None:
    """1,536 rows over eight GPUs are 192, one and a half blocks of 128."""
    asked: Any = {"model": "Qwen/Qwen3-235B-A22B-FP8", "gpu": "h200_sxm"}
    rule = "0.19 divides experts at whole blocks of 128 .* 8 GPUs has 192 rows a GPU; "
    with pytest.raises(CapacityError, match=f"{rule}set enable_expert_parallel"):
        estimate_capacity(**asked, engine_version="0.19", tensor_parallel_size=8)
    for given in (
        {"engine_version": "0.19", "tensor_parallel_size": 4},
        {"engine_version": "0.33", "tensor_parallel_size": 8},
        {
            "engine_version": "0.19",
            "tensor_parallel_size": 8,
            "enable_expert_parallel": True,
        },
    ):
        assert estimate_capacity(**asked | given).num_gpu_blocks > 0


def test_ranks_of_a_dense_model_have_the_pool_of_one() -> None:
    one = estimate_capacity("meta-llama/Llama-3.1-8B", "h200_sxm")
    many = estimate_capacity(
        "meta-llama/Llama-3.1-8B", "h200_sxm", data_parallel_size=4
    )
    assert many.num_gpu_blocks == one.num_gpu_blocks
