"""What runs of the generations before V1 say of themselves, in odd corners."""

from __future__ import annotations

from typing import Any

import pytest

from cache.sequences import SequenceStatus
from sim.config import parse_config
from sim.errors import ConfigError
from sim.simulate import Simulation


def simulation(workload: dict[str, Any], *, num_requests: int, **engine: Any) -> Any:
    return Simulation(
        parse_config(
            {
                "workload": {
                    "synthetic": {
                        "num_requests": num_requests,
                        "arrivals": {"kind": "poisson", "rate": 200.0},
                        "prompt_tokens": {"kind": "fixed", "tokens": 60},
                        "output_tokens": {"kind": "fixed", "tokens": 60},
                    }
                }
                | workload,
                "engine": {"model": "meta-llama/Llama-3.1-8B", "gpu": "h200_sxm"}
                | engine,
            }
        )
    )


@pytest.mark.parametrize("scheduler", ["cacheflow", "v0_2"])
def test_a_group_that_never_swaps_back_is_a_stall(scheduler: str) -> None:
    stuck = simulation(
        {"best_of": 3},
        num_requests=1,
        scheduler=scheduler,
        admission_check=False,
        num_gpu_blocks_override=10,
        max_model_len=200,
        preemption_mode="swap",
    )
    summary = stuck.run(check_every=1).summary
    assert summary["stalled"]
    assert summary["unfinished"] == 1
    [warning] = [w for w in summary["warnings"] if "stalled" in w]
    assert "1 are swapped out" in warning
    assert "admission_check" in warning


def test_who_rejects_everybody_says_what_bounds_the_length() -> None:
    refused = simulation(
        {},
        num_requests=4,
        scheduler="cacheflow",
        num_gpu_blocks_override=200,
        max_num_batched_tokens=50,
        max_num_seqs=8,
    )
    with pytest.raises(ConfigError, match="50 max_num_batched_tokens") as error:
        refused.run()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_lookahead_slots", [0, 5, 17, 40])
@pytest.mark.parametrize("width", ["best_of", "beam_width"])
def test_physical_tokens_are_the_filled_slots_of_distinct_blocks(
    width: str, num_lookahead_slots: int
) -> None:
    """Empty blocks that lookahead slots took are shared by forks as well."""
    block_size = 16
    run = simulation(
        {width: 3},
        num_requests=6,
        scheduler="v0",
        block_size=block_size,
        num_gpu_blocks_override=64,
        max_model_len=200,
        num_lookahead_slots=num_lookahead_slots,
    )
    scheduler = run.scheduler
    num_shared = 0

    def compare(_: object) -> None:
        nonlocal num_shared
        filled: dict[int, int] = {}
        for group in scheduler.running:
            for seq in group.get_seqs(SequenceStatus.RUNNING):
                table = scheduler.block_manager.get_block_table(seq)
                for index, block_id in enumerate(table):
                    num_tokens = seq.num_computed_tokens - index * block_size
                    num_tokens = min(max(num_tokens, 0), block_size)
                    filled[block_id] = max(num_tokens, filled.get(block_id, 0))
        usage = scheduler.cache_usage()
        num_shared += usage.num_logical_blocks - usage.num_physical_blocks
        assert usage.num_physical_tokens == sum(filled.values())

    run.engine.observe(1, compare)
    assert run.run().summary["num_preemptions_swap"] > 0
    assert num_shared > 0
