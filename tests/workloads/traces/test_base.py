"""Rules for every reader, held against each of them."""

from __future__ import annotations

import gzip
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads.traces.samples import FIRST_LINE, OPTIONS, SAMPLES, read, write
from workloads import (
    TRACE_READERS,
    TraceFormatError,
    TraceReader,
    WorkloadError,
    WorkloadWarning,
)
from workloads.traces.base import (
    columns_in_arrival_order,
    in_arrival_order,
    numbered_lines,
)

if TYPE_CHECKING:
    from pathlib import Path

kinds = pytest.mark.parametrize("kind", sorted(SAMPLES))
line_kinds = pytest.mark.parametrize("kind", sorted(FIRST_LINE))


def test_every_reader_is_held_to_this() -> None:
    assert sorted(SAMPLES) == sorted(TRACE_READERS)
    assert all(issubclass(kind, TraceReader) for kind in TRACE_READERS.values())


@kinds
def test_contract(kind: str, tmp_path: Path) -> None:
    requests = read(kind, write(tmp_path, SAMPLES[kind]))
    assert [request.request_id for request in requests] == [0, 1, 2]
    assert requests[0].arrival_s == 0.0
    assert sorted(request.output_segment for request in requests) == [1, 3, 5]
    for request in requests:
        assert all(segment >= 0 and n >= 1 for segment, n in request.prompt)
        assert request.max_tokens is None


@kinds
@pytest.mark.parametrize(
    "change",
    [
        lambda text: gzip.compress(text.encode()),
        lambda text: pa.compress(text.encode(), "zstd", asbytes=True),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.rstrip("\n"),
        lambda text: text + "\n  \n",
        lambda text: b"\xef\xbb\xbf" + text.encode(),
    ],
    ids=["gzip", "zstd", "CRLF", "no last newline", "blank lines", "byte-order mark"],
)
def test_the_same_trace_in_other_clothes(
    kind: str, change: Any, tmp_path: Path
) -> None:
    plain = read(kind, write(tmp_path, SAMPLES[kind], "plain"))
    assert read(kind, write(tmp_path, change(SAMPLES[kind]), "other.gz")) == plain


@kinds
def test_text_and_home_paths(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path, SAMPLES[kind])
    assert read(kind, str(path)) == read(kind, f"~/{path.name}") == read(kind, path)


@kinds
@pytest.mark.parametrize("path", [None, 5, b"trace.csv", True, ["trace.csv"]])
def test_a_path_that_is_none(kind: str, path: Any) -> None:
    with pytest.raises(WorkloadError, match=r"^path must be text; got .*; give"):
        read(kind, path)


@kinds
def test_missing_file(kind: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"nowhere\.csv'; check the path, or fetch"):
        read(kind, tmp_path / "nowhere.csv")


@kinds
def test_directory(kind: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"is a folder; give the file in it"):
        read(kind, tmp_path)


@kinds
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES[kind])
    path.chmod(0)
    with pytest.raises(WorkloadError, match="Permission denied"):
        read(kind, path)


@kinds
@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "trace.txt/below"])
def test_impossible_path(
    kind: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SAMPLES[kind])
    with pytest.raises(WorkloadError, match="a trace must be readable"):
        read(kind, path)


@kinds
@pytest.mark.parametrize("content", ["", "\n\n", " \n"])
def test_empty_file(kind: str, content: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=r"trace\.txt: a trace needs .*; got"):
        read(kind, write(tmp_path, content))


@kinds
def test_text_in_another_encoding(kind: str, tmp_path: Path) -> None:
    lines = SAMPLES[kind].encode().splitlines(keepends=True)
    path = write(tmp_path, b"".join([*lines[:2], b"\xff\xfe\n", *lines[2:]]))
    with pytest.raises(
        TraceFormatError, match=r"trace\.txt:3: .* UTF-8 text; got 0xff"
    ):
        read(kind, path)


@kinds
@pytest.mark.parametrize("skip", [False, True])
def test_compressed_data_cut_short_is_refused_always(
    kind: str, skip: bool, tmp_path: Path
) -> None:
    content = SAMPLES[kind].encode()
    whole = (gzip.compress(content), pa.compress(content, "zstd", asbytes=True))
    for data, name in zip(whole, ("gzip", "zstd"), strict=True):
        path = write(tmp_path, data[: len(data) * 2 // 3])
        rule = rf"^{path}:\d+: {name} data must be whole; .*fetch .* again"
        with pytest.raises(TraceFormatError, match=rule):
            read(kind, path, skip_bad_lines=skip)


@kinds
@pytest.mark.parametrize("cut", [12, 40, -8])
def test_gzip_cut_short(kind: str, cut: int, tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(SAMPLES[kind].encode())[:cut])
    with pytest.raises(TraceFormatError, match=r"trace\.txt:\d+: .*fetch .* again"):
        read(kind, path)


@kinds
def test_gzip_with_wrong_bytes(kind: str, tmp_path: Path) -> None:
    content = bytearray(gzip.compress(SAMPLES[kind].encode()))
    content[-6] ^= 255  # in the checksum
    with pytest.raises(TraceFormatError, match=r"trace\.txt:\d+: gzip data must be"):
        read(kind, write(tmp_path, bytes(content)))


@line_kinds
def test_unsorted_rows_are_sorted_with_a_warning(kind: str, tmp_path: Path) -> None:
    lines = SAMPLES[kind].splitlines(keepends=True)
    first = FIRST_LINE[kind] - 1
    mixed = [*lines[:first], lines[-1], lines[-2], lines[-3]]
    path = write(tmp_path, "".join(mixed))
    rule = rf"trace\.txt:{first + 2}: timestamps must not fall; 2 of 3 rows .* sorted"
    with pytest.warns(WorkloadWarning, match=rule):
        requests = read(kind, path)
    expected = read(kind, write(tmp_path, SAMPLES[kind], "sorted"))
    if kind == "kvsim":  # texts keep the names of their lines
        assert [request.prompt for request in requests] == [
            ((4, 374),),
            ((2, 9), (40, 1)),
            ((0, 8),),
        ]
        requests = [
            request._replace(prompt=other.prompt, output_segment=other.output_segment)
            for request, other in zip(requests, expected, strict=True)
        ]
    assert requests == expected


@line_kinds
def test_nothing_is_handed_out_before_all_is_checked(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES[kind] + "broken\n")
    reader_type: Any = TRACE_READERS[kind]
    reader = reader_type(path=path, **OPTIONS.get(kind, {}))
    line = FIRST_LINE[kind] + 3
    with pytest.raises(TraceFormatError, match=rf"trace\.txt:{line}: ") as info:
        reader.read()
    assert "\n" not in str(info.value)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_order_is_stable_and_the_count_is_right(times: list[int]) -> None:
    rows = [(time, number) for number, time in enumerate(times, start=1)]
    early = [n for t, n in rows if any(t < before for before in times[: n - 1])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert in_arrival_order("trace", list(rows)) == sorted(rows)
    if not early:
        assert caught == []
    else:
        (warning,) = caught
        start = f"trace:{early[0]}: timestamps must not fall; {len(early)} of "
        assert str(warning.message).startswith(start)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=90))
def test_columns_are_ordered_as_rows_are(times: list[int]) -> None:
    rows = [(time, 2 * i, 7 + i) for i, time in enumerate(times)]
    columns = (np.array(column) for column in zip(*rows, strict=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        times_only, others = columns_in_arrival_order("trace", *columns)
        expected = in_arrival_order("trace", rows)
    assert times_only.tolist() == [time for time, *_ in expected]
    assert others.tolist() == [other for *_, other in expected]
    messages = [str(warning.message) for warning in caught]
    assert messages[::2] == messages[1::2]


@line_kinds
def test_warnings_point_at_the_caller(kind: str, tmp_path: Path) -> None:
    lines = SAMPLES[kind].splitlines(keepends=True)
    path = write(tmp_path, "".join([*lines, lines[-2]]))
    with pytest.warns(WorkloadWarning) as caught:
        read(kind, path)
    assert [warning.filename for warning in caught] == [read.__code__.co_filename]


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "one\n\n  \nfour  \n")
    assert list(numbered_lines(path)) == [(1, "one"), (4, "four")]


@line_kinds
def test_malformed_lines_are_left_out_counted_and_reported(
    kind: str, tmp_path: Path
) -> None:
    lines = SAMPLES[kind].encode().splitlines(keepends=True)
    first = FIRST_LINE[kind]
    bad = [b"\xff\n", b"bro\0ken\n", b"broken\n"]
    content = [*lines[:first], bad[0], lines[first], *bad[1:], *lines[first + 1 :]]
    path = write(tmp_path, b"".join(content))
    with pytest.raises(TraceFormatError, match=rf"^{path}:{first + 1}: .*UTF-8"):
        read(kind, path)
    rule = (
        rf"^{path}: left out 3 malformed lines; the first: {path}:{first + 1}: .*0xff"
    )
    with pytest.warns(WorkloadWarning, match=rule) as caught:
        requests = read(kind, path, skip_bad_lines=True)
    assert [warning.filename for warning in caught] == [read.__code__.co_filename]
    expected = read(kind, write(tmp_path, SAMPLES[kind], "good"))
    assert [request.request_id for request in requests] == [0, 1, 2]
    assert [request.arrival_s for request in requests] == [
        request.arrival_s for request in expected
    ]
    assert [request.num_prompt_tokens for request in requests] == [
        request.num_prompt_tokens for request in expected
    ]


@kinds
def test_a_nul_byte_is_refused_with_its_line(kind: str, tmp_path: Path) -> None:
    lines = SAMPLES[kind].splitlines(keepends=True)
    lines[2] = lines[2][:-2] + "\0" + lines[2][-2:]
    with pytest.raises(TraceFormatError, match=r"trace\.txt:3: "):
        read(kind, write(tmp_path, "".join(lines)))


@line_kinds
def test_only_bad_lines_are_no_trace(kind: str, tmp_path: Path) -> None:
    header = SAMPLES[kind].splitlines(keepends=True)[: FIRST_LINE[kind] - 1]
    path = write(tmp_path, "".join([*header, "broken\n"]))
    with (
        pytest.warns(WorkloadWarning, match="left out 1 malformed line; the first: "),
        pytest.raises(TraceFormatError, match="a trace needs at least one request"),
    ):
        read(kind, path, skip_bad_lines=True)
