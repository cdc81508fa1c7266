"""Windows of a trace drawn at random: laws, identity, chains; shares of replicas."""

from __future__ import annotations

import numpy as np
import pytest

from workloads import RequestColumns, RequestSpec, Streams, TraceWorkload, WorkloadError
from workloads.transforms.resampling import Resampling
from workloads.transforms.splitting import SplitWorkload, replicas_of


def hour(num: int = 3600) -> RequestColumns:
    """One request a second, each as long as its second."""
    seconds = np.arange(num)
    return RequestColumns(seconds + 0.5, seconds + 1, seconds + 1)


class Reader:
    def __init__(self, requests: object) -> None:
        self.requests = requests

    def read(self) -> object:
        return iter(self.requests)  # type: ignore[call-overload]


def test_windows_are_pieces_of_the_trace() -> None:
    drawn = Resampling(60.0).apply(hour(), Streams(3))
    assert isinstance(drawn, RequestColumns)
    assert len(drawn) == 3600
    window = (drawn.arrival_s // 60).astype(int)
    assert window.max() == 59
    # within a window one second follows the other, around the end of the trace
    steps = np.diff(drawn.num_prompt_tokens)
    inside = np.diff(window) == 0
    assert set(steps[inside].tolist()) <= {1, -3599}
    assert np.allclose(np.diff(drawn.arrival_s)[inside], 1.0)


def test_every_moment_is_as_likely() -> None:
    counts = np.zeros(3600)
    for seed in range(200):
        drawn = Resampling(60.0).apply(hour(), Streams(seed))
        counts += np.bincount(drawn.num_prompt_tokens - 1, minlength=3600)  # type: ignore[attr-defined]
    tenths = counts.reshape(10, 360).mean(axis=1)
    assert tenths.mean() == pytest.approx(200.0, rel=0.001)
    assert np.all(np.abs(tenths / 200 - 1) < 0.12)  # four standard errors
    assert counts[:30].mean() == pytest.approx(200, rel=0.2)  # the edges, too


def test_seeds_differ_and_repeat() -> None:
    one, again, other = (
        Resampling(60.0, num_windows=5).apply(hour(), Streams(seed))
        for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other
    assert len(one) == 300


def test_lists_are_drawn_like_columns() -> None:
    listed = Resampling(60.0).apply(list(hour(600)), Streams(4))
    columns = Resampling(60.0).apply(hour(600), Streams(4))
    facts = [(r.arrival_s, r.num_prompt_tokens) for r in listed]
    assert facts == [(r.arrival_s, r.num_prompt_tokens) for r in columns]


def chats() -> list[RequestSpec]:
    """Ten sessions of two turns that share a first segment."""
    specs: list[RequestSpec] = []
    for i in range(10):
        first = 2 * i
        specs.append(
            RequestSpec(
                first, 10.0 * i, ((0, 50), (2 + 4 * i, 9)), 5, 1 + 4 * i, session_id=i
            )
        )
        specs.append(
            RequestSpec(
                first + 1,
                10.0 * i + 3.0,
                ((0, 50), (2 + 4 * i, 9), (1 + 4 * i, 5), (4 + 4 * i, 7)),
                5,
                3 + 4 * i,
                session_id=i,
                previous_id=first,
                delay_s=3.0,
            )
        )
    return specs


def test_chains_come_whole_and_copies_have_texts_of_their_own() -> None:
    drawn = Resampling(20.0, num_windows=30).apply(chats(), Streams(0))
    assert len(drawn) % 2 == 0
    for request in drawn:
        if request.previous_id is not None:
            before = drawn[request.previous_id]
            assert before.session_id == request.session_id
            assert request.prompt[:2] == before.prompt
            assert request.prompt[2][0] == before.output_segment
    firsts = [r.prompt[1][0] for r in drawn if r.previous_id is None]
    assert len(set(firsts)) == len(firsts)
    # those that are drawn once share their system prompt, as recorded
    assert sum(r.prompt[0][0] == 0 for r in drawn) > 2


def test_windows_are_drawn_before_the_rate_is_scaled() -> None:
    reader = Reader(list(hour(600)))
    plain = TraceWorkload(reader, resampling=Resampling(60.0), seed=7).requests()
    twice = TraceWorkload(
        reader, rate_scale=2.0, resampling=Resampling(60.0), seed=7
    ).requests()
    assert [r.arrival_s / 2 for r in plain] == [r.arrival_s for r in twice]


@pytest.mark.parametrize(
    ("window_s", "num_windows", "words"),
    [(1e4, None, "at most the trace's length"), (60.0, 10**9, "integer|between|hold")],
)
def test_windows_that_cannot_be(
    window_s: float, num_windows: int | None, words: str
) -> None:
    with pytest.raises(WorkloadError, match=words):
        Resampling(window_s, num_windows).apply(hour(600), Streams(0))


@pytest.mark.parametrize("by", ["random", "round_robin"])
def test_replicas_share_all_requests_once(by: str) -> None:
    whole = TraceWorkload(Reader(list(hour(600))))
    parts = [SplitWorkload(whole, 4, i, by).requests() for i in range(4)]  # type: ignore[arg-type]
    seconds = sorted(r.num_prompt_tokens for part in parts for r in part)
    assert seconds == list(range(1, 601))
    for part in parts:
        assert [r.request_id for r in part] == list(range(len(part)))
    if by == "round_robin":
        assert {len(part) for part in parts} == {150}


def test_turns_of_a_session_stay_together() -> None:
    chosen = replicas_of(chats(), 3, "random", 0)
    assert (chosen[::2] == chosen[1::2]).all()
    assert len(set(chosen.tolist())) == 3


def test_a_share_of_nothing_is_refused() -> None:
    whole = TraceWorkload(Reader(list(hour(2))))
    with pytest.raises(WorkloadError, match="gets none"):
        SplitWorkload(whole, 5, 4, "round_robin").requests()
    with pytest.raises(WorkloadError, match="between 0 and 1"):
        SplitWorkload(whole, 2, 2)
