"""A fleet over time: its replicas and their requests, pool by pool."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.results import schema
from sim.results.fleet.pulls import pulls_of
from sim.results.tables.columns import Texts
from sim.results.tables.memory import ResultTable
from sim.results.tables.steps import engines_in, span_columns, spans_s
from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.results.recording.recorder import Recording
    from sim.results.recording.tokens import Floats, Integers

    Change = tuple[float, int, str]
    """When the replica at a place comes into a state."""
    Span = tuple[float, float]

_MOST_TIMES: Final = 1000
_STATES: Final = {
    "num_ready": ("ready",),
    "num_starting": ("starting",),
    "num_draining": ("draining", "dying"),
}
"""By column, the states of the replicas that it counts."""
ABSENT: Final = ("starting", "off")
"""States in which a replica serves no request."""


def times_of(duration_s: float) -> Floats:
    """Return at most 1,000 times from 0 on, a round number of seconds apart."""
    steps = ((m, k) for k in count(-6) for m in (1, 2, 5))
    m, k = next((m, k) for m, k in steps if duration_s < _MOST_TIMES * m * 10.0**k)
    times_s: Floats = np.arange(_MOST_TIMES, dtype=np.float64) * m
    times_s = times_s * 10.0**k if k > 0 else times_s / 10.0**-k
    return times_s[: max(int(np.searchsorted(times_s, duration_s)), 1)]


def state_spans(
    changes: Iterable[Change], num_places: int, end_s: float
) -> list[list[tuple[float, float, str]]]:
    """Return by place the states of a replica: begin, end and name of each.

    Parameters
    ----------
    changes
        In order; all replicas are ready before.
    num_places
        The most replicas that there can be.
    end_s
        Of the run.
    """
    spans: list[list[tuple[float, float, str]]] = [[] for _ in range(num_places)]
    since = [(0.0, "ready")] * num_places
    for time_s, place, state in changes:
        begin_s, before = since[place]
        if time_s > begin_s:
            spans[place].append((begin_s, time_s, before))
        since[place] = (time_s, state)
    for own, (begin_s, state) in zip(spans, since, strict=True):
        own.append((begin_s, max(end_s, begin_s), state))
    return spans


def absences(
    spans: Sequence[Sequence[tuple[float, float, str]]],
) -> list[list[list[float]]]:
    """Return by place the spans in which its replica served no request."""
    found: list[list[list[float]]] = []
    for own in spans:
        joined: list[list[float]] = []
        for begin_s, end_s, state in own:
            if state in ABSENT and end_s > begin_s:
                if joined and joined[-1][1] == begin_s:
                    joined[-1][1] = end_s
                else:
                    joined.append([begin_s, end_s])
        found.append(joined)
    return found


def series(
    recording: Recording,
    pools: Sequence[tuple[str, Sequence[Sequence[int]]]],
    spans: Sequence[Sequence[tuple[float, float, str]]],
    held: Sequence[Span],
    duration_s: float,
) -> ResultTable:
    """Return the state of each pool at regular times, in the columns of a fleet.

    Parameters
    ----------
    recording
        Of the run.
    pools
        Names, and the places of the engines of each replica.
    spans
        See `state_spans`.
    held
        Spans in which requests waited for an engine to be there.
    duration_s
        Of the run.
    """
    times_s = times_of(duration_s)
    running, waiting = _queues(recording, len(spans), times_s)
    moving = _transfers(recording, len(spans), times_s)
    num_held = _num_under_way(held, times_s)
    names, parts = Texts(), []
    for name, replicas in pools:
        own = [span for ranks in replicas for span in spans[ranks[0]]]
        places = [place for ranks in replicas for place in ranks]
        numbers: dict[str, Any] = {
            column: _num_under_way(
                [(begin, end) for begin, end, state in own if state in states], times_s
            )
            for column, states in _STATES.items()
        }
        parts.append(
            {
                "time_s": times_s,
                "pool": [name] * len(times_s),
                **numbers,
                "num_running": running[places].sum(axis=0),
                "num_waiting": waiting[places].sum(axis=0),
                "num_held": num_held,
                "num_transfers": moving[places].sum(axis=0),
            }
        )
    whole: dict[str, Any] = {
        column: np.concatenate([part[column] for part in parts])
        for column in schema.FLEET
        if column != "pool"
    }
    order = np.argsort(whole["time_s"], kind="stable")
    whole = {column: values[order] for column, values in whole.items()}
    pool_of = [name for part in parts for name in part["pool"]]
    whole["pool"] = names.column(names.encode([pool_of[i] for i in order]))
    return ResultTable(whole, schema.FLEET)


def _queues(
    recording: Recording, num_places: int, times_s: Floats
) -> tuple[Integers, Integers]:
    """Return by place and time how many requests the step in progress had.

    Behind the last step of an engine those that are left there to the end, as of one
    that is stuck.
    """
    steps = recording.step_table
    running = np.zeros((num_places, len(times_s)), np.int64)
    stops_s = np.zeros(num_places)
    waiting = np.zeros_like(running)
    columns = ("num_running", "num_waiting", "engine", *span_columns(steps))
    for batch in steps.batches(tuple(dict.fromkeys(columns))):
        for place in engines_in(batch["engine"]):
            is_own = batch["engine"] == place
            own = (
                batch
                if is_own.all()
                else {name: column[is_own] for name, column in batch.items()}
            )
            start_s = own["start_s"]
            first, last = np.searchsorted(times_s, (start_s[0], np.inf))
            row = np.searchsorted(start_s, times_s[first:last], side="right") - 1
            ends_s = start_s + spans_s(own)
            is_on = times_s[first:last] < ends_s[row]
            at = first + np.flatnonzero(is_on)
            running[place, at] = own["num_running"][row[is_on]]
            waiting[place, at] = own["num_waiting"][row[is_on]]
            stops_s[place] = ends_s[-1]
    _add_left(recording.request_table, times_s, stops_s, running, waiting)
    return running, waiting


def _add_left(
    requests: ResultTable,
    times_s: Floats,
    stops_s: Floats,
    running: Integers,
    waiting: Integers,
) -> None:
    """Add requests that never ended, from the end of their engine's last step on."""
    runs = requests.is_one_of("status", [RequestStatus.RUNNING.value])
    is_left = np.isnan(requests["finish_s"]) & (requests["engine"] >= 0)
    for row in np.flatnonzero(is_left):
        place = requests["engine"][row]
        since_s = max(requests["arrival_s"][row], stops_s[place])
        found = running if runs[row] else waiting
        found[place, np.searchsorted(times_s, since_s) :] += 1


def _transfers(recording: Recording, num_places: int, times_s: Floats) -> Integers:
    """Return by place and time how many prompts were being read."""
    transfers = recording.transfer_table
    found = np.zeros((num_places, len(times_s)), np.int64)
    if transfers is not None and "prefill_engine" in transfers.kinds:
        pulls = pulls_of(transfers)
        for place in np.unique(pulls["engine"]):
            own = pulls["engine"] == place
            pairs = zip(pulls["begin_s"][own], pulls["end_s"][own], strict=True)
            found[place] = _num_under_way([*pairs], times_s)
    return found


def _num_under_way(spans: Sequence[Span], times_s: Floats) -> Integers:
    """Return how many spans are under way at each time, their ends excluded."""
    begins_s = np.sort([begin_s for begin_s, _ in spans])
    ends_s = np.sort([end_s for _, end_s in spans])
    begun = np.searchsorted(begins_s, times_s, side="right")
    found: Integers = begun - np.searchsorted(ends_s, times_s, side="right")
    return found
