"""Agents of kv-cache-tester: who waits for whom, and which text is the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.workloads.traces.samples import read, write
from workloads import TraceFormatError, WorkloadWarning

if TYPE_CHECKING:
    from pathlib import Path


def request(t: float, tokens: int, *runs: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 10, "hash_ids": [*runs]} | more


SUB_AGENT = {
    "t": 9.0,
    "type": "subagent",
    "requests": [request(0.0, 128, [50, 2])],
}
SESSION = {
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        request(0.0, 130, [1, 2], api_time=4.0),
        SUB_AGENT,
        request(20.0, 320, [1, 2], [7, 3], think_time=3.0),
        request(30.0, 9_000, [1, 140], think_time=1.0),
    ],
}


def session(tmp_path: Path, **changed: Any) -> Path:
    return write(tmp_path, json.dumps(SESSION | changed) + "\n")


def test_requests_follow_answers_and_sub_agents_run_beside(tmp_path: Path) -> None:
    first, again, _, sub = read("kv_cache_tester", session(tmp_path))
    assert (again.previous_id, again.delay_s) == (first.request_id, 3.0)
    # 9 s after the session began, of which the answer before took 4
    assert (sub.previous_id, sub.delay_s) == (first.request_id, 5.0)
    assert sub.session_id == first.session_id


def test_equal_ids_are_equal_text_and_the_rest_is_own(tmp_path: Path) -> None:
    first, again, *_ = read("kv_cache_tester", session(tmp_path))
    assert [tokens for _, tokens in first.prompt] == [128, 2]
    assert [tokens for _, tokens in again.prompt] == [128, 192]
    assert first.prompt[0] == again.prompt[0]
    other = read("kv_cache_tester", write(tmp_path, (json.dumps(SESSION) + "\n") * 2))
    texts = [{text for text, _ in each.prompt} for each in other]
    sessions = {each.session_id for each in other}
    assert sessions == {0, 1}
    by_session = [
        set().union(
            *(t for t, o in zip(texts, other, strict=True) if o.session_id == s)
        )
        for s in (0, 1)
    ]
    assert by_session[0].isdisjoint(by_session[1])


def test_sessions_end_before_what_is_too_long(tmp_path: Path) -> None:
    path = session(tmp_path)
    rule = "max_context_tokens of 1,000 left out 0 of 1 sessions, and parts of 1$"
    with pytest.warns(WorkloadWarning, match=rule):
        found = read("kv_cache_tester", path, max_context_tokens=1000)
    assert [each.num_prompt_tokens for each in found] == [130, 320, 128]


def test_sessions_too_long_from_the_start_are_counted(tmp_path: Path) -> None:
    lines = [SESSION, SESSION | {"requests": [request(0.0, 130, [1, 2], out=1)]}]
    path = write(tmp_path, "".join(json.dumps(each) + "\n" for each in lines))
    rule = "max_context_tokens of 131 left out 1 of 2 sessions, and parts of 0$"
    with pytest.warns(WorkloadWarning, match=rule):
        (only,) = read("kv_cache_tester", path, max_context_tokens=131)
    assert only.session_id == 1


def test_an_answer_without_tokens_counts_as_one(tmp_path: Path) -> None:
    path = session(tmp_path, requests=[request(0.0, 130, [1, 2], out=0)])
    (only,) = read("kv_cache_tester", path)
    assert only.num_output_tokens == 1


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"block_size": 0}, "block_size"),
        ({"requests": 3}, "requests must be a list"),
        ({"requests": [request(0.0, 64, [1])]}, "must be runs"),
        ({"requests": [request(-1.0, 64, [1, 1])]}, "t must be seconds"),
        ({"requests": [{"t": 0}]}, "in"),
    ],
)
def test_malformed_sessions_are_refused(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TraceFormatError, match=problem):
        read("kv_cache_tester", session(tmp_path, **changed))
