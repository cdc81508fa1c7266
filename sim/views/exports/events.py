"""What all events of a trace have in common."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def microseconds(time_s: float) -> float:
    """Return a time in us, in whole ns: neighbours meet exactly."""
    return round(time_s * 1e9) / 1e3


def named(process: int, thread: int | None, name: str) -> Event:
    """Return an event that gives a process or one of its threads a name."""
    what = "process_name" if thread is None else "thread_name"
    event: Event = {"ph": "M", "ts": 0, "pid": process, "tid": thread or 0}
    return event | {"name": what, "args": {"name": name}}
