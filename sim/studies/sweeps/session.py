"""One go at a sweep: from its first run, or from where it was interrupted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.studies.sweeps.dataset import RunDataset
from sim.studies.sweeps.rows import RowMaker, summary_of, text_keys
from sim.studies.sweeps.task import run_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sim.studies.sweeps.expand import Sweep
    from sim.studies.sweeps.job import Executor, Job, Task

_MOST_PROBLEMS = 5


@dataclass
class Tally:
    """What came of the runs of a session.

    Parameters
    ----------
    num_runs
        Runs of the whole sweep.
    counts
        How many ended in which way, earlier sessions included.
    run_wall_s
        Seconds of all runs of this session, together.
    problems
        The first few that are not done, a line each.
    """

    num_runs: int
    counts: dict[str, int] = field(default_factory=dict)
    run_wall_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        """Runs that have come to their end."""
        return sum(self.counts.values())

    @property
    def num_failed(self) -> int:
        """Runs that are not done, and will not be."""
        return self.num_ended - self.counts.get("done", 0)

    @property
    def is_complete(self) -> bool:
        """Whether no run is left."""
        return self.num_ended == self.num_runs


def run_sweep(
    sweep: Sweep,
    jobs: Sequence[Job],
    directory: Path,
    executor: Executor,
    *,
    on_outcome: Callable[[Tally], None] | None = None,
    task: Task = run_summary,
) -> Tally:
    """Carry out the runs that are not in the dataset yet.

    Parameters
    ----------
    sweep, jobs
        The sweep, and all of its runs.
    directory
        Of the dataset; see `RunDataset`.
    executor
        Open; if it is stopped, what was finished is kept.
    on_outcome
        Called at the beginning, and whenever a run has ended.
    task
        What a run does.
    """
    keys = sweep.spec.keys
    rows = RowMaker(keys, text_keys(jobs, keys), sweep.spec.repeats)
    by_index = {job.index: job for job in jobs}
    told = on_outcome or (lambda _: None)
    with RunDataset(directory, rows.leaders) as dataset:
        ended = dataset.finished()
        tally = Tally(len(jobs), dataset.counts())
        told(tally)
        left = (job for job in jobs if job.index not in ended)
        for outcome in executor.run(left, task):
            row = rows.row(by_index[outcome.index], outcome)
            dataset.append(row)
            tally.counts[outcome.status] = tally.counts.get(outcome.status, 0) + 1
            tally.run_wall_s += outcome.wall_s
            if outcome.status != "done" and len(tally.problems) < _MOST_PROBLEMS:
                tally.problems.append(summary_of(row))
            told(tally)
        if tally.is_complete:
            dataset.finish()
    return tally
