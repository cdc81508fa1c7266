from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.views.plots.binning import (
    Envelope,
    Medians,
    StepColumns,
    StepMeans,
    cdf_points,
    extremes_per_column,
)
from sim.views.plots.style import plain_number, short_number, time_unit
from tests.sim.views.plots.whole_columns import WholeColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.views.plots import Tables
    from sim.views.plots.binning import Floats

NAN = float("nan")


class Gathered:
    """A value over columns, gathered from batches cut where `cuts` says."""

    def __init__(
        self,
        spans: tuple[Floats, Floats],
        values: Floats,
        axis: tuple[float, int],
        *,
        cuts: Sequence[int] = (),
        idle_is_zero: bool = False,
        **medians: int,
    ) -> None:
        start_s, end_s = spans
        columns = StepColumns(*axis)
        self.envelope = Envelope(columns, idle_is_zero=idle_is_zero)
        self.medians = Medians(columns, **medians)
        self.means = StepMeans(columns)
        borders = sorted({0, start_s.size, *cuts})
        for first, stop in itertools.pairwise(borders):
            placed = columns.place(start_s[first:stop], end_s[first:stop])
            batch = np.append(values[first:stop], NAN)
            for gatherer in (self.envelope, self.medians, self.means):
                gatherer.add(placed, batch)

    def arrays(self) -> dict[str, Floats]:
        return {
            "low": self.envelope.low,
            "high": self.envelope.high,
            "mean": self.envelope.mean,
            "median": self.medians.median,
            "mean_per_step": self.means.mean,
        }


def spans_of(*spans: tuple[float, float]) -> tuple[Floats, Floats]:
    """Starts and ends of steps given as (start, latency)."""
    start, latency = np.array(spans, dtype=np.float64).T
    return start, np.minimum(start + latency, np.append(start[1:], np.inf))


def test_columns_weight_by_time_and_leave_gaps() -> None:
    spans = spans_of((0.0, 3.0), (3.0, 1.0), (8.0, 4.0))
    arrays = Gathered(spans, np.array([10.0, 20.0, 5.0]), (12.0, 6)).arrays()
    expected = {
        "low": [10.0, 10.0, NAN, NAN, 5.0, 5.0],
        "high": [10.0, 20.0, NAN, NAN, 5.0, 5.0],
        "mean": [10.0, 15.0, NAN, NAN, 5.0, 5.0],
        "median": [10.0, 15.0, NAN, NAN, 5.0, 5.0],
        "mean_per_step": [10.0, 20.0, NAN, NAN, 5.0, 5.0],
    }
    for name, heights in expected.items():
        np.testing.assert_allclose(arrays[name], heights)


def test_an_idle_engine_is_empty() -> None:
    spans = spans_of((0.0, 3.0), (3.0, 1.0), (8.0, 3.0))
    values = np.array([10.0, 20.0, 5.0])
    envelope = Gathered(spans, values, (12.0, 6), idle_is_zero=True).envelope
    assert envelope.low.tolist() == [10.0, 10.0, 0.0, 0.0, 5.0, 0.0]
    assert envelope.high.tolist() == [10.0, 20.0, 0.0, 0.0, 5.0, 5.0]
    assert envelope.mean.tolist() == [10.0, 15.0, 0.0, 0.0, 5.0, 2.5]
    nothing = Envelope(StepColumns(1.0, 2), idle_is_zero=True)
    assert nothing.mean.tolist() == [0.0, 0.0]


def test_mean_of_the_curve_is_the_mean_of_the_summary(full_run: Tables) -> None:
    """`sim.results.metrics` counts idle time as an empty cache; so does the figure."""
    usage, latency_s = (full_run.steps[c] for c in ("kv_cache_usage", "latency_s"))
    drawn = full_run.curves.state["kv_cache_usage_percent"].mean.mean()
    mean = 100.0 * (usage @ latency_s) / full_run.stop_s
    assert drawn == pytest.approx(mean, rel=1e-9)


def test_columns_agree_with_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    latency = rng.exponential(1.0, 300)
    start = np.cumsum(latency + np.where(rng.random(300) < 0.1, 4.0, 0.0)) - latency
    values = rng.normal(size=300)
    stop_s = float(start[-1] + latency[-1])
    gathered = Gathered(
        (start, start + latency), values, (stop_s, 70), cuts=range(0, 300, 7)
    )
    low, high, mean = (gathered.arrays()[name] for name in ("low", "high", "mean"))
    edges = gathered.envelope.columns.edges_s
    for i, (left, right) in enumerate(itertools.pairwise(edges)):
        inside = np.clip(
            np.minimum(start + latency, right) - np.maximum(start, left), 0, None
        )
        held = values[inside > 0]
        if not held.size:
            assert np.isnan([low[i], high[i], mean[i]]).all()
            continue
        assert (low[i], high[i]) == (held.min(), held.max())
        assert mean[i] == pytest.approx((values @ inside) / inside.sum(), abs=1e-9)


QUARTERS = st.integers(0, 40).map(lambda quarters: quarters / 4.0)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Steps of any length, zero included, that touch, pause and cross columns."""
    steps = draw(st.lists(st.tuples(QUARTERS, QUARTERS), min_size=1, max_size=40))
    length, pause = np.array(steps).T
    pause[draw(st.lists(st.integers(0, len(steps) - 1)))] = 0.0
    start_s = np.cumsum(length + pause) - length - pause[0] * draw(st.booleans())
    stop_s = float(start_s[-1] + length[-1]) + draw(QUARTERS)
    return {
        "start_s": start_s,
        # some steps say that they last until after the next one starts
        "latency_s": length + draw(st.sampled_from([0.0, 0.5])),
        "values": np.array(
            draw(st.lists(st.integers(0, 9), min_size=len(steps), max_size=len(steps))),
            dtype=np.float64,
        ),
        "stop_s": stop_s or 1.0,
        "num_columns": draw(st.integers(1, 30)),
        "cuts": draw(st.lists(st.integers(0, len(steps)))),
    }


@given(run=runs(), idle_is_zero=st.booleans())
def test_batches_give_what_whole_arrays_give(
    run: dict[str, Any], *, idle_is_zero: bool
) -> None:
    start_s, latency_s, values = (run[n] for n in ("start_s", "latency_s", "values"))
    axis = run["stop_s"], run["num_columns"]
    end_s = np.minimum(start_s + latency_s, np.append(start_s[1:], np.inf))
    gathered = Gathered(
        (start_s, end_s), values, axis, cuts=run["cuts"], idle_is_zero=idle_is_zero
    )
    whole = WholeColumns(start_s, latency_s, *axis, idle_is_zero=idle_is_zero)
    steps = WholeColumns(start_s, latency_s, *axis)
    expected = {n: getattr(whole, n)(values) for n in ("low", "high", "mean", "median")}
    expected["mean_per_step"] = steps.mean_per_step(values)
    for name, array in gathered.arrays().items():
        near = 1e-9 if name.startswith("mean") else 0.0  # sums in another order
        np.testing.assert_allclose(
            array, expected[name], rtol=near, atol=near, err_msg=name
        )


def test_mean_per_step_counts_each_step_where_it_starts() -> None:
    # Ten short steps and a long one: per step, not per second.
    spans = [(0.1 * i, 0.1) for i in range(10)] + [(1.0, 4.0), (8.0, 1.0)]
    values = np.array([*[10.0] * 10, 1000.0, 7.0])
    expected = [10, 1000, 1000, 1000, 1000, NAN, NAN, NAN, 7]
    gathered = Gathered(spans_of(*spans), values, (9.0, 9))
    np.testing.assert_array_equal(gathered.means.mean, expected)
    one = Gathered(spans_of((0.0, 2.0)), np.array([3.0]), (2.0, 1))
    assert one.means.mean.tolist() == [3.0]
    both = spans_of(*[(0.5 * i, 0.5) for i in range(4)])
    assert Gathered(both, np.arange(4.0), (2.0, 1)).means.mean.tolist() == [1.5]
    assert np.isnan(StepMeans(StepColumns(1.0, 2)).mean).all()


@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 10, 11), range(100)])
def test_a_median_of_very_many_steps_is_of_evenly_spaced_ones(
    cuts: Sequence[int],
) -> None:
    spans = spans_of(*[(0.01 * i, 0.01) for i in range(100)])
    values = np.random.default_rng(1).normal(size=100)
    gathered = Gathered(spans, values, (2.0, 2), cuts=cuts, max_steps=30)
    median = gathered.medians.median
    assert median[0] == np.median(values[::4])
    assert np.isnan(median[1])
    exact = Gathered(spans, values, (2.0, 2), cuts=cuts, max_steps=100)
    assert exact.medians.median[0] == np.median(values)


def test_thinning_keeps_extremes_of_each_column() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.uniform(0, 10, 5_000), rng.normal(size=5_000)
    edges = np.linspace(0, 10, 11)
    kept = extremes_per_column(x, y, edges)
    assert kept.size == 20
    for left in range(10):
        inside = (x >= left) & (x < left + 1)
        chosen = y[kept][(x[kept] >= left) & (x[kept] < left + 1)]
        assert sorted(chosen) == [y[inside].min(), y[inside].max()]


@pytest.mark.parametrize("size", [1, 2, 10, 5_000])
def test_cdf_keeps_both_ends(size: int) -> None:
    values = np.random.default_rng(size).lognormal(size=size)
    x, share = cdf_points(values, 100)
    assert x.size <= 100
    assert (x[0], x[-1], share[-1]) == (values.min(), values.max(), 1.0)
    for at, below in zip(x, share, strict=True):
        assert below == pytest.approx((values <= at).mean())


def test_units_of_time() -> None:
    names = [time_unit(s)[1] for s in (1, 600, 601, 10_800, 10_801)]
    assert names == ["s", "s", "min", "min", "h"]


def test_numbers_are_written_plainly() -> None:
    written = [plain_number(value) for value in (0.1 + 0.2, 1234567.0, 20.0)]
    assert written == ["0.3", "1,234,567", "20"]
    short = [short_number(value) for value in (0.0, 9_999.0, 12_500.0, 3.2e6)]
    assert short == ["0", "9,999", "12.5k", "3.2M"]
