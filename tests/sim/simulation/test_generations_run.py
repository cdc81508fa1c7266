"""Runs of the generations before V1, in odd corners."""

from __future__ import annotations

from typing import Any

import pytest

from cache.sequences import SequenceStatus
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.simulation.run import Simulation


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


@pytest.mark.parametrize(
    ("engine", "chunks", "budget"),
    [
        ({}, True, 2048),
        ({"num_gpu_blocks_override": 1500}, True, 2048),
        ({"num_gpu_blocks_override": 2060}, True, 2048),
        ({"enable_chunked_prefill": True, "max_model_len": 30_000}, True, 2048),
        ({"max_model_len": 30_000}, False, 30_000),
        ({"max_model_len": 1000}, False, 2048),
        ({"sliding_window": 4096, "max_model_len": 40_000}, False, 40_000),
        ({"max_num_batched_tokens": 777}, True, 777),
    ],
)
def test_v0_chunks_and_budgets_as_its_release_does(
    engine: dict[str, Any], chunks: bool, budget: int
) -> None:
    made = simulation({}, num_requests=1, scheduler="v0", **engine)
    config = made.scheduler.scheduler_config
    assert config.enable_chunked_prefill == chunks
    assert config.max_num_batched_tokens == budget
    assert made.capacity.max_num_batched_tokens == budget
    long = simulation(
        {
            "synthetic": {
                "num_requests": 2,
                "arrivals": {"kind": "poisson", "rate": 1.0},
                "prompt_tokens": {"kind": "fixed", "tokens": 900},
                "output_tokens": {"kind": "fixed", "tokens": 3},
            }
        },
        num_requests=2,
        scheduler="v0",
        **engine,
    )
    assert long.run().summary["completed"] == 2


def test_a_budget_follows_the_length_that_the_pool_holds() -> None:
    for scheduler in ("v0_2", "v0"):
        made = simulation(
            {},
            num_requests=1,
            scheduler=scheduler,
            num_gpu_blocks_override=1500,
            **({"enable_chunked_prefill": False} if scheduler == "v0" else {}),
        )
        capacity = made.capacity
        assert 20_000 < capacity.max_model_len < 24_000
        assert capacity.max_num_batched_tokens == capacity.max_model_len
        assert "can always bring to an end" in " ".join(made.warnings)


@pytest.mark.parametrize(
    ("engine", "rule"),
    [
        ({"scheduler": "v0_2", "sliding_window": 17}, "engine: sliding_window must be"),
        (
            {
                "scheduler": "v0",
                "sliding_window": 64,
                "enable_prefix_caching": True,
            },
            "engine: .*sliding window",
        ),
        ({"scheduler": "v0", "swap_space": 1e6}, "engine.swap_space: .*CPU; lower it"),
    ],
)
def test_what_no_manager_can_hold_is_refused_in_a_line(
    engine: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        simulation({}, num_requests=1, **engine)
    assert "\n" not in str(caught.value)


def test_tokens_behind_a_window_are_not_in_the_cache() -> None:
    run = simulation({}, num_requests=3, scheduler="v0", sliding_window=32)
    steps = run.run(check_every=1).steps
    assert (steps["num_physical_tokens"] <= steps["num_physical_blocks"] * 16).all()
    assert (steps["num_physical_tokens"] == steps["num_logical_tokens"]).all()
    # 120 tokens a request: blocks that end before its last window are given back.
    assert steps["num_logical_tokens"].max() < 3 * 120


def test_who_counts_samples_and_beams_as_requests_says_so() -> None:
    engine = {"scheduler": "v1", "num_gpu_blocks_override": 500}
    samples = simulation({"best_of": 2}, num_requests=2, **engine).run().summary
    assert samples["num_requests"] == samples["completed"] == 4
    assert any("every sample as a request" in line for line in samples["warnings"])
    beams = simulation({"beam_width": 2}, num_requests=2, **engine).run().summary
    assert beams["num_requests"] == beams["completed"] == 2 * (1 + 2 * 59)
    assert any("token by token" in line for line in beams["warnings"])


@pytest.mark.parametrize(
    ("workload", "engine", "key"),
    [
        ({}, {"evictor": "lru", "scheduler": "v0"}, "engine.evictor"),
        ({"priority": 3}, {}, "workload.priority"),
        (
            {},
            {
                "scheduler": "v0",
                "enable_chunked_prefill": True,
                "scheduling_policy": "priority",
            },
            "engine.scheduling_policy",
        ),
        ({"beam_width": 2, "best_of": 2}, {"scheduler": "v0"}, "workload.best_of"),
    ],
)
def test_keys_that_change_nothing_are_named(
    workload: dict[str, Any], engine: dict[str, Any], key: str
) -> None:
    made = simulation(workload, num_requests=1, **engine)
    assert [line for line in made.warnings if line.startswith(key)]
    plain = simulation({}, num_requests=1)
    assert not [line for line in plain.warnings if "nothing" in line]
