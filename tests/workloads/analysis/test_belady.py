"""The clairvoyant bound: the best of all policies, and never below LRU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads.analysis.plain_caches import best_hits, blocks_of, request
from tests.workloads.analysis.test_lru import specs
from tests.workloads.shared_traces import MOONCAKE, shared_trace
from workloads.analysis.belady import belady_blocks_for, belady_hits, next_reads
from workloads.analysis.lru import lru_curve
from workloads.analysis.paths import block_paths
from workloads.traces import MooncakeTraceReader

if TYPE_CHECKING:
    from workloads.spec import RequestSpec

tiny = st.lists(
    st.builds(
        request,
        prompt=st.lists(
            st.tuples(st.sampled_from([0, 2, 101]), st.integers(1, 4)),
            min_size=1,
            max_size=2,
        ),
        num_output_tokens=st.integers(1, 3),
        output_segment=st.sampled_from([101, 103]),
    ),
    min_size=1,
    max_size=6,
)


@given(requests=tiny, block_size=st.integers(1, 3), size=st.integers(0, 3))
def test_bound_is_the_best_of_all_policies(
    requests: list[RequestSpec], block_size: int, size: int
) -> None:
    plain = [blocks_of(spec, block_size) for spec in requests]
    reads = next_reads(block_paths(requests, block_size))
    assert belady_hits(reads, size) == best_hits(plain, size)


@given(requests=specs, block_size=st.integers(1, 6))
def test_bound_lies_between_lru_and_the_infinite_cache(
    requests: list[RequestSpec], block_size: int
) -> None:
    paths = block_paths(requests, block_size)
    curve, reads = lru_curve(paths), next_reads(paths)
    found = [belady_hits(reads, size) for size in range(60)]
    assert found == sorted(found)
    assert all(
        curve.hits_at(size) <= hits <= curve.most_hits
        for size, hits in enumerate(found)
    )
    enough = paths.num_distinct_blocks
    assert belady_hits(reads, enough) == curve.most_hits
    wanted = round(0.8 * curve.most_hits)
    least = belady_blocks_for(reads, wanted, enough)
    assert belady_hits(reads, least) >= wanted
    assert least == 0 or belady_hits(reads, least - 1) < wanted


def test_what_is_read_again_stays_and_lru_would_lose_it() -> None:
    turns = [request([(0, 9)]), request([(2, 9)]), request([(4, 9)]), request([(0, 9)])]
    paths = block_paths(turns, 4)
    assert lru_curve(paths).hits_at([2, 5, 6]).tolist() == [0, 1, 2]
    reads = next_reads(paths)
    assert [belady_hits(reads, size) for size in range(4)] == [0, 1, 2, 2]


@pytest.mark.slow
def test_bound_on_a_real_trace() -> None:
    trace = MooncakeTraceReader(shared_trace(MOONCAKE))
    paths = block_paths(trace.read(), 16)
    curve, reads = lru_curve(paths), next_reads(paths)
    for size in (10, 1_000, 10_000, 100_000, 1_000_000):
        assert curve.hits_at(size) <= belady_hits(reads, size) <= curve.most_hits
    assert belady_hits(reads, 1_000_000) == curve.most_hits == 3_381_090
