"""Requests in chains, kept as columns: equal to the list of them."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.sessions import FollowUps
from sim.results.recording.traffic import Traffic
from workloads.errors import WorkloadError
from workloads.requests import chained
from workloads.requests.chained import NONE, ChainedRequests
from workloads.requests.chains import gathered, has_chains, in_order
from workloads.requests.columns import arrivals_s, largest, numbers
from workloads.spec import RequestSpec
from workloads.transforms.sampling import SampledWorkload

if TYPE_CHECKING:
    from collections.abc import Sequence

FIELDS = ("session_id", "previous_id", "priority", "delay_s", "num_output_tokens")


def drawn(seed: int, num_requests: int = 60) -> list[RequestSpec]:
    """Draw sessions that quote all, a part or nothing of what was said, in any order.

    Ids have gaps.
    """
    draw = random.Random(seed)
    ids = sorted(draw.sample(range(3 * num_requests), num_requests))
    found: list[RequestSpec] = []
    for number, request_id in enumerate(ids):
        before = draw.choice(found) if found and draw.random() < 0.7 else None
        said: tuple[tuple[int, int], ...] = ()
        if before is not None:
            said = (*before.prompt, (before.output_segment, before.num_output_tokens))
            said = said[: draw.choice([0, 1, len(said) - 1, len(said), len(said)])]
        own = [(2 * number, draw.randint(1, 9)), (2 * draw.randint(0, 5), 3)]
        own = own[: draw.randint(0 if said else 1, 2)]
        found.append(
            RequestSpec(
                request_id=request_id,
                arrival_s=draw.choice([0.0, 1.5, round(9 * draw.random(), 1)]),
                prompt=(*said, *own),
                num_output_tokens=draw.randint(1, 7),
                output_segment=draw.choice([1, 2**40]) * 2 * number + 1,
                slo_class=draw.choice(["", "gold"]),
                priority=draw.choice([0, 3]),
                session_id=None if before is None else before.session_id,
                previous_id=None if before is None else before.request_id,
                delay_s=draw.choice([0.0, 0.1, 7.25]),
            )
        )
        if before is None and draw.random() < 0.8:
            found[-1] = found[-1]._replace(session_id=number)
    if draw.random() < 0.5:
        draw.shuffle(found)
    return found


@given(st.integers(0, 2**32))
def test_columns_are_the_list(seed: int) -> None:
    requests = drawn(seed)
    listed, columns = in_order(requests), gathered(requests)
    assert isinstance(columns, ChainedRequests)
    assert list(columns) == listed
    assert columns == listed
    assert columns == gathered(requests)
    assert columns != listed[:-1]
    assert [columns[-1], columns[5], *columns[3:20:4]] == [
        *(listed[-1], listed[5]),
        *listed[3:20:4],
    ]
    assert all(
        type(value) is type(other)
        for one, two in zip(columns, listed, strict=True)
        for value, other in zip(one, two, strict=True)
    )
    assert pickle.loads(pickle.dumps(columns)) == listed
    for field in FIELDS:
        assert numbers(columns, field).tolist() == numbers(listed, field).tolist()
    assert arrivals_s(columns) == arrivals_s(listed)
    assert has_chains(columns) == has_chains(listed)
    assert largest(columns, "priority") == largest(listed, "priority")


@given(st.integers(0, 2**32))
def test_facts_and_follow_ups_are_those_of_the_list(seed: int) -> None:
    requests = drawn(seed)
    listed, columns = in_order(requests), gathered(requests)
    one, two = Traffic.of(columns), Traffic.of(listed)
    for name in ("session_id", "turn", "priority", "slo_code"):
        assert getattr(one, name).tolist() == getattr(two, name).tolist()
    assert one.slo_classes.column(one.slo_code).texts == (
        two.slo_classes.column(two.slo_code).texts
    )
    for specs in (columns, listed):
        follow_ups = FollowUps(specs)
        waits = [spec for spec in listed if spec.previous_id is not None]
        assert [*follow_ups.openings()] == [
            spec for spec in listed if spec.previous_id is None
        ]
        for spec in listed:
            assert follow_ups.of(spec) == [
                each for each in waits if each.previous_id == spec.request_id
            ]


class Kept:
    def __init__(self, requests: Sequence[RequestSpec]) -> None:
        self._requests = requests

    def requests(self) -> Sequence[RequestSpec]:
        return self._requests


@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": 9},
        {"slo_class": {"gold": 0.5, "silver": 0.5}, "priority": {0: 0.3, 2: 0.7}},
        {"slo_class": {"gold": 0.5, "none": 0.5}, "priority": {"gold": 4, "none": -1}},
        {"priority": {"gold": 4, "": -1}},
        {"best_of": {1: 0.5, 3: 0.5}, "output_end": {"stop": 0.5, "length": 0.5}},
        {"beam_width": {1: 0.5, 4: 0.5}, "slo_class": "gold", "priority": 2},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("has_sessions", [True, False])
def test_what_is_drawn_is_that_of_the_list(
    asked: dict[str, Any], has_sessions: bool
) -> None:
    requests = drawn(7)
    if has_sessions:
        requests = whole_sessions(requests)
    listed, columns = in_order(requests), gathered(requests)
    one = SampledWorkload(Kept(columns), seed=3, **asked).requests()
    two = SampledWorkload(Kept(listed), seed=3, **asked).requests()
    assert isinstance(one, ChainedRequests)
    assert list(one) == two != listed
    assert list(columns) == listed


def whole_sessions(requests: Sequence[RequestSpec]) -> list[RequestSpec]:
    """Return requests each of which is in the session of the one before."""
    ordered = in_order(requests)
    found: list[RequestSpec] = []
    for request in ordered:
        before = request.previous_id
        owner = request.request_id if before is None else found[before].session_id
        found.append(request._replace(session_id=owner))
    return found


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"request_id": 0}, "request_id must be unique; got 0 twice"),
        ({"previous_id": 3}, "got 3 of request 3, which comes later"),
        ({"previous_id": 9}, "got 9 of request 3, which comes later"),
        ({"previous_id": -5}, "got -5 of request 3, which is missing"),
        ({"delay_s": -1.0}, "delay_s must be finite and >= 0; got -1.0 of request 3"),
        ({"delay_s": float("nan")}, "delay_s must be finite"),
        ({"delay_s": float("inf")}, "delay_s must be finite"),
    ],
)
def test_faults_are_those_of_the_list(change: dict[str, Any], rule: str) -> None:
    requests = [
        RequestSpec(
            *(i, 0.0, ((2 * i, 5),), 1, 2 * i + 1),
            previous_id=i - 1 if i else None,
        )
        for i in range(6)
    ]
    requests[3] = requests[3]._replace(**change)
    requests[5] = requests[5]._replace(delay_s=-2.0)  # a later one is not told
    for ordered in (in_order, gathered):
        with pytest.raises(WorkloadError, match=rule):
            ordered(requests)


def test_long_columns_lie_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers beyond int32 that come late, too."""
    monkeypatch.setattr(chained, "_HELD", 8)
    monkeypatch.setattr("workloads.requests.long_arrays.SPILLED_BYTES", 64)
    requests = drawn(11, 200)
    requests[-1] = requests[-1]._replace(output_segment=2**50 + 1)
    columns = gathered(iter(requests))
    assert list(columns) == in_order(requests)
    assert not columns.arrival_s.flags.writeable
    assert columns.output_segment.dtype == np.int64
    assert columns.num_output_tokens.dtype == np.int32
    drawn_columns = SampledWorkload(Kept(columns), slo_class="gold").requests()
    assert {request.slo_class for request in drawn_columns} == {"gold"}


def test_text_that_is_quoted_is_kept_once() -> None:
    said: tuple[tuple[int, int], ...] = ()
    requests = []
    for turn in range(50):
        prompt = (*said, (2 * turn, 10))
        requests.append(
            RequestSpec(
                *(turn, 0.0, prompt, 4, 2 * turn + 1),
                session_id=0,
                previous_id=turn - 1 if turn else None,
            )
        )
        said = (*prompt, (2 * turn + 1, 4))
    columns = gathered(requests)
    assert len(columns.own_segment) == 50
    assert columns.num_quoted.tolist() == [2 * turn for turn in range(50)]
    assert list(columns) == requests
    assert repr(columns).startswith("ChainedRequests(<50 requests: RequestSpec(")


def test_a_look_for_follow_ups_takes_no_memory_of_all() -> None:
    """NumPy would turn a column into wider integers for each search."""
    chats = []
    for session in range(0, 20_000, 2):
        first = RequestSpec(session, 0.0, ((2 * session, 5),), 3, 2 * session + 1)
        chats += [first, first._replace(request_id=session + 1, previous_id=session)]
    follow_ups = FollowUps(gathered(chats))
    tracemalloc.start()
    try:
        found = follow_ups.of(chats[9_000])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [spec.previous_id for spec in found] == [9_000]
    assert peak_bytes < 20_000


def test_none_is_no_number_of_a_request() -> None:
    columns = gathered(drawn(5))
    assert NONE in numbers(columns, "previous_id")
    assert replace(columns) == columns
    assert len(gathered([])) == 0
