"""The one-pass LRU curve against an LRU written plainly, exactly, at many sizes."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads.analysis.plain_caches import (
    blocks_of,
    plain_infinite_hits,
    plain_lru_hits,
    request,
)
from tests.workloads.shared_traces import MOONCAKE, SHAREGPT, shared_trace
from workloads.analysis.lru import TouchCounts, lru_curve
from workloads.analysis.paths import NEVER, Marks, block_paths
from workloads.requests.columns import RequestColumns
from workloads.traces import LlmServingSimTraceReader, MooncakeTraceReader

if TYPE_CHECKING:
    from workloads.spec import RequestSpec

segments = st.tuples(st.sampled_from([0, 2, 4, 6, 101, 103]), st.integers(1, 20))
specs = st.lists(
    st.builds(
        request,
        prompt=st.lists(segments, min_size=1, max_size=4),
        num_output_tokens=st.integers(1, 12),
        output_segment=st.sampled_from([101, 103, 105, 107]),
    ),
    min_size=1,
    max_size=30,
)


def agrees(requests: list[RequestSpec], block_size: int, prompts_only: bool) -> None:
    paths = block_paths(requests, block_size, prompts_only=prompts_only)
    curve = lru_curve(paths)
    plain = [
        blocks_of(spec, block_size, prompts_only=prompts_only) for spec in requests
    ]
    assert curve.most_hits == plain_infinite_hits(plain)
    num_distinct = len({block for blocks, _ in plain for block in blocks})
    assert paths.num_distinct_blocks == num_distinct
    assert paths.num_blocks == sum(len(blocks) for blocks, _ in plain)
    sizes = sorted({round(x) for x in np.geomspace(1, num_distinct + 2, 10)})
    if num_distinct < 50:
        sizes = list(range(num_distinct + 2))
    for size in sizes:
        assert curve.hits_at(size) == plain_lru_hits(plain, size), size


@given(requests=specs, block_size=st.integers(1, 6), prompts_only=st.booleans())
def test_curve_is_that_of_a_plain_lru(
    requests: list[RequestSpec], block_size: int, prompts_only: bool
) -> None:
    agrees(requests, block_size, prompts_only)


@pytest.mark.slow
@pytest.mark.parametrize("prompts_only", [False, True])
def test_curve_of_a_real_trace_is_that_of_a_plain_lru(prompts_only: bool) -> None:
    trace = MooncakeTraceReader(shared_trace(MOONCAKE))
    agrees(list(islice(trace.read(), 200)), 64, prompts_only)


@pytest.mark.slow
def test_curve_of_many_real_requests_is_that_of_a_plain_lru() -> None:
    trace = MooncakeTraceReader(shared_trace(MOONCAKE))
    agrees(list(islice(trace.read(), 1_000)), 16, prompts_only=False)


def test_curve_of_real_token_ids_is_that_of_a_plain_lru() -> None:
    trace = LlmServingSimTraceReader(shared_trace(SHAREGPT))
    agrees(list(trace.read()), 16, prompts_only=False)


def test_a_conversation_finds_its_past_and_the_last_token_is_computed() -> None:
    first = request([(0, 8)], num_output_tokens=5, output_segment=1)
    second = request([(0, 8), (1, 5), (2, 3)], num_output_tokens=1)
    again = request([(0, 8)], num_output_tokens=1)
    curve = lru_curve(block_paths([first, second, again], 4))
    # The first leaves 8 + 4 tokens: three blocks, all of them found by the second,
    # whose last token is in its fourth. Of the first prompt, asked again, the
    # second block holds the last token.
    assert curve.hits_at([0, 1, 2, 3, 4]).tolist() == [0, 2, 3, 4, 4]
    alone = lru_curve(block_paths([first, second, again], 4, prompts_only=True))
    assert alone.most_hits == 3


def test_a_cold_or_unshared_workload_has_a_flat_curve() -> None:
    curve = lru_curve(block_paths([request([(2 * i, 64)]) for i in range(9)], 16))
    assert curve.most_hits == 0
    assert curve.hits_at([0, 10**9]).tolist() == [0, 0]
    assert curve.blocks_for(0) == 0


@given(requests=specs, block_size=st.integers(1, 6))
def test_condensed_paths_are_shorter_and_leave_the_same_blocks(
    requests: list[RequestSpec], block_size: int
) -> None:
    paths = block_paths(requests, block_size)
    short = paths.condensed()
    assert len(short.run) <= len(paths.run)
    assert short.num_distinct_blocks == paths.num_distinct_blocks
    for whole, merged in zip(paths.visits(), short.visits(), strict=True):
        for column in (1, 2):
            assert sum(v[column] for v in whole) == sum(v[column] for v in merged)
        # What others meet too is left as it is.
        shared = [visit for visit in merged if visit in whole]
        assert merged[: len(shared)] == shared
        assert len(merged) - len(shared) <= 1


@pytest.mark.parametrize("prompts_only", [False, True])
def test_columns_have_the_paths_of_their_list(prompts_only: bool) -> None:
    columns = RequestColumns(
        np.arange(4.0), np.array([5, 1, 16, 40]), np.array([1, 2, 1, 20])
    )
    own = block_paths(columns, 8, prompts_only=prompts_only)
    plain = block_paths(list(columns), 8, prompts_only=prompts_only)
    assert own.shares_nothing
    assert lru_curve(own).most_hits == 0
    for name in ("num_prompt_tokens", "num_readable", "num_blocks", "num_requests"):
        assert getattr(own, name) == getattr(plain, name)
    assert own.num_distinct_blocks == plain.num_distinct_blocks
    sums = [sum(visit[1] for visit in visits) for visits in plain.visits()]
    assert [sum(visit[1] for visit in visits) for visits in own.visits()] == sums


@given(st.data())
def test_touch_counts_are_those_of_a_list(data: st.DataObject) -> None:
    num_requests = data.draw(st.integers(1, 20))
    counts, plain = TouchCounts(num_requests), [0] * num_requests
    for number in range(num_requests):
        moved = data.draw(st.integers(0, 9))
        plain[number] += moved
        counts.move(NEVER, moved)
        for earlier in range(number):
            num_blocks = data.draw(st.integers(0, plain[earlier]))
            counts.move(earlier, num_blocks)
            plain[earlier] -= num_blocks
            plain[number] += num_blocks
        counts.append()
        for earlier in range(number + 1):
            assert counts.num_after(earlier) == sum(plain[earlier + 1 : number + 1])


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12))))
def test_marks_are_those_of_a_plain_array(calls: list[tuple[int, int]]) -> None:
    marks, plain = Marks(1), [NEVER] * 12
    for mark, (num_blocks, some) in enumerate(calls):
        num_marked = min(some, num_blocks)
        found = marks.replace(0, num_blocks, num_marked, mark)
        assert [m for length, m in found for _ in range(length)] == plain[:num_blocks]
        plain[:num_blocks] = [mark] * num_marked + [NEVER] * (num_blocks - num_marked)


def test_touches_are_counted_from_the_first_request_on() -> None:
    counts = TouchCounts(3)
    counts.append()
    assert counts.num_blocks == 0
    counts.move(NEVER, 3)
    counts.append()
    assert counts.num_after(0) == counts.num_blocks == 3
    counts.move(1, 2)
    counts.append()
    assert (counts.num_after(1), counts.num_blocks) == (2, 3)
