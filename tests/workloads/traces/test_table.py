from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.workloads.traces.samples import write
from workloads import RequestSpec, TraceFormatError, WorkloadError
from workloads.requests.columns import SpecIterator
from workloads.traces import TableTraceReader

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {"time": "t", "prompt_tokens": "p", "output_tokens": "o"}


def read(path: Path, **options: Any) -> list[RequestSpec]:
    return list(TableTraceReader(path, **{**NAMES, **options}).read())


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        (("1764200000", "1764200001.5"), "s"),
        (("1764200000000", "1764200001500"), "ms"),
        (("1764200000000000", "1764200001500000"), "us"),
        (("1764200000000000000", "1764200001500000000"), "ns"),
        (("2025-11-26 23:33:20", "2025-11-26T23:33:21.500Z"), None),
        (("2025-11-27T00:33:20+01:00", "2025-11-26T23:33:21.5"), None),
    ],
)
def test_times(times: tuple[str, str], unit: str | None, tmp_path: Path) -> None:
    path = write(tmp_path, f"o,t,x,p\n3,{times[0]},,5\n4,{times[1]},,6\n")
    reader = TableTraceReader(path, **NAMES, time_unit=unit)  # type: ignore[arg-type]
    requests = reader.read()
    assert isinstance(requests, SpecIterator)
    first, second = requests
    assert first == RequestSpec(0, 0.0, ((0, 5),), 3, 1)
    assert second == RequestSpec(1, pytest.approx(1.5, abs=1e-6), ((2, 6),), 4, 3)


def test_objects_in_objects(tmp_path: Path) -> None:
    rows = [
        {
            "custom_id": f"r{i}",
            "response": {
                "body": {
                    "created": 100 + i,
                    "usage": {"prompt_tokens": 7 + i, "completion_tokens": 2},
                }
            },
        }
        for i in range(2)
    ]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)))
    names = {
        "time": "response.body.created",
        "prompt_tokens": "response.body.usage.prompt_tokens",
        "output_tokens": "response.body.usage.completion_tokens",
    }
    assert read(path, time_unit="s", **names) == [
        RequestSpec(0, 0.0, ((0, 7),), 2, 1),
        RequestSpec(1, 1.0, ((2, 8),), 2, 3),
    ]
    names["time"] = "created"
    rule = (
        r":1: keys must include created; got custom_id, response\.body\.created, .*; "
        "name one that is there"
    )
    with pytest.raises(TraceFormatError, match=rule):
        read(path, time_unit="s", **names)


def test_keys_with_points(tmp_path: Path) -> None:
    path = write(tmp_path, '{"a.t": 3, "p": 1, "o": 1}')
    assert read(path, time="a.t", time_unit="s")[0].arrival_s == 0.0


def test_prompts_go_on_from_the_one_before_in_their_session(tmp_path: Path) -> None:
    text = "t,p,o,who\n0,10,2,a\n1,5,1,b\n2,20,3,a\n3,8,1,\n4,15,1,a\n"
    path = write(tmp_path, text)
    options = {"time_unit": "s", "session": "who"}
    apart = read(path, **options)
    assert [request.session_id for request in apart] == [0, 1, 0, None, 0]
    assert [request.previous_id for request in apart] == [None] * 5
    assert [request.prompt for request in apart] == [
        ((2 * i, num),) for i, num in enumerate((10, 5, 20, 8, 15))
    ]
    together = read(path, **options, assume_history=True)
    assert [request.prompt for request in together] == [
        ((0, 10),),
        ((2, 5),),
        ((0, 10), (1, 2), (4, 8)),
        ((6, 8),),
        ((0, 10), (1, 2), (4, 3)),
    ]
    assert [request._replace(prompt=()) for request in together] == [
        request._replace(prompt=()) for request in apart
    ]


def test_the_next_of_a_session_waits_for_the_answer_before(tmp_path: Path) -> None:
    path = write(tmp_path, "t,p,o,who\n0,9,2,a\n1,5,1,b\n2,20,3,a\n3,8,1,\n90,9,1,a\n")
    options = {"time_unit": "s", "session": "who", "assume_history": True}
    recorded = read(path, **options)
    closed = read(path, **options, think_time_s=1.5)
    keys = ("arrival_s", "session_id", "previous_id", "delay_s")
    assert [tuple(getattr(each, key) for key in keys) for each in closed] == [
        (0.0, 0, None, 0.0),
        (1.0, 1, None, 0.0),
        (1.5, 0, 0, 1.5),
        (3.0, None, None, 0.0),
        (3.0, 0, 2, 1.5),
    ]
    reset = {"arrival_s": 0.0, "previous_id": None, "delay_s": 0.0}
    assert [each._replace(**reset) for each in closed] == [
        each._replace(**reset) for each in recorded
    ]
    at_once = read(path, **options, think_time_s=0)
    assert [each.num_prompt_tokens for each in at_once] == [9, 20, 9, 5, 8]
    assert [each.previous_id for each in at_once] == [None, 0, 1, None, None]


def test_prompts_begin_with_one_system_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, "t,p,o,who\n0,10,2,a\n1,5,1,b\n2,20,3,a\n3,8,1,\n")
    alone = read(path, time_unit="s", system_tokens=6)
    assert [each.prompt for each in alone] == [
        ((8, 6), (0, 4)),
        ((8, 5),),
        ((8, 6), (4, 14)),
        ((8, 6), (6, 2)),
    ]
    sessions = {"session": "who", "assume_history": True}
    together = read(path, time_unit="s", system_tokens=6, **sessions)
    assert [each.prompt for each in together] == [
        ((8, 6), (0, 4)),
        ((8, 5),),
        ((8, 6), (0, 4), (1, 2), (4, 8)),
        ((8, 6), (6, 2)),
    ]


def test_numbers_need_their_unit(tmp_path: Path) -> None:
    rule = "time_unit must be one of s, ms, us, ns where times are numbers; got 3 as t"
    for text in ("t,p,o\n3,1,1\n", '{"t": 3, "p": 1, "o": 1}'):
        with pytest.raises(WorkloadError, match=rule):
            read(write(tmp_path, text))


@pytest.mark.parametrize(
    ("row", "unit", "problem"),
    [
        ("noon,1,1", None, "t must be a time such as .*; got 'noon'; mend or remove"),
        ("1900-01-01,1,1", None, "t must be a time such as .*; got '1900-01-01'"),
        (
            "2025-11-26,1,1",
            "ms",
            "t must be a finite number of ms .*; got '2025-11-26'",
        ),
        ("-3,1,1", "s", "t must be a finite number of s .*; got -3.0"),
        ("3,1.5,1", "s", "p must be a whole number .*; got 1.5"),
        ("3,1,0", "s", "o must be a whole number .*; got 0"),
        ("3,1,", "s", "o must be a whole number .*; got ''"),
    ],
)
def test_bad_lines(row: str, unit: str | None, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"t,p,o\n{row}\n")
    with pytest.raises(TraceFormatError, match=rf"trace\.txt:2: {problem}"):
        read(path, time_unit=unit)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"time": 3}, "time must be the name of a column; got 3"),
        ({"output_tokens": None}, "output_tokens must be the name of a column"),
        ({"time_unit": "min"}, "time_unit must be one of s, ms, us, ns; got 'min'"),
        ({"assume_history": True}, "assume_history needs session"),
        ({"think_time_s": 0}, "think_time_s needs session, the column of .*; name it"),
        ({"think_time_s": -1.0}, "think_time_s must be between 0 and 1e.09; got -1.0"),
        ({"system_tokens": 0.5}, "system_tokens must be an integer; got 0.5; give"),
    ],
)
def test_settings(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        TableTraceReader("trace", **{**NAMES, **options})
