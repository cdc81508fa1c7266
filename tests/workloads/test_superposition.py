"""Copies of a trace laid over each other: rates, burstiness, identity, chains."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads.laws import arrivals_of, counts, dispersion, variation
from tests.workloads.shared_traces import (
    AZURE_CODE,
    AZURE_CONV,
    MOONCAKE,
    shared_trace,
)
from workloads import (
    RequestColumns,
    RequestSpec,
    SpecIterator,
    Streams,
    TraceWorkload,
    WorkloadError,
    arrival_times_s,
)
from workloads.arrivals import GammaArrivals, MarkovModulatedArrivals
from workloads.traces import AzureTraceReader, MooncakeTraceReader
from workloads.transforms.superposition import superposed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads import ArrivalProcess


class Reader:
    """A trace of columns, or of a list."""

    def __init__(self, requests: Sequence[RequestSpec]) -> None:
        self.given = requests

    def read(self) -> Iterator[RequestSpec]:
        if isinstance(self.given, RequestColumns):
            return SpecIterator(self.given)
        return iter(self.given)


def columns_at(times_s: Any, **more: Any) -> RequestColumns:
    num = len(times_s)
    prompts, outputs = np.arange(10, 10 + num), np.arange(5, 5 + num)
    return RequestColumns(np.array(times_s, dtype=float), prompts, outputs, **more)


def bursty(process: ArrivalProcess, num_requests: int = 40_000) -> RequestColumns:
    rng = Streams(5).generator("arrivals")
    times_s = np.array(arrival_times_s(process, rng, num_requests))
    return columns_at(times_s - times_s[0])


def scaled(
    requests: Sequence[RequestSpec], rate_scale: float, **more: Any
) -> Sequence[RequestSpec]:
    more = {"scale_by": "superposition"} | more
    return TraceWorkload(Reader(requests), rate_scale, **more).requests()


# -- rate and burstiness -----------------------------------------------------------

RENEWAL = GammaArrivals(rate=10.0, burstiness=0.1)
STORMS = MarkovModulatedArrivals(rates=[4.0, 60.0], dwell_s=[20.0, 4.0])


@pytest.mark.parametrize("num_copies", [2, 8])
@pytest.mark.parametrize("process", [RENEWAL, STORMS])
def test_copies_have_their_times_the_rate_and_less_burstiness(
    process: ArrivalProcess, num_copies: int
) -> None:
    one = bursty(process)
    many = scaled(one, float(num_copies))
    one_s, many_s = one.arrival_s, arrivals_of(many)
    assert len(many) == num_copies * len(one)
    # In the same time: the rate, too, is so many times as high.
    assert many_s[-1] == pytest.approx(one_s[-1], rel=1e-3)
    of_one, of_many = variation(np.diff(one_s)), variation(np.diff(many_s))
    assert 1 < of_many < 1 + {2: 0.9, 8: 0.7}[num_copies] * (of_one - 1)
    # Storms of one copy fall into the calm of others: the rate swings less, about
    # as much less as independent parts of a sum do.
    one_swing, many_swing = (
        variation(counts(times_s, 2.0)) for times_s in (one_s, many_s)
    )
    assert many_swing == pytest.approx(one_swing / num_copies**0.5, rel=0.15)


@pytest.mark.parametrize("process", [RENEWAL, STORMS])
def test_compression_keeps_burstiness(process: ArrivalProcess) -> None:
    one = bursty(process)
    four = scaled(one, 4.0, scale_by="compression")
    one_s, four_s = one.arrival_s, arrivals_of(four)
    assert len(four) == len(one)
    assert four_s.tolist() == (one_s / 4).tolist()
    assert variation(np.diff(four_s)) == pytest.approx(variation(np.diff(one_s)))
    for window_s in (0.5, 2.0, 16.0):
        assert dispersion(four_s, window_s / 4) == dispersion(one_s, window_s)
        # In the same window, storms are four times as dense; copies even them out.
        copies_s = arrivals_of(scaled(one, 4.0))
        same = dispersion(copies_s, window_s)
        assert same == pytest.approx(dispersion(one_s, window_s), rel=0.25)
        if process is STORMS:
            assert dispersion(four_s, window_s) > 1.25 * same


@pytest.mark.parametrize("rate_scale", [0.3, 1.7, 2.25])
def test_a_part_of_a_copy_is_thinned_at_random(rate_scale: float) -> None:
    one = bursty(RENEWAL)
    many = scaled(one, rate_scale)
    assert len(many) / len(one) == pytest.approx(rate_scale, abs=0.02)
    # Thinning keeps requests everywhere, and no others.
    halves = counts(arrivals_of(many), float(one.arrival_s[-1]) / 4)
    assert halves / halves.mean() == pytest.approx(1, abs=0.15)
    seen = Counter(request.num_prompt_tokens for request in many)
    assert set(seen) <= set(one.num_prompt_tokens.tolist())
    whole = int(rate_scale)
    assert set(seen.values()) <= {whole, whole + 1}


def test_seeds_shift_copies_and_nothing_else_does() -> None:
    one = bursty(RENEWAL, 500)
    two, again, other = (scaled(one, 2.0, seed=seed) for seed in (1, 1, 2))
    assert two == again
    assert two != other
    # The second copy stands where it stood when a third comes.
    three = {request.arrival_s for request in scaled(one, 3.0, seed=1)}
    assert {request.arrival_s for request in two} < three
    assert set(one.arrival_s.tolist()) < {request.arrival_s for request in two}


def test_the_shift_goes_around_the_end() -> None:
    one = columns_at([0.0, 1.0, 4.0])
    offset = Streams(0).generator("superposition_offsets").random()
    span_s = 4.0 * 4 / 3
    shifted = sorted((time_s + offset * span_s) % span_s for time_s in (0, 1, 4))
    found = arrivals_of(superposed(one, 2.0, Streams(0)))
    assert found == pytest.approx(np.sort([0.0, 1.0, 4.0, *shifted]))
    alone = arrivals_of(superposed(columns_at([0.0, 0.0]), 3.0, Streams(0)))
    assert alone.tolist() == [0.0] * 6  # no span: all at once


def test_one_copy_is_the_trace() -> None:
    one = columns_at([0.0, 1.0, 4.0])
    assert scaled(one, 1.0) == one
    assert scaled([*one], 1) == one


# -- what each request is ----------------------------------------------------------


def as_told(requests: Sequence[RequestSpec]) -> list[Any]:
    """Return requests with texts and sessions by the order in which they appear."""
    texts: dict[tuple[str, int | None], int] = {}

    def name(kind: str, value: int | None) -> int:
        return texts.setdefault((kind, value), len(texts))

    return [
        request._replace(
            prompt=tuple((name("text", s), n) for s, n in request.prompt),
            output_segment=name("text", request.output_segment),
            session_id=request.session_id and name("session", request.session_id),
        )
        for request in requests
    ]


times = st.lists(st.integers(0, 50).map(float), min_size=1, max_size=12).map(sorted)


@given(times, st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]), st.integers(0, 9))
def test_copies_of_columns_are_those_of_the_list(
    times_s: list[float], num_copies: float, seed: int
) -> None:
    num = len(times_s)
    columns = columns_at(times_s, best_of=np.arange(1, num + 1), first_text=4)
    try:
        by_list = superposed([*columns], num_copies, Streams(seed))
    except WorkloadError as error:
        with pytest.raises(WorkloadError, match=str(error)):
            superposed(columns, num_copies, Streams(seed))
        return
    by_columns = superposed(columns, num_copies, Streams(seed))
    assert isinstance(by_columns, RequestColumns)
    assert as_told(by_columns) == as_told(by_list)
    assert [request.request_id for request in by_list] == list(range(len(by_list)))
    assert len({r.output_segment for r in by_list}) == len(by_list)


def chats() -> list[RequestSpec]:
    """Two chats of two turns behind one system prompt, and a request alone."""
    system = (100, 64)
    return [
        RequestSpec(0, 0.0, (system, (0, 5)), 7, 1, session_id=0),
        RequestSpec(1, 2.0, (system, (2, 5)), 7, 3, session_id=1),
        RequestSpec(
            2,
            5.0,
            (system, (0, 5), (1, 7), (4, 3)),
            9,
            5,
            session_id=0,
            previous_id=0,
            delay_s=5.0,
        ),
        RequestSpec(3, 8.0, ((6, 20),), 2, 7),
        RequestSpec(
            4,
            10.0,
            (system, (2, 5), (3, 7), (8, 3)),
            9,
            9,
            session_id=1,
            previous_id=1,
            delay_s=8.0,
        ),
    ]


@pytest.mark.parametrize("share_text", [False, True])
def test_chains_stay_within_a_copy(share_text: bool) -> None:
    many = scaled(chats(), 3.0, copies_share_text=share_text)
    assert len(many) == 15
    assert [request.request_id for request in many] == list(range(15))
    times_s = arrivals_of(many)
    assert (np.diff(times_s) >= 0).all()
    for request in many:
        if request.previous_id is None:
            continue
        before = many[request.previous_id]
        assert request.session_id == before.session_id
        assert request.arrival_s == before.arrival_s + request.delay_s
        assert request.prompt[:2] == before.prompt
        assert request.prompt[2][0] == before.output_segment
    sessions = Counter(request.session_id for request in many)
    assert sorted(sessions.values()) == [2] * 6 + [3]
    assert sessions[None] == 3
    # What was generated is each copy's own; prompts are shared if that is wished.
    assert len({request.output_segment for request in many}) == 15
    systems = {r.prompt[0][0] for r in many if r.prompt[0][1] == 64}
    assert len(systems) == (1 if share_text else 3)
    # The first copy keeps its names and its times.
    assert {chat.prompt for chat in chats()} <= {request.prompt for request in many}
    roots = {chat.arrival_s for chat in chats() if chat.previous_id is None}
    assert roots < {request.arrival_s for request in many}


@given(st.integers(0, 200), st.sampled_from([0.4, 1.5, 2.7]))
def test_thinning_keeps_whole_chains(seed: int, num_copies: float) -> None:
    try:
        many = scaled(chats(), num_copies, seed=seed)
    except WorkloadError as error:
        assert num_copies < 1, error  # noqa: PT017 - luck may leave none
        return
    turns = Counter(r.session_id for r in many if r.session_id is not None)
    assert set(turns.values()) <= {2}


def test_columns_that_share_text_become_a_list() -> None:
    many = scaled(columns_at([0.0, 1.0, 4.0]), 2.0, copies_share_text=True)
    assert isinstance(many, list)
    assert Counter(r.prompt for r in many).most_common(1)[0][1] == 2


# -- what is refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"scale_by": "both"}, "scale_by must be one of compression, superposition"),
        ({"scale_by": None}, "scale_by must be one of"),
        ({"scale_by": ["compression"]}, "scale_by must be one of"),
        ({"copies_share_text": True}, "copies_share_text needs copies; got scale_by"),
        ({"copies_share_text": 1}, "copies_share_text must be true or false; got 1"),
        ({"seed": -1}, "seed must be between"),
        (
            {"rate_scale": 1e8, "scale_by": "superposition"},
            "rate_scale must be at most 10000000 copies; got",
        ),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^{rule}.*; \w+") as info:
        TraceWorkload(Reader(columns_at([0.0])), **arguments)
    assert "\n" not in str(info.value)


def test_too_many_copies_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkloadError, match=r"leave none; raise rate_scale"):
        scaled(columns_at([0.0]), 1e-6)
    monkeypatch.setattr("workloads.transforms.superposition.MAX_REQUESTS", 5)
    with pytest.raises(WorkloadError, match=r"3 copies of 2 are more; lower rate"):
        scaled(columns_at([0.0, 1.0]), 3.0)
    assert len(scaled(columns_at([0.0]), 5.0)) == 5


# -- real traces -------------------------------------------------------------------


@pytest.mark.parametrize("name", [AZURE_CONV, AZURE_CODE])
def test_a_real_trace_by_both_ways(name: str) -> None:
    reader = AzureTraceReader(shared_trace(name))
    trace, compressed, copies = (
        TraceWorkload(reader, rate_scale, scale_by=scale_by).requests()  # type: ignore[arg-type]
        for rate_scale, scale_by in (
            (1.0, "compression"),
            (3.0, "compression"),
            (3.0, "superposition"),
        )
    )
    trace_s, compressed_s, copies_s = map(arrivals_of, (trace, compressed, copies))
    rates = [len(times_s) / times_s[-1] for times_s in (compressed_s, copies_s)]
    assert rates == pytest.approx([3 * len(trace_s) / trace_s[-1]] * 2, rel=1e-3)
    cvs = [variation(np.diff(s)) for s in (trace_s, compressed_s, copies_s)]
    assert cvs[1] == pytest.approx(cvs[0], rel=1e-9)
    assert 1 < cvs[2] < 1 + 0.8 * (cvs[0] - 1)
    assert dispersion(compressed_s, 20.0) == pytest.approx(
        dispersion(trace_s, 60.0), rel=1e-9
    )
    assert dispersion(copies_s, 20.0) < dispersion(compressed_s, 20.0)
    assert isinstance(copies, RequestColumns)
    pairs = Counter((r.num_prompt_tokens, r.num_output_tokens) for r in copies)
    once = Counter((r.num_prompt_tokens, r.num_output_tokens) for r in trace)
    assert pairs == Counter({pair: 3 * count for pair, count in once.items()})


def test_a_real_trace_with_prefixes() -> None:
    reader = MooncakeTraceReader(shared_trace(MOONCAKE))
    window = (0.0, 400.0)
    one = TraceWorkload(reader, window=window).requests()

    def distinct(copies_share_text: bool) -> int:
        many = TraceWorkload(
            reader,
            3.0,
            window,
            scale_by="superposition",
            copies_share_text=copies_share_text,
        ).requests()
        assert len(many) == 3 * len(one)
        return len({segment for request in many for segment, _ in request.prompt})

    texts = len({segment for request in one for segment, _ in request.prompt})
    assert distinct(True) == texts
    assert distinct(False) == 3 * texts
