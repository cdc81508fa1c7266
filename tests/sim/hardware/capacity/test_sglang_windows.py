"""SGLang's two pools of gpt-oss, by hand from its shape and the memory that is left."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import CapacityError
from sim.hardware.capacity import (
    CapacityEstimate,
    estimate_capacity,
    format_capacity,
)

MODEL = "openai/gpt-oss-20b"
BYTES = 2 * 8 * 64 * 2  # of a token of a layer: keys and values, 8 heads of 64
FULL = WINDOW = 12  # layers


def estimate(model: str = MODEL, **more: Any) -> CapacityEstimate:
    given: dict[str, Any] = {"engine_version": "0.5.23", "block_size": 1}
    return estimate_capacity(model, "h100_sxm", **given | more)


@pytest.mark.parametrize("ratio", [None, 0.1, 1.0])
def test_memory_is_divided_by_the_ratio(ratio: float | None) -> None:
    pool = estimate(swa_full_tokens_ratio=ratio)
    share = 0.8 if ratio is None else ratio
    left = pool.available_kv_bytes
    tokens = int(left // (BYTES * FULL + share * BYTES * WINDOW))
    assert pool.kv_cache_tokens == tokens
    assert pool.swa_max_total_num_tokens == int(tokens * share)
    # gpt-oss sees 128 tokens, itself among them, which SGLang does not count
    assert pool.sliding_window_size == 127
    held = BYTES * (FULL * tokens + WINDOW * pool.swa_max_total_num_tokens)
    assert left - 2 * BYTES * (FULL + WINDOW) < held <= left
    assert pool.num_gpu_blocks_low < tokens < pool.num_gpu_blocks_high
    assert (pool.pool_source, pool.warnings) == ("profile", ())


def test_both_pools_are_told() -> None:
    pool = estimate()
    assert (pool.kv_cache_tokens, pool.swa_max_total_num_tokens) == (
        1_255_182,
        1_004_145,
    )
    said = format_capacity(pool)
    assert "max_total_num_tokens: 1,255,182, of layers with a window 1,004,145" in said
    assert "2 pools; a request of 131,072 tokens" in said
    first, second = pool.kv_cache_groups
    assert (first["num_blocks"], second["num_blocks"]) == (1_255_182, 1_004_145)
    assert (first["kind"], second["kind"]) == (
        "full attention",
        "sliding window of 128",
    )
    assert second["pages"] == (
        (12, BYTES, "keys and values of 8 heads x 64 in bfloat16"),
    )
    told = pool.to_dict()
    assert told["swa_max_total_num_tokens"] == 1_004_145
    plain = estimate("meta-llama/Llama-3.1-8B").to_dict()
    assert "swa_max_total_num_tokens" not in plain


def test_pools_that_are_given_are_divided_as_well() -> None:
    pool = estimate(num_gpu_blocks_override=100, block_size=16)
    assert (pool.kv_cache_tokens, pool.swa_max_total_num_tokens) == (1600, 1280)
    assert pool.available_kv_bytes == BYTES * (FULL * 1600 + WINDOW * 1280)
    assert pool.pool_source == "num_gpu_blocks_override"
    pool = estimate(kv_cache_memory_bytes=2**30)
    assert pool.kv_cache_tokens == int(2**30 // (BYTES * (FULL + 0.8 * WINDOW)))
    assert pool.pool_source == "kv_cache_memory_bytes"


def test_requests_size_the_second_pool_where_nothing_is_shared() -> None:
    """A window, what waits to be given back, and two chunks on their way."""
    given: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 256}
    pool = estimate(**given)
    most = 256 * (127 + 128 + 2) + 2 * 8192 + 1
    assert pool.swa_max_total_num_tokens == most
    left = pool.available_kv_bytes - most * BYTES * WINDOW
    assert pool.kv_cache_tokens == left // (BYTES * FULL)
    # not without a limit of requests, nor with whole prompts
    for other in ({"max_num_seqs": None}, {"enable_chunked_prefill": False}):
        pool = estimate(**given | other)
        assert pool.swa_max_total_num_tokens == int(pool.kv_cache_tokens * 0.8)


def test_windows_may_keep_all_tokens() -> None:
    pool = estimate(disable_hybrid_kv_cache_manager=True)
    left = pool.available_kv_bytes
    assert pool.kv_cache_tokens == left // (BYTES * (FULL + WINDOW))
    assert pool.swa_max_total_num_tokens == 0
    # as the release lets them of Gemma 3: 62 layers, 16 heads of 128
    gemma = estimate("google/gemma-3-27b-pt")
    assert gemma.block_bytes == 62 * 2 * 16 * 128 * 2
    assert gemma.swa_max_total_num_tokens == 0


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        (MODEL, {"engine_version": "0.5.22"}, "0.5.23 of gemma2, gemma3, gpt_oss, not"),
        ("google/gemma-4-31B", {}, "gemma-4-31B has 50 with a window or a state"),
        (MODEL, {"swa_full_tokens_ratio": 1.5}, "above 0 and at most 1, got 1.5"),
        (
            "meta-llama/Llama-3.1-8B",
            {"swa_full_tokens_ratio": 0.5},
            "divides two pools, and meta-llama/Llama-3.1-8B has one",
        ),
        (
            MODEL,
            {"num_gpu_blocks_override": 160},
            r"more than a window and a page \(128 tokens\), got 128",
        ),
        (MODEL, {"kv_cache_memory_bytes": 40_000}, "must hold two blocks at least"),
    ],
)
def test_what_is_refused(model: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(CapacityError, match=said):
        estimate(model, **more)
