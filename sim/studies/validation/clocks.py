"""One clock and one unit for measurements: mistakes that look like errors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from sim.studies.validation.observed import MeasuredError

if TYPE_CHECKING:
    from sim.studies.validation.observed import (
        Floats,
        Observed,
        ObservedRequests,
        TimeSeries,
    )

_LATEST_BEGIN_S: Final = 86_400.0
"""A run that begins later is on a clock whose zero is not the run's."""
_SLOW_TPOT_S: Final = 2.0
"""Seconds a token that no served engine takes, and milliseconds that all do."""
_LOW_USAGE: Final = 0.01
"""A usage that is never above it is probably a share, taken for percent."""
_MOST_SHIFTS: Final = 2_000


def on_one_clock(measured: Observed) -> Observed:
    """Return the measurement on a clock that begins with the run, and with doubts.

    A clock whose zero is far away (an epoch, the start of a machine) is moved to the
    first arrival, of requests and series alike. Nothing else is changed.
    """
    requests, series = measured.requests, measured.series
    if requests is None:
        return measured
    warnings = [*measured.warnings, *_unit_warnings(requests)]
    notes = list(measured.notes)
    if series is not None:
        warnings += _usage_warnings(series)
    if requests.arrival_s is not None:
        if series is not None:
            _check_overlap(requests, series)
            warnings += _shift_warnings(requests, series)
        begin_s = float(requests.arrival_s.min())
        if begin_s > _LATEST_BEGIN_S:
            notes.append(f"times are given from the first arrival, at {begin_s:,.3f} s")
            requests = replace(requests, arrival_s=requests.arrival_s - begin_s)
            if series is not None:
                series = replace(series, time_s=series.time_s - begin_s)
    return replace(
        measured,
        requests=requests,
        series=series,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _unit_warnings(requests: ObservedRequests) -> list[str]:
    tpot_s = requests.tpot_s[~np.isnan(requests.tpot_s)]
    if not len(tpot_s) or float(np.median(tpot_s)) < _SLOW_TPOT_S:
        return []
    return [
        f"half of the requests took {float(np.median(tpot_s)):.3g} s a token or more; "
        "are the times milliseconds? They must be seconds"
    ]


def _usage_warnings(series: TimeSeries) -> list[str]:
    usage = series.kv_cache_usage
    if usage is None or float(np.nanmax(usage)) > _LOW_USAGE:
        return []
    return [
        f"kv_cache_pct is at most {100.0 * float(np.nanmax(usage)):.3g}: is it a share "
        "of 1? It must be percent"
    ]


def _check_overlap(requests: ObservedRequests, series: TimeSeries) -> None:
    begin_s, end_s = _span_s(requests)
    first_s, last_s = float(series.time_s[0]), float(series.time_s[-1])
    if last_s < begin_s or first_s > end_s:
        raise MeasuredError(
            f"the time series runs from {first_s:,.1f} to {last_s:,.1f} s, the "
            f"requests from {begin_s:,.1f} to {end_s:,.1f} s; give both on one clock"
        )


def _span_s(requests: ObservedRequests) -> tuple[float, float]:
    assert requests.arrival_s is not None
    begin_s = float(requests.arrival_s.min())
    ends_s = requests.arrival_s + requests.e2el_s
    return begin_s, float(np.nanmax(ends_s, initial=begin_s))


def _shift_warnings(requests: ObservedRequests, series: TimeSeries) -> list[str]:
    """Say when the requests' own times contradict the series.

    Between arrival and last token a request runs or waits, so that both files say how
    many were in the system.
    """
    if series.num_running is None or series.num_waiting is None:
        return []
    if np.isnan(requests.e2el_s).any():
        return []  # the end of a failed request is unknown
    seen = series.num_running + series.num_waiting
    if series.num_swapped is not None:
        seen = seen + series.num_swapped
    apart = _apart(requests, series.time_s, seen)
    if not apart > 1.0 + 0.1 * float(np.nanmean(seen)):
        return []
    shifts_s = _shifts_s(requests, series.time_s)
    distances = [_apart(requests, series.time_s + by, seen) for by in shifts_s]
    best = int(np.argmin(distances))
    text = (
        f"the time series has {apart:.1f} requests more or less in the engine than the "
        "requests' own times say, on average"
    )
    if distances[best] < 0.5 * apart:
        text += f"; with {shifts_s[best]:+.3g} s added to its t it would be "
        text += f"{distances[best]:.1f}: are both on one clock?"
    else:
        text += "; are both of the same run and engine?"
    return [text]


def _shifts_s(requests: ObservedRequests, time_s: Floats) -> Floats:
    begin_s, end_s = _span_s(requests)
    tick_s = float(np.median(np.diff(time_s))) / 2.0 if len(time_s) > 1 else 1.0
    tick_s = max(tick_s, 2.0 * (end_s - begin_s) / _MOST_SHIFTS, 1e-9)
    count = int((end_s - begin_s) / tick_s) + 1
    return np.arange(-count, count + 1, dtype=np.float64) * tick_s


def _apart(requests: ObservedRequests, time_s: Floats, seen: Floats) -> float:
    """Return the mean distance between `seen` and the requests in the system."""
    assert requests.arrival_s is not None
    ends_s = np.sort(requests.arrival_s + requests.e2el_s)
    arrived = np.searchsorted(np.sort(requests.arrival_s), time_s, side="right")
    present = arrived - np.searchsorted(ends_s, time_s, side="right")
    distance = np.abs(present - seen)
    return float(np.nanmean(distance)) if not np.isnan(distance).all() else 0.0
