"""The curve against V1's block pool itself: requests through it one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.tokens import SegmentTokens
from cache.v1.runs.tables import RunTables
from tests.oracles.v1_manager import KVCacheManager
from tests.workloads.analysis.plain_caches import blocks_of
from tests.workloads.analysis.test_lru import specs
from tests.workloads.shared_traces import MOONCAKE, shared_trace
from workloads.analysis.lru import lru_curve
from workloads.analysis.paths import block_paths
from workloads.traces import MooncakeTraceReader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.block import KVCacheBlock
    from cache.tokens import TokenIds
    from workloads.spec import RequestSpec


@dataclass
class Served:
    """A request as the managers need it."""

    request_id: int
    num_tokens: int
    tokens: TokenIds
    num_computed_tokens: int = 0
    block_table: list[KVCacheBlock] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_quiet_tokens: int = 0
    table: Any = None


def pool_hits(requests: Iterable[RequestSpec], num_gpu_blocks: int, size: int) -> int:
    """Return the blocks that requests find, one after the other, block by block."""
    manager = KVCacheManager(
        num_gpu_blocks, size, enable_caching=True, unhashed_first=True
    )
    num_hits = 0
    for number, spec in enumerate(requests):
        num_prompt = spec.num_prompt_tokens
        served = Served(
            number, num_prompt, SegmentTokens(spec.prompt, spec.output_segment)
        )
        hits = manager.get_computed_blocks(served)
        num_hits += len(hits)
        assert manager.allocate_slots(served, num_prompt - len(hits) * size, hits)
        served.num_computed_tokens = num_prompt
        for _ in range(spec.num_output_tokens - 1):
            served.num_tokens += 1
            assert manager.allocate_slots(served, 1)
            served.num_computed_tokens += 1
        manager.free(served)
    return num_hits


def num_pool_blocks(spec: RequestSpec, size: int) -> int:
    return -(-(spec.num_prompt_tokens + spec.num_output_tokens - 1) // size)


def without_copies(requests: Iterable[RequestSpec], size: int) -> list[RequestSpec]:
    """Leave out requests for which the pool would hold two blocks of one content.

    V1 computes again what it has, into another block, where a prompt is found whole
    and ends with a block, or where an answer is generated that was there before. The
    curve counts such a block once.
    """
    kept: list[RequestSpec] = []
    seen: set[int] = set()
    for spec in requests:
        blocks, num_readable = blocks_of(spec, size)
        if seen.isdisjoint(blocks[num_readable:]):
            kept.append(spec)
            seen.update(blocks)
    return kept


def has_rest(spec: RequestSpec, size: int) -> bool:
    """Whether tokens are left behind the last full block: they need a block too."""
    return (spec.num_prompt_tokens + spec.num_output_tokens - 1) % size > 0


@given(requests=specs, size=st.integers(1, 6), spare=st.integers(0, 30))
def test_pool_finds_what_the_curve_says(
    requests: list[RequestSpec], size: int, spare: int
) -> None:
    requests = without_copies(requests, size)
    num_blocks = max(num_pool_blocks(spec, size) for spec in requests) + spare
    curve = lru_curve(block_paths(requests, size))
    # One block more is the null block; one of the others holds the rest, if any.
    found = pool_hits(requests, num_blocks + 1, size)
    assert curve.hits_at(num_blocks - 1) <= found <= curve.hits_at(num_blocks)
    if all(has_rest(spec, size) for spec in requests):
        assert found == curve.hits_at(num_blocks - 1)
    if not any(has_rest(spec, size) for spec in requests):
        assert found == curve.hits_at(num_blocks)


@pytest.mark.slow
def test_pool_finds_what_the_curve_says_of_a_real_trace() -> None:
    size = 512
    trace = MooncakeTraceReader(shared_trace(MOONCAKE))
    first = [spec for spec in islice(trace.read(), 500) if has_rest(spec, size)]
    requests = without_copies(first, size)
    assert len(requests) > 490
    curve = lru_curve(block_paths(requests, size))
    most = max(num_pool_blocks(spec, size) for spec in requests)
    for num_blocks in np.geomspace(most, 10_000, 10).astype(int).tolist():
        found = pool_hits(requests, num_blocks + 1, size)
        assert found == curve.hits_at(num_blocks - 1)


def run_pool_hits(requests: Iterable[RequestSpec], num_gpu_blocks: int) -> int:
    """Return the blocks of 16 that requests find, by runs: the same, but quick."""
    tables = RunTables(num_gpu_blocks, 16, unhashed_first=True)
    num_hits = 0
    for number, spec in enumerate(requests):
        num_tokens = spec.num_prompt_tokens
        served = Served(
            number, num_tokens, SegmentTokens(spec.prompt, spec.output_segment)
        )
        found = tables.find(served, num_tokens)
        num_hits += found.num_blocks
        tables.begin(served, num_tokens, found)
        num_tokens += spec.num_output_tokens - 1
        tables.extend_known(served, num_tokens, num_tokens)
        tables.free(served)
    return num_hits


@pytest.mark.slow
def test_pool_finds_what_the_curve_says_of_a_whole_trace() -> None:
    requests = list(MooncakeTraceReader(shared_trace(MOONCAKE)).read())
    curve = lru_curve(block_paths(requests, 16))
    for num_blocks in np.geomspace(8_200, 6_000_000, 10).astype(int).tolist():
        found = run_pool_hits(requests, num_blocks + 1)
        # Seven prompts are found whole and end with a block: their copies, and
        # the rest behind full blocks, take a little room.
        assert curve.hits_at(num_blocks - 4) <= found <= curve.hits_at(num_blocks)
