from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.plots.binning import StepColumns, cdf_points, extremes_per_column
from sim.plots.style import plain_number, short_number, time_unit

if TYPE_CHECKING:
    from sim.plots import Tables


def columns_of(*spans: tuple[float, float], stop_s: float, num: int) -> StepColumns:
    start, latency = (np.array(values) for values in zip(*spans, strict=True))
    return StepColumns(start, latency, stop_s, num)


def test_columns_weight_by_time_and_leave_gaps() -> None:
    columns = columns_of((0.0, 3.0), (3.0, 1.0), (8.0, 4.0), stop_s=12.0, num=6)
    values = np.array([10.0, 20.0, 5.0])
    nan = float("nan")
    expected = {
        "low": [10.0, 10.0, nan, nan, 5.0, 5.0],
        "high": [10.0, 20.0, nan, nan, 5.0, 5.0],
        "mean": [10.0, 15.0, nan, nan, 5.0, 5.0],
        "median": [10.0, 15.0, nan, nan, 5.0, 5.0],
    }
    for name, heights in expected.items():
        np.testing.assert_allclose(getattr(columns, name)(values), heights)


def test_an_idle_engine_is_empty() -> None:
    start, latency = np.array([0.0, 3.0, 8.0]), np.array([3.0, 1.0, 3.0])
    columns = StepColumns(start, latency, 12.0, 6, idle_is_zero=True)
    values = np.array([10.0, 20.0, 5.0])
    assert columns.low(values).tolist() == [10.0, 10.0, 0.0, 0.0, 5.0, 0.0]
    assert columns.high(values).tolist() == [10.0, 20.0, 0.0, 0.0, 5.0, 5.0]
    assert columns.mean(values).tolist() == [10.0, 15.0, 0.0, 0.0, 5.0, 2.5]
    nothing = StepColumns(np.zeros(0), np.zeros(0), 1.0, 2, idle_is_zero=True)
    assert nothing.mean(np.zeros(0)).tolist() == [0.0, 0.0]


def test_mean_of_the_curve_is_the_mean_of_the_summary(full_run: Tables) -> None:
    """`sim.metrics` counts idle time as an empty cache; so does the figure."""
    usage, latency_s = full_run.step("kv_cache_usage"), full_run.step("latency_s")
    drawn = full_run.state.mean(usage).mean()
    assert drawn == pytest.approx(usage @ latency_s / full_run.stop_s, rel=1e-9)


def test_columns_agree_with_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    latency = rng.exponential(1.0, 300)
    start = np.cumsum(latency + np.where(rng.random(300) < 0.1, 4.0, 0.0)) - latency
    values = rng.normal(size=300)
    stop_s = float(start[-1] + latency[-1])
    columns = StepColumns(start, latency, stop_s, 70)
    low, high, mean = (f(values) for f in (columns.low, columns.high, columns.mean))
    edges = columns.edges_s
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


def test_mean_per_step_counts_each_step_where_it_starts() -> None:
    # Ten short steps and a long one: per step, not per second.
    spans = [(0.1 * i, 0.1) for i in range(10)] + [(1.0, 4.0), (8.0, 1.0)]
    columns = columns_of(*spans, stop_s=9.0, num=9)
    values = np.array([*[10.0] * 10, 1000.0, 7.0])
    nan = float("nan")
    expected = [10, 1000, 1000, 1000, 1000, nan, nan, nan, 7]
    np.testing.assert_array_equal(columns.mean_per_step(values), expected)
    one = columns_of((0.0, 2.0), stop_s=2.0, num=1)
    assert one.mean_per_step(np.array([3.0])).tolist() == [3.0]
    both = columns_of(*[(0.5 * i, 0.5) for i in range(4)], stop_s=2.0, num=1)
    assert both.mean_per_step(np.arange(4.0)).tolist() == [1.5]
    nothing = StepColumns(np.zeros(0), np.zeros(0), 1.0, 2)
    assert np.isnan(nothing.mean_per_step(np.zeros(0))).all()


def test_a_step_ends_at_the_latest_when_the_next_one_starts() -> None:
    columns = columns_of((0.0, 9.0), (1.0, 1.0), stop_s=2.0, num=2)
    assert columns.high(np.array([7.0, 3.0])).tolist() == [7.0, 3.0]


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
