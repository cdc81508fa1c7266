"""The rules of Chrome's trace-event format, as far as our traces use it."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Event = dict[str, Any]


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def read_trace(path: Path) -> list[Event]:
    """Return the events of a trace that keeps the rules."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    trace = json.loads(text, parse_constant=_no_constant)
    assert trace["displayTimeUnit"] == "ms"
    events: list[Event] = trace["traceEvents"]
    _check_each(events)
    _check_slices(events)
    return events


def _check_each(events: list[Event]) -> None:
    last = 0.0
    for event in events:
        assert event["ph"] in "MXBECi"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= last, "not sorted"
        last = event["ts"]
        if event["ph"] != "E":
            assert event["name"]
        if event["ph"] == "C":
            assert all(isinstance(v, int | float) for v in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in "gpt"


def _check_slices(events: list[Event]) -> None:
    """Complete events follow each other; begun ones nest and end."""
    ends: dict[tuple[int, int], float] = {}
    open_: dict[tuple[int, int], int] = Counter()
    for event in events:
        thread = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= round(ends.get(thread, 0.0), 3), "steps overlap"
            ends[thread] = event["ts"] + event["dur"]
        elif event["ph"] == "B":
            open_[thread] += 1
            assert open_[thread] <= 2, "a request and its phase"
        elif event["ph"] == "E":
            open_[thread] -= 1
            assert open_[thread] >= 0, "ended before it began"
    assert not any(open_.values()), "not balanced"


def seconds_by_name(events: list[Event]) -> dict[str, float]:
    """Return how long slices that begin and end took together; requests as one."""
    found: dict[str, float] = defaultdict(float)
    stacks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        stack = stacks[event["pid"], event["tid"]]
        if event["ph"] == "B":
            stack.append(event)
        elif event["ph"] == "E":
            begun = stack.pop()
            name = "request" if stack == [] else begun["name"]
            found[name] += (event["ts"] - begun["ts"]) / 1e6
    return dict(found)
