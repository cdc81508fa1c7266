"""Rules for every writer: requests that a reader reads come back as they were."""

from __future__ import annotations

import gzip
import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared import shared
from tests.workloads.traces.samples import SAMPLES, read, write
from workloads import RequestColumns, RequestSpec, WorkloadError
from workloads.requests.chains import in_order
from workloads.traces import (
    TRACE_READERS,
    TRACE_WRITERS,
    KvsimTraceWriter,
    MooncakeTraceWriter,
    TraceWriter,
    write_trace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# Options that keep which requests share text.
OPTIONS: dict[str, dict[str, Any]] = {"llmservingsim": {"make_up_token_ids": True}}

kinds = pytest.mark.parametrize("kind", sorted(TRACE_WRITERS))


def writer_of(kind: str) -> TraceWriter:
    writer_type: Any = TRACE_WRITERS[kind]
    writer: TraceWriter = writer_type(**OPTIONS.get(kind, {}))
    return writer


def test_every_writer_is_held_to_this() -> None:
    read_only = {"kv_cache_tester", "qwen_bailian", "sharegpt", "table"}
    assert set(TRACE_READERS) - set(TRACE_WRITERS) == read_only
    assert all(issubclass(kind, TraceWriter) for kind in TRACE_WRITERS.values())


@kinds
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".GZ"])
def test_round_trip(kind: str, suffix: str, tmp_path: Path) -> None:
    requests = read(kind, write(tmp_path, SAMPLES[kind]))
    path = tmp_path / f"written{suffix}"
    assert writer_of(kind).losses(requests) == []
    write_trace(path, requests, writer_of(kind))
    assert read(kind, path) == requests
    first = path.read_bytes()
    write_trace(path, requests, writer_of(kind), overwrite=True)
    assert path.read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.txt", path.name]


times = st.lists(st.integers(0, 10**13), min_size=1, max_size=8).map(sorted)
lengths = st.integers(1, 10**6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@kinds
@settings(max_examples=40)
@given(data=st.data())
def test_round_trip_of_what_every_format_holds(
    kind: str, folder: Path, data: st.DataObject
) -> None:
    units = {"azure": 10**7, "mooncake": 1000, "llmservingsim": 10**9}.get(kind, 997)
    requests = [
        # A prompt of one block, for Mooncake's sake.
        RequestSpec(
            i, unit / units, ((2 * i, data.draw(st.integers(1, 512))),), num, 2 * i + 1
        )
        for i, (unit, num) in enumerate(
            (unit, data.draw(lengths)) for unit in [0, *data.draw(times)]
        )
    ]
    assert writer_of(kind).losses(requests) == []
    path = folder / kind
    write_trace(path, requests, TRACE_WRITERS[kind](), overwrite=True)
    assert read(kind, path) == requests


@st.composite
def sessions(draw: st.DrawFn) -> list[RequestSpec]:
    """Sessions of turns, whose prompts hold the same blocks and new ones."""
    requests: list[RequestSpec] = []
    for session_id in range(draw(st.integers(1, 4))):
        arrival_s = draw(st.integers(0, 9)) / 1000
        prompt: tuple[tuple[int, int], ...] = ()
        for turn in range(draw(st.integers(1, 4))):
            new = (2 * (100 * session_id + turn) * draw(st.integers(0, 1)), 512)
            prompt = (*prompt, new)
            requests.append(
                RequestSpec(
                    len(requests),
                    arrival_s,
                    prompt,
                    draw(st.integers(1, 99)),
                    0,
                    session_id=session_id,
                    previous_id=len(requests) - 1 if turn else None,
                    delay_s=draw(st.integers(0, 10**7)) / 1000 if turn else 0.0,
                )
            )
    first_s = min(r.arrival_s for r in requests if r.previous_id is None)
    return [
        request._replace(output_segment=2 * i + 1)
        for i, request in enumerate(in_order(requests, start_s=first_s))
    ]


@settings(max_examples=60)
@given(sessions())
def test_sessions_of_mooncake(folder: Path, requests: list[RequestSpec]) -> None:
    writer = MooncakeTraceWriter()
    assert writer.losses(requests) == []
    path = folder / "sessions of mooncake"
    write_trace(path, requests, writer, overwrite=True)
    found = read("mooncake", path)
    assert [request._replace(arrival_s=0) for request in found] == [
        request._replace(arrival_s=0) for request in requests
    ]
    assert [request.arrival_s for request in found] == pytest.approx(
        [request.arrival_s for request in requests], rel=1e-12, abs=1e-12
    )
    write_trace(path, found, writer, overwrite=True)
    assert read("mooncake", path) == found


@settings(max_examples=60)
@given(sessions())
def test_sessions_of_llmservingsim(folder: Path, requests: list[RequestSpec]) -> None:
    writer = writer_of("llmservingsim")
    assert writer.losses(requests) == []
    path = folder / "agents"
    write_trace(path, requests, writer, overwrite=True)
    found = read("llmservingsim", path)
    # The names of texts are new; a second time they stay.
    assert len(found) == len(requests)
    write_trace(path, found, writer, overwrite=True)
    assert read("llmservingsim", path) == found


CHAIN = [
    RequestSpec(0, 0.0, ((0, 5),), 6, 1),
    RequestSpec(1, 1.0, ((0, 5), (1, 6), (2, 1)), 6, 3, previous_id=0, delay_s=1.0),
    RequestSpec(2, 2.0, ((0, 5), (1, 6), (4, 1)), 6, 5, previous_id=0, delay_s=2.0),
]


def test_what_is_lost_is_listed() -> None:
    requests = [
        CHAIN[0]._replace(arrival_s=0.5, delay_s=3.0, priority=1, best_of=2),
        CHAIN[1]._replace(max_tokens=9, slo_class="chat", session_id=2),
    ]
    assert TRACE_WRITERS["vidur"]().losses(requests) == [
        "which prompts share text (2 of 2 requests)",
        "session ids (1 of 2 requests)",
        "that requests wait for the end of another (they arrive at their earliest) "
        "(1 of 2 requests)",
        "seconds that a user spends before a first request (1 of 2 requests)",
        "max_tokens that clients state (1 of 2 requests)",
        "priorities (1 of 2 requests)",
        "parallel samples and beams (1 of 2 requests)",
        "service levels (slo_class) (1 of 2 requests)",
        "time before the first arrival (0.5 s): a trace starts at 0",
    ]
    columns = RequestColumns(*map(_array, ([0.0, 1.0], [3, 4], [5, 6])), priority=3)
    assert TRACE_WRITERS["mooncake"]().losses(columns) == [
        "priorities (2 of 2 requests)"
    ]
    assert TRACE_WRITERS["vidur"]().losses(columns) == ["priorities (2 of 2 requests)"]


def _array(values: list[Any]) -> Any:
    import numpy as np  # noqa: PLC0415

    return np.array(values)


@pytest.mark.parametrize("kind", ["mooncake", "llmservingsim"])
def test_two_that_wait_for_the_same(kind: str, tmp_path: Path) -> None:
    losses = writer_of(kind).losses(CHAIN)
    assert (
        "that 1 of 3 requests wait for another than the last of their session (they "
        "arrive at their earliest)"
    ) in losses
    assert ("that 3 of 3 requests had no session id (a chain needs one here)") in losses
    path = tmp_path / "trace"
    write_trace(path, CHAIN, writer_of(kind))
    found = read(kind, path)
    assert [request.previous_id for request in found] == [None, 0, None]
    assert [request.session_id for request in found] == [0, 0, 0]
    assert [request.arrival_s for request in found] == [0, 1, 2]


@pytest.mark.slow
def test_published_traces_come_back(tmp_path: Path) -> None:
    mooncake = shared("traces/mooncake_fast25_conversation.jsonl")
    requests = read("mooncake", mooncake)
    write_trace(tmp_path / "m", requests, MooncakeTraceWriter())
    # Byte for byte, the ids too.
    assert (tmp_path / "m").read_bytes() == mooncake.read_bytes()
    name = "llmservingsim_sharegpt_llama31_300_sps10.jsonl.gz"
    requests = read("llmservingsim", shared(f"traces/{name}"))
    write_trace(tmp_path / "l", requests, writer_of("llmservingsim"))
    assert read("llmservingsim", tmp_path / "l") == requests
    requests = read("azure", shared("traces/azure_llm_2023_code.csv"))
    for kind in ("azure", "burstgpt", "kvsim", "llmservingsim", "vidur", "vllm_bench"):
        write_trace(tmp_path / kind, requests, TRACE_WRITERS[kind]())
        assert read(kind, tmp_path / kind) == requests


def test_the_azure_file_keeps_its_clock(tmp_path: Path) -> None:
    path = shared("traces/azure_llm_2023_code.csv")
    writer_type: Any = TRACE_WRITERS["azure"]
    writer = writer_type(start="2023-11-16 18:17")
    requests = read("azure", path)
    lines = list(writer.lines(requests))
    first = path.read_text().splitlines()[1]
    assert lines[1].startswith("2023-11-16 18:17:00.0000000,")
    assert lines[1].strip().split(",")[1:] == first.split(",")[1:]


@pytest.mark.parametrize("start", ["2023-11-16", "soon", "2023-11-16 25:00", 5])
def test_a_start_that_is_none(start: Any) -> None:
    writer_type: Any = TRACE_WRITERS["azure"]
    with pytest.raises(WorkloadError, match=r"start must be a time such as .*; got"):
        writer_type(start=start)


def test_azure_ends_with_the_calendar(tmp_path: Path) -> None:
    late = [RequestSpec(0, 0.0, ((0, 1),), 1, 1), RequestSpec(1, 1e12, ((2, 1),), 1, 3)]
    with pytest.raises(WorkloadError, match="before the year 10000"):
        write_trace(tmp_path / "late.csv", late, TRACE_WRITERS["azure"]())
    assert list(tmp_path.iterdir()) == []
    fine = [late[0], late[1]._replace(arrival_s=1e-8)]
    assert TRACE_WRITERS["azure"]().losses(fine) == [
        "times below 100 ns (1 of 2 requests)"
    ]


class Breaking:
    """A writer that fails after a line."""

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        return []

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        yield "a line\n"
        raise WorkloadError("enough")


@pytest.mark.parametrize("name", ["a", "a.gz", "a.zst"])
def test_nothing_half_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("before")
    with pytest.raises(WorkloadError, match="enough"):
        write_trace(path, CHAIN, Breaking(), overwrite=True)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_must_not_be_written(tmp_path: Path) -> None:
    path = write(tmp_path, "before")
    writer = KvsimTraceWriter()
    with pytest.raises(WorkloadError, match=r"exists already; .*--overwrite"):
        write_trace(path, CHAIN, writer)
    assert path.read_text() == "before"
    with pytest.raises(WorkloadError, match="is a folder; give a file in it"):
        write_trace(tmp_path, CHAIN, writer, overwrite=True)
    with pytest.raises(WorkloadError, match="must be in a folder that exists"):
        write_trace(tmp_path / "no" / "file", CHAIN, writer)
    with pytest.raises(WorkloadError, match="cannot be written"):
        write_trace(tmp_path / ("x" * 300), CHAIN, writer)


def test_permissions_and_compression(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        write_trace(tmp_path / "a.gz", CHAIN, KvsimTraceWriter())
    finally:
        os.umask(umask)
    assert (tmp_path / "a.gz").stat().st_mode & 0o777 == 0o640
    write_trace(tmp_path / "a.zst", CHAIN, KvsimTraceWriter())
    text = "".join(KvsimTraceWriter().lines(CHAIN)).encode()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == text
    stream = pa.input_stream(str(tmp_path / "a.zst"), compression="zstd")
    assert stream.read() == text


@kinds
def test_columns_are_written_as_their_requests(kind: str, tmp_path: Path) -> None:
    columns = RequestColumns(*map(_array, ([0.0, 1.0], [3, 4], [5, 6])))
    for name, requests in (("columns", columns), ("listed", list(columns))):
        write_trace(tmp_path / name, requests, writer_of(kind))
    assert (tmp_path / "columns").read_bytes() == (tmp_path / "listed").read_bytes()
