"""The lanes of a trace: what requests do, as slices that nest and never overlap."""

from __future__ import annotations

import heapq
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Any

from sim.views.exports.phases import ENDED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sim.results.folder import RunFolder
    from sim.views.exports.phases import Change


Event = dict[str, Any]


def microseconds(time_s: float) -> float:
    """Return a time in us, in whole ns: neighbours meet exactly."""
    return round(time_s * 1e9) / 1e3


def named(process: int, thread: int | None, name: str) -> Event:
    """Return an event that gives a process or one of its threads a name."""
    what = "process_name" if thread is None else "thread_name"
    event: Event = {"ph": "M", "ts": 0, "pid": process, "tid": thread or 0}
    return event | {"name": what, "args": {"name": name}}


_COLUMNS = (
    *("request_id", "status", "num_prompt_tokens", "num_output_tokens"),
    *("num_preemptions", "num_cached_tokens", "num_recomputed_tokens"),
    *("ttft_s", "tpot_s", "e2el_s"),
)


class RequestLanes:
    """Turns changes of requests into slices that nest and never overlap."""

    def __init__(self, folder: RunFolder, process: int) -> None:
        self._process = process
        self._facts = folder.columns("requests", _COLUMNS)
        ids = self._facts["request_id"].tolist()
        self._row = {each: i for i, each in enumerate(ids)}
        self._free: list[int] = []
        self._num_lanes = 0
        self._lane: dict[int, int] = {}

    def events(
        self, changes: Iterable[Change], begin_s: float, end_s: float
    ) -> Iterator[Event]:
        """Yield slices of a window in order of time, each closed.

        Requests that live when it begins or ends are cut there.
        """
        alive: dict[int, str] = {}
        changes = iter(changes)
        first = _skip(changes, alive, begin_s)
        for request_id, phase in alive.items():
            yield from self._opened(request_id, phase, begin_s)
        for change in chain(first, changes):
            if change.time_s >= end_s and (
                change.time_s > end_s or change.phase != ENDED
            ):
                break
            if change.phase == ENDED:
                if alive.pop(change.request_id, None) is not None:
                    yield from self._closed(change.request_id, change.time_s)
            elif change.request_id not in alive:
                alive[change.request_id] = change.phase
                yield from self._opened(change.request_id, change.phase, change.time_s)
            elif alive[change.request_id] != change.phase:
                alive[change.request_id] = change.phase
                yield self._event("E", change.request_id, change.time_s)
                yield self._phase(change.request_id, change.phase, change.time_s)
        for request_id in alive:
            yield from self._closed(request_id, end_s)

    def _opened(self, request_id: int, phase: str, now: float) -> Iterator[Event]:
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane = self._num_lanes = self._num_lanes + 1
            yield self._name(lane, now)
        self._lane[request_id] = lane
        about = {"name": f"request {request_id}", "args": self._about(request_id)}
        yield self._event("B", request_id, now) | about
        yield self._phase(request_id, phase, now)

    def _closed(self, request_id: int, now: float) -> Iterator[Event]:
        yield self._event("E", request_id, now)
        yield self._event("E", request_id, now)
        heapq.heappush(self._free, self._lane.pop(request_id))

    def _name(self, lane: int, now: float) -> Event:
        return named(self._process, lane, f"lane {lane}") | {"ts": microseconds(now)}

    def _phase(self, request_id: int, phase: str, now: float) -> Event:
        return self._event("B", request_id, now) | {"name": phase}

    def _event(self, kind: str, request_id: int, now: float) -> Event:
        lane = self._lane[request_id]
        event: Event = {"ph": kind, "ts": microseconds(now)}
        return event | {"pid": self._process, "tid": lane}

    def _about(self, request_id: int) -> Mapping[str, Any]:
        row = self._row[request_id]
        facts = {name: column[row] for name, column in self._facts.items()}
        plain = {
            name: value if isinstance(value, str) else value.item()
            for name, value in facts.items()
        }
        # No NaN: JSON has no word for it, and what there is none of is left out.
        return {
            name: value
            for name, value in plain.items()
            if not isinstance(value, float) or isfinite(value)
        }


def _skip(
    changes: Iterator[Change], alive: dict[int, str], begin_s: float
) -> list[Change]:
    """Follow who lives until a window begins; return the first change in it."""
    for change in changes:
        if change.time_s >= begin_s:
            return [change]
        if change.phase == ENDED:
            alive.pop(change.request_id, None)
        else:
            alive[change.request_id] = change.phase
    return []
