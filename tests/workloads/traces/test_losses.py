"""Fields that a writer does not list as lost are there when the file is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workloads.traces.samples import read
from tests.workloads.traces.test_token_trie import num_common_segment_tokens
from workloads import RequestSpec, WorkloadError
from workloads.requests.chains import in_order
from workloads.traces import TRACE_WRITERS, TraceWriter, write_trace

if TYPE_CHECKING:
    from pathlib import Path

kinds = pytest.mark.parametrize("kind", sorted(TRACE_WRITERS))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("losses") / "trace"


segments = st.tuples(st.sampled_from([0, 2, 4, 90, 1, 3]), st.integers(1, 40))


@st.composite
def requests_of_any_kind(draw: st.DrawFn) -> list[RequestSpec]:
    """Requests that keep the contract; most fields are defaults, some are not."""
    requests: list[RequestSpec] = []
    for i in range(draw(st.integers(1, 7))):
        own = st.integers(1, 40).map(lambda num, i=i: ((200 + 2 * i, num),))
        previous_id = draw(st.none() | st.integers(0, i - 1)) if i else None
        waits = previous_id is not None
        requests.append(
            RequestSpec(
                request_id=i,
                arrival_s=draw(st.just(0.0) | st.floats(0, 1e6)),
                prompt=draw(
                    own | st.lists(segments, min_size=1, max_size=4).map(tuple)
                ),
                # Unlike any other's, so that another order of one time shows.
                num_output_tokens=7 * draw(st.integers(0, 5)) + i + 1,
                output_segment=2 * i + 1,
                priority=draw(st.sampled_from([0, 0, 0, 5])),
                slo_class=draw(st.sampled_from(["", "", "", "chat"])),
                session_id=draw(st.none() | st.integers(0, 2)),
                previous_id=previous_id,
                delay_s=draw(st.floats(0, 1e3)) if waits else 0.0,
            )
        )
    return in_order(requests)


def writer_of(kind: str) -> TraceWriter:
    options: dict[str, dict[str, Any]] = {
        "llmservingsim": {"make_up_token_ids": True},
        "mooncake": {"block_tokens": 1},
    }
    writer_type: Any = TRACE_WRITERS[kind]
    writer: TraceWriter = writer_type(**options.get(kind, {}))
    return writer


def lengths_of(requests: list[RequestSpec]) -> list[tuple[int, int]]:
    return [(each.num_prompt_tokens, each.num_output_tokens) for each in requests]


@kinds
@settings(max_examples=30)
@given(requests=requests_of_any_kind())
def test_nothing_is_lost_in_silence(
    kind: str, path: Path, requests: list[RequestSpec]
) -> None:
    writer = writer_of(kind)
    lost = " ".join(writer.losses(requests))
    write_trace(path, requests, writer, overwrite=True)
    options = {"block_tokens": 1} if kind == "mooncake" else {}
    found = read(kind, path, **options)
    assert sorted(lengths_of(found)) == sorted(lengths_of(requests))
    if lengths_of(found) != lengths_of(requests):
        return  # equal times, in another order
    start_s = requests[0].arrival_s if "time before the first" in lost else 0.0
    assert [each.arrival_s for each in found] == pytest.approx(
        [each.arrival_s - start_s for each in requests], abs=1.1e-7, rel=1e-9
    )
    fields = {
        "session": lambda each: each.session_id,
        "priorities": lambda each: each.priority,
        "service levels": lambda each: each.slo_class,
        "wait": lambda each: each.previous_id,
    }
    for word, field in fields.items():
        if word not in lost:
            assert list(map(field, found)) == list(map(field, requests))
    if "share" not in lost and "quote" not in lost:
        for i, one in enumerate(requests):
            for other, found_other in zip(requests[:i], found[:i], strict=True):
                common = num_common_segment_tokens(one.prompt, other.prompt)
                kept = num_common_segment_tokens(found[i].prompt, found_other.prompt)
                assert kept == common


def test_times_and_lengths_that_do_not_fit(path: Path) -> None:
    late = [RequestSpec(0, 1e10, ((0, 1),), 1, 1)]
    with pytest.raises(WorkloadError, match="times must be below 9e"):
        write_trace(path, late, TRACE_WRITERS["llmservingsim"](), overwrite=True)
    long = [RequestSpec(0, 0.0, ((0, 10**9),), 1, 1)]
    with pytest.raises(WorkloadError, match="at most 200000000 token ids; got 10"):
        writer_of("llmservingsim").losses(long)
