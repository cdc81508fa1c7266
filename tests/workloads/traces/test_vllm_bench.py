from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.workloads.traces.samples import read, write
from workloads import RequestSpec, TraceFormatError, WorkloadWarning
from workloads.traces import VllmBenchTraceWriter

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {
    "backend": "vllm",
    "completed": 2,
    "input_lens": [12, 9],
    "output_lens": [5, 6],
    "ttfts": [0.1, 0.2],
    "itls": [[0.1], []],
    "start_times": [1000.5, 1001.75],
    "generated_texts": ["a", "b"],
    "errors": ["", ""],
}


def read_result(folder: Path, result: Any, **options: Any) -> list[RequestSpec]:
    text = result if isinstance(result, str) else json.dumps(result)
    return read("vllm_bench", write(folder, text, "result.json"), **options)


def test_literal(tmp_path: Path) -> None:
    assert read_result(tmp_path, GOOD) == [
        RequestSpec(0, 0.0, ((0, 12),), 5, 1),
        RequestSpec(1, 1.25, ((2, 9),), 6, 3),
    ]


def test_without_errors(tmp_path: Path) -> None:
    result = {key: value for key, value in GOOD.items() if key != "errors"}
    assert len(read_result(tmp_path, result)) == 2


@pytest.mark.parametrize(("failures", "num"), [("drop", 1), ("keep", 2)])
@pytest.mark.parametrize(
    "change", [{"output_lens": [5, 0]}, {"errors": ["", "Bad Gateway"]}]
)
def test_failures(
    failures: str, num: int, change: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.warns(WorkloadWarning, match="1 requests without a response"):
        requests = read_result(tmp_path, GOOD | change, failures=failures)
    assert [request.num_output_tokens for request in requests] == [5, 1][:num]


@pytest.mark.parametrize(
    ("result", "line", "problem"),
    [
        ({}, 1, "a result must have the lists start_times, .*; run .*save-detailed"),
        ([GOOD], 1, "a result must be a JSON object"),
        (
            {key: value for key, value in GOOD.items() if key != "start_times"},
            1,
            "a result must have the lists start_times; .*--save-detailed",
        ),
        (GOOD | {"input_lens": [1]}, 1, "lists must have one length; got"),
        (GOOD | {"errors": [""]}, 1, "lists must have one length; got"),
        (GOOD | {"errors": 3}, 1, "errors must be a list"),
        (GOOD | {"input_lens": [12, -1]}, 1, "request 1: input_lens must be"),
        (GOOD | {"input_lens": [12, 9.5]}, 1, "request 1: input_lens must be"),
        (GOOD | {"start_times": [0, None]}, 1, "request 1: start_times must be"),
        (GOOD | {"output_lens": [5, "6"]}, 1, "request 1: output_lens must be"),
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD), 2, "a result must be one JSON"),
        (json.dumps(GOOD)[:-5], 1, "a result must be one JSON object"),
    ],
)
def test_bad_results(result: Any, line: int, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=rf"result\.json:{line}: {problem}"):
        read_result(tmp_path, result)


def test_the_line_is_that_of_the_list(tmp_path: Path) -> None:
    text = json.dumps(GOOD | {"input_lens": [12, 0]}, indent=1)
    line = text[: text.index('"start_times"')].count("\n") + 1
    with pytest.raises(TraceFormatError, match=rf"result\.json:{line}: request 1: "):
        read_result(tmp_path, text)
    with pytest.warns(WorkloadWarning, match="left out 1 malformed line"):
        (request,) = read_result(tmp_path, text, skip_bad_lines=True)
    assert request.num_prompt_tokens == 12


def test_written(tmp_path: Path) -> None:
    requests = read_result(tmp_path, GOOD)
    text = "".join(VllmBenchTraceWriter().lines(requests))
    assert json.loads(text) == {
        "num_prompts": 2,
        "start_times": [0.0, 1.25],
        "input_lens": [12, 9],
        "output_lens": [5, 6],
        "errors": ["", ""],
    }
    assert read_result(tmp_path, text) == requests


def test_the_line_of_bad_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(b'\n{"errors": "\xff"}')
    with pytest.raises(TraceFormatError, match=r"json:2: "):
        read("vllm_bench", path)
