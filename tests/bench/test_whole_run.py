"""Whole runs of the loop on the Azure conversation trace, requests per second.

Trace reading, result tables and figures are not counted; `kvsim run` prints the same
figure. The table in README.md beside this file says what was seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.config import load_config
from sim.simulate import Simulation
from tests.shared import ROOT, shared

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

REGIMES: dict[str, list[str]] = {
    "light x1": ["workload.trace.rate_scale=1"],
    "loaded x3": ["workload.trace.rate_scale=3"],
    "saturated x6": ["workload.trace.rate_scale=6"],
    "preempting x3, 6k blocks": [
        "workload.trace.rate_scale=3",
        "engine.num_gpu_blocks_override=6000",
    ],
    "loaded x3, prefix caching": [
        "workload.trace.rate_scale=3",
        "engine.enable_prefix_caching=true",
    ],
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.benchmark(group="whole run: 19,366 requests, stepwise")
def test_azure_conversation(benchmark: BenchmarkFixture, regime: str) -> None:
    trace = shared("traces/azure_llm_2023_conv.csv")
    config = load_config(
        ROOT / "examples" / "azure_conv.yaml",
        [f"workload.trace.path={trace}", *REGIMES[regime]],
    )

    def prepared() -> tuple[tuple[Simulation], dict[str, Any]]:
        return (Simulation(config),), {}

    def loop(simulation: Simulation) -> int:
        simulation.env.run(until=simulation.engine.done)
        return simulation.progress().num_done

    done = benchmark.pedantic(loop, setup=prepared, rounds=5)
    assert done == 19_366
    median_s = benchmark.stats.stats.median
    benchmark.extra_info["requests_per_s"] = done / median_s
    print(f"\n{regime}: {done / median_s:,.0f} requests/s (median of 5)")
