"""Runs one after the other, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from sim.studies.sweeps.perform import perform
from sim.studies.sweeps.supplies import NOTHING, Supplies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sim.studies.sweeps.job import Job, Outcome, Task


class SerialExecutor:
    """See `Executor`: the plainest there is, against which others count.

    Parameters
    ----------
    supplies
        Traces that are read already.
    """

    num_workers = 1

    def __init__(self, supplies: Supplies = NOTHING) -> None:
        self._supplies = supplies
        self._stopping = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def run(self, jobs: Iterable[Job], task: Task) -> Iterator[Outcome]:
        """See `Executor.run`."""
        shelf = self._supplies.shelf()
        for job in jobs:
            if self._stopping:
                return
            with shelf.at_hand():
                outcome = perform(job, task)
            yield outcome

    def stop(self) -> None:
        """See `Executor.stop`."""
        self._stopping = True
