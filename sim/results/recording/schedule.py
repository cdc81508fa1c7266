"""``schedule.jsonl.zst``: every decision of a run, with its times.

A header, then a line a step as `kvsim decisions` writes it (`sim.scheduler.log.lines`),
with ``start_s`` and ``end_s``, when its output was processed: where several steps are
in flight, the next has begun by then. What a replay on a GPU or a trace viewer needs.
"""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sim.errors import ConfigError
from sim.scheduler.generations import GENERATIONS, generation_behind
from sim.scheduler.log.files import SCHEDULE_FORMAT
from sim.scheduler.log.lines import Line, Names, StepLog, names_of
from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from sim.costs.base import StepCost

SCHEDULE_FILE = "schedule.jsonl.zst"
FORMAT_VERSION = 1

_BUFFERED_LINES = 256


class IdNames(dict[int, str]):
    """Names of the requests of a run: their ids as text; made once each."""

    def __missing__(self, request_id: int) -> str:
        name = self[request_id] = str(request_id)
        return name


def log_of(scheduler: Any, names: Names) -> StepLog:
    """Return the log that writes the lines of a scheduler.

    Parameters
    ----------
    scheduler
        Of a run.
    names
        Of its requests.

    Raises
    ------
    ConfigError
        If its decisions have no format.
    """
    generation = generation_behind(scheduler)
    if generation is not None:
        log: StepLog = generation.parts().log(scheduler, names)
        return log
    raise ConfigError(
        f"--record schedule is built for the schedulers {', '.join(GENERATIONS)} and "
        f"those derived of them; {type(scheduler).__name__} has no log format, leave "
        f"it out"
    )


class ScheduleFile:
    """A `sim.engine.loop.StepListener` that writes all steps, as they are taken.

    Parameters
    ----------
    path
        The file; there is none yet. Leave the context to complete it.
    scheduler
        Whose steps are written.
    facts
        For the header: the sizes and limits by which lines are read.

    Raises
    ------
    ConfigError
        If the scheduler's decisions have no format.

    Notes
    -----
    The same run gives the same bytes, on either path. Memory is bounded by the requests
    that the engine holds.
    """

    def __init__(self, path: Path, scheduler: Any, facts: Mapping[str, Any]) -> None:
        self._names = IdNames()
        self._log = log_of(scheduler, self._names)
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        self._lines = deque[Line]()  # of steps without an output
        self._queued: list[Request] = []
        header = {"format": SCHEDULE_FORMAT, "version": FORMAT_VERSION, **facts}
        self._texts = [self._encode(header)]
        self._stream = pa.CompressedOutputStream(str(path), "zstd")

    def __enter__(self) -> ScheduleFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            self._stream.close()

    def scheduled(
        self,
        step: int,
        start_s: float,
        cost: StepCost,
        output: Any,
        scheduler: Any,
    ) -> None:
        del cost, scheduler
        line: Line = {"t": step, "start_s": float(start_s)}  # the clock begins with 0
        if aborted := self._aborted():
            line["abort"] = names_of(aborted, self._names)
            self._forget(aborted)
        line |= self._log.batch(output) | self._log.queues()
        line |= self._log.queries(output)
        for name in ("hashes", "ph"):  # no decisions
            line.pop(name, None)
        self._lines.append(line)
        self._queued = self._log.requests()
        self._forget(output.ignored)

    def _aborted(self) -> list[Request]:
        """Return the requests withdrawn since the last call, by id."""
        aborted = [
            request
            for request in self._queued
            if request.status is RequestStatus.FINISHED_ABORTED
        ]
        return sorted(aborted, key=lambda request: request.request_id)

    def ended(self, end_s: float, finished: Sequence[Request], scheduler: Any) -> None:
        del scheduler
        line = self._lines.popleft()
        line["end_s"] = float(end_s)
        if finished:
            line["fin"] = names_of(finished, self._names)
        line["free_end"] = self._log.free()
        self._texts.append(self._encode(line))
        self._forget(finished)
        if len(self._texts) >= _BUFFERED_LINES:
            self._flush()

    def _forget(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._log.forget(request)
            self._names.pop(request.request_id, None)

    def _flush(self) -> None:
        self._texts.append("")  # ends the last line
        self._stream.write("\n".join(self._texts).encode())
        self._texts.clear()
