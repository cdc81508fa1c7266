"""Sessions: what chats and agents ask, turn by turn."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from workloads.arrivals import ARRIVALS
from workloads.draws.counts import COUNTS
from workloads.draws.durations import DURATIONS
from workloads.errors import WorkloadError
from workloads.lengths import LENGTHS
from workloads.prefixes import SystemPrompts
from workloads.sessions import SESSIONS, Agent, Chat, SessionWorkload
from workloads.transforms.sampling import SampledWorkload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.spec import RequestSpec


def tokens(number: int) -> Any:
    return LENGTHS["fixed"](tokens=number)


def count(number: int) -> Any:
    return COUNTS["fixed"](number=number)


def seconds(value_s: float) -> Any:
    return DURATIONS["fixed"](value_s=value_s)


def chat(**changes: Any) -> Chat:
    arguments: dict[str, Any] = {
        "turns": COUNTS["geometric"](mean=4.0),
        "prompt_tokens": LENGTHS["uniform"](low=5, high=60),
        "output_tokens": LENGTHS["uniform"](low=5, high=200),
        "think_s": DURATIONS["exponential"](mean_s=10.0),
    }
    return Chat(**(arguments | changes))


def agent(**changes: Any) -> Agent:
    arguments: dict[str, Any] = {
        "tool_calls": COUNTS["geometric"](mean=6.0),
        "task_tokens": LENGTHS["uniform"](low=20, high=300),
        "call_tokens": LENGTHS["uniform"](low=5, high=40),
        "result_tokens": LENGTHS["uniform"](low=5, high=800),
        "answer_tokens": LENGTHS["uniform"](low=100, high=600),
        "tool_s": DURATIONS["exponential"](mean_s=1.0),
    }
    return Agent(**(arguments | changes))


def workload(sessions: Any, **changes: Any) -> SessionWorkload:
    arguments: dict[str, Any] = {
        "arrivals": ARRIVALS["poisson"](rate=0.5),
        "num_sessions": 40,
        "seed": 2,
    }
    return SessionWorkload(sessions=sessions, **(arguments | changes))


def by_session(requests: Sequence[RequestSpec]) -> dict[int, list[RequestSpec]]:
    found: dict[int, list[RequestSpec]] = defaultdict(list)
    for request in requests:
        assert request.session_id is not None
        found[request.session_id].append(request)
    return dict(found)


def test_a_chat_word_for_word() -> None:
    prompts = SystemPrompts(1, tokens(100))
    kind = chat(
        turns=count(3),
        prompt_tokens=tokens(20),
        first_prompt_tokens=tokens(50),
        output_tokens=tokens(30),
        think_s=seconds(7.5),
        prefixes=prompts,
    )
    arrivals = ARRIVALS["constant"](rate=0.1)
    found = workload(kind, arrivals=arrivals, num_sessions=2).requests()
    # Text 0 is the system prompt; request i has text 1 + i and output 2 i + 1.
    first = [r for r in found if r.session_id == 0]
    assert [r.prompt for r in first] == [
        ((0, 100), (2, 50)),
        ((0, 100), (2, 50), (1, 30), (4, 20)),
        ((0, 100), (2, 50), (1, 30), (4, 20), (3, 30), (6, 20)),
    ]
    assert [r.output_segment for r in first] == [1, 3, 5]
    assert [r.arrival_s for r in found] == [0.0, 7.5, 10.0, 15.0, 17.5, 25.0]
    assert [r.session_id for r in found] == [0, 0, 1, 0, 1, 1]
    assert [r.previous_id for r in found] == [None, 0, None, 1, 2, 4]
    assert {r.delay_s for r in found} == {7.5}
    second = [r for r in found if r.session_id == 1]
    assert [r.output_segment for r in second] == [7, 9, 11]


def test_an_agent_word_for_word() -> None:
    kind = agent(
        tool_calls=count(2),
        task_tokens=tokens(50),
        call_tokens=tokens(8),
        result_tokens=tokens(200),
        answer_tokens=tokens(300),
        tool_s=seconds(2.0),
    )
    arrivals = ARRIVALS["constant"](rate=1.0)
    found = workload(kind, arrivals=arrivals, num_sessions=1).requests()
    assert [r.prompt for r in found] == [
        ((0, 50),),
        ((0, 50), (1, 8), (2, 200)),
        ((0, 50), (1, 8), (2, 200), (3, 8), (4, 200)),
    ]
    assert [r.num_output_tokens for r in found] == [8, 8, 300]
    assert [r.delay_s for r in found] == [0.0, 2.0, 2.0]
    assert [r.previous_id for r in found] == [None, 0, 1]


def test_sub_agents_start_side_by_side_and_are_read_by_the_agent() -> None:
    kind = agent(
        tool_calls=count(1),
        task_tokens=tokens(50),
        call_tokens=tokens(8),
        answer_tokens=LENGTHS["uniform"](low=100, high=600),
        sub_agents=count(3),
        tool_s=seconds(2.0),
    )
    arrivals = ARRIVALS["constant"](rate=1.0)
    call, *subs, last = workload(kind, arrivals=arrivals, num_sessions=1).requests()
    said = ((0, 50), (1, 8))
    assert [sub.prompt for sub in subs] == [(*said, (2 * i, 50)) for i in (1, 2, 3)]
    assert {(sub.previous_id, sub.delay_s) for sub in subs} == {(0, 0.0)}
    assert last.prompt == said + tuple(
        (sub.output_segment, sub.num_output_tokens) for sub in subs
    )
    longest = max(subs, key=lambda sub: sub.num_output_tokens)
    assert last.previous_id == longest.request_id
    assert (last.delay_s, call.num_output_tokens) == (2.0, 8)
    assert len({sub.num_output_tokens for sub in subs}) == 3


@pytest.mark.parametrize("kind", [chat(), agent(), agent(sub_agents=count(2))])
def test_a_turn_goes_on_from_the_one_before(kind: Any) -> None:
    requests = workload(kind).requests()
    for request in requests:
        if request.previous_id is None:
            continue
        before = requests[request.previous_id]
        assert before.session_id == request.session_id
        assert request.arrival_s == before.arrival_s + request.delay_s
    texts = [s for r in requests for s, _ in r.prompt if s % 2 == 0]
    own = [r.prompt[-1][0] for r in requests if r.prompt[-1][0] % 2 == 0]
    assert set(own) == set(texts)
    assert len(own) == len(set(own))  # nobody shares text with another session
    if not isinstance(kind, Chat):
        return
    for turns in by_session(requests).values():
        for before, after in pairwise(turns):
            history = (
                *before.prompt,
                (before.output_segment, before.num_output_tokens),
            )
            assert after.prompt[:-1] == history
            assert after.previous_id == before.request_id


def test_numbers_of_turns_and_think_times_follow_their_law() -> None:
    requests = workload(chat(), num_sessions=4_000).requests()
    turns = [len(each) for each in by_session(requests).values()]
    numbers = np.bincount(turns, minlength=20)[1:15]
    law = stats.geom(1 / 4).pmf(np.arange(1, 15))
    expected = np.append(law, 1 - law.sum()) * 4_000
    observed = np.append(numbers, 4_000 - numbers.sum())
    assert stats.chisquare(observed, expected).pvalue > 0.01
    thoughts_s = [r.delay_s for r in requests if r.previous_id is not None]
    assert stats.kstest(thoughts_s, stats.expon(scale=10.0).cdf).pvalue > 0.01


@pytest.mark.parametrize("kind", [chat(), agent(sub_agents=count(1))])
def test_more_sessions_begin_with_fewer(kind: Any) -> None:
    few, many = (
        by_session(workload(kind, num_sessions=number).requests())
        for number in (7, 1500)
    )

    def facts(sessions: dict[int, list[RequestSpec]], name: int) -> list[Any]:
        return [r._replace(request_id=0, previous_id=None) for r in sessions[name]]

    for session in few:
        assert facts(few, session) == facts(many, session)
    assert sorted(many) == list(range(1500))


def test_streams_are_apart() -> None:
    plain = by_session(workload(chat()).requests())
    longer = by_session(workload(chat(turns=count(9))).requests())
    for session, turns in plain.items():
        for a, b in zip(turns, longer[session], strict=False):
            assert a.num_output_tokens == b.num_output_tokens
            assert a.delay_s == b.delay_s


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 900), st.integers(0, 1000), st.booleans())
def test_no_context_is_longer_than_its_limit(
    limit: int, seed: int, is_agent: bool
) -> None:
    more: dict[str, Any] = {"max_context_tokens": limit}
    kind = agent(sub_agents=count(1), **more) if is_agent else chat(**more)
    requests = workload(kind, num_sessions=12, seed=seed).requests()
    assert sorted(by_session(requests)) == list(range(12))
    longest = max(r.num_prompt_tokens + r.num_output_tokens for r in requests)
    assert longest <= limit


def test_a_limit_ends_sessions_and_cuts_nothing_else() -> None:
    free = by_session(workload(chat()).requests())
    held = by_session(workload(chat(max_context_tokens=600)).requests())
    assert sum(map(len, held.values())) < sum(map(len, free.values()))
    for session, turns in held.items():
        for a, b in zip(turns, free[session], strict=False):
            assert a.num_prompt_tokens == b.num_prompt_tokens
            assert a.num_output_tokens == b.num_output_tokens


def test_rates_are_scaled_and_think_times_are_not() -> None:
    slow = by_session(workload(chat()).requests())
    fast = by_session(workload(chat(), rate_scale=4.0).requests())
    for session, turns in slow.items():
        assert fast[session][0].arrival_s == turns[0].arrival_s / 4
        assert [r.delay_s for r in fast[session]] == [r.delay_s for r in turns]


def test_a_duration_bounds_when_sessions_begin() -> None:
    requests = workload(chat(), num_sessions=None, duration_s=60.0).requests()
    roots = [r.arrival_s for r in requests if r.previous_id is None]
    assert 0 < max(roots) < 60 < max(r.arrival_s for r in requests)


def test_a_session_keeps_one_priority_and_one_service_level() -> None:
    shares: dict[str, Any] = {
        "priority": {0: 0.5, 3: 0.5},
        "slo_class": {"interactive": 0.7, "batch": 0.3},
    }
    for kind in (chat(), agent(sub_agents=count(1))):
        requests = SampledWorkload(workload(kind), **shares).requests()
        sessions = by_session(requests)
        for turns in sessions.values():
            assert len({(r.priority, r.slo_class) for r in turns}) == 1
        found = {(turns[0].priority, turns[0].slo_class) for turns in sessions.values()}
        assert len(found) == 4
    # Chains alone make a session, too.
    without = [r._replace(session_id=None) for r in workload(chat()).requests()]

    class Listed:
        def requests(self) -> Sequence[RequestSpec]:
            return without

    drawn = SampledWorkload(Listed(), **shares).requests()
    for request in drawn:
        if request.previous_id is not None:
            assert request.priority == drawn[request.previous_id].priority


class Own:
    """A kind of session of a user's."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def requests(self, arrivals_s: Sequence[float], streams: Any) -> Any:
        found = chat().requests(arrivals_s, streams)
        return (request._replace(**self.changes) for request in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_output_tokens": 0}, "Own.requests must yield prompts and outputs"),
        ({"prompt": ()}, "at least 1 token; got 0 and"),
        ({"arrival_s": float("nan")}, "finite arrivals from 0; got nan"),
        ({"request_id": 3}, "request_id must be unique"),
        ({"session_id": -1}, "session_id from 0 to 39; got -1"),
        ({"session_id": 10**30}, "session_id from 0 to"),
    ],
)
def test_a_kind_is_held_to_its_contract(changes: Any, message: str) -> None:
    assert len(workload(Own()).requests()) == len(workload(chat()).requests())
    with pytest.raises(WorkloadError, match=message):
        workload(Own(**changes)).requests()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: chat(turns=4), "turns must have the method quantile"),
        (lambda: chat(think_s=4), "think_s must have the method quantile"),
        (
            lambda: chat(first_prompt_tokens=4),
            "first_prompt_tokens must have the method quantile",
        ),
        (lambda: chat(max_context_tokens=1), "max_context_tokens must be between 2"),
        (lambda: agent(tool_s=1.0), "tool_s must have the method quantile"),
        (lambda: agent(sub_agents=2), "sub_agents must have the method quantile"),
        (lambda: agent(prefixes=2), "prefixes must have the method prefixes"),
        (lambda: workload(3), "sessions must have the method requests"),
        (lambda: workload(chat(), arrivals=2), "arrivals must have the method times_s"),
        (lambda: workload(chat(), duration_s=3.0), "exactly one of num_sessions"),
        (lambda: workload(chat(), num_sessions=0), "num_sessions must be between"),
        (lambda: workload(chat(), rate_scale=0), "rate_scale must be > 0"),
    ],
)
def test_wrong_parameters_are_refused(make: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        make()


def test_a_prefix_must_leave_room() -> None:
    prompts = SystemPrompts(1, tokens(600))
    kind = chat(prefixes=prompts, max_context_tokens=601)
    with pytest.raises(WorkloadError, match=r"got 601, and a shared prefix of 600"):
        workload(kind).requests()


def test_the_table_names_them_all() -> None:
    assert dict(SESSIONS) == {"chat": Chat, "agent": Agent}
