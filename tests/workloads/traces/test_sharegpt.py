from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads.traces.samples import SHAREGPT, read, write
from workloads import RequestSpec, TraceFormatError, WorkloadError, WorkloadWarning
from workloads.arrivals import ConstantArrivals
from workloads.traces import ShareGptTraceReader
from workloads.traces.parsing import json_values

if TYPE_CHECKING:
    from pathlib import Path


def turn(speaker: str, value: str, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value, **more}


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [turn(*each) for each in turns]}


def read_file(folder: Path, content: Any, **options: Any) -> list[RequestSpec]:
    text = content if isinstance(content, str) else json.dumps(content)
    return read("sharegpt", write(folder, text, "share.json"), **options)


TWO_TURNS = conversation(
    ("human", "a" * 40), ("gpt", "b" * 80), ("human", "c" * 20), ("gpt", "d" * 8)
)


def test_literal(tmp_path: Path) -> None:
    requests = read_file(tmp_path, [TWO_TURNS], think_time_s=7.5)
    assert requests == [
        RequestSpec(0, 0.0, ((2, 10),), 20, 1, session_id=0),
        RequestSpec(
            *(1, 7.5, ((2, 10), (1, 20), (6, 5)), 2, 3),
            session_id=0,
            previous_id=0,
            delay_s=7.5,
        ),
    ]


def test_an_array_of_conversations_and_one_a_line_are_the_same(tmp_path: Path) -> None:
    entries = json.loads(SHAREGPT)
    lines = "\n".join(map(json.dumps, entries))
    expected = read_file(tmp_path, SHAREGPT)
    assert len(expected) == 3
    assert read_file(tmp_path, lines) == expected
    assert read_file(tmp_path, json.dumps(entries, indent=2)) == expected


def test_equal_beginnings_are_shared(tmp_path: Path) -> None:
    system = ("system", "s" * 400)
    requests = read_file(
        tmp_path,
        [
            conversation(system, ("human", "q" * 40), ("gpt", "x")),
            conversation(system, ("human", "r" * 40), ("gpt", "x")),
            conversation(system, ("human", "q" * 40), ("gpt", "y")),
            conversation(("human", "q" * 40), ("gpt", "x")),
        ],
    )
    first, second, third, fourth = (request.prompt for request in requests)
    assert [num for _, num in first] == [100, 10]
    assert first == third
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert fourth[0] not in first
    assert len({request.output_segment for request in requests}) == 4


def test_turns_out_of_order(tmp_path: Path) -> None:
    requests = read_file(
        tmp_path,
        [
            conversation(
                ("gpt", "hello"),  # nobody asked
                ("human", "a" * 8),
                ("human", "b" * 8),
                ("gpt", ""),  # nothing said
                ("gpt", "c" * 12),
                ("human", "d" * 4),
            )
        ],
    )
    (request,) = requests
    assert [num for _, num in request.prompt] == [1, 2, 2]
    assert request.num_output_tokens == 3


def test_conversations_without_an_answer(tmp_path: Path) -> None:
    silent = [conversation(), conversation(("human", "a")), conversation(("gpt", "b"))]
    with pytest.warns(WorkloadWarning, match="3 of 4 conversations hold no answered"):
        requests = read_file(tmp_path, [*silent, TWO_TURNS])
    assert len(requests) == 2
    with pytest.raises(TraceFormatError, match="at least one request"):
        read_file(tmp_path, silent)


def test_first_turns_only(tmp_path: Path) -> None:
    assert len(read_file(tmp_path, [TWO_TURNS] * 3, max_turns=1)) == 3
    assert len(read_file(tmp_path, [TWO_TURNS] * 3, max_turns=2)) == 6


def test_token_counts_in_the_file(tmp_path: Path) -> None:
    turns = [turn("human", "Hi", tokens=7), turn("gpt", "Ho", tokens=9)]
    path = write(tmp_path, json.dumps([{"conversations": turns}]))
    (request,) = ShareGptTraceReader(path, tokens_key="tokens").read()
    assert (request.num_prompt_tokens, request.num_output_tokens) == (7, 9)
    with pytest.raises(TraceFormatError, match=":1: num must be a whole number"):
        ShareGptTraceReader(path, tokens_key="num").read()


def test_arrivals(tmp_path: Path) -> None:
    requests = read_file(
        tmp_path, [TWO_TURNS] * 2, arrivals=ConstantArrivals(rate=2.0), think_time_s=9
    )
    assert [request.arrival_s for request in requests] == [0, 0.5, 9, 9.5]
    assert [request.session_id for request in requests] == [0, 1, 0, 1]
    assert [request.previous_id for request in requests] == [None, None, 0, 1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "lengths must come from .*; got neither"),
        ({"tokens_per_character": 0.2, "tokens_key": "n"}, "lengths .*; got both"),
        ({"tokens_per_character": 0}, "tokens_per_character must be > 0"),
        ({"tokens_key": 4}, "tokens_key must be text"),
        ({"tokens_key": "n", "max_turns": 0}, "max_turns must be"),
        ({"tokens_key": "n", "think_time_s": -1}, "think_time_s must be"),
        ({"tokens_key": "n", "arrivals": 3}, "arrivals must have the method"),
        ({"tokens_key": "n", "seed": -1}, "seed must be"),
    ],
)
def test_bad_options(options: Any, problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        ShareGptTraceReader("share.json", **options)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('[\n{"conversations": []},\n{"conversations" []}]', 3, "a trace must be JSON"),
        ('[\n{"conversations": []}\n{"conversations": []}]', 3, "values of an array"),
        ('[\n{"conversations": []}', 2, "an array must end"),
        ('[\n{"conversations": [', 2, "a trace must be JSON"),
        ('[{"conversations": []}]\n\n]', 3, "an array must end the file"),
        ("[\n3]", 2, "a conversation must be an object"),
        ('[\n{"id": 3}]', 2, "a conversation must be an object"),
        ('[\n{"conversations": 3}]', 2, "a conversation must be an object"),
        ('[\n{"conversations": [3]}]', 2, "turn 0 must say"),
        ('[\n{"conversations": [{"from": "gpt"}]}]', 2, "turn 0 must say"),
        ('[\n{"conversations": [{"from": 1, "value": ""}]}]', 2, "turn 0 must say"),
        (
            '[\n\n{"conversations": [{"from": "gpt", "value": "\0"}]}]',
            3,
            "a trace must",
        ),
        ("[" * 100_000, 1, "a trace must be JSON"),
    ],
)
def test_bad_files(text: str, line: int, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=rf"share\.json:{line}: {problem}"):
        read_file(tmp_path, text)


def test_bad_conversations_are_left_out(tmp_path: Path) -> None:
    with pytest.warns(WorkloadWarning, match=r"left out 2 malformed lines; .*json:1: "):
        requests = read_file(tmp_path, [3, TWO_TURNS, {}], skip_bad_lines=True)
    assert len(requests) == 2
    # Where the next one begins is unknown here.
    with pytest.raises(TraceFormatError, match="a trace must be JSON"):
        read_file(tmp_path, '[{"conversations" []},\n{}]', skip_bad_lines=True)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.lists(values, max_size=6),
    st.sampled_from([None, 0, 2]),
    st.integers(1, 9),
    st.booleans(),
)
def test_values_come_one_by_one_as_all_at_once(
    tmp_path_factory: Any,
    expected: list[Any],
    indent: int | None,
    num_bytes: int,
    escaped: bool,
) -> None:
    text = json.dumps(expected, indent=indent, ensure_ascii=escaped)
    path = write(tmp_path_factory.mktemp("values"), text)
    with mock.patch.object(json_values, "CHUNK_BYTES", num_bytes):
        found = list(json_values.json_values(path))
    assert [value for _, value in found] == expected
    lines = [line for line, _ in found]
    assert lines == sorted(lines)
    if indent == 0 and not any(isinstance(value, list | dict) for value in expected):
        assert lines == list(range(2, len(expected) + 2))
