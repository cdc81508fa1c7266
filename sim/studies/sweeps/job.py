"""One run of many, its outcome, and the run that an executor starts next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, Protocol, Self

Status = Literal["done", "failed", "crashed", "refused"]

Task = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From a complete configuration, as plain data, to JSON-ready numbers.

A function at the top of a module that workers can import, such as
`sim.studies.sweeps.task.run_summary`.
"""

MAX_TRIES = 3
"""Twice among others, which may have been the cause; the last time alone."""

CRASHED = (
    f"the process that ran it died, {MAX_TRIES} times, the last time with nothing "
    "beside it: a crash in native code, an exit, or too little memory; try it with "
    "'kvsim run'"
)


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Parameters
    ----------
    index
        Its place among all runs, from 0: results are put in this order.
    overrides
        Values that set it apart, by configuration key with dots, JSON-ready.
    config
        The complete configuration, as `sim.config.tables.parse_config` takes it.
    """

    index: int
    overrides: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Parameters
    ----------
    index
        That of the job.
    status
        ``done``; ``refused`` for a mistake in the configuration or in a class of the
        user's; ``failed`` with an exception; ``crashed`` if the process died of it,
        every time it was tried.
    summary
        The result of the task, of a run that is done.
    error
        The reason in a line or, where it failed, the traceback.
    wall_s
        Seconds it took, which differ from machine to machine.
    """

    index: int
    status: Status
    summary: Mapping[str, Any] | None
    error: str | None
    wall_s: float


class Executor(Protocol):
    """Carries runs out; use it in a ``with`` block, for as many calls as you like."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def num_workers(self) -> int:
        """Runs that go on at a time."""
        ...

    def run(self, jobs: Iterable[Job], task: Task) -> Iterator[Outcome]:
        """Yield the outcome of each job, in order of finishing.

        Jobs are taken as workers come free, a few ahead.
        """
        ...

    def stop(self) -> None:
        """Ask `run` to yield finished jobs and end; safe in a signal handler."""
        ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """A job, and the number of the try."""

    job: Job
    number: int = 1


class Attempts:
    """The jobs still to be run: new ones, and those whose worker died."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self._ahead: deque[Job] = deque()
        self._again: deque[Attempt] = deque()
        self._alone: deque[Attempt] = deque()
        self._num_going = 0
        self._one_alone = False

    def next(self) -> Attempt | None:
        if self._one_alone:
            return None
        attempt = self._again.popleft() if self._again else self._fresh()
        if attempt is None and self._alone and not self._num_going:
            attempt = self._alone.popleft()
            self._one_alone = True
        if attempt is not None:
            self._num_going += 1
        return attempt

    def next_few(self, most: int, num_takers: int) -> list[Attempt]:
        """Return new ones to be run in a row, or a single one that was tried before.

        Fewer than `most` towards the end, so that all takers have some to the last.
        """
        is_new = not self._again
        first = self.next()
        if first is None:
            return []
        few = [first]
        if is_new and first.number == 1:
            self._look_ahead(2 * num_takers * most)
            for _ in range(min(most - 1, len(self._ahead) // (2 * num_takers))):
                few.append(Attempt(self._ahead.popleft()))
                self._num_going += 1
        return few

    def _look_ahead(self, num: int) -> None:
        self._ahead.extend(islice(self._jobs, max(0, num - len(self._ahead))))

    def _fresh(self) -> Attempt | None:
        self._look_ahead(1)
        return Attempt(self._ahead.popleft()) if self._ahead else None

    def ended(self) -> None:
        self._num_going -= 1
        self._one_alone = False

    def innocent(self, attempt: Attempt) -> None:
        """Put back a run that had not begun when its worker died."""
        self.ended()
        self._again.append(attempt)

    def died(self, attempt: Attempt, wall_s: float) -> Outcome | None:
        """Put back a run whose worker died or, after the last try, say so."""
        self.ended()
        if attempt.number == MAX_TRIES:
            return Outcome(attempt.job.index, "crashed", None, CRASHED, wall_s)
        tried = replace(attempt, number=attempt.number + 1)
        (self._alone if tried.number == MAX_TRIES else self._again).append(tried)
        return None
