"""Hits of an infinite cache of unlike layers, beside those of V1's own tables."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.tokens import SegmentTokens
from cache.v1.block_tables import BlockTables
from cache.v1.groups.kinds import EngineLimits
from tests.cache.test_group_machine import (
    Stub,
    admit,
    chunked,
    full,
    go_on,
    layout,
    mamba,
    window,
)
from tests.workloads.analysis.test_lru import request, specs
from tests.workloads.shared_traces import MOONCAKE, shared_trace
from workloads.analysis.kept_ends import kept_ends
from workloads.analysis.lru import lru_curve
from workloads.analysis.paths import block_paths
from workloads.errors import WorkloadError
from workloads.traces import MooncakeTraceReader

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheSpec
    from workloads.spec import RequestSpec

MOST_TOKENS = 10**6
GROUPS: list[tuple[list[KVCacheSpec], list[int]]] = [
    ([window(4, 9), full(4)], [8]),
    ([window(2, 6), full(4)], [6]),
    ([full(2), window(4, 6), window(4, 11)], [8, 12]),
    ([window(3, 40), full(3)], [39]),
    ([chunked(4, 8), full(4)], []),
    ([mamba(4), mamba(4), full(4)], [4]),
    ([mamba(6, checkpoints=1), full(6)], [6]),
]
"""Layers, and the tails that they need."""


def tables_of(
    groups: list[KVCacheSpec], num_blocks: int, interval: int = 0
) -> BlockTables:
    limits = EngineLimits(MOST_TOKENS, MOST_TOKENS, MOST_TOKENS)
    planned = layout(groups, num_blocks)
    return BlockTables(
        planned, limits, enable_caching=True, retention_interval=interval
    )


def served_hits(tables: BlockTables, requests: list[RequestSpec], most: int) -> int:
    """Return the tokens found, one request after the other, in chunks of `most`."""
    num_hits = 0
    for number, spec in enumerate(requests):
        tokens = SegmentTokens(spec.prompt, spec.output_segment)
        num_prompt = spec.num_prompt_tokens
        served = Stub(number, num_prompt, num_prompt, tokens)
        found = tables.find(served, num_prompt)
        num_hits += found.num_blocks * tables.hit_alignment
        assert admit(tables, served, most)
        tables.end_call()
        while served.num_computed_tokens < num_prompt:
            assert go_on(tables, served, most)
            tables.end_call()
        for _ in range(spec.num_output_tokens - 1):
            assert go_on(tables, served, 1)
            tables.end_call()
        tables.free(served)
    return num_hits


def agrees(layers: list[KVCacheSpec], counted: int, served: int) -> None:
    """Equal, but where small blocks are shared by prompts that part in a larger one."""
    if layers == GROUPS[1][0]:
        assert counted <= served
    else:
        assert counted == served


@settings(max_examples=30)
@given(
    requests=specs,
    groups=st.sampled_from(GROUPS),
    most=st.sampled_from([12, MOST_TOKENS]),
)
def test_tables_find_what_is_counted(
    requests: list[RequestSpec],
    groups: tuple[list[KVCacheSpec], list[int]],
    most: int,
) -> None:
    layers, tails = groups
    tables = tables_of(layers, 5_000)
    size = tables.hit_alignment
    paths = block_paths(requests, size)
    found = kept_ends(paths, tails)
    agrees(layers, found.num_hits * size, served_hits(tables, requests, most))
    assert found.num_hits <= lru_curve(paths).most_hits


@settings(max_examples=30)
@given(requests=specs, groups=st.sampled_from(GROUPS[:4]), every=st.integers(1, 4))
def test_tables_find_what_is_counted_at_intervals(
    requests: list[RequestSpec],
    groups: tuple[list[KVCacheSpec], list[int]],
    every: int,
) -> None:
    layers, tails = groups
    interval = every * tables_of(layers, 2).layout.scheduler_block_size
    tables = tables_of(layers, 5_000, interval)
    size = tables.hit_alignment
    found = kept_ends(block_paths(requests, size), tails, interval)
    served = served_hits(tables, requests, MOST_TOKENS)
    agrees(layers, found.num_hits * size, served)


@settings(max_examples=30)
@given(requests=specs, groups=st.sampled_from(GROUPS), spare=st.integers(0, 40))
def test_lru_of_full_attention_bounds_a_pool_of_several_groups(
    requests: list[RequestSpec],
    groups: tuple[list[KVCacheSpec], list[int]],
    spare: int,
) -> None:
    layers, _ = groups
    size = tables_of(layers, 2).hit_alignment
    longest = max(r.num_prompt_tokens + r.num_output_tokens for r in requests)
    num_blocks = len(layers) * (longest // 2 + 4) + spare
    found = served_hits(tables_of(layers, num_blocks), requests, MOST_TOKENS)
    curve = lru_curve(block_paths(requests, size))
    assert found <= curve.hits_at(num_blocks) * size


def test_third_request_of_a_shared_beginning_is_the_first_that_is_served() -> None:
    requests = [request([(2, 40), (4 + 2 * i, 24)]) for i in range(4)]
    paths = block_paths(requests, 4)
    assert lru_curve(paths).most_hits == 3 * 10
    found = kept_ends(paths, [8])
    assert found.num_hits == 2 * 10
    # The ends of four prompts, at token 60 of 64, and where they part, at 40.
    assert found.kept_tokens == (4 * 8 + 8,)


def test_answers_are_found_by_the_turn_after_next() -> None:
    turns = [
        request([(2, 40)], num_output_tokens=21, output_segment=103),
        request([(2, 40), (103, 20), (4, 20)], num_output_tokens=1),
    ]
    paths = block_paths(turns, 4)
    assert lru_curve(paths).most_hits == 15
    assert kept_ends(paths, [8]).num_hits == 9  # up to the end of the first prompt
    assert kept_ends(paths, [8], 12).num_hits == 15
    assert kept_ends(paths, []).num_hits == 15


def test_intervals_of_tokens_are_whole_and_not_negative() -> None:
    with pytest.raises(WorkloadError, match="retention interval"):
        kept_ends(block_paths([], 4), [8], -4)


def test_tables_find_what_is_counted_of_a_real_trace() -> None:
    trace = MooncakeTraceReader(shared_trace(MOONCAKE))
    requests = list(islice(trace.read(), 20))
    tables = tables_of([window(16, 128), full(16)], 60_000)
    found = kept_ends(block_paths(requests, 16), [128])
    assert found.num_hits * 16 == served_hits(tables, requests, MOST_TOKENS) > 0
