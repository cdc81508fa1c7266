"""How long preempted requests waited until they ran again, from a recorded schedule."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sim.errors import ResultsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

SCHEDULE_FILE: Final = "schedule.jsonl.zst"

Resumed = dict[tuple[int, int], float]


def resumed_s(path: Path, preempted: Mapping[int, Sequence[int]]) -> Resumed:
    """Return when preempted requests were scheduled again.

    Only lines that may hold such a request are taken apart: a schedule has a line a
    step, each with the queues.
    """
    due = sorted((t, request) for request, steps in preempted.items() for t in steps)
    waiting: dict[int, int] = {}
    found: Resumed = {}
    try:
        for step, line in enumerate(_lines(path)):
            while due and due[0][0] < step:
                t, request = due.pop(0)
                waiting[request] = t
            if waiting:
                _resume(line, waiting, found)
            elif not due:
                break
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise ResultsError(
            f"'{path}' cannot be read: {error}; record it again, or take it away"
        ) from error
    return found


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of the steps, the header left out."""
    with pa.input_stream(str(path), compression="zstd") as stream:
        lines = io.BufferedReader(stream, 1 << 20)
        next(lines, b"")
        yield from lines


def _resume(line: bytes, waiting: dict[int, int], found: Resumed) -> None:
    """Note which of the waiting requests a step computes, and when it starts."""
    if not any(b'["%d",' % request in line for request in waiting):
        return
    step = json.loads(line)
    scheduled = {int(entry[0]) for entry in step["sched"]}
    for request in [each for each in waiting if each in scheduled]:
        found[request, waiting.pop(request)] = float(step["start_s"])
