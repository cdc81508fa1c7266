"""A request that the pool can never hold, where steps are formed ahead."""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import parse_config
from tests.identity.compare import assert_equal_paths, one_by_one
from tests.sim.config.test_config import minimal


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("budget", [6, 7])
def test_a_prompt_given_up_amid_its_chunks_ends_the_run(
    num_stages: int, budget: int
) -> None:
    """It computed and gave up the same chunks for ever: one was always in flight."""
    data: dict[str, Any] = minimal(
        async_scheduling=num_stages == 1,
        pipeline_parallel_size=num_stages,
        block_size=1,
        num_gpu_blocks_override=92,
        max_model_len=169,
        max_num_seqs=1,
        max_num_batched_tokens=budget,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
        admission_check=False,
    )
    data["workload"]["synthetic"] |= {
        "num_requests": 3,
        "prompt_tokens": {"kind": "fixed", "tokens": 10},
        "output_tokens": {"kind": "fixed", "tokens": 98},
    }
    compared = assert_equal_paths(parse_config(data), reference=one_by_one)
    assert compared.chosen.summary["stalled"]
    assert compared.chosen.summary["unfinished"] == 3
    assert compared.chosen.summary["num_preemptions"] == (2 if num_stages == 1 else 1)
