from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shared import shared
from tests.workloads.shared_traces import MOONCAKE, shared_trace
from workloads import RequestSpec, TraceFormatError, WorkloadError, WorkloadWarning
from workloads.traces import MooncakeTraceReader, MooncakeTraceWriter

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"timestamp": 0, "input_length": 10, "output_length": 6, "hash_ids": [0]}


def read(
    folder: Path, *lines: str | dict[str, Any], **options: int
) -> list[RequestSpec]:
    path = folder / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join([*texts, ""]))
    return list(MooncakeTraceReader(path=path, **options).read())


def test_literal(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        {
            "timestamp": 0,
            "input_length": 1300,
            "output_length": 5,
            "hash_ids": [7, 8, 40],
        },
        {"timestamp": 27, "input_length": 1024, "output_length": 6, "hash_ids": [7, 8]},
        {"timestamp": 3000.5, "input_length": 1, "output_length": 7, "hash_ids": [9]},
    )
    assert requests == [
        RequestSpec(0, 0.0, ((14, 512), (16, 512), (80, 276)), 5, 1),
        RequestSpec(1, 0.027, ((14, 512), (16, 512)), 6, 3),
        RequestSpec(2, 3.0005, ((18, 1),), 7, 5),
    ]


def test_other_granularity_and_other_keys(tmp_path: Path) -> None:
    line = {**GOOD, "input_length": 40, "hash_ids": [3, 4, 5], "session_id": "x"}
    (request,) = read(tmp_path, line, block_tokens=16)
    assert request.prompt == ((6, 16), (8, 16), (10, 8))


def test_the_first_arrival_is_time_0(tmp_path: Path) -> None:
    requests = read(tmp_path, GOOD | {"timestamp": 5000}, GOOD | {"timestamp": 5250})
    assert [request.arrival_s for request in requests] == [0, 0.25]


@given(st.integers(1, 10_000), st.integers(1, 700))
def test_segments_add_up(tmp_path_factory: Any, length: int, block: int) -> None:
    ids = list(range(-(-length // block)))
    line = GOOD | {"input_length": length, "hash_ids": ids}
    (request,) = read(tmp_path_factory.mktemp("trace"), line, block_tokens=block)
    assert request.num_prompt_tokens == length
    assert all(num_tokens == block for _, num_tokens in request.prompt[:-1])
    assert 1 <= request.prompt[-1][1] <= block


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            '{"timestamp": 27, "input_len',
            "one JSON object; got .*input_len'",
        ),
        ("", None),
        ("[1, 2]", r"a line must be a JSON object; got '\[1, 2\]'"),
        ("12", "a line must be a JSON object; got '12'"),
        ("{}", "keys must include timestamp, input_length, .*; got none"),
        ({"timestamp": 1}, "keys must include input_length, .*; got timestamp"),
        (GOOD | {"timestamp": float("nan")}, "timestamp must be finite?.*; got nan"),
        (GOOD | {"timestamp": float("inf")}, "timestamp must be .*; got inf"),
        (GOOD | {"timestamp": -1}, "timestamp must be .*; got -1"),
        (GOOD | {"timestamp": "27"}, "timestamp must be .*; got '27'"),
        (GOOD | {"timestamp": None}, "timestamp must be .*; got None"),
        ('{"timestamp": 1' + "0" * 400 + "}", "keys must include input_length"),
        (GOOD | {"timestamp": 10**400}, "timestamp must be .* to 1e\\+15; got 1000"),
        (GOOD | {"timestamp": 1e300}, "timestamp must be .*; got 1e"),
        (GOOD | {"timestamp": 10**15 + 1}, "timestamp must be .*; got 1000"),
        (GOOD | {"timestamp": "9" * 9000}, "timestamp must be .*; got '99"),
        (GOOD | {"timestamp": [0]}, "timestamp must be .*; got "),
        (GOOD | {"timestamp": True}, "timestamp must be .*; got True"),
        (GOOD | {"input_length": 0}, "input_length must be a whole .*; got 0"),
        (GOOD | {"input_length": -3}, "input_length must be .*; got -3"),
        (GOOD | {"input_length": 10.0}, "input_length must be .*; got 10.0"),
        (GOOD | {"input_length": "10"}, "input_length must be .*; got '10'"),
        (GOOD | {"output_length": 0}, "output_length must be .*; got 0"),
        (GOOD | {"input_length": 10**400}, "input_length must be .*; got 1000"),
        (GOOD | {"input_length": 1e300}, "input_length must be .*; got 1e"),
        (GOOD | {"input_length": True}, "input_length must be .*; got True"),
        (GOOD | {"output_length": 6.0}, "output_length must be .*; got 6.0"),
        (GOOD | {"output_length": True}, "output_length must be .*; got True"),
        (GOOD | {"output_length": float("nan")}, "output_length must be .*; got nan"),
        (GOOD | {"hash_ids": None}, "hash_ids must be a list of .*; got 'None'"),
        (GOOD | {"hash_ids": ["a"]}, "hash_ids must be a list of integers"),
        (GOOD | {"hash_ids": [-1]}, "hash_ids must be a list of integers"),
        (GOOD | {"hash_ids": [1.0]}, "hash_ids must be a list of integers"),
        (GOOD | {"hash_ids": [True]}, "hash_ids must be a list of integers"),
        (
            GOOD | {"hash_ids": []},
            "hash_ids must be one per 512 tokens, 1 for .*; got 0",
        ),
        (GOOD | {"hash_ids": [1, 2]}, "hash_ids must be one per 512 .*; got 2"),
        (GOOD | {"input_length": 513}, "tokens, 2 for input_length 513; got 1"),
        ('{"timestamp": ' + "9" * 5000 + "}", "one JSON object"),
        ("[" * 100_000, "one JSON object"),
        ({"a\nb" * 500: 1}, r"keys must include timestamp, .*; got a\\nb"),
    ],
)
def test_bad_lines(
    line: str | dict[str, Any], problem: str | None, tmp_path: Path
) -> None:
    if problem is None:
        assert len(read(tmp_path, GOOD, line, GOOD)) == 2
        return
    problem = problem.replace("finite?", "a finite number of milliseconds")
    with pytest.raises(
        TraceFormatError, match=rf"trace\.jsonl:2: .*{problem}.*; \w+"
    ) as e:
        read(tmp_path, GOOD, line, GOOD)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < len(str(tmp_path)) + 400


def test_the_largest_timestamp(tmp_path: Path) -> None:
    first, last = read(tmp_path, GOOD, GOOD | {"timestamp": 10**15})
    assert (first.arrival_s, last.arrival_s) == (0.0, 1e12)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "512", True])
def test_bad_block(bad: Any) -> None:
    with pytest.raises(WorkloadError, match=r"^block_tokens must be .*; got .*; give"):
        MooncakeTraceReader(path="trace.jsonl", block_tokens=bad)


def test_published_trace() -> None:
    requests = list(MooncakeTraceReader(path=shared_trace(MOONCAKE)).read())
    assert len(requests) == 12_031
    assert requests[-1].arrival_s == pytest.approx(3537.0, abs=0.05)
    prompt_tokens = [request.num_prompt_tokens for request in requests]
    output_tokens = [request.num_output_tokens for request in requests]
    assert sum(prompt_tokens) / len(requests) == pytest.approx(12035.1, abs=0.05)
    assert max(prompt_tokens) == 126_195
    assert sum(output_tokens) / len(requests) == pytest.approx(342.6, abs=0.05)
    assert max(output_tokens) == 2000


def test_prefixes_of_the_published_trace() -> None:
    # What an infinite cache that fills at once would serve.
    num_hit_tokens = num_hit_blocks = num_tokens = num_blocks = num_requests_hit = 0
    seen: set[int] = set()
    for request in MooncakeTraceReader(path=shared_trace(MOONCAKE)).read():
        num_tokens += request.num_prompt_tokens
        num_blocks += len(request.prompt)
        hits = 0
        for segment, num_segment_tokens in request.prompt:
            if segment not in seen:
                break
            hits += 1
            num_hit_tokens += num_segment_tokens
        num_hit_blocks += hits
        num_requests_hit += hits > 0
        seen.update(segment for segment, _ in request.prompt)
    assert (num_blocks, len(seen)) == (288_500, 182_790)
    assert num_hit_blocks / num_blocks == pytest.approx(0.3664, abs=5e-5)
    assert (num_hit_tokens, num_tokens) == (54_098_411, 144_793_823)  # 37.36 %
    # All but the first: block id 0 is common to all.
    assert num_requests_hit == 12_030


FOLLOW_UP = {key: value for key, value in GOOD.items() if key != "timestamp"}


def test_sessions_of_recorded_arrivals(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        GOOD | {"session_id": "b"},
        GOOD | {"timestamp": 5, "session_id": "a", "delay": None},
        GOOD | {"timestamp": 6},
        GOOD | {"timestamp": 7, "session_id": "b"},
    )
    assert [request.session_id for request in requests] == [0, 1, None, 0]
    assert [request.previous_id for request in requests] == [None] * 4


def test_session_ids_that_are_numbers_are_kept(tmp_path: Path) -> None:
    lines = [GOOD | {"session_id": session} for session in ("12", 7, "12")]
    assert [request.session_id for request in read(tmp_path, *lines)] == [12, 7, 12]
    lines[1]["session_id"] = "07"
    assert [request.session_id for request in read(tmp_path, *lines)] == [0, 1, 0]


def test_turns_with_a_delay_follow_the_turn_before(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        GOOD | {"timestamp": 1000, "session_id": "x"},
        FOLLOW_UP | {"session_id": "x", "delay": 2500.5},
        GOOD | {"timestamp": 2000, "session_id": "y"},
        FOLLOW_UP | {"session_id": "x", "delay": 0, "timestamp": None},
    )
    assert requests == [
        RequestSpec(0, 0.0, ((0, 10),), 6, 1, session_id=0),
        RequestSpec(1, 1.0, ((0, 10),), 6, 3, session_id=1),
        RequestSpec(
            *(2, 2.5005, ((0, 10),), 6, 5), session_id=0, previous_id=0, delay_s=2.5005
        ),
        RequestSpec(3, 2.5005, ((0, 10),), 6, 7, session_id=0, previous_id=2),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (GOOD | {"delay": 5, "session_id": "x"}, "timestamp or delay; got both"),
        (FOLLOW_UP | {"delay": 5}, "a line with delay must have a session_id"),
        (FOLLOW_UP | {"delay": 5, "session_id": "z"}, "first line of a session must"),
        (FOLLOW_UP | {"delay": -5, "session_id": "x"}, "delay must be a finite number"),
        (FOLLOW_UP | {"delay": "5", "session_id": "x"}, "delay must be a finite"),
        (FOLLOW_UP | {"delay": float("inf"), "session_id": "x"}, "delay must be a fin"),
        (GOOD | {"session_id": 1.5}, "session_id must be text or a whole number"),
        (GOOD | {"session_id": ["x"]}, "session_id must be text or a whole number"),
        ({"text_input": "Hi", "timestamp": 0}, "keys must include input_length, "),
    ],
)
def test_bad_sessions(line: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=rf"trace\.jsonl:2: .*{problem}"):
        read(tmp_path, GOOD | {"session_id": "x"}, line)


def test_what_follows_a_bad_line_follows_what_is_left(tmp_path: Path) -> None:
    lines = [
        GOOD | {"session_id": "x"},
        FOLLOW_UP | {"session_id": "x", "delay": -1},
        FOLLOW_UP | {"session_id": "x", "delay": 7},
        GOOD | {"session_id": "y", "timestamp": -1},
        FOLLOW_UP | {"session_id": "y", "delay": 7},
    ]
    with pytest.warns(WorkloadWarning, match="left out 3 malformed lines"):
        requests = read(tmp_path, *lines, skip_bad_lines=True)
    assert [request.previous_id for request in requests] == [None, 0]


def test_ids_of_full_blocks_only(tmp_path: Path) -> None:
    lines = [
        GOOD | {"input_length": 40, "hash_ids": [3, 4]},
        GOOD | {"input_length": 32, "hash_ids": [3, 9]},
        GOOD | {"input_length": 5, "hash_ids": []},
    ]
    requests = read(tmp_path, *lines, block_tokens=16, full_blocks_only=True)
    assert [request.prompt for request in requests] == [
        ((6, 16), (8, 16), (20, 8)),
        ((6, 16), (18, 16)),
        ((24, 5),),
    ]
    with pytest.raises(TraceFormatError, match=r"3 for .*; got 2; .*full_blocks_only"):
        read(tmp_path, *lines, block_tokens=16)


def test_requests_of_one_timestamp_are_spread_until_the_next(tmp_path: Path) -> None:
    lines = [GOOD | {"timestamp": t} for t in (3000, 3000, 3000, 6000, 6000, 9000)]
    requests = read(tmp_path, *lines, spread_arrivals=True)
    assert [request.arrival_s for request in requests] == [0, 1, 2, 3, 4.5, 6]
    (alone,) = read(tmp_path, GOOD | {"timestamp": 3000}, spread_arrivals=True)
    assert alone.arrival_s == 0


def test_follow_ups_are_sent_as_before_when_arrivals_are_spread(tmp_path: Path) -> None:
    lines = [
        GOOD | {"timestamp": 0, "session_id": "x"},
        GOOD | {"timestamp": 0, "session_id": "y"},
        FOLLOW_UP | {"session_id": "x", "delay": 500},
        GOOD | {"timestamp": 2000, "session_id": "z"},
    ]
    requests = read(tmp_path, *lines, spread_arrivals=True)
    sent = [(each.arrival_s, each.previous_id, each.delay_s) for each in requests]
    assert (1.0, None, 0.0) in sent
    assert [each[2] for each in sent if each[1] is not None] == [0.5]


def test_the_published_trace_spread() -> None:
    path = shared("traces/mooncake_fast25_conversation.jsonl")
    recorded, spread = (
        list(MooncakeTraceReader(path=path, spread_arrivals=each).read())
        for each in (False, True)
    )
    assert len({each.arrival_s for each in recorded}) == 1180
    assert len({each.arrival_s for each in spread}) == len(spread) == 12_031
    assert [each.prompt for each in spread] == [each.prompt for each in recorded]
    late_s = [b.arrival_s - a.arrival_s for a, b in zip(recorded, spread, strict=True)]
    assert min(late_s) == 0
    assert max(late_s) < 12.1  # the longest pause of the trace


def test_the_derived_trace_of_full_blocks() -> None:
    path = shared(
        "ground_truth/llmservingsim_bench_vllm0190/RTXPRO6000_Llama-3.1-8B/"
        "trace_block16.jsonl"
    )
    reader = MooncakeTraceReader(path=path, block_tokens=16, full_blocks_only=True)
    requests = list(reader.read())
    assert len(requests) == 300
    assert sum(request.num_prompt_tokens for request in requests) == 257_239


def test_written() -> None:
    requests = [
        RequestSpec(0, 0.25, ((14, 512), (16, 512), (80, 276)), 5, 1),
        RequestSpec(1, 0.5, ((14, 512), (16, 100)), 6, 3),
    ]
    lines = [json.loads(line) for line in MooncakeTraceWriter().lines(requests)]
    assert lines == [
        {
            "timestamp": 250,
            "input_length": 1300,
            "output_length": 5,
            "hash_ids": [7, 8, 40],
        },
        {"timestamp": 500, "input_length": 612, "output_length": 6, "hash_ids": [7, 8]},
    ]


def test_written_in_other_blocks() -> None:
    requests = [
        RequestSpec(0, 0.0, ((0, 20), (2, 30)), 5, 1, session_id=3),
        RequestSpec(
            *(1, 2.0, ((0, 20), (2, 30), (1, 5), (8, 9)), 6, 3),
            session_id=3,
            previous_id=0,
            delay_s=2.0,
        ),
        RequestSpec(2, 2.0, ((0, 20), (4, 12)), 6, 5),
    ]
    writer = MooncakeTraceWriter(block_tokens=16)
    lines = [json.loads(line) for line in writer.lines(requests)]
    assert [line["hash_ids"] for line in lines] == [
        [0, 1, 2, 3],
        [0, 1, 2, 4],  # what is left of a prompt, 2 tokens, is no whole block
        [0, 5],
    ]
    assert [line.get("session_id") for line in lines] == ["3", "3", None]
    assert [line.get("delay") for line in lines] == [None, 2000, None]
    assert [line.get("timestamp") for line in lines] == [0, None, 2000]
    assert writer.losses(requests) == [
        "shared text that is no block of 16 tokens",
        "that 1 prompts quote what was generated for another request",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mooncake")


segments = st.tuples(st.sampled_from([0, 2, 4, 1, 3]), st.integers(1, 40))


@given(
    st.lists(st.lists(segments, min_size=1, max_size=5).map(tuple), min_size=1),
    st.integers(1, 20),
)
def test_equal_leading_blocks_are_equal_leading_ids(
    folder: Path, prompts: list[Any], block: int
) -> None:
    requests = [
        RequestSpec(i, 0.0, prompt, 1, 2 * i + 1) for i, prompt in enumerate(prompts)
    ]
    path = folder / "trace.jsonl"
    writer = MooncakeTraceWriter(block_tokens=block)
    path.write_text("".join(writer.lines(requests)))
    written = list(MooncakeTraceReader(path=path, block_tokens=block).read())

    def texts(request: RequestSpec) -> list[tuple[int, int]]:
        return [(s, i) for s, num in request.prompt for i in range(num)]

    def num_common(one: list[Any], other: list[Any]) -> int:
        pairs = zip(one, other, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other))
        )

    for one, one_written in zip(requests, written, strict=True):
        assert one_written.num_prompt_tokens == one.num_prompt_tokens
        for other, other_written in zip(requests, written, strict=True):
            common = num_common(texts(one), texts(other))
            kept = num_common(texts(one_written), texts(other_written))
            assert common // block * block <= kept <= common
