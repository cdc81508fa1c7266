"""Several of the installed vLLM, with its NIXL connector, beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.scheduler.hosted.api import installed_version, nearest_release
from sim.studies.conformance.conform import Coverage, compare
from sim.studies.conformance.random_group_pairs import random_group_pools_workload
from sim.studies.conformance.random_groups import STYLES
from sim.studies.conformance.random_pairs import (
    random_pair_workload,
    random_pools_workload,
)
from tests.hosted.test_conform import minor, pytestmark, why_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["pytestmark"]

NUM_WORKLOADS, WORKLOADS_A_TEST = 240, 60


def met_from(
    first: int, drawn: Callable[..., Any], **settings: Any
) -> Mapping[str, int]:
    """Compare workloads of some seeds; return by event how many had it."""
    release = nearest_release(installed_version())
    coverage = Coverage()
    for seed in range(first, first + WORKLOADS_A_TEST):
        workload = drawn(seed, release, **settings)
        comparison = compare(workload)
        assert comparison.difference is None, (
            f"seed {seed}: {comparison.difference.in_words(('vLLM', 'kvsim'))}"
        )
        coverage.add(workload, comparison)
    return coverage.workloads_with


@pytest.mark.skipif(
    bool(why_missing()) or minor() != "0.33", reason="pairs are known of 0.33 only"
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, WORKLOADS_A_TEST))
def test_random_pairs_go_as_in_the_real_engine(first: int, asynchronous: bool) -> None:
    met = met_from(first, random_pair_workload, async_scheduling=asynchronous)
    for name in ("pulls", "failed pulls", "expired leases", "preempted decodes"):
        assert met[name] > 0, name


@pytest.mark.skipif(
    bool(why_missing()) or minor() != "0.33", reason="pools are known of 0.33 only"
)
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, WORKLOADS_A_TEST))
def test_random_pools_go_as_in_the_real_engines(
    first: int, asynchronous: bool, speculative: bool
) -> None:
    met = met_from(
        first,
        random_pools_workload,
        async_scheduling=asynchronous,
        speculative=speculative,
    )
    rare = "accepted drafts", "padded admissions"
    if not speculative:
        rare = "preemptions beside pulls", "aborts beside pulls"
    for name in (
        *("several prefillers", "several decoders", "heartbeats to several"),
        *("leases that end while another decoder pulls", "prompts of decoders"),
        *rare,
    ):
        assert met[name] > 0, name


def mostly_states(seed: int, release: str, **settings: Any) -> Any:
    """Hits of states are rare."""
    styles = STYLES if seed % 3 == 2 else ("states",)
    return random_group_pools_workload(seed, release, styles=styles, **settings)


@pytest.mark.skipif(
    bool(why_missing()) or minor() != "0.33", reason="pools are known of 0.33 only"
)
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, WORKLOADS_A_TEST))
def test_random_groups_in_pools_go_as_in_the_real_engines(
    first: int, asynchronous: bool, speculative: bool
) -> None:
    met = met_from(
        *(first, mostly_states),
        prefillers=0,
        decoders=0,
        async_scheduling=asynchronous,
        speculative=speculative,
    )
    of_states = ("groups of states", "hits inside blocks", "junctions")
    for name in (
        *("groups of windows", "groups of chunked attention", "failed pulls"),
        *("blocks of several sizes", "preemptions beside pulls"),
        *(("accepted drafts", "padded admissions") if speculative else of_states),
    ):
        assert met[name] > 0, name


@pytest.mark.skipif(
    bool(why_missing()) or minor() != "0.33", reason="pools are known of 0.33 only"
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, WORKLOADS_A_TEST))
def test_random_pools_with_tiers_go_as_in_the_real_engines(
    first: int, asynchronous: bool
) -> None:
    met = met_from(
        first, random_pools_workload, async_scheduling=asynchronous, offload=True
    )
    for name in (
        *("pulls", "pulls of nothing", "failed pulls", "expired leases"),
        *("loads", "stores", "evicted chunks", "refused stores", "flushes"),
    ):
        assert met[name] > 0, name
