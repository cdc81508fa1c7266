from __future__ import annotations

import math
import re
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import (
    ARRIVALS,
    MAX_REQUESTS,
    ArrivalProcess,
    Streams,
    WorkloadError,
    arrival_times_s,
)
from workloads.arrivals import (
    BurstArrivals,
    ConstantArrivals,
    DiurnalArrivals,
    GammaArrivals,
    MarkovModulatedArrivals,
    PiecewiseArrivals,
    PoissonArrivals,
    ReplayArrivals,
    WeibullArrivals,
)
from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

rates = st.floats(1e-9, 1e9)
silences = st.just(0.0)


@st.composite
def curves(draw: st.DrawFn) -> PiecewiseArrivals:
    """A curve that never ends."""
    gaps_s = draw(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6))
    times_s = [0.0, *np.cumsum(gaps_s).tolist()]
    values = draw(
        st.lists(rates | silences, min_size=len(gaps_s), max_size=len(gaps_s))
    )
    last = draw(rates)
    kind = draw(st.sampled_from(["linear", "step"]))
    afterwards = draw(st.sampled_from(["hold", "repeat"]))
    first = [last] if afterwards == "repeat" else [draw(rates)]
    points = list(zip(times_s, [*first, *values[1:], last], strict=True))
    return PiecewiseArrivals(points, kind, afterwards)


@st.composite
def storms(draw: st.DrawFn) -> MarkovModulatedArrivals:
    """States, of which at least one has some arrivals each time."""
    dwell_s = draw(st.lists(st.floats(1e-9, 1e6), min_size=2, max_size=4))
    others = st.lists(rates | silences, min_size=len(dwell_s) - 1, max_size=3)
    most = draw(st.floats(0.1, 1e3)) * len(dwell_s) / dwell_s[0]
    listed = [min(most, 1e9), *draw(others)][: len(dwell_s)]
    if listed[0] * dwell_s[0] < 0.05 * len(dwell_s):
        return MarkovModulatedArrivals([5.0, 0.0], [1.0, 9.0])
    return MarkovModulatedArrivals(listed, dwell_s)


processes = st.one_of(
    st.builds(PoissonArrivals, rate=rates),
    st.builds(GammaArrivals, rate=rates, burstiness=st.floats(1e-3, 1e9)),
    st.builds(ConstantArrivals, rate=rates),
    st.builds(
        BurstArrivals,
        burst_size=st.integers(1, 100),
        interval_s=rates,
        start_s=st.floats(0, 1e9),
    ),
    st.builds(
        BurstArrivals,
        burst_size=st.integers(1, 100),
        interval_s=rates,
        base_rate=rates,
    ),
    st.builds(WeibullArrivals, rate=rates, shape=st.floats(0.1, 1000)),
    st.builds(
        DiurnalArrivals,
        rate=rates,
        peak_to_mean=st.floats(1, 2),
        period_s=rates,
        peak_s=st.none() | st.floats(0, 1e9),
    ),
    curves(),
    storms(),
)


def rng(seed: int = 0) -> np.random.Generator:
    return Streams(seed).generator("arrivals")


class Listed:
    """A user's own process: the times it was given, then the end."""

    def __init__(self, *times_s: float) -> None:
        self.given_s = times_s

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        yield from self.given_s


def test_constant() -> None:
    times_s = arrival_times_s(ConstantArrivals(rate=4), rng(), num_requests=5)
    assert times_s == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_constant_does_not_drift() -> None:
    times_s = arrival_times_s(ConstantArrivals(rate=10), rng(), num_requests=100_001)
    assert times_s[-1] == 10_000.0


def test_burst() -> None:
    process = BurstArrivals(burst_size=2, interval_s=10, start_s=1)
    assert arrival_times_s(process, rng(), num_requests=5) == [1, 1, 11, 11, 21]
    assert arrival_times_s(process, rng(), duration_s=11) == [1, 1]
    assert arrival_times_s(process, rng(), duration_s=11.5) == [1, 1, 11, 11]


def test_duration_is_half_open_and_after_scaling() -> None:
    process = ConstantArrivals(rate=1)
    assert arrival_times_s(process, rng(), duration_s=3) == [0, 1, 2]
    scaled_s = arrival_times_s(process, rng(), duration_s=3, rate_scale=2)
    assert scaled_s == [0, 0.5, 1, 1.5, 2, 2.5]


def test_poisson_begins_with_a_gap() -> None:
    expected_s = np.cumsum(rng().standard_exponential(3) / 8)
    times_s = arrival_times_s(PoissonArrivals(rate=8), rng(), num_requests=3)
    assert times_s == expected_s.tolist()


def test_gamma_of_shape_1_is_poisson_draw_by_draw() -> None:
    gamma_s = arrival_times_s(GammaArrivals(rate=8), rng(), num_requests=9999)
    poisson_s = arrival_times_s(PoissonArrivals(rate=8), rng(), num_requests=9999)
    assert gamma_s == pytest.approx(poisson_s, rel=1e-12)


@pytest.mark.parametrize("burstiness", [0.1, 0.5, 1.0, 4.0])
def test_gamma_has_the_rate_and_the_variation_it_states(burstiness: float) -> None:
    process = GammaArrivals(rate=8.0, burstiness=burstiness)
    gaps_s = np.diff(arrival_times_s(process, rng(), num_requests=200_000))
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=0.02)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(burstiness**-0.5, rel=0.02)


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    times_s = arrival_times_s(PoissonArrivals(rate=20.0), rng(), duration_s=10_000)
    counts = np.bincount(np.array(times_s).astype(int), minlength=10_000)
    assert counts.mean() == pytest.approx(20, rel=0.01)
    assert counts.var() == pytest.approx(20, rel=0.05)


@given(processes, st.integers(0, 100))
def test_times_are_finite_and_never_fall(process: ArrivalProcess, seed: int) -> None:
    # 5,000 crosses the size of a chunk of draws.
    times_s = arrival_times_s(process, rng(seed), num_requests=5000)
    assert len(times_s) == 5000
    assert times_s[0] >= 0
    assert times_s[-1] < math.inf
    assert all(early <= late for early, late in pairwise(times_s))
    assert times_s == arrival_times_s(process, rng(seed), num_requests=5000)
    assert all(type(time_s) is float for time_s in times_s)


@given(processes, st.integers(1, 5000))
def test_a_short_run_is_the_start_of_a_long_one(
    process: ArrivalProcess, num_requests: int
) -> None:
    long_s = arrival_times_s(process, rng(), num_requests=5000)
    short_s = arrival_times_s(process, rng(), num_requests=num_requests)
    assert short_s == long_s[:num_requests]


@given(st.floats(0.1, 100), st.floats(0.1, 100))
def test_rescaled_time_rescales_arrivals(rate: float, rate_scale: float) -> None:
    process = PoissonArrivals(rate=rate)
    times_s = arrival_times_s(process, rng(), num_requests=50)
    scaled_s = arrival_times_s(process, rng(), num_requests=50, rate_scale=rate_scale)
    assert scaled_s == [time_s / rate_scale for time_s in times_s]


@settings(max_examples=50)
@given(st.floats(0.1, 50), st.floats(0.1, 50))
def test_duration_takes_exactly_the_times_before_it(rate: float, end_s: float) -> None:
    process = GammaArrivals(rate=rate, burstiness=0.5)
    expected_s = []
    for time_s in process.times_s(rng()):
        if time_s >= end_s:
            break
        expected_s.append(time_s)
    if expected_s:
        assert arrival_times_s(process, rng(), duration_s=end_s) == expected_s
    else:
        with pytest.raises(WorkloadError, match="none arrives"):
            arrival_times_s(process, rng(), duration_s=end_s)


BAD_NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    0,
    0.0,
    -3,
    1e-320,
    1e300,
    "8",
    None,
    True,
]


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize(
    ("kind", "name", "others"),
    [
        ("poisson", "rate", {}),
        ("constant", "rate", {}),
        ("gamma", "rate", {"burstiness": 1.0}),
        ("gamma", "burstiness", {"rate": 1.0}),
        ("burst", "interval_s", {"burst_size": 1}),
        ("burst", "burst_size", {"interval_s": 1}),
        ("weibull", "rate", {}),
        ("weibull", "shape", {"rate": 1.0}),
        ("diurnal", "rate", {}),
        ("diurnal", "peak_to_mean", {"rate": 1.0}),
        ("diurnal", "period_s", {"rate": 1.0}),
    ],
)
def test_bad_parameters(
    kind: str, name: str, others: dict[str, float], bad: object
) -> None:
    with pytest.raises(
        WorkloadError, match=rf"^{name} must be .*; got .*; \w+"
    ) as info:
        ARRIVALS[kind](**{name: bad}, **others)
    assert "\n" not in str(info.value)
    assert repr(bad) in str(info.value)


def test_a_number_that_yaml_read_as_text_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"got '1e-3'; write 0\.001 without quotes"):
        PoissonArrivals(rate="1e-3")  # type: ignore[arg-type]


@pytest.mark.parametrize("burstiness", [1e-6, 0.0009])
def test_burstiness_too_small(burstiness: float) -> None:
    with pytest.raises(WorkloadError, match=r"burstiness must be at least 0\.001"):
        GammaArrivals(rate=1, burstiness=burstiness)


@pytest.mark.parametrize("start_s", [-1, math.nan, math.inf])
def test_bad_start(start_s: float) -> None:
    with pytest.raises(WorkloadError, match=r"^start_s must be"):
        BurstArrivals(burst_size=1, interval_s=1, start_s=start_s)


CURVE = [[0.0, 1.0], [5.0, 2.0]]


@pytest.mark.parametrize(
    ("kind", "arguments", "rule"),
    [
        (
            "burst",
            {"burst_size": 1, "interval_s": 1, "base_rate": -1},
            "base_rate must",
        ),
        ("weibull", {"rate": 1, "shape": 0.09}, "shape must be between 0.1 and 1000"),
        ("diurnal", {"rate": 1, "peak_to_mean": 2.1}, "peak_to_mean .*: kind piecew"),
        ("diurnal", {"rate": 1, "peak_s": -1}, "peak_s must be between 0 and"),
        ("diurnal", {"rate": 1, "peak_s": "noon"}, "peak_s must be a number"),
        ("piecewise", {"points": []}, "points must be a list"),
        ("piecewise", {"points": "0 1"}, "points must be a list"),
        ("piecewise", {"points": 5}, "points must be a list"),
        ("piecewise", {"points": [0, 1]}, r"points\[0\] must be two numbers"),
        ("piecewise", {"points": [[0, 1, 2]]}, r"points\[0\] must be two numbers"),
        ("piecewise", {"points": [[0, "1"]]}, r"points\[0\] must be a number"),
        ("piecewise", {"points": [[1, 1]]}, "points must begin at 0 s; got 1 s"),
        ("piecewise", {"points": [[0, 1], [0, 2]]}, "points must rise .* at index 1"),
        ("piecewise", {"points": [[0, 1], [5, -2]]}, r"points\[1\]: the rate must be"),
        ("piecewise", {"points": [[0, 1], [-5, 2]]}, r"points\[1\]: the time must be"),
        ("piecewise", {"points": [[0, 0], [9, 0]]}, "points must have a rate above 0"),
        ("piecewise", {"points": [[0, 3]], "afterwards": "repeat"}, "rate above 0 for"),
        (
            "piecewise",
            {"points": CURVE, "interpolation": "cubic"},
            "interpolation must",
        ),
        (
            "piecewise",
            {"points": CURVE, "afterwards": None},
            "afterwards must be one of",
        ),
        (
            "piecewise",
            {"points": CURVE, "interpolation": "step", "afterwards": "repeat"},
            "the last of the steps must have rate 1 to repeat; got 2",
        ),
        (
            "piecewise",
            {"points": CURVE, "interpolation": "step", "afterwards": "end"},
            "the last of the steps must have rate 0 to end; got 2",
        ),
        ("markov_modulated", {"rates": [1], "dwell_s": [1]}, "rates and dwell_s must"),
        ("markov_modulated", {"rates": [1, 2], "dwell_s": [1]}, "got 2 and 1"),
        ("markov_modulated", {"rates": 5, "dwell_s": [1]}, "rates must be a list"),
        (
            "markov_modulated",
            {"rates": [1, -1], "dwell_s": [1, 1]},
            r"rates\[1\] must be between",
        ),
        (
            "markov_modulated",
            {"rates": [1, 2], "dwell_s": [0, 1]},
            r"dwell_s\[0\] must be > 0",
        ),
        (
            "markov_modulated",
            {"rates": [1, 0], "dwell_s": [1e-4, 1e-4]},
            "must give a state at least 0.001 arrivals .*; got 5e-05; use kind poisson",
        ),
        (
            "markov_modulated",
            {"rates": [0, 0], "dwell_s": [1, 1]},
            "at least 0.001 arr",
        ),
        ("replay", {"trace": "trace.csv"}, "trace must have the method read"),
        ("replay", {"trace": None}, "trace must have the method read"),
    ],
)
def test_what_is_refused(kind: str, arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rule) as info:
        ARRIVALS[kind](**arguments)
    assert "\n" not in str(info.value)
    assert re.search(r"; \w+", str(info.value))


class Trace:
    """A user's own reader of three arrivals."""

    def read(self) -> Iterator[RequestSpec]:
        for i, arrival_s in enumerate((0.0, 4.0, 4.0)):
            yield RequestSpec(i, arrival_s, ((2 * i, 5),), 5, 2 * i + 1)


def test_replay() -> None:
    assert arrival_times_s(ReplayArrivals(Trace()), rng(), 3) == [0, 4, 4]
    part = ReplayArrivals(Trace(), window=(1, None))
    assert arrival_times_s(part, rng(), duration_s=9) == [3, 3]
    assert arrival_times_s(ReplayArrivals(Trace(), (0, 4)), rng(), 1) == [0]
    with pytest.raises(WorkloadError, match=r"num_requests is 4, but .* after 3"):
        arrival_times_s(ReplayArrivals(Trace()), rng(), num_requests=4)
    with pytest.raises(WorkloadError, match="window must have 0 <= start < end"):
        ReplayArrivals(Trace(), window=(4, 4))


def test_curves_at_known_places() -> None:
    # The third unit of area is reached at 2.5 s, the eighth at 5.5 s.
    class Units:
        def standard_exponential(self, size: int) -> Any:
            return np.ones(size)

    points = [[0, 1.0], [2, 2.0], [4, 0.0], [5, 4.0], [5.5, 4.0]]
    step = PiecewiseArrivals(points, "step")
    units: Any = Units()
    times_s = list(islice(step.times_s(units), 9))
    assert times_s == [1.0, 4 / 2, 2.5, 3.0, 3.5, 5.0, 5.25, 5.5, 5.75]
    ramp = PiecewiseArrivals([[0, 0.0], [4, 4.0]])
    assert list(islice(ramp.times_s(units), 9)) == pytest.approx(
        [2**0.5, 2, 6**0.5, 8**0.5, 10**0.5, 12**0.5, 14**0.5, 4, 4.25]
    )
    again = PiecewiseArrivals([[0, 2.0], [1, 0.0]], afterwards="repeat")
    assert list(islice(again.times_s(units), 3)) == [1, 2, 3]
    for peak_to_mean in (1.0, 1.2, 1.7, 2.0):
        day = DiurnalArrivals(1.0, peak_to_mean, period_s=40.0, peak_s=0.0)
        found_s = np.array(list(islice(day.times_s(units), 90)))
        swing_s = (peak_to_mean - 1) * 40 / (2 * math.pi)
        areas = found_s + swing_s * np.sin(found_s * 2 * math.pi / 40)
        assert areas == pytest.approx(np.arange(1, 91), abs=1e-10)
        assert found_s[[39, 79]] == pytest.approx([40, 80])


def test_exactly_one_limit() -> None:
    process = ConstantArrivals(rate=1)
    with pytest.raises(WorkloadError, match=r"exactly one of num_requests .* add one"):
        arrival_times_s(process, rng())
    with pytest.raises(WorkloadError, match=r"exactly one of .* remove one"):
        arrival_times_s(process, rng(), num_requests=1, duration_s=1)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "3", True, MAX_REQUESTS + 1])
def test_bad_num_requests(bad: object) -> None:
    with pytest.raises(WorkloadError, match=r"^num_requests must be .*; got .*; give"):
        arrival_times_s(ConstantArrivals(rate=1), rng(), num_requests=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["duration_s", "rate_scale"])
@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, "3", True])
def test_bad_duration_and_scale(name: str, bad: object) -> None:
    arguments = {"duration_s": 5.0} | {name: bad}
    with pytest.raises(WorkloadError, match=rf"^{name} must be .*; got .*; \w+"):
        arrival_times_s(ConstantArrivals(rate=1), rng(), **arguments)  # type: ignore[arg-type]


def test_too_many_for_a_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.arrivals.base.MAX_REQUESTS", 100)
    with pytest.raises(WorkloadError, match="may hold 100 requests; more arrive"):
        arrival_times_s(ConstantArrivals(rate=1e9), rng(), duration_s=1)
    assert len(arrival_times_s(ConstantArrivals(rate=100), rng(), duration_s=1)) == 100


def test_a_users_own_process() -> None:
    assert arrival_times_s(Listed(0.5, 0.5, 2), rng(), num_requests=3) == [0.5, 0.5, 2]
    assert arrival_times_s(Listed(0.5, 0.5, 2), rng(), duration_s=9) == [0.5, 0.5, 2]
    assert isinstance(Listed(), ArrivalProcess)


@pytest.mark.parametrize(
    "times_s",
    [(1.0, 0.5), (math.nan,), (-1.0,), (0.0, math.inf), (1.0, math.nan), ("1", None)],
)
def test_a_process_that_breaks_its_contract(times_s: tuple[float, ...]) -> None:
    with pytest.raises(WorkloadError, match=r"never fall; .* mend Listed\.times_s"):
        arrival_times_s(Listed(*times_s), rng(), num_requests=2)


def test_a_process_that_ends_too_early() -> None:
    with pytest.raises(WorkloadError, match=r"num_requests is 3, but .* ended after 2"):
        arrival_times_s(Listed(0, 1), rng(), num_requests=3)
    with pytest.raises(WorkloadError, match="at least one request"):
        arrival_times_s(Listed(), rng(), duration_s=3)


def test_registry() -> None:
    assert sorted(ARRIVALS) == [
        "burst",
        "constant",
        "diurnal",
        "gamma",
        "markov_modulated",
        "piecewise",
        "poisson",
        "replay",
        "weibull",
    ]
    assert all(issubclass(kind, ArrivalProcess) for kind in ARRIVALS.values())
    first = islice(ARRIVALS["poisson"](rate=1.0).times_s(rng()), 1)  # type: ignore[call-arg]
    assert next(first) > 0
