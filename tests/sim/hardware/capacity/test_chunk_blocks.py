"""Whether chunked layers give up the blocks behind their chunk, by release."""

from __future__ import annotations

from typing import Any

import pytest

from sim.hardware.capacity import estimate_capacity, format_capacity

SCOUT = "meta-llama/Llama-4-Scout-17B-16E"
DRAFTS = {"num_speculative_tokens": 3, "draft_model": "meta-llama/Llama-3.2-1B"}


@pytest.mark.parametrize(
    ("arguments", "num_tables"),
    [
        ({}, 4),
        ({"engine_version": "0.19"}, 4),
        ({"engine_version": "0.11"}, 1),
        ({"disable_hybrid_kv_cache_manager": True}, 1),
        (DRAFTS | {"speculative_method": "eagle3"}, 1),
        ({"num_speculative_tokens": 3, "speculative_method": "ngram"}, 4),
    ],
)
def test_chunked_layers_keep_all_blocks_where_the_release_does(
    arguments: dict[str, Any], num_tables: int
) -> None:
    pool = estimate_capacity(SCOUT, "h200_sxm", tensor_parallel_size=8, **arguments)
    assert pool.plan is not None
    assert len(pool.plan.layout.groups) == num_tables
    # Beside drafts there are the layers of the drafter.
    pages = pool.plan.layout.bytes_per_block // (16 * 2 * 128 * 2)
    assert pages >= 48 if num_tables == 1 else pages == 12
    kept = "chunks of 8,192, whose blocks are kept" in format_capacity(pool)
    assert kept == (num_tables == 1)
