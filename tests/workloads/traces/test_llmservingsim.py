from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.shared import shared
from tests.workloads.traces.samples import read, write
from workloads import RequestSpec, TraceFormatError, WorkloadWarning
from workloads.requests.columns import SpecIterator
from workloads.traces import LlmServingSimTraceReader, LlmServingSimTraceWriter

if TYPE_CHECKING:
    from pathlib import Path

FLAT = {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 50}
CALL = {"input_toks": 1472, "output_toks": 133, "tool_duration_ns": 127348767}
SESSION = {
    "session_id": "task-0-run0",
    "arrival_time_ns": 4059740,
    "sub_requests": [CALL, {"input_toks": 1582, "output_toks": 125}],
}


def read_lines(folder: Path, *lines: Any, **options: Any) -> list[RequestSpec]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return read("llmservingsim", write(folder, "\n".join(texts)), **options)


def test_flat_without_token_ids(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(FLAT) + "\n" + json.dumps(FLAT))
    requests = LlmServingSimTraceReader(path).read()
    assert isinstance(requests, SpecIterator)
    assert list(requests) == [
        RequestSpec(0, 0.0, ((0, 3),), 2, 1),
        RequestSpec(1, 0.0, ((2, 3),), 2, 3),
    ]


def test_token_ids(tmp_path: Path) -> None:
    # The first lines of the published example, shortened.
    requests = read_lines(
        tmp_path,
        FLAT | {"input_tok_ids": [1, 2, 3], "output_tok_ids": [11, 12]},
        FLAT | {"input_toks": 4, "input_tok_ids": [1, 2, 9, 8]},
        FLAT | {"input_toks": 5, "input_tok_ids": [1, 2, 3, 11, 4]},
        FLAT,
    )
    assert [request.prompt for request in requests] == [
        ((0, 3),),
        ((0, 2), (2, 2)),
        ((0, 3), (1, 1), (4, 1)),
        ((6, 3),),
    ]


def test_sessions(tmp_path: Path) -> None:
    requests = read_lines(tmp_path, SESSION, FLAT | {"arrival_time_ns": 50_000_000})
    assert requests == [
        RequestSpec(0, 0.0, ((0, 1472),), 133, 1, session_id=0),
        RequestSpec(1, 0.04594026, ((2, 3),), 2, 3),
        RequestSpec(
            *(2, 0.127348767, ((4, 1582),), 125, 5),
            session_id=0,
            previous_id=0,
            delay_s=0.127348767,
        ),
    ]


def test_history_is_assumed_only_where_asked(tmp_path: Path) -> None:
    longer = {"input_toks": 1700, "output_toks": 5}
    calls = [CALL, {"input_toks": 1582, "output_toks": 125}, longer]
    requests = read_lines(
        tmp_path, SESSION | {"sub_requests": calls}, assume_history=True
    )
    assert [request.prompt for request in requests] == [
        ((0, 1472),),
        ((0, 1472), (1, 110)),
        ((0, 1472), (1, 110), (3, 118)),
    ]
    shorter = SESSION | {"sub_requests": [CALL, FLAT | {"input_toks": 9}]}
    assert read_lines(tmp_path, shorter, assume_history=True)[1].prompt == ((0, 9),)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"input_toks": 3, "output_toks": 2}, "keys must include arrival_time_ns; got"),
        (FLAT | {"arrival_time_ns": -1}, "arrival_time_ns must be a whole number"),
        (FLAT | {"arrival_time_ns": 1.5}, "arrival_time_ns must be a whole number"),
        (FLAT | {"arrival_time_ns": 10**19}, "arrival_time_ns must be a whole number"),
        ({"arrival_time_ns": 0}, "keys must include input_toks, output_toks; got"),
        (FLAT | {"input_toks": 0}, "input_toks must be a whole number"),
        (FLAT | {"output_toks": 0}, "output_toks must be a whole number"),
        (FLAT | {"input_tok_ids": 5}, "input_tok_ids must be a list of integers"),
        (FLAT | {"input_tok_ids": [1, 2]}, "input_tok_ids must be one per token, 3"),
        (FLAT | {"input_tok_ids": [1, 2, -3]}, "input_tok_ids must be a list of int"),
        (FLAT | {"input_tok_ids": [1, 2, 2**63]}, "input_tok_ids must be a list of"),
        (FLAT | {"input_tok_ids": [1, 2, 3.0]}, "input_tok_ids must be a list of int"),
        (FLAT | {"input_tok_ids": [1, 2, True]}, "input_tok_ids must be a list of"),
        (FLAT | {"output_tok_ids": [1]}, "output_tok_ids must be one per token, 2"),
        (SESSION | {"session_id": None}, "session_id of sub_requests must be text"),
        (SESSION | {"sub_requests": []}, "sub_requests must be a list of at least"),
        (SESSION | {"sub_requests": {}}, "sub_requests must be a list of at least"),
        (
            SESSION | {"sub_requests": [CALL, 3]},
            r"sub_requests\[1\]: must be an object",
        ),
        (
            SESSION | {"sub_requests": [CALL, {"input_toks": 1}]},
            r"sub_requests\[1\]: keys must include input_toks, output_toks|sub_requests"
            r"\[1\]: keys must include output_toks",
        ),
        (
            SESSION | {"sub_requests": [CALL | {"tool_duration_ns": -1}]},
            r"sub_requests\[0\]: tool_duration_ns must be a whole number",
        ),
    ],
)
def test_bad_lines(line: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=rf"trace\.txt:2: (?:{problem})"):
        read_lines(tmp_path, FLAT, line)


def test_a_bad_session_is_left_out_as_one(tmp_path: Path) -> None:
    bad = SESSION | {"sub_requests": [CALL, {}]}
    with pytest.warns(WorkloadWarning, match="left out 1 malformed line;"):
        requests = read_lines(tmp_path, bad, FLAT, skip_bad_lines=True)
    assert [request.session_id for request in requests] == [None]


def test_written() -> None:
    requests = [
        RequestSpec(0, 0.0, ((0, 2),), 2, 1, session_id=7),
        RequestSpec(1, 0.5, ((0, 1),), 1, 3),
        RequestSpec(
            *(2, 1.0, ((0, 2), (1, 2), (4, 1)), 1, 5),
            session_id=7,
            previous_id=0,
            delay_s=1.0,
        ),
    ]
    plain = LlmServingSimTraceWriter()
    assert list(map(json.loads, plain.lines(requests))) == [
        {
            "arrival_time_ns": 0,
            "session_id": "7",
            "sub_requests": [
                {"input_toks": 2, "output_toks": 2, "tool_duration_ns": 10**9},
                {"input_toks": 5, "output_toks": 1, "tool_duration_ns": 0},
            ],
        },
        {"arrival_time_ns": 500_000_000, "input_toks": 1, "output_toks": 1},
    ]
    assert plain.losses(requests) == [
        "which prompts share text (3 of 3 requests): make_up_token_ids=true keeps it"
    ]
    made_up = LlmServingSimTraceWriter(make_up_token_ids=True)
    assert made_up.losses(requests) == []
    first, second = map(json.loads, made_up.lines(requests))
    assert [call["input_tok_ids"] for call in first["sub_requests"]] == [
        [0, 1],
        [0, 1, 2, 3, 5],
    ]
    assert first["sub_requests"][0]["output_tok_ids"] == [2, 3]
    assert second["input_tok_ids"] == [0]


def test_prefixes_of_the_published_trace() -> None:
    # What an infinite cache of blocks of 16 tokens that fills at once would serve.
    path = shared("traces/llmservingsim_sharegpt_llama31_300_sps10.jsonl.gz")
    requests = read("llmservingsim", path)
    assert len(requests) == 300
    assert requests[-1].arrival_s == pytest.approx(29.1, abs=0.05)
    seen: set[tuple[tuple[int, int], ...]] = set()
    num_hit = num_tokens = num_blocks = num_requests_hit = 0
    for request in requests:
        tokens = [(s, i) for s, num in request.prompt for i in range(num)]
        # Equal leading segments are an equal prefix: a block is known by all before it.
        ends = range(16, len(tokens) + 1, 16)
        prefixes = [tuple(_runs(tokens[:end])) for end in ends]
        hits = next((i for i, p in enumerate(prefixes) if p not in seen), len(prefixes))
        num_hit += 16 * hits
        num_requests_hit += hits > 0
        num_tokens += len(tokens)
        num_blocks += len(prefixes)
        seen.update(prefixes)
    assert (num_hit, num_tokens) == (19_520, 257_239)
    assert (num_blocks, len(seen)) == (15_942, 14_722)
    assert num_requests_hit == 32  # 10.7 %
    output_tokens = [request.num_output_tokens for request in requests]
    assert sum(output_tokens) / 300 == pytest.approx(652.5, abs=0.05)
    assert max(output_tokens) == 1021


def _runs(tokens: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return tokens as segments again."""
    runs: dict[int, int] = {}
    for segment, _ in tokens:
        runs[segment] = runs.get(segment, 0) + 1
    return list(runs.items())
