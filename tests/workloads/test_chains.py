"""Chains of requests: order, numbers, earliest arrivals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import WorkloadError
from workloads.requests.chains import has_chains, in_order
from workloads.requests.columns import RequestColumns
from workloads.spec import RequestSpec


def spec(
    request_id: int,
    arrival_s: float,
    previous_id: int | None = None,
    delay_s: float = 0.0,
) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        arrival_s=arrival_s,
        prompt=((2 * request_id, 10),),
        num_output_tokens=5,
        output_segment=2 * request_id + 1,
        previous_id=previous_id,
        delay_s=delay_s,
    )


def test_follow_ups_come_at_their_earliest() -> None:
    # In file order, a session at a time; ids with a gap.
    chat = [spec(0, 0.0), spec(1, 0.0, 0, 30.0), spec(2, 0.0, 1, 2.5)]
    other = [spec(7, 12.0), spec(9, 0.0, 7, 1.0)]
    ordered = in_order([*other, *chat])
    assert [r.arrival_s for r in ordered] == [0.0, 12.0, 13.0, 30.0, 32.5]
    assert [r.request_id for r in ordered] == [0, 1, 2, 3, 4]
    assert [r.previous_id for r in ordered] == [None, None, 1, 0, 3]
    assert [r.delay_s for r in ordered] == [0.0, 0.0, 1.0, 30.0, 2.5]
    assert [r.output_segment for r in ordered] == [1, 15, 19, 3, 5]


def test_scaling_leaves_think_times_alone() -> None:
    requests = [spec(0, 10.0), spec(1, 14.0), spec(2, 99.0, 0, 3.0)]
    ordered = in_order(requests, rate_scale=2.0, start_s=10.0)
    assert [r.arrival_s for r in ordered] == [0.0, 2.0, 3.0]
    assert [r.previous_id for r in ordered] == [None, None, 0]


def test_ordering_twice_changes_nothing() -> None:
    requests = [spec(0, 0.5), spec(1, 0.0, 0, 0.1), spec(2, 0.55), spec(3, 0, 1, 0.0)]
    ordered = in_order(requests)
    assert in_order(ordered) == ordered
    assert in_order(reversed(ordered)) == ordered


def test_equal_arrivals_keep_their_ids_order() -> None:
    requests = [spec(0, 1.0), spec(1, 1.0), spec(2, 1.0, 0), spec(3, 1.0, 2)]
    assert [r.prompt[0][0] for r in in_order(requests)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([spec(0, 0.0), spec(1, 0.0, 5)], "got 5 of request 1, which comes later"),
        ([spec(0, 0.0), spec(1, 0.0, 1)], "got 1 of request 1, which comes later"),
        ([spec(3, 0.0), spec(4, 0.0, 1)], "got 1 of request 4, which is missing"),
        ([spec(0, 0.0), spec(0, 1.0)], "request_id must be unique; got 0 twice"),
        ([spec(0, 0.0), spec(1, 0.0, 0, -1.0)], "delay_s must be finite and >= 0"),
        ([spec(0, 0.0), spec(1, 0.0, 0, math.nan)], "delay_s must be finite"),
        ([spec(0, 0.0, None, math.inf)], "delay_s must be finite"),
    ],
)
def test_broken_chains_are_refused(requests: list[RequestSpec], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        in_order(requests)


def test_columns_have_no_chains() -> None:
    lengths = np.ones(3, dtype=np.int64)
    columns = RequestColumns(np.arange(3.0), lengths, lengths)
    assert not has_chains(columns)
    assert not has_chains(list(columns))
    assert has_chains([*columns, spec(3, 0.0, 0)])
    assert in_order(columns) == list(columns)


@st.composite
def chains(draw: st.DrawFn) -> list[RequestSpec]:
    requests = []
    for number in range(draw(st.integers(1, 20))):
        before = draw(st.none() | st.integers(0, number - 1)) if number else None
        time_s = draw(st.floats(0, 10))
        requests.append(spec(number, time_s, before, 0.0 if before is None else time_s))
    return draw(st.permutations(requests))


@given(chains(), st.sampled_from([0.5, 1.0, 3.0]))
def test_order_keeps_chains(requests: list[RequestSpec], rate_scale: float) -> None:
    ordered = in_order(requests, rate_scale)
    old = {r.prompt[0][0]: r for r in requests}
    assert sorted(r.prompt for r in ordered) == sorted(r.prompt for r in requests)
    assert [r.request_id for r in ordered] == list(range(len(requests)))
    times_s = [r.arrival_s for r in ordered]
    assert times_s == sorted(times_s)
    for request in ordered:
        before = old[request.prompt[0][0]]
        if request.previous_id is None:
            assert before.previous_id is None
            assert request.arrival_s == before.arrival_s / rate_scale
        else:
            previous = ordered[request.previous_id]
            assert previous.request_id < request.request_id
            assert request.arrival_s == previous.arrival_s + request.delay_s
            assert previous.prompt[0][0] == 2 * before.previous_id  # type: ignore[operator]


def test_columns_are_asked_without_making_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(*_: object) -> None:
        raise AssertionError("a request was made")

    lengths = np.ones(3, dtype=np.int64)
    columns = RequestColumns(np.arange(3.0), lengths, lengths)
    monkeypatch.setattr(RequestColumns, "_specs", made)
    assert not has_chains(columns)
    with pytest.raises(AssertionError, match="a request was made"):
        list(columns)
