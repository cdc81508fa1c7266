"""Blocks and bytes that kernels need, by release and GPU: states and packed experts."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import CapacityError
from sim.hardware.capacity import estimate_capacity
from sim.hardware.models.kv_memory import kv_memory

QWEN = "Qwen/Qwen3-Next-80B-A3B-Instruct"
GRANITE = "ibm-granite/granite-4.0-h-small"


def groups(model: str, gpu: str, **arguments: Any) -> list[tuple[int, int]]:
    """Return tokens of a block, and blocks of a request, of states and of attention."""
    pool = estimate_capacity(
        model, gpu, tensor_parallel_size=2, max_model_len=65_536, **arguments
    )
    return [
        (group["block_size"], group["blocks_per_request"])
        for group in pool.kv_cache_groups
    ]


@pytest.mark.parametrize(
    ("gpu", "arguments", "block_size", "states"),
    [
        ("h200_sxm", {}, 576, 3),
        ("b200_sxm", {}, 576, 3),
        ("rtx_pro_6000_server", {}, 576, 3),
        ("a100_sxm", {"num_gpu_blocks_override": 5000}, 544, 2),
        ("mi300x", {}, 544, 2),
        ("h200_sxm", {"engine_version": "0.32"}, 544, 2),
        ("h200_sxm", {"gdn_prefill_backend": "triton"}, 544, 2),
        ("mi300x", {"gdn_prefill_backend": "flashinfer"}, 544, 2),
        ("h200_sxm", {"block_size": 48}, 576, 3),
    ],
)
def test_flashinfer_writes_states_of_delta_nets(
    gpu: str, arguments: dict[str, Any], block_size: int, states: int
) -> None:
    found = groups(QWEN, gpu, **arguments)
    assert (block_size, states) in found
    assert {size for size, _ in found} == {block_size}


def test_without_caching_a_request_has_one_state() -> None:
    assert groups(QWEN, "h200_sxm", enable_prefix_caching=False)[0] == (65_536, 1)


@pytest.mark.parametrize(("release", "states"), [("0.31", 2), ("0.32", 3)])
def test_the_kernel_of_mamba2_writes_states_from_a_release_on(
    release: str, states: int
) -> None:
    assert groups(GRANITE, "a100_sxm", engine_version=release)[0] == (528, states)


def test_a_curve_of_a_gpu_has_the_blocks_of_its_kernel() -> None:
    sizes = [
        kv_memory(QWEN, gpu, block_size=16, tensor_parallel_size=2).hit_tokens
        for gpu in (None, "h200_sxm", "mi300x")
    ]
    assert sizes == [544, 576, 544]


def test_a_kernel_that_is_not_known_is_refused() -> None:
    with pytest.raises(CapacityError, match="one of flashinfer, triton, cutedsl; got"):
        groups(QWEN, "h200_sxm", gdn_prefill_backend="fla")


@pytest.mark.parametrize(
    ("model", "gpu", "block_size", "taken"),
    [
        ("deepseek-ai/DeepSeek-V3.2", "h200_sxm", 16, "64 tokens"),
        ("deepseek-ai/DeepSeek-V3.2", "h200_sxm", 64, None),
        ("deepseek-ai/DeepSeek-V3.2", "mi355x", 16, None),
        ("deepseek-ai/DeepSeek-V3", "b200_sxm", 16, "32 or 64 tokens"),
        ("deepseek-ai/DeepSeek-V3", "b200_sxm", 32, None),
        ("deepseek-ai/DeepSeek-V3", "h200_sxm", 16, None),
    ],
)
def test_blocks_that_kernels_do_not_take_are_warned_of(
    model: str, gpu: str, block_size: int, taken: str | None
) -> None:
    pool = estimate_capacity(model, gpu, tensor_parallel_size=8, block_size=block_size)
    assert len(pool.warnings) == (taken is not None)
    assert taken is None or f"take blocks of {taken}" in pool.warnings[0]


def packed_gib(release: str, gpu: str) -> float:
    found = estimate_capacity(
        "openai/gpt-oss-120b", gpu, engine_version=release, max_model_len=8192
    )
    return found.weights_bytes / 2**30


def test_packed_experts_are_laid_out_as_the_release_does() -> None:
    """By hand, without scales: inputs of 1,440 bytes are 1,472 in 64s, 1,440 in 32s."""
    experts, layers = 128, 36
    wider = (5760 + 2880) * 32 * experts * layers / 2**30
    since_17 = packed_gib("0.17", "h200_sxm") - packed_gib("0.16", "h200_sxm")
    since_22 = packed_gib("0.22", "h200_sxm") - packed_gib("0.20", "h200_sxm")
    assert since_17 == pytest.approx(wider, rel=0.05)
    assert since_22 == pytest.approx(-wider, rel=0.05)


def test_packed_experts_weigh_what_engines_said() -> None:
    """A start of 0.26 on an H100, ours; one by Marlin's kernel (kvcached 187)."""
    assert packed_gib("0.26", "h100_sxm") == pytest.approx(61.43, rel=0.007)
    assert packed_gib("0.12", "a100_sxm_80gb") == pytest.approx(65.965, rel=0.001)


def test_packed_experts_on_blackwell_are_multiples_of_256() -> None:
    """3,072 for 2,880 on either side, of weights and scales."""
    wide, plain = 3 * 3072 * 3072, 3 * 2880 * 2880
    more = 36 * 128 * (wide - plain) * (1 / 2 + 1 / 32) / 2**30
    checkpoint = 60.80  # as its files are
    assert packed_gib("0.26", "b200") == pytest.approx(checkpoint + more, rel=0.002)
