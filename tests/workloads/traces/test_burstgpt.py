from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

from tests.workloads.traces.samples import read, write
from workloads import RequestSpec, TraceFormatError, WorkloadError, WorkloadWarning
from workloads.requests.columns import SpecIterator
from workloads.traces import BurstGptTraceReader, BurstGptTraceWriter

if TYPE_CHECKING:
    from pathlib import Path

# The published header of 2024, and that of the third file.
OLD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
NEW = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,"
NEW += "Total tokens,Log Type"


def read_rows(folder: Path, header: str, *rows: str, **options: Any) -> Any:
    path = write(folder, "\n".join([header, *rows, ""]), "burst.csv")
    return read("burstgpt", path, **options)


def test_literal(tmp_path: Path) -> None:
    requests = read_rows(
        tmp_path,
        OLD,
        "5,ChatGPT,472,18,490,Conversation log",
        "45.5,GPT-4,1087,230,1317,API log",
    )
    assert requests == [
        RequestSpec(0, 0.0, ((0, 472),), 18, 1),
        RequestSpec(1, 40.5, ((2, 1087),), 230, 3),
    ]


def test_sessions_are_numbered_and_arrivals_stay(tmp_path: Path) -> None:
    requests = read_rows(
        tmp_path,
        NEW,
        "19440110.0,1722ac82-0a46,43,GPT-4,906,446,1352,Conversation log",
        "19440161.0,d5983bf9-4b48,2,ChatGPT,36,29,65,Conversation log",
        "19440192.0,,5,GPT-4,8,9,17,API log",
        "19440200.0,1722ac82-0a46,3,GPT-4,7,6,13,Conversation log",
    )
    assert [request.session_id for request in requests] == [0, 1, None, 0]
    assert [request.arrival_s for request in requests] == [0, 51, 82, 90]
    assert [request.previous_id for request in requests] == [None] * 4
    assert requests[3] == RequestSpec(3, 90.0, ((6, 7),), 6, 7, session_id=0)


@pytest.mark.parametrize(
    ("failures", "lengths"), [("drop", [18]), ("keep", [18, 1, 1])]
)
def test_failures(failures: str, lengths: list[int], tmp_path: Path) -> None:
    rows = ["5,ChatGPT,472,18,490,x", "6,ChatGPT,1087,0,1087,x", "7,ChatGPT,3,0,3,x"]
    with pytest.warns(WorkloadWarning, match="2 requests without a response .* are"):
        requests = read_rows(tmp_path, OLD, *rows, failures=failures)
    assert [request.num_output_tokens for request in requests] == lengths


@pytest.mark.parametrize(
    ("failures", "lengths", "what"),
    [
        ("drop", [472, 9], "3 requests without a response .* are left out; failures="),
        ("keep", [472, 5, 9], "kept with .* 1 token, but 2 without a prompt are left"),
    ],
)
def test_failures_without_a_prompt(
    failures: str, lengths: list[int], what: str, tmp_path: Path
) -> None:
    """The published file has such rows among its first hundred."""
    rows = ["5,ChatGPT,472,18,490,x", "1106,ChatGPT,0,0,0,x", "1107,ChatGPT,5,0,5,x"]
    rows += ["4525,GPT-4,0,0,0,x", "4574,ChatGPT,9,8,17,x"]
    with pytest.warns(WorkloadWarning, match=what):
        requests = read_rows(tmp_path, OLD, *rows, failures=failures)
    assert [request.num_prompt_tokens for request in requests] == lengths


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("6,ChatGPT,0,5,5,x", "Request tokens must be a whole number from 1 "),
        ("6,ChatGPT,-1,0,0,x", "Request tokens must be a whole number from 1 "),
        ("6,ChatGPT,0,-1,0,x", "Request tokens must be a whole number from 1 "),
        ("x,ChatGPT,0,0,0,x", "Timestamp must be a finite number of seconds"),
    ],
)
def test_what_is_no_failure(row: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=f":3: {problem}"):
        read_rows(tmp_path, OLD, "5,ChatGPT,472,18,490,x", row)


def test_part_of_the_calls(tmp_path: Path) -> None:
    rows = ["5,ChatGPT,1,1,2,API log", "6,GPT-4,2,1,3,API log", "7,GPT-4,3,1,4,Chat"]
    both = read_rows(tmp_path, OLD, *rows, model="GPT-4")
    assert [request.num_prompt_tokens for request in both] == [2, 3]
    assert both[0].arrival_s == 0.0
    (one,) = read_rows(tmp_path, OLD, *rows, model="GPT-4", log_type="API log")
    assert one.num_prompt_tokens == 2
    with pytest.raises(TraceFormatError, match="at least one request"):
        read_rows(tmp_path, OLD, *rows, model="Claude")
    few = ["Timestamp,Request tokens,Response tokens", "5,1,1"]
    with pytest.raises(TraceFormatError, match="columns must include Model; got"):
        read_rows(tmp_path, *few, model="GPT-4")


def test_without_sessions_there_are_columns(tmp_path: Path) -> None:
    path = write(tmp_path, f"{OLD}\n5,ChatGPT,472,18,490,API log\n")
    assert isinstance(BurstGptTraceReader(path).read(), SpecIterator)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("5,ChatGPT,0,18,18,x", "Request tokens must be a whole number from 1"),
        ("5,ChatGPT,-4,18,18,x", "Request tokens must be .*; got -4"),
        ("5,ChatGPT,4,-1,3,x", "Response tokens must be .*; got -1"),
        ("5,ChatGPT,4,1.0,5,x", "Response tokens must be .*; got '1.0'"),
        ("-5,ChatGPT,4,1,5,x", "Timestamp must be a finite number of seconds"),
        ("nan,ChatGPT,4,1,5,x", "Timestamp must be a finite number"),
        ("inf,ChatGPT,4,1,5,x", "Timestamp must be a finite number"),
        ("1_0,ChatGPT,4,1,5,x", "Timestamp must be a finite number"),
        ("1e13,ChatGPT,4,1,5,x", "Timestamp must be a finite number"),
        ("5,ChatGPT", "a line must have 6 fields"),
    ],
)
def test_bad_lines(row: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=rf"burst\.csv:3: {problem}.*; \w+"):
        read_rows(tmp_path, OLD, "1,ChatGPT,1,1,2,x", row)


def test_bad_rule() -> None:
    with pytest.raises(WorkloadError, match=r"failures must be .*; got 'hide'"):
        BurstGptTraceReader("x.csv", failures="hide")  # type: ignore[arg-type]


def test_written(tmp_path: Path) -> None:
    requests = [
        RequestSpec(0, 0.0, ((0, 5),), 6, 1, session_id=4),
        RequestSpec(1, 0.1, ((2, 7),), 8, 3),
    ]
    lines = list(BurstGptTraceWriter().lines(requests))
    assert lines == [
        f"{NEW}\n",
        "0.0,4,,unknown,5,6,11,Conversation log\n",
        "0.1,,,unknown,7,8,15,API log\n",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read("burstgpt", write(tmp_path, "".join(lines))) == requests
    named = list(BurstGptTraceWriter(model='a "b",\nc').lines(requests))
    path = write(tmp_path, "".join(named))
    assert read("burstgpt", path, model='a "b", c') == requests
