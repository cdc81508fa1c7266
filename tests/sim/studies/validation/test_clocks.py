"""Mistakes of clock and unit are found, not compared."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from sim.studies.validation.clocks import on_one_clock
from sim.studies.validation.observed import (
    MeasuredError,
    Observed,
    ObservedRequests,
    TimeSeries,
)

EPOCH_S = 1_777_142_838.0


def measured(*, series_from_s: float = 0.0, requests_from_s: float = 0.0) -> Observed:
    """A hundred requests, ten seconds each, and the states that belong to them."""
    arrival_s = np.arange(100.0)
    time_s = np.arange(0.5, 110.0)
    num_present = np.minimum.reduce(
        [np.floor(time_s) + 1, np.full(110, 10.0), np.ceil(110 - time_s) - 1]
    )
    running = np.minimum(num_present, 8.0)
    return Observed(
        source="made up",
        requests=ObservedRequests(
            num_prompt_tokens=np.full(100, 10),
            num_output_tokens=np.full(100, 101),
            ttft_s=np.full(100, 0.2),
            e2el_s=np.full(100, 10.0),
            arrival_s=arrival_s + requests_from_s,
        ),
        series=TimeSeries(
            time_s=time_s + series_from_s,
            num_running=running,
            num_waiting=num_present - running,
        ),
    )


def test_what_agrees_is_left_alone() -> None:
    found = on_one_clock(measured())
    assert found.warnings == ()
    assert found.notes == ()
    assert found.requests is not None
    assert found.requests.arrival_s is not None
    assert found.requests.arrival_s[0] == 0.0


def test_a_far_zero_is_moved_to_the_first_arrival() -> None:
    found = on_one_clock(measured(series_from_s=EPOCH_S, requests_from_s=EPOCH_S))
    assert found.warnings == ()
    assert "times are given from the first arrival" in found.notes[0]
    assert found.requests is not None
    assert found.requests.arrival_s is not None
    assert found.requests.arrival_s[:2].tolist() == [0.0, 1.0]
    assert found.series is not None
    assert found.series.time_s[0] == 0.5


@pytest.mark.parametrize(("series_s", "requests_s"), [(EPOCH_S, 0.0), (0.0, EPOCH_S)])
def test_clocks_without_a_common_moment_are_refused(
    series_s: float, requests_s: float
) -> None:
    with pytest.raises(MeasuredError, match="give both on one clock"):
        on_one_clock(measured(series_from_s=series_s, requests_from_s=requests_s))


@pytest.mark.parametrize("late_s", [-30.0, 30.0])
def test_a_shifted_series_is_told_and_by_how_much(late_s: float) -> None:
    (warning,) = on_one_clock(measured(series_from_s=late_s)).warnings
    found = re.search(r"with (\S+) s added to its t it would be 0\.0", warning)
    assert found is not None
    assert float(found[1]) == pytest.approx(-late_s, abs=0.6)  # arrivals are 1 s apart


def test_a_series_of_another_run_is_told() -> None:
    observed = measured()
    assert observed.series is not None
    assert observed.series.num_waiting is not None
    more = replace(observed.series, num_waiting=observed.series.num_waiting + 40.0)
    (warning,) = on_one_clock(replace(observed, series=more)).warnings
    assert warning.endswith("are both of the same run and engine?")


def test_milliseconds_are_told() -> None:
    observed = measured()
    assert observed.requests is not None
    slow = replace(
        observed.requests,
        ttft_s=1e3 * observed.requests.ttft_s,
        e2el_s=1e3 * observed.requests.e2el_s,
    )
    (warning,) = on_one_clock(Observed(source="", requests=slow)).warnings
    assert "are the times milliseconds" in warning


def test_a_share_in_place_of_percent_is_told() -> None:
    observed = measured()
    assert observed.series is not None
    usage = np.full(110, 0.0097)  # 0.97 in a column of percent
    series = replace(observed.series, kv_cache_usage=usage)
    (warning,) = on_one_clock(replace(observed, series=series)).warnings
    assert "at most 0.97: is it a share" in warning
