"""Common prefixes as the installed vLLM counts them, and when it reads them once.

`make test-hosted VLLM=0.17.1`: 0.32 has neither any more.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.costs.roofline.cascade_rule import CascadeRule
from sim.scheduler.hosted.api import installed_version, nearest_release
from sim.scheduler.v1.dialect import dialect_of
from sim.studies.conformance import driver_of
from sim.studies.conformance.driver import hosted_scheduler, make_scheduler
from sim.studies.conformance.random_v1 import random_workload
from tests.hosted.test_conform import pytestmark as hosted
from tests.hosted.test_conform import why_missing

if TYPE_CHECKING:
    from sim.studies.conformance.workload import DecisionWorkload

NOTHING: Any = None
HAS_CASCADE = (
    not why_missing() and dialect_of(nearest_release(installed_version())).has_cascade
)
pytestmark = [
    *hosted,
    pytest.mark.skipif(not HAS_CASCADE, reason="removed in 0.32"),
]


def test_the_rule_is_that_of_the_installed_attention() -> None:
    backend = pytest.importorskip("vllm.v1.attention.backends.flash_attn")
    names = backend.use_cascade_attention.__code__.co_varnames
    others = {
        name: value
        for name, value in (
            *((f"use_{kind}", False) for kind in ("alibi", "sliding_window")),
            ("use_local_attention", False),
            ("dcp_world_size", 1),
        )
        if name in names
    }
    rng = Random(0)
    answers = set()
    for _ in range(20_000):
        num_kv_heads = rng.choice([1, 2, 4, 8, 32])
        num_heads = num_kv_heads * rng.choice([1, 1, 2, 4, 5, 7, 8, 16, 130])
        num_requests = rng.choice([1, 7, 8, 9, 16, 32, rng.randint(1, 600)])
        num_tokens = rng.choice([16 * rng.randint(0, 40), 16 * rng.randint(0, 2000)])
        num_sms = rng.choice([58, 82, 108, 128, 132, 142, 188])
        queries = np.ones(num_requests, np.int32)
        has_chunks = rng.random() < 0.3
        if has_chunks:
            queries[rng.randrange(num_requests)] = rng.randint(2, 900)
        theirs = backend.use_cascade_attention(
            common_prefix_len=num_tokens,
            query_lens=queries,
            num_query_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_sms=num_sms,
            **others,
        )
        rule = CascadeRule(num_heads, num_kv_heads, num_sms, NOTHING)
        ours = rule.is_used(num_tokens, num_requests, has_chunks=has_chunks)
        assert ours == theirs, (num_tokens, queries, num_heads, num_kv_heads, num_sms)
        answers.add((ours, has_chunks))
    assert len(answers) == 4


def theirs(workload: DecisionWorkload) -> list[list[int]]:
    """Return leading blocks in common, by step, as the installed scheduler says."""
    told: list[list[int]] = []

    def make(workload: DecisionWorkload) -> Any:
        scheduler = hosted_scheduler(workload)
        own = scheduler.engine.scheduler.schedule

        def schedule() -> Any:
            output = own()
            blocks = output.num_common_prefix_blocks
            told.append([blocks] if isinstance(blocks, int) else list(blocks))
            return output

        scheduler.engine.scheduler.schedule = schedule
        return scheduler

    for _ in driver_of(workload, make=make).lines():
        pass
    return told


def ours(workload: DecisionWorkload) -> list[list[int]]:
    told: list[list[int]] = []

    def make(workload: DecisionWorkload) -> Any:
        scheduler = make_scheduler(workload, engine_version=installed_version())
        scheduler.tell_common_prefixes()
        common, own = scheduler.common_prefix, scheduler.schedule

        def schedule(now_s: float) -> Any:
            output = own(now_s)
            told.append(common.num_blocks())
            return output

        scheduler.schedule = schedule
        return scheduler

    for _ in driver_of(workload, make=make).lines():
        pass
    return told


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_common_prefixes_are_those_of_the_installed_scheduler(first: int) -> None:
    release = nearest_release(installed_version())
    num_shared = 0
    for seed in range(first, first + 50):
        workload = random_workload(seed, release)
        told = theirs(workload)
        assert ours(workload) == told, seed
        num_shared += any(any(blocks) for blocks in told)
    assert num_shared >= 10
