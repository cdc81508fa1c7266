"""The memory rule of transformers' continuous batching."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from sim.cli.main import run as kvsim
from sim.errors import CapacityError
from sim.hardware.capacity import CapacityEstimate, estimate_capacity
from sim.hardware.gpus import GIB, load_gpu
from sim.hardware.models.bundled import load_model
from tests.conformance.hf_reference import why_missing

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.2-1B")


def estimate(
    model: str = MODELS[0], gpu: str = "h200_sxm", **more: Any
) -> CapacityEstimate:
    arguments: dict[str, Any] = {"engine_version": "5.17", "block_size": 256}
    return estimate_capacity(model, gpu, **arguments | more)


def test_the_blocks_of_an_8b_model_on_an_h200() -> None:
    """Held against the release's own handler; see below."""
    found = estimate()
    assert found.num_gpu_blocks == 3452
    assert found.num_gpu_blocks_low < 3452 < found.num_gpu_blocks_high
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (8192, 1024)
    parts = found.weights_bytes + found.non_torch_bytes + found.activation_peak_bytes
    assert found.requested_bytes - parts == found.num_gpu_blocks * found.block_bytes
    assert found.left_bytes == found.available_kv_bytes
    assert found.constants_source == "transformers' own rule, held against no log"


def test_the_pool_grows_with_what_is_left() -> None:
    plain = estimate().num_gpu_blocks
    assert estimate(gpu_memory_utilization=0.5).num_gpu_blocks < plain
    assert estimate(max_num_batched_tokens=65536).num_gpu_blocks < plain
    assert estimate(block_size=128).num_gpu_blocks == pytest.approx(2 * plain, abs=1)
    # All KV heads are counted on each rank: half of what a rank saves is left unused.
    two = estimate(tensor_parallel_size=2)
    assert two.num_gpu_blocks < 1.1 * plain
    assert two.block_bytes * 2 == estimate().block_bytes


def test_a_small_device_has_smaller_batches() -> None:
    found = estimate("meta-llama/Llama-3.1-8B", "rtx_4090")
    assert 256 <= found.max_num_batched_tokens < 8192
    assert found.kv_cache_tokens >= 8 * found.max_num_batched_tokens


def test_overrides_win_over_the_rule() -> None:
    assert estimate(num_gpu_blocks_override=77).num_gpu_blocks == 77
    by_bytes = estimate(kv_cache_memory_bytes=10 * GIB)
    assert by_bytes.num_gpu_blocks == 10 * GIB // by_bytes.block_bytes
    assert by_bytes.num_gpu_blocks_low == by_bytes.num_gpu_blocks
    assert estimate(swap_space=4.0).num_cpu_blocks == 4 * GIB // by_bytes.block_bytes


def test_what_does_not_fit_is_answered_in_a_line() -> None:
    with pytest.raises(CapacityError, match="no room for a KV cache"):
        estimate("meta-llama/Llama-3.1-8B", gpu_memory_utilization=0.001)
    with pytest.raises(CapacityError, match="must have full attention in all layers"):
        estimate("google/gemma-2-2b")
    with pytest.raises(CapacityError, match="a vLLM release such as"):
        estimate(engine_version="5.16")


def test_the_command_knows_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", MODELS[0], "--gpu", "h200_sxm", "--engine-version", "5.17"]
    assert kvsim(["capacity", *asked, "--block-size", "256", "--quiet"]) == 0
    assert capsys.readouterr().out == "3452\n"


@pytest.mark.skipif(why_missing() is not None, reason=why_missing() or "")
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("gpu", ["h200_sxm", "rtx_4090"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_num_batched_tokens", [None, 2048])
def test_the_rule_is_the_releases(
    name: str, gpu: str, max_num_batched_tokens: int | None
) -> None:
    """Number of blocks and tokens of a batch, from the same free memory."""
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig  # noqa: PLC0415
    from transformers.generation.configuration_utils import (  # noqa: PLC0415
        ContinuousBatchingConfig,
    )
    from transformers.generation.continuous_batching import cache  # noqa: PLC0415

    ours = estimate(name, gpu, max_num_batched_tokens=max_num_batched_tokens)
    model = load_model(name)
    config = LlamaConfig(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        num_hidden_layers=model.num_hidden_layers,
        vocab_size=model.vocab_size,
    )
    config._attn_implementation = "flash_attention_2"
    settings = ContinuousBatchingConfig(
        max_memory_percent=0.9,
        max_blocks_per_request=32,
        use_async_batching=False,
        max_batch_tokens=max_num_batched_tokens,
    )
    total = load_gpu(gpu).memory_bytes
    held = ours.weights_bytes + ours.non_torch_bytes
    with patch.object(
        cache, "get_device_and_memory_breakdown", lambda: (None, total, held, held)
    ):
        handler = cache.PagedAttentionMemoryHandler(
            config,
            settings,
            torch.bfloat16,
            ["full_attention"],
            model.num_hidden_layers,
        )
        theirs = handler.infer_max_batch_tokens_and_num_blocks()
    assert theirs == (ours.max_num_batched_tokens, ours.num_gpu_blocks)
