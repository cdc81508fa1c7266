from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.workloads.traces.samples import read, write
from workloads import RequestSpec, TraceFormatError
from workloads.requests.columns import SpecIterator
from workloads.traces import VidurTraceReader, VidurTraceWriter

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens"


def test_literal(tmp_path: Path) -> None:
    # As in the published file: times with the noise of a subtraction, and from pandas.
    path = write(
        tmp_path, f"{HEADER}\n1.0,374,44\n1.00001,9,1\n6.8926549999999995,5,2\n"
    )
    assert read("vidur", path) == [
        RequestSpec(0, 0.0, ((0, 374),), 44, 1),
        RequestSpec(1, 1.00001 - 1, ((2, 9),), 1, 3),
        RequestSpec(2, 6.8926549999999995 - 1, ((4, 5),), 2, 5),
    ]
    assert isinstance(VidurTraceReader(path).read(), SpecIterator)


def test_other_columns_and_exponents(tmp_path: Path) -> None:
    header = "num_decode_tokens,pd_ratio,arrived_at,num_prefill_tokens"
    path = write(tmp_path, f"{header}\n7,0.5,0,8\n9,x,1e-05,10\n")
    assert read("vidur", path) == [
        RequestSpec(0, 0.0, ((0, 8),), 7, 1),
        RequestSpec(1, 1e-05, ((2, 10),), 9, 3),
    ]


def test_lengths_without_times_are_no_trace(tmp_path: Path) -> None:
    path = write(tmp_path, "num_prefill_tokens,num_decode_tokens\n1,2\n")
    with pytest.raises(
        TraceFormatError, match=r":1: columns must include arrived_at; "
    ):
        read("vidur", path)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("1.0,0,1", "num_prefill_tokens must be a whole number from 1 .*; got 0"),
        ("1.0,1,0", "num_decode_tokens must be .*; got 0"),
        ("1.0,1,1000000001", "num_decode_tokens must be .*; got 1000000001"),
        ("1.0,1," + "9" * 5000, "num_decode_tokens must be .*; got '999"),
        ("1.0,\u0663,1", "num_prefill_tokens must be .*; got"),
        ("x,1,1", "arrived_at must be a finite number of seconds .*; got 'x'"),
        ("-1,1,1", "arrived_at must be a finite number of seconds .*; got '-1'"),
        ("1.0,1", "a line must have 3 fields; got '1.0,1'"),
    ],
)
def test_bad_lines(row: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEADER}\n0,1,1\n{row}\n")
    with pytest.raises(TraceFormatError, match=rf"trace\.txt:3: {problem}.*; \w+"):
        read("vidur", path)


def test_written() -> None:
    requests = [RequestSpec(0, 0.1, ((0, 5), (2, 1)), 6, 1)]
    assert list(VidurTraceWriter().lines(requests)) == [f"{HEADER}\n", "0.1,6,6\n"]
    assert VidurTraceWriter().losses(requests) == [
        "time before the first arrival (0.1 s): a trace starts at 0"
    ]
