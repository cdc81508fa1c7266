"""The phases of each request, as changes in order of time and as slices of a trace.

Two sources tell: the tables, which know when a request was preempted but not when it
came back, and the recorded schedule, which knows both.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from itertools import chain
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.scheduler.log.files import read_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from sim.results.folder import Columns, RunFolder


WAITING, PREFILL, DECODE, ENDED = "waiting", "prefill", "decode", ""
PREEMPTED, RECOMPUTE, SWAPPED = "preempted", "recompute", "swapped"
AFTER_PREEMPTION = "after preemption"
"""Waiting, computing again and decoding, which the tables do not tell apart."""

REQUEST_COLUMNS = (
    "request_id",
    "arrival_s",
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
    "num_prompt_tokens",
    "num_sequences",
)
PREEMPTION_COLUMNS = ("time_s", "request_id", "num_output_tokens")


class Change(NamedTuple):
    """A request begins something else; `phase` is empty where it ends."""

    time_s: float
    request_id: int
    phase: str


def phases(folder: RunFolder) -> tuple[Iterator[Change], list[str]]:
    """Return the changes of all requests in order of time, and the unknown facts."""
    requests = folder.columns("requests", REQUEST_COLUMNS)
    preemptions = folder.columns("preemptions", PREEMPTION_COLUMNS)
    schedule = folder.recorded("schedule.jsonl.zst")
    if schedule is not None:
        return schedule_phases(requests, preemptions, schedule), []
    notes = []
    if len(preemptions["time_s"]):
        notes.append(
            "when preempted requests came back is not recorded; for that, run it with "
            "--record schedule"
        )
    return table_phases(requests, preemptions), notes


def table_phases(requests: Columns, preemptions: Columns) -> Iterator[Change]:
    """Return the changes as far as the tables know them."""
    ids = requests["request_id"]
    parts = [
        (ids, requests["arrival_s"], WAITING),
        (ids, requests["first_scheduled_s"], PREFILL),
        (ids, requests["first_token_s"], DECODE),
        (preemptions["request_id"], preemptions["time_s"], AFTER_PREEMPTION),
        (ids, requests["finish_s"], ENDED),
    ]
    times_s = np.concatenate([times for _, times, _ in parts])
    of_whom = np.concatenate([whom for whom, _, _ in parts])
    kinds = np.repeat(np.arange(len(parts)), [len(whom) for whom, _, _ in parts])
    order = np.lexsort((of_whom, kinds, times_s))
    for i in order[~np.isnan(times_s[order])]:
        yield Change(float(times_s[i]), int(of_whom[i]), parts[kinds[i]][2])


def schedule_phases(
    requests: Columns, preemptions: Columns, schedule: Path
) -> Iterator[Change]:
    """Return the changes with those that only the schedule knows."""
    arrivals = _of_column(requests, "arrival_s", WAITING)
    ends = _of_column(requests, "finish_s", ENDED)
    steps = _Steps(requests, preemptions).changes(read_log(schedule))
    # At the same instant in this order: an arrival may be scheduled, and its
    # first token may be its last one.
    return heapq.merge(arrivals, steps, ends, key=lambda change: change.time_s)


def _of_column(requests: Columns, name: str, phase: str) -> Iterator[Change]:
    times_s = requests[name]
    for i in np.argsort(times_s, kind="stable"):
        if isnan(times_s[i]):
            return  # sorted last
        yield Change(float(times_s[i]), int(requests["request_id"][i]), phase)


class _Steps:
    def __init__(self, requests: Columns, preemptions: Columns) -> None:
        self._row = {int(each): i for i, each in enumerate(requests["request_id"])}
        self._requests = requests
        self._outputs: dict[int, deque[int]] = defaultdict(deque)
        for each, num in zip(
            preemptions["request_id"], preemptions["num_output_tokens"], strict=True
        ):
            self._outputs[int(each)].append(int(num))
        self._phase: dict[int, str] = {}
        self._before_swap: dict[int, str] = {}
        self._to_compute: dict[int, int] = {}

    def changes(self, lines: Iterable[Mapping[str, Any]]) -> Iterator[Change]:
        """Yield the changes by the scheduler's calls and the outputs of steps."""
        in_flight: deque[Mapping[str, Any]] = deque()
        for line in lines:
            start_s = line["start_s"]
            while in_flight and in_flight[0]["end_s"] <= start_s:
                yield from self._processed(in_flight.popleft())
            for name, mode in line.get("preempt", ()):
                yield self._preempted(int(name), mode, start_s)
            for entry in line.get("sched", ()):
                yield from self._scheduled(int(entry[0]), start_s)
            in_flight.append(line)
        for line in in_flight:
            yield from self._processed(line)

    def _processed(self, line: Mapping[str, Any]) -> Iterator[Change]:
        for entry in line.get("sched", ()):
            yield from self._computed(entry, line["end_s"])
        for name in line.get("fin", ()):
            self._phase.pop(int(name), None)

    def _preempted(self, request_id: int, mode: str, now: float) -> Change:
        outputs = self._outputs[request_id]
        num_outputs = outputs.popleft() if outputs else 0
        before = self._phase.get(request_id, PREFILL)
        if mode == "swap":
            self._before_swap[request_id] = before
        else:
            prompt = self._requests["num_prompt_tokens"][self._row[request_id]]
            self._to_compute[request_id] = int(prompt) + num_outputs
        self._phase[request_id] = SWAPPED if mode == "swap" else PREEMPTED
        return Change(now, request_id, self._phase[request_id])

    def _scheduled(self, request_id: int, now: float) -> Iterator[Change]:
        before = self._phase.get(request_id)
        if before is None:
            phase = PREFILL
        elif before == PREEMPTED:
            phase = RECOMPUTE
        elif before == SWAPPED:
            phase = self._before_swap.pop(request_id)
        else:
            return
        self._phase[request_id] = phase
        yield Change(now, request_id, phase)

    def _computed(self, entry: list[Any], now: float) -> Iterator[Change]:
        request_id = int(entry[0])
        phase = self._phase.get(request_id)  # none if it has ended meanwhile
        if phase not in (PREFILL, RECOMPUTE):
            return
        row = self._row[request_id]
        # NaN, of one that never got a token, is not below either.
        if not self._requests["first_token_s"][row] <= now:
            return
        # Generations without a count of computed tokens compute it all at once.
        if phase == RECOMPUTE and len(entry) == 4:
            is_single = self._requests["num_sequences"][row] == 1
            if is_single and entry[3] + entry[1] < self._to_compute[request_id]:
                return
        self._phase[request_id] = DECODE
        yield Change(now, request_id, DECODE)


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
    """Follow requests until a window begins; return the first change in it."""
    for change in changes:
        if change.time_s >= begin_s:
            return [change]
        if change.phase == ENDED:
            alive.pop(change.request_id, None)
        else:
            alive[change.request_id] = change.phase
    return []
