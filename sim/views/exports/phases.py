"""What each request was doing, as changes in order of time.

Two sources tell: the tables, which know when a request was preempted but not when it
came back, and the recorded schedule, which knows both.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from math import isnan
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
    """Return the changes of all requests in order of time, and what is not known."""
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
    # At the same instant in this order: who arrives may be scheduled, who got its
    # first token may have got its last one.
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
        """Yield what the scheduler's calls and the ends of steps change."""
        for line in lines:
            start_s, end_s = line["start_s"], line["end_s"]
            for name, mode in line.get("preempt", ()):
                yield self._preempted(int(name), mode, start_s)
            entries = line.get("sched", ())
            for entry in entries:
                yield from self._scheduled(int(entry[0]), start_s)
            for entry in entries:
                yield from self._computed(entry, end_s)
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
        phase = self._phase[request_id]
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
