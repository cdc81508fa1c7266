"""One run of many, what became of it, and who carries runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

Status = Literal["done", "failed", "crashed", "refused"]

Task = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From a complete configuration, as plain data, to JSON-ready numbers.

A function at the top of a module that workers can import, such as
`sim.studies.sweeps.task.run_summary`.
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Parameters
    ----------
    index
        Its place among all runs, from 0: results are put in this order.
    overrides
        What sets it apart: values by configuration key with dots, JSON-ready.
    config
        The complete configuration, as `sim.config.tables.parse_config` takes it.
    """

    index: int
    overrides: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    Parameters
    ----------
    index
        That of the job.
    status
        ``done``; ``refused`` for a mistake in the configuration; ``failed`` with an
        exception; ``crashed`` if the process died of it, every time it was tried.
    summary
        What the task returned, of a run that is done.
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
        """Yield what becomes of each job, in order of finishing.

        Jobs are taken as workers come free, a few ahead.
        """
        ...

    def stop(self) -> None:
        """Ask `run` to yield what is finished and end; safe in a signal handler."""
        ...
