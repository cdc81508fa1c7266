"""Whole runs on the published traces: counts, laws and hit rates that must hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.config.tables import load_config
from sim.simulation.run import Simulation
from tests.shared import ROOT, shared
from workloads.traces.mooncake import MooncakeTraceReader

if TYPE_CHECKING:
    from pathlib import Path

    from sim.results.run import Results

AZURE = "traces/azure_llm_2023_conv.csv"
MOONCAKE = "traces/mooncake_fast25_conversation.jsonl"


def run(example: str, trace: Path, *overrides: str, check_every: int = 0) -> Results:
    config = load_config(
        ROOT / "examples" / example, [f"workload.trace.path={trace}", *overrides]
    )
    return Simulation(config).run(check_every=check_every)


def test_azure_under_pressure_loses_nobody() -> None:
    results = run("azure_conv_pressure.yaml", shared(AZURE), check_every=2000)
    summary = results.summary
    assert summary["completed"] == summary["num_requests"] == 19_366
    # Means of traces/README.md: 1154.7 tokens in, 211.1 out.
    assert summary["total_input_tokens"] / 19_366 == pytest.approx(1154.7, abs=0.05)
    assert summary["total_output_tokens"] / 19_366 == pytest.approx(211.1, abs=0.05)
    assert summary["num_preemptions"] > 200
    assert summary["kv_cache_usage_max"] == 1.0
    requests, steps = results.requests, results.steps
    assert (requests["first_scheduled_s"] >= requests["arrival_s"]).all()
    assert (steps["num_physical_tokens"] <= steps["num_physical_blocks"] * 16).all()
    # Every token is computed once, but for those that preemptions threw away; what
    # follows the last token of an answer is computed in vain, one step ahead.
    once = summary["total_input_tokens"] + summary["total_output_tokens"] - 19_366
    again = summary["recomputed_tokens"] + summary["num_wasted_tokens"]
    assert steps["num_batched_tokens"].sum() == once + again
    # Little's law.
    sojourn_s = (requests["finish_s"] - requests["arrival_s"]).mean()
    rate = len(requests) / summary["duration"]
    assert summary["num_in_system_mean"] == pytest.approx(rate * sojourn_s, rel=1e-9)


def ideal_hits(trace: Path, block_size: int) -> int:
    """Hit tokens of an endless, instantly filled cache, counted on its own.

    A prompt's last token is always computed, so of a prompt that is known whole and
    ends with a block, that block does not count.
    """
    seen: set[tuple[int, ...]] = set()
    total = 0
    for request in MooncakeTraceReader(trace).read():
        ids = [
            segment * 1_000 + offset // block_size
            for segment, length in request.prompt
            for offset in range(0, length, block_size)
        ]
        num_full = request.num_prompt_tokens // block_size
        findable = (request.num_prompt_tokens - 1) // block_size
        chain = 0
        hitting = True
        for index in range(num_full):
            chain = hash((chain, ids[index]))
            key = (index, chain)
            hitting = hitting and key in seen and index < findable
            total += block_size * hitting
            seen.add(key)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [128, 16])
def test_an_endless_cache_reaches_the_ideal_hit_rate(block_size: int) -> None:
    trace = shared(MOONCAKE)
    results = run(
        "mooncake_conversation.yaml",
        trace,
        f"engine.block_size={block_size}",
        f"engine.num_gpu_blocks_override={7_000_000 * 16 // block_size}",
    )
    summary = results.summary
    assert summary["num_preemptions"] == summary["num_evictions"] == 0
    assert summary["prefix_cache_queries"] == 144_793_823
    assert summary["prefix_cache_hits"] == ideal_hits(trace, block_size)
    if block_size == 16:  # traces/README.md, in blocks of 512 with a partial last one
        assert summary["prefix_cache_hit_rate"] == pytest.approx(0.3736, abs=0.0005)


@pytest.mark.slow
def test_a_bounded_cache_hits_less_and_keeps_its_proof() -> None:
    results = run(
        "mooncake_conversation.yaml",
        shared(MOONCAKE),
        "engine.block_size=128",
        "workload.trace.limit=2500",
        check_every=500,
    )
    summary = results.summary
    assert summary["completed"] == 2500
    assert summary["num_evictions"] > 0
    assert 0 < summary["prefix_cache_hit_rate"] < 0.3
    steps = results.steps
    assert (steps["num_logical_blocks"] >= steps["num_physical_blocks"]).all()
    assert (steps["num_logical_blocks"] > steps["num_physical_blocks"]).any()
    assert (steps["num_physical_tokens"] <= steps["num_physical_blocks"] * 128).all()
    assert (steps["num_physical_tokens"] >= 0).all()
