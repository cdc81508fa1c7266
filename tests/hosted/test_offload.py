"""The installed vLLM's offloading connector beside ours: `make test-hosted`."""

from __future__ import annotations

from typing import Any

import pytest

from sim.scheduler.hosted.api import installed_version, nearest_release
from sim.studies.conformance.conform import Coverage, compare
from sim.studies.conformance.random_offload import (
    random_group_offload_workload,
    random_offload_workload,
)
from tests.hosted.test_conform import minor, pytestmark, why_missing

__all__ = ["pytestmark"]

NUM_WORKLOADS, WORKLOADS_A_TEST = 240, 60


@pytest.mark.skipif(
    bool(why_missing()) or minor() != "0.33", reason="a CPU tier is known of 0.33 only"
)
@pytest.mark.parametrize(
    "draw", [random_offload_workload, random_group_offload_workload]
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, WORKLOADS_A_TEST))
def test_random_tiers_go_as_in_the_real_engine(
    first: int, asynchronous: bool, draw: Any
) -> None:
    release = nearest_release(installed_version())
    coverage = Coverage()
    for seed in range(first, first + WORKLOADS_A_TEST):
        workload = draw(seed, release, async_scheduling=asynchronous)
        comparison = compare(workload)
        assert comparison.difference is None, (
            f"seed {seed}: {comparison.difference.in_words(('vLLM', 'kvsim'))}"
        )
        coverage.add(workload, comparison)
    met = coverage.workloads_with
    for name in ("loads", "stores", "evicted chunks", "refused stores", "flushes"):
        assert met[name] > 0, name
