from __future__ import annotations

import itertools
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sim.config.trace_shelf import ReadTrace
from tests.workloads.shared_traces import AZURE_CONV, shared_trace
from workloads import (
    ARRIVALS,
    LENGTHS,
    TRACE_READERS,
    RequestSpec,
    SyntheticWorkload,
    TraceReader,
    TraceWorkload,
    Workload,
    WorkloadError,
)
from workloads.arrivals import ConstantArrivals, PoissonArrivals
from workloads.errors import WorkloadWarning
from workloads.lengths import (
    CoupledLengths,
    FixedLength,
    LognormalLength,
    UniformLength,
)
from workloads.lengths.empirical import trace_lengths
from workloads.traces import AzureTraceReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


class Listed:
    """A user's own reader: nothing but `read`."""

    def __init__(self, *requests: Any) -> None:
        self.listed = requests
        self.num_read = 0

    def read(self) -> Iterator[RequestSpec]:
        for request in self.listed:
            self.num_read += 1
            yield request


def at(*arrivals_s: float) -> Listed:
    return Listed(
        *(
            RequestSpec(i, arrival_s, ((2 * i, 10 + i),), 5, 2 * i + 1, 7, -1)
            for i, arrival_s in enumerate(arrivals_s)
        )
    )


def arrivals_s(workload: Workload) -> list[float]:
    return [request.arrival_s for request in workload.requests()]


def test_a_whole_trace_is_as_it_was_read() -> None:
    reader = at(0, 1, 1, 2.5)
    assert TraceWorkload(reader).requests() == list(reader.listed)


def test_rate_scale() -> None:
    assert arrivals_s(TraceWorkload(at(0, 3, 6), rate_scale=3)) == [0, 1, 2]
    assert arrivals_s(TraceWorkload(at(0, 3, 6), rate_scale=0.5)) == [0, 6, 12]


def test_window_is_half_open_and_starts_at_0() -> None:
    workload = TraceWorkload(at(0, 1, 2, 3, 4), window=(1, 3))
    assert arrivals_s(workload) == [0, 1]
    assert arrivals_s(TraceWorkload(at(0, 2, 4), window=(1, 9))) == [1, 3]
    assert arrivals_s(TraceWorkload(at(0, 2), window=[0, 2])) == [0]  # type: ignore[arg-type]


def test_window_with_an_open_end() -> None:
    assert arrivals_s(TraceWorkload(at(0, 1, 2, 3), window=(2, None))) == [0, 1]
    read = yaml.safe_load("window: [1.5, null]\nrate_scale: 0.5\nlimit: 1")
    assert arrivals_s(TraceWorkload(at(0, 1, 2, 3), **read)) == [1]
    (hint,) = (f.type for f in fields(TraceWorkload) if f.name == "window")
    assert "float | None" in str(hint)  # a configuration is checked against it


def test_empty_window_with_an_open_end() -> None:
    rule = r"window must hold .* from 5 s on \(.*: 2 s\); move the window"
    with pytest.raises(WorkloadError, match=rule):
        TraceWorkload(at(0, 1, 2), window=(5, None)).requests()


def test_window_then_limit_then_scale() -> None:
    workload = TraceWorkload(at(*range(10)), rate_scale=2, window=(4, 9), limit=3)
    assert arrivals_s(workload) == [0, 0.5, 1]


def test_a_moved_request_keeps_all_but_place() -> None:
    reader = at(0, 5, 8)
    workload = TraceWorkload(reader, rate_scale=2, window=(4, 9))
    expected = [
        reader.listed[1]._replace(request_id=0, arrival_s=0.5),
        reader.listed[2]._replace(request_id=1, arrival_s=2.0),
    ]
    assert workload.requests() == expected


def test_no_more_is_read_than_needed() -> None:
    reader = at(*range(100))
    TraceWorkload(reader, limit=3).requests()
    assert reader.num_read == 4
    # After a window a chain that began in it may go on.
    reader = at(*range(100))
    TraceWorkload(reader, window=(0, 5)).requests()
    assert reader.num_read == 100


def chains(*given: tuple[float, int | None, float]) -> Listed:
    """A trace of `(arrival_s, previous_id, delay_s)`; each quotes the answer before."""
    requests: list[RequestSpec] = []
    for i, (arrival_s, previous_id, delay_s) in enumerate(given):
        before = () if previous_id is None else ((2 * previous_id + 1, 5),)
        spec = RequestSpec(i, arrival_s, (*before, (2 * i, 10)), 5, 2 * i + 1)
        requests.append(spec._replace(previous_id=previous_id, delay_s=delay_s))
    return Listed(*requests)


# Two chains, 0-2-4 and 3-5, and a request alone.
CHAINS = (
    (0.0, None, 0.0),
    (1.0, None, 0.0),
    (3.0, 0, 3.0),
    (4.0, None, 0.0),
    (9.0, 2, 6.0),
    (9.5, 3, 5.5),
)


def told(workload: TraceWorkload) -> list[tuple[int, float, int | None, int]]:
    """Return id, arrival, previous id and the number in the trace of each request."""
    return [
        (r.request_id, r.arrival_s, r.previous_id, r.output_segment // 2)
        for r in workload.requests()
    ]


def test_a_trace_of_chains_is_as_it_was_read() -> None:
    reader = chains(*CHAINS)
    assert TraceWorkload(reader).requests() == list(reader.listed)


def test_a_window_keeps_chains_that_begin_in_it() -> None:
    assert told(TraceWorkload(chains(*CHAINS), window=(0, 1))) == [
        (0, 0.0, None, 0),
        (1, 3.0, 0, 2),
        (2, 9.0, 1, 4),
    ]
    assert told(TraceWorkload(chains(*CHAINS), window=(1, 9))) == [
        (0, 0.0, None, 1),
        (1, 3.0, None, 3),
        (2, 8.5, 1, 5),
    ]
    # Follow-ups of 9 s are there, but what began them is not.
    with pytest.raises(WorkloadError, match=r"in \[5, 20\) s \(.*: 4 s\); widen"):
        TraceWorkload(chains(*CHAINS), window=(5, 20)).requests()


def test_a_limit_keeps_the_first_of_a_window_and_what_they_follow() -> None:
    workload = TraceWorkload(chains(*CHAINS), window=(0, 2), limit=3)
    assert told(workload) == [(0, 0.0, None, 0), (1, 1.0, None, 1), (2, 3.0, 0, 2)]


def test_compression_leaves_think_times() -> None:
    # Sessions begin four times as often; nobody thinks faster.
    assert told(TraceWorkload(chains(*CHAINS), rate_scale=4)) == [
        (0, 0.0, None, 0),
        (1, 0.25, None, 1),
        (2, 1.0, None, 3),
        (3, 3.0, 0, 2),
        (4, 6.5, 2, 5),
        (5, 9.0, 3, 4),
    ]


@pytest.mark.parametrize("previous_id", [1, 2, -1])
def test_a_follow_up_of_what_does_not_come_before(previous_id: int) -> None:
    reader = chains((0.0, None, 0.0))
    bad = reader.listed[0]._replace(request_id=1, previous_id=previous_id)
    rule = rf"must yield a previous_id before .*; got {previous_id}, at position 1"
    with pytest.raises(WorkloadError, match=rule):
        TraceWorkload(Listed(reader.listed[0], bad)).requests()


times = st.lists(st.floats(0, 1e6), min_size=1, max_size=30).map(sorted)


@given(times, st.floats(1e-3, 1e3), st.floats(0, 1e6), st.floats(0.1, 1e6))
def test_properties_of_a_part(
    given_s: list[float], rate_scale: float, start_s: float, length_s: float
) -> None:
    end_s = start_s + length_s
    kept_s = [time_s for time_s in given_s if start_s <= time_s < end_s]
    workload = TraceWorkload(at(*given_s), rate_scale, (start_s, end_s))
    if not kept_s:
        with pytest.raises(WorkloadError, match="window must hold a request"):
            workload.requests()
        return
    requests = workload.requests()
    assert [request.request_id for request in requests] == list(range(len(kept_s)))
    expected_s = [(time_s - start_s) / rate_scale for time_s in kept_s]
    assert [request.arrival_s for request in requests] == expected_s
    assert expected_s == sorted(expected_s)


def test_empty_window() -> None:
    rule = r"window must hold .* \[5, 9\) s \(.*: 2 s\); widen or move"
    with pytest.raises(WorkloadError, match=rule):
        TraceWorkload(at(0, 1, 2), window=(5, 9)).requests()


def test_empty_reader() -> None:
    with pytest.raises(WorkloadError, match=r"at least one .* Listed yields none"):
        TraceWorkload(Listed()).requests()


class Endless:
    """A user's own reader that makes requests up, a second apart."""

    def read(self) -> Iterator[RequestSpec]:
        for i in itertools.count():
            yield RequestSpec(i, float(i), ((2 * i, 10),), 5, 2 * i + 1)


def test_a_reader_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.traces.base.MAX_REQUESTS", 100)
    reader = Endless()
    rule = r"^a workload may hold 100 requests; Endless\.read yields more; .*set limit$"
    refused: list[Callable[[], object]] = [
        TraceWorkload(reader).requests,
        TraceWorkload(reader, window=(500, 550)).requests,
        lambda: trace_lengths(reader),
        lambda: ReadTrace.of(reader),
    ]
    for each in refused:
        with pytest.raises(WorkloadError, match=rule):
            each()
    assert len(TraceWorkload(reader, limit=100).requests()) == 100
    part = TraceWorkload(reader, window=(500, None), limit=50)
    assert arrivals_s(part) == [*range(50)]


def test_times_of_two_clocks_are_named() -> None:
    epoch_s = 1.7e9
    mixed = TraceWorkload(at(0.0, 1.5, epoch_s, epoch_s + 60.0))
    with pytest.warns(WorkloadWarning, match=r"requests 1 and 2 .* 53.9 years apart"):
        assert len(mixed.requests()) == 4
    # A part of one clock, a slow rate and a recording of years are as they are.
    for told in (
        TraceWorkload(at(0.0, 1.5, epoch_s), limit=2),
        TraceWorkload(at(0.0, 1e9, 2e9, 3e9)),
        TraceWorkload(at(0.0, 3e7, 3.2e7)),
        TraceWorkload(at(0.0, epoch_s)),
    ):
        assert told.requests()


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, "2", True, None])
def test_bad_rate_scale(bad: Any) -> None:
    with pytest.raises(WorkloadError, match=r"^rate_scale must be .*; got .*; \w+"):
        TraceWorkload(at(0), rate_scale=bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", True, math.nan])
def test_bad_limit(bad: Any) -> None:
    with pytest.raises(WorkloadError, match=r"^limit must be .*; got .*; give"):
        TraceWorkload(at(0), limit=bad)


@pytest.mark.parametrize(
    "bad",
    [
        *[(1, 1), (2, 1), (-1, 1), (0, math.nan), (math.nan, 1), (0, math.inf)],
        *[(0,), (0, 1, 2), "01", 5, ("0", 1), (None, 5), (True, 5)],
        *[(None, None), (-1, None), (math.inf, None), (0, 10**400), (10**400, None)],
    ],
)
def test_bad_window(bad: Any) -> None:
    with pytest.raises(WorkloadError, match=r"^window .*must .*; got .*; \w+"):
        TraceWorkload(at(0), window=bad)


@pytest.mark.parametrize("bad", [None, "trace.csv", 5])
def test_bad_reader(bad: Any) -> None:
    with pytest.raises(WorkloadError, match=r"^reader must have the method read"):
        TraceWorkload(bad)


GOOD = RequestSpec(0, 1.0, ((0, 5),), 5, 1)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (GOOD._replace(arrival_s=0.5), "finite arrivals .*; got 0.5 s after 1.0 s"),
        (GOOD._replace(arrival_s=math.nan), "finite arrivals .*; got nan"),
        (GOOD._replace(arrival_s=math.inf), "finite arrivals .*; got inf"),
        (GOOD._replace(num_output_tokens=0), "at least 1 token; got 5 and 0"),
        (GOOD._replace(prompt=()), "at least 1 token; got 0 and 5"),
        ((1.0, 5, 5), "RequestSpec; got tuple"),
        (GOOD._replace(arrival_s="2"), "RequestSpec of numbers and segments; got Req"),
        (GOOD._replace(prompt=None), "RequestSpec of numbers and segments; got Req"),
        (GOOD._replace(prompt=(3, 4)), "RequestSpec of numbers and segments; got Req"),
    ],
)
def test_a_reader_that_breaks_its_contract(bad: Any, problem: str) -> None:
    rule = rf"^Listed\.read must yield .*{problem}.* position 1; mend the reader"
    with pytest.raises(WorkloadError, match=rule):
        TraceWorkload(Listed(GOOD, bad)).requests()


class ReadsNothing:
    def read(self) -> Any:
        return None


def test_a_reader_that_returns_nothing() -> None:
    rule = r"^ReadsNothing\.read must yield RequestSpec; got NoneType; mend the reader"
    with pytest.raises(WorkloadError, match=rule):
        TraceWorkload(ReadsNothing()).requests()


def synthetic(**changes: Any) -> SyntheticWorkload:
    arguments: dict[str, Any] = {
        "arrivals": PoissonArrivals(rate=8.0),
        "prompt_tokens": LognormalLength(median=1000, sigma=1.0),
        "output_tokens": LognormalLength(median=200, sigma=0.7),
        "num_requests": 500,
    }
    return SyntheticWorkload(**(arguments | changes))


def columns(workload: Workload) -> tuple[list[float], list[int], list[int]]:
    requests = workload.requests()
    return (
        [request.arrival_s for request in requests],
        [request.num_prompt_tokens for request in requests],
        [request.num_output_tokens for request in requests],
    )


def test_synthetic_literal() -> None:
    workload = SyntheticWorkload(
        arrivals=ConstantArrivals(rate=2),
        prompt_tokens=FixedLength(100),
        output_tokens=FixedLength(7),
        num_requests=3,
    )
    assert workload.requests() == [
        RequestSpec(0, 0.0, ((0, 100),), 7, 1),
        RequestSpec(1, 0.5, ((2, 100),), 7, 3),
        RequestSpec(2, 1.0, ((4, 100),), 7, 5),
    ]


def test_equal_seeds_are_equal_and_others_are_not() -> None:
    assert synthetic(seed=3).requests() == synthetic(seed=3).requests()
    for one, other in zip(
        columns(synthetic(seed=3)), columns(synthetic(seed=4)), strict=True
    ):
        assert one != other


def test_changing_one_thing_leaves_the_others() -> None:
    times_s, prompts, outputs = columns(synthetic())
    changed = columns(synthetic(prompt_tokens=UniformLength(1, 9)))
    assert (changed[0], changed[2]) == (times_s, outputs)
    changed = columns(synthetic(output_tokens=UniformLength(1, 9)))
    assert changed[:2] == (times_s, prompts)
    changed = columns(synthetic(arrivals=ConstantArrivals(rate=1)))
    assert changed[1:] == (prompts, outputs)
    changed = columns(synthetic(rank_correlation=0.5))
    assert changed[:2] == (times_s, prompts)
    assert changed[2] != outputs


def test_a_long_run_begins_with_the_short_one() -> None:
    long = synthetic(num_requests=9000, rank_correlation=0.3).requests()
    short = synthetic(num_requests=10, rank_correlation=0.3).requests()
    assert short == long[:10]
    end_s = long[100].arrival_s
    timed = synthetic(num_requests=None, duration_s=end_s, rank_correlation=0.3)
    assert timed.requests() == long[:100]


def test_synthetic_rate_scale() -> None:
    times_s, *lengths = columns(synthetic())
    scaled_s, *scaled_lengths = columns(synthetic(rate_scale=4))
    assert scaled_s == [time_s / 4 for time_s in times_s]
    assert scaled_lengths == lengths


def test_duration_is_that_of_the_workload_itself() -> None:
    one = synthetic(num_requests=None, duration_s=100).requests()
    four = synthetic(num_requests=None, duration_s=100, rate_scale=4).requests()
    assert one[-1].arrival_s < 100
    assert four[-1].arrival_s < 100
    assert len(four) == pytest.approx(4 * len(one), rel=0.1)


@pytest.mark.parametrize("rho", [-1, -0.6, 0, 0.3, 0.9, 1])
def test_rank_correlation_of_lengths(rho: float) -> None:
    workload = synthetic(num_requests=50_000, rank_correlation=rho)
    _, prompts, outputs = columns(workload)
    ranks = [np.array(x).argsort(kind="stable").argsort() for x in (prompts, outputs)]
    correlations = np.asarray(np.corrcoef(ranks))
    assert correlations[0, 1] == pytest.approx(rho, abs=0.015)


@pytest.mark.parametrize(
    ("name", "bad", "rule"),
    [
        ("rank_correlation", 1.01, "rank_correlation must be between -1 and 1"),
        ("rank_correlation", -2, "rank_correlation must be between -1 and 1"),
        ("rank_correlation", math.nan, "rank_correlation must be finite"),
        ("rank_correlation", "0.5", "rank_correlation must be a number"),
        ("rate_scale", 0, "rate_scale must be > 0"),
        ("rate_scale", math.nan, "rate_scale must be finite"),
        ("num_requests", None, "exactly one of num_requests and duration_s"),
        ("num_requests", 0, "num_requests must be between 1"),
        ("duration_s", 5, "exactly one of num_requests and duration_s"),
        ("seed", -1, "seed must be between"),
        ("seed", 1.5, "seed must be an integer"),
        ("arrivals", 8.0, "arrivals must have the method times_s"),
        ("lengths", 512, "lengths stands for .*; got also prompt_tokens and output"),
        ("prompt_tokens", 512, "prompt_tokens must have the method quantile"),
        ("output_tokens", None, "output_tokens must have the method quantile"),
    ],
)
def test_bad_parameters(name: str, bad: Any, rule: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^{rule}.*; \w+") as info:
        synthetic(**{name: bad})
    assert "\n" not in str(info.value)


class Own:
    """A user's own distribution."""

    def __init__(self, tokens: NDArray[Any]) -> None:
        self.tokens = tokens

    def quantile(self, u: NDArray[np.float64]) -> NDArray[Any]:
        return self.tokens


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (np.array([1, 0]), "from 1 to 1000000000; got 0 to 1"),
        (np.array([1, 2 * 10**9]), "got 1 to 2000000000"),
        (np.array([1.0, 2.0]), r"integers of shape \(2,\); got float64"),
        (np.array([1, 2, 3]), r"integers of shape \(2,\); got int64 \(3,\)"),
        ([1, 2], "must be an array of integers; got list"),
    ],
)
def test_a_distribution_that_breaks_its_contract(
    tokens: NDArray[Any], problem: str
) -> None:
    workload = synthetic(num_requests=2, output_tokens=Own(tokens))
    with pytest.raises(WorkloadError, match=rf"{problem}.*; mend Own\.quantile"):
        workload.requests()


def test_a_users_own_distribution() -> None:
    workload = synthetic(num_requests=2, output_tokens=Own(np.array([4, 5])))
    assert columns(workload)[2] == [4, 5]


class Twins:
    """A user's own pairs."""

    def __init__(self, num_too_many: int = 0) -> None:
        self.num_too_many = num_too_many

    def pairs(
        self, u: NDArray[np.float64], v: NDArray[np.float64]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        tokens = 1 + (u * 9).astype(np.int64)
        return tokens, np.append(tokens, tokens[: self.num_too_many])


def in_pairs(pairs: Any, **more: Any) -> SyntheticWorkload:
    return SyntheticWorkload(
        ConstantArrivals(rate=2), num_requests=9, lengths=pairs, **more
    )


def test_lengths_in_pairs() -> None:
    _, prompts, outputs = columns(in_pairs(Twins()))
    assert prompts == outputs
    assert len(set(prompts)) > 1
    # The two distributions, coupled, are such pairs.
    apart = synthetic(num_requests=9, rank_correlation=0.7)
    pairs = CoupledLengths(
        LognormalLength(median=1000, sigma=1.0),
        LognormalLength(median=200, sigma=0.7),
        0.7,
    )
    assert columns(in_pairs(pairs))[1:] == columns(apart)[1:]


def test_pairs_that_break_their_contract() -> None:
    rule = r"output_tokens must be integers of shape \(9,\); .*; mend Twins\.pairs"
    with pytest.raises(WorkloadError, match=rule):
        in_pairs(Twins(1)).requests()


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"rank_correlation": 0.2}, "got also rank_correlation; remove"),
        ({"output_tokens": FixedLength(1)}, "got also output_tokens; remove"),
        ({"lengths": FixedLength(1)}, r"lengths must have the method pairs\("),
        ({"lengths": None}, "prompt_tokens must have the method quantile.*got None"),
    ],
)
def test_lengths_are_given_in_one_way(more: dict[str, Any], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rule):
        in_pairs(more.pop("lengths", Twins()), **more)


def test_no_arrival_in_the_duration() -> None:
    workload = synthetic(num_requests=None, duration_s=1e-6)
    with pytest.raises(WorkloadError, match=r"none arrives in .*; raise the rate"):
        workload.requests()


def test_built_from_a_configuration() -> None:
    # As the simulator does it: `kind` and keyword arguments.
    arrivals: Any = ARRIVALS["gamma"]
    lengths: Any = LENGTHS["fixed"]
    workload = SyntheticWorkload(
        arrivals=arrivals(**{"rate": 8.0, "burstiness": 0.5}),
        prompt_tokens=lengths(**{"tokens": 3}),
        output_tokens=lengths(**{"tokens": 4}),
        num_requests=5,
    )
    assert isinstance(workload, Workload)
    assert len(workload.requests()) == 5


def test_the_real_trace_in_parts() -> None:
    reader_type: Any = TRACE_READERS["azure"]
    reader = reader_type(path=shared_trace(AZURE_CONV))
    assert isinstance(reader, TraceReader)
    whole = TraceWorkload(reader).requests()
    assert len(whole) == 19_366
    scaled = TraceWorkload(reader, rate_scale=3.0, limit=5000).requests()
    assert len(scaled) == 5000
    assert scaled[-1].arrival_s == whole[4999].arrival_s / 3
    halves = [
        TraceWorkload(reader, window=window).requests()
        for window in ((0, 1800), (1800, 3600))
    ]
    assert sum(map(len, halves)) == 19_366
    assert halves[1][0].prompt == whole[len(halves[0])].prompt


def test_a_reader_is_read_anew_each_time() -> None:
    workload = TraceWorkload(AzureTraceReader(path=shared_trace(AZURE_CONV)), limit=9)
    assert workload.requests() == workload.requests()
