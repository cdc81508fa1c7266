"""The schedule in Chrome's trace-event format, for ui.perfetto.dev.

Two processes: the engine (steps, swaps, preemptions, counters) and its requests, each
on a lane of its own while it lives. Events come in order of time and are written as
they come.

Source: "Trace Event Format", Google, 2016 (phases M, X, B, E, C and i; times in us).
"""

from __future__ import annotations

import gzip
import heapq
import json
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from math import inf, isfinite, isnan, nan
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from sim.views.exports.request_lanes import (
    Event,
    RequestLanes,
    microseconds,
    named,
    phases,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from sim.results.folder import RunFolder

ENGINE, REQUESTS = 1, 2
"""Numbers of the two processes."""
_STEPS, _SWAPS, _PREEMPTIONS, _MORE_STEPS = 1, 2, 3, 4
"""Numbers of the engine's tracks; steps beside others have more of them, at the end."""
_ROUNDING_US = 0.01

_STEP_COLUMNS = (
    *("step", "start_s", "latency_s", "swap_s", "num_batched_tokens", "num_decodes"),
    *("num_prefills", "num_prefill_tokens", "num_recomputed_tokens"),
    *("num_copied_blocks", "num_finished", "num_swapped_in_blocks"),
    *("num_swapped_out_blocks", "kv_cache_usage", "cpu_cache_usage"),
    *("num_running", "num_waiting", "num_swapped"),
)
_STEP_ARGS = _STEP_COLUMNS[4:11]
_COUNTERS = {
    "kv_cache_usage_perc": "kv_cache_usage",
    "cpu_cache_usage_perc": "cpu_cache_usage",
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "num_requests_swapped": "num_swapped",
}
_PREEMPTION_COLUMNS = (
    *("time_s", "step", "request_id", "for_request_id", "reason", "mode"),
    *("num_tokens_lost", "num_output_tokens", "num_blocks_freed", "num_blocks_moved"),
    *("kv_cache_usage_before", "kv_cache_usage_after"),
)
_ABOUT = ("title", "seed", "num_gpu_blocks", "block_size", "scheduling", "path")


@dataclass(frozen=True, slots=True)
class Window:
    """Simulated seconds of interest: steps that begin in [begin_s, end_s)."""

    begin_s: float = 0.0
    end_s: float = inf

    def __contains__(self, time_s: float) -> bool:
        return self.begin_s <= time_s < self.end_s


def write_trace(folder: RunFolder, path: Path, window: Window) -> list[str]:
    """Write the trace, compressed if the name ends in ``.gz``; return what to say."""
    changes, notes = phases(folder)
    lanes = RequestLanes(folder, REQUESTS)
    end_s = min(window.end_s, _end_s(folder))
    events = heapq.merge(
        _step_events(folder, window),
        _preemption_events(folder, window),
        lanes.events(changes, window.begin_s, max(end_s, window.begin_s)),
        key=lambda event: event["ts"],
    )
    about = {name: folder.summary.get(name) for name in _ABOUT}
    with _opened(path) as file:
        num = _write(file, about, chain(_names(), events))
    return [f"{num:,} events; open it in ui.perfetto.dev", *notes]


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write, packed if its name says so: the same bytes every time."""
    with path.open("wb") as file:
        if ".gz" not in path.suffixes:
            yield file
            return
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            yield packed  # type: ignore[misc]


def _write(file: IO[bytes], about: Event, events: Iterable[Event]) -> int:
    head = {"displayTimeUnit": "ms", "otherData": about}
    file.write(json.dumps(head, allow_nan=False)[:-1].encode())
    file.write(b', "traceEvents": [')
    encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
    num = 0
    for event in events:
        file.write(b",\n" if num else b"\n")
        file.write(encode(event).encode())
        num += 1
    file.write(b"\n]}\n")
    return num


def _names() -> Iterator[Event]:
    yield named(ENGINE, None, "engine")
    yield named(REQUESTS, None, "requests")
    for thread, name in ((_STEPS, "steps"), (_SWAPS, "swaps")):
        yield named(ENGINE, thread, name)
    yield named(ENGINE, _PREEMPTIONS, "preemptions")


def _end_s(folder: RunFolder) -> float:
    times_s = folder.columns("requests", ("arrival_s", "finish_s")).values()
    end_s = max(float(np.nanmax(each, initial=0.0)) for each in times_s)
    for batch in folder.step_table.batches(("start_s", "latency_s")):
        end_s = max(end_s, float(batch["start_s"][-1] + batch["latency_s"][-1]))
    return end_s


def _rows(
    batches: Iterable[dict[str, npt.NDArray[Any]]], names: Iterable[str]
) -> Iterator[dict[str, Any]]:
    names = list(names)
    for batch in batches:
        columns = [batch[name].tolist() for name in names]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


# -- the engine ---------------------------------------------------------------------


def _step_events(folder: RunFolder, window: Window) -> Iterator[Event]:
    """Yield steps, swaps and counters; steps that overlap have tracks of their own.

    A step is held until the next of its track, to end before it, and what began later
    on other tracks with it.
    """
    names: tuple[str, ...] = _STEP_COLUMNS
    if "output_s" in folder.step_table.kinds:
        names = (*names, "output_s")
    held: list[list[Event]] = []
    ready: list[tuple[float, int, Event]] = []
    number = count()
    shown: dict[str, float] = {}
    for row in _rows(folder.step_table.batches(names), names):
        if row["start_s"] >= window.end_s:
            break
        if row["start_s"] not in window:
            continue
        begin = microseconds(row["start_s"])
        track = next((i for i, each in enumerate(held) if _end(each) <= begin), None)
        if track is None:
            track = len(held)
            held.append([])
            if track:
                name = f"steps, {track + 1} in flight"
                yield named(ENGINE, _steps_thread(track), name)
        for event in held[track]:
            if event["ph"] == "X":
                event["dur"] = min(event["dur"], round(begin - event["ts"], 3))
            heapq.heappush(ready, (event["ts"], next(number), event))
        slices = _slices(row, begin, _steps_thread(track))
        held[track] = [*_counters(row, begin, shown), *slices]
        first = min(events[0]["ts"] for events in held)
        while ready and ready[0][0] <= first:
            yield heapq.heappop(ready)[2]
    for event in chain.from_iterable(held):
        heapq.heappush(ready, (event["ts"], next(number), event))
    while ready:
        yield heapq.heappop(ready)[2]


def _end(events: Iterable[Event]) -> float:
    """Return when the last of some slices ends, but for what rounding adds."""
    ends = (each["ts"] + each["dur"] for each in events if each["ph"] == "X")
    return float(max(ends)) - _ROUNDING_US


def _steps_thread(track: int) -> int:
    return _MORE_STEPS + track - 1 if track else _STEPS


def _counters(
    row: dict[str, Any], begin: float, shown: dict[str, float]
) -> Iterator[Event]:
    for name, column in _COUNTERS.items():
        # What is never anything but 0 gets no track.
        if row[column] != shown.get(name, 0 if "cpu" in name or "swap" in name else -1):
            shown[name] = row[column]
            event: Event = {"ph": "C", "ts": begin, "pid": ENGINE, "tid": 0}
            yield event | {"name": name, "args": {"value": row[column]}}


def _slices(row: dict[str, Any], begin: float, thread: int) -> Iterator[Event]:
    end_s = row.get("output_s", nan)
    if isnan(end_s):  # a queue that stalled leaves its last step in flight
        end_s = row["start_s"] + row["latency_s"]
    args = {name: row[name] for name in _STEP_ARGS if row[name]}
    yield _slice(thread, f"step {row['step']}", begin, end_s) | {"args": args}
    blocks_in, blocks_out = row["num_swapped_in_blocks"], row["num_swapped_out_blocks"]
    if blocks_in or blocks_out:
        swap_end_s = min(end_s, row["start_s"] + row["swap_s"])
        name = f"swap {blocks_in} in, {blocks_out} out"
        args = {"blocks_in": blocks_in, "blocks_out": blocks_out}
        args |= {"swap_ms": row["swap_s"] * 1e3}
        yield _slice(_SWAPS, name, begin, swap_end_s) | {"args": args}


def _slice(thread: int, name: str, begin: float, end_s: float) -> Event:
    dur = round(microseconds(end_s) - begin, 3)
    event: Event = {"ph": "X", "ts": begin, "dur": dur, "pid": ENGINE, "tid": thread}
    return event | {"name": name}


def _preemption_events(folder: RunFolder, window: Window) -> Iterator[Event]:
    columns = folder.columns("preemptions", _PREEMPTION_COLUMNS)
    for row in _rows([columns], _PREEMPTION_COLUMNS):
        if row["time_s"] not in window:
            continue
        who, whom = row["request_id"], row["for_request_id"]
        args = {name: value for name, value in row.items() if is_plain(value)}
        yield {
            "ph": "i",
            "s": "p",
            "ts": microseconds(row["time_s"]),
            "pid": ENGINE,
            "tid": _PREEMPTIONS,
            "name": f"preempt {who} for {whom}",
            "args": args,
        }


def is_plain(value: Any) -> bool:
    """Whether JSON has a word for it: no NaN, no infinity."""
    return not isinstance(value, float) or isfinite(value)
