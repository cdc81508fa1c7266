from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads.traces.samples import read, write
from workloads import RequestSpec, TraceFormatError, WorkloadError, WorkloadWarning
from workloads.traces import KvsimTraceReader, KvsimTraceWriter, write_trace

if TYPE_CHECKING:
    from pathlib import Path

HEADER = '{"kvsim_requests": 1}'
FIRST = {"arrival_s": 0.5, "prompt": 7, "num_output_tokens": 3}


def read_lines(folder: Path, *lines: Any, **options: Any) -> list[RequestSpec]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path = write(folder, "\n".join([HEADER, *texts, ""]))
    return read("kvsim", path, **options)


def test_literal(tmp_path: Path) -> None:
    requests = read_lines(
        tmp_path,
        {"arrival_s": 0, "prompt": 374, "num_output_tokens": 44, "session_id": 7},
        {
            "arrival_s": 4.5,
            "prompt": [[0, 374], [1, 44], [6, 80]],
            "num_output_tokens": 9,
            "session_id": 7,
            "previous_id": 0,
            "delay_s": 4.5,
        },
        {"arrival_s": 4.5, "prompt": 1, "num_output_tokens": 1, "output_segment": 90},
    )
    assert requests == [
        RequestSpec(0, 0.0, ((0, 374),), 44, 1, session_id=7),
        RequestSpec(
            *(1, 4.5, ((0, 374), (1, 44), (6, 80)), 9, 3),
            session_id=7,
            previous_id=0,
            delay_s=4.5,
        ),
        RequestSpec(2, 4.5, ((4, 1),), 1, 90),
    ]


segments = st.tuples(st.integers(0, 2**62), st.integers(1, 10**6))
seconds = st.floats(0, 1e12, allow_subnormal=True)


@st.composite
def requests_of_any_kind(draw: st.DrawFn) -> list[RequestSpec]:
    times_s = sorted(draw(st.lists(seconds, min_size=1, max_size=6)))
    requests = []
    for i, arrival_s in enumerate(times_s):
        own = st.integers(1, 10**9).map(lambda n, i=i: ((2 * i, n),))
        requests.append(
            RequestSpec(
                request_id=i,
                arrival_s=arrival_s,
                prompt=draw(own | st.lists(segments, min_size=1).map(tuple)),
                num_output_tokens=draw(st.integers(1, 10**9)),
                output_segment=draw(st.just(2 * i + 1) | st.integers(0, 2**62)),
                max_tokens=draw(st.none() | st.integers(1, 10**9)),
                priority=draw(st.integers(-(10**9), 10**9)),
                best_of=draw(st.integers(1, 256)),
                beam_width=draw(st.integers(1, 256)),
                beam_switch_share=draw(st.floats(0, 1)),
                slo_class=draw(st.text()),
                session_id=draw(st.none() | st.integers(0, 2**62)),
                previous_id=draw(st.none() | st.integers(0, i - 1)) if i else None,
                delay_s=draw(seconds),
            )
        )
    return requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kvsim")


@given(requests_of_any_kind(), st.sampled_from(["", ".gz", ".zst"]))
def test_nothing_is_lost(
    folder: Path, requests: list[RequestSpec], suffix: str
) -> None:
    path = folder / f"requests.jsonl{suffix}"
    assert KvsimTraceWriter().losses(requests) == []
    write_trace(path, requests, KvsimTraceWriter(), overwrite=True)
    assert list(KvsimTraceReader(path).read()) == requests


def test_defaults_are_left_out() -> None:
    requests = [
        RequestSpec(0, 1.5, ((0, 9),), 2, 1),
        RequestSpec(1, 1.5, ((0, 9),), 2, 3, slo_class="chat"),
    ]
    assert list(KvsimTraceWriter().lines(requests)) == [
        '{"kvsim_requests": 1}\n',
        '{"arrival_s": 1.5, "prompt": 9, "num_output_tokens": 2}\n',
        '{"arrival_s": 1.5, "prompt": [[0, 9]], "num_output_tokens": 2, '
        '"slo_class": "chat"}\n',
    ]


def test_a_position_that_is_none() -> None:
    with pytest.raises(
        WorkloadError, match="request_id must be the position, 0; got 4"
    ):
        list(KvsimTraceWriter().lines([RequestSpec(4, 0.0, ((0, 1),), 1, 1)]))


@pytest.mark.parametrize(
    "header",
    ['{"kvsim_requests": 2}', '{"kvsim_requests": true}', json.dumps(FIRST), "{}"],
)
@pytest.mark.parametrize("skip", [False, True])
def test_another_header(header: str, skip: bool, tmp_path: Path) -> None:
    path = write(tmp_path, f"{header}\n{json.dumps(FIRST)}\n")
    rule = r':1: the first line must be {"kvsim_requests": 1}; got .*; give'
    with pytest.raises(TraceFormatError, match=rule):
        read("kvsim", path, skip_bad_lines=skip)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"arrival_s": -1}, "arrival_s must be a finite number of seconds"),
        ({"arrival_s": float("nan")}, "arrival_s must be .*; got nan"),
        ({"arrival_s": True}, "arrival_s must be .*; got True"),
        ({"prompt": 0}, "prompt must be a whole number from 1"),
        ({"prompt": []}, "prompt must be a number of tokens or a list of"),
        ({"prompt": [[0]]}, "prompt must be a number of tokens or a list of"),
        ({"prompt": [[0, 0]]}, "prompt must be a number of tokens or a list of"),
        ({"prompt": [[-1, 5]]}, "prompt must be a number of tokens or a list of"),
        ({"prompt": [[0, True]]}, "prompt must be a number of tokens or a list of"),
        ({"prompt": [[0, 10**9], [2, 1]]}, "prompt in all must be a whole number"),
        ({"num_output_tokens": 0}, "num_output_tokens must be a whole number"),
        ({"output_segment": -1}, "output_segment must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be a whole number"),
        ({"priority": None}, "priority must be a whole number"),
        ({"best_of": 0}, "best_of must be a whole number"),
        ({"beam_switch_share": 2}, "beam_switch_share must be a finite number"),
        ({"slo_class": 1}, "slo_class must be text"),
        ({"session_id": "a"}, "session_id must be a whole number"),
        ({"delay_s": -0.5}, "delay_s must be a finite number of seconds"),
        ({"previous_id": 1}, "previous_id must be a request before, from 0 to 0"),
        ({"request_id": 0}, "keys must be of arrival_s, .*; got 'request_id'"),
    ],
)
def test_bad_lines(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=rf"trace\.txt:3: {problem}.*; \w+"):
        read_lines(tmp_path, FIRST, FIRST | change)


@pytest.mark.parametrize("key", sorted(FIRST))
def test_needed_keys(key: str, tmp_path: Path) -> None:
    entry = {name: value for name, value in FIRST.items() if name != key}
    with pytest.raises(TraceFormatError, match=rf":2: keys must include {key}; got"):
        read_lines(tmp_path, entry)


def test_what_waits_for_a_bad_line_is_left_out_with_it(tmp_path: Path) -> None:
    follow_up = FIRST | {"previous_id": 1, "delay_s": 1}
    other = FIRST | {"previous_id": 0}
    with pytest.warns(WorkloadWarning, match="left out 2 malformed lines"):
        requests = read_lines(
            tmp_path, FIRST, "broken", follow_up, other, FIRST, skip_bad_lines=True
        )
    assert requests == [
        RequestSpec(0, 0.5, ((0, 7),), 3, 1),
        RequestSpec(1, 0.5, ((6, 7),), 3, 7, previous_id=0),
        RequestSpec(2, 0.5, ((8, 7),), 3, 9),
    ]


def test_unsorted_chains(tmp_path: Path) -> None:
    with pytest.warns(WorkloadWarning, match=r":4: timestamps must not fall; 1 of 3"):
        requests = read_lines(
            tmp_path,
            FIRST | {"arrival_s": 9},
            FIRST | {"arrival_s": 11, "previous_id": 0, "delay_s": 2},
            FIRST | {"arrival_s": 1},
        )
    assert [request.arrival_s for request in requests] == [1, 9, 11]
    assert [request.previous_id for request in requests] == [None, None, 1]
