"""A session of a sweep: from its first run, or from where it was interrupted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.studies.sweeps.dataset import RowMaker, RunDataset, summary_of, text_keys
from sim.studies.sweeps.local import LocalExecutor
from sim.studies.sweeps.supplies import gather
from sim.studies.sweeps.task import run_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sim.studies.sweeps.expand import Sweep
    from sim.studies.sweeps.job import Executor, Job

_MOST_PROBLEMS = 5


@dataclass
class Tally:
    """Counts of a session's runs, and the problems among them."""

    num_runs: int
    """Runs of the whole sweep."""
    counts: dict[str, int] = field(default_factory=dict)
    """Runs by their status, earlier sessions included."""
    run_wall_s: float = 0.0
    """Seconds of all runs of this session, together."""
    problems: list[str] = field(default_factory=list)
    """The first few runs that are not done, a line each."""

    @property
    def num_ended(self) -> int:
        return sum(self.counts.values())

    @property
    def num_failed(self) -> int:
        """Runs that are not done, and will not be."""
        return self.num_ended - self.counts.get("done", 0)

    @property
    def is_complete(self) -> bool:
        return self.num_ended == self.num_runs


def executor_for(
    jobs: Sequence[Job], workers: int | None, address: str | None, *, at_least: int = 2
) -> Executor:
    """Return an executor of jobs: processes here or, at an address, a Ray cluster.

    Traces that `at_least` so many jobs have are read once, here; for a cluster, whose
    nodes cannot read them, all are.
    """
    if address is None:
        return LocalExecutor(workers, gather(jobs, at_least))
    from sim.studies.sweeps.ray_cluster import RayExecutor  # noqa: PLC0415  (an extra)

    return RayExecutor(address, gather(jobs, at_least=1))


def run_sweep(
    sweep: Sweep,
    jobs: Sequence[Job],
    directory: Path,
    executor: Executor,
    *,
    on_outcome: Callable[[Tally], None] | None = None,
) -> Tally:
    """Carry out those of the sweep's jobs that are not in the dataset yet.

    If the executor, which is open, is stopped, finished runs are kept. `on_outcome`
    is called at the beginning, and whenever a run has ended.
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
        for outcome in executor.run(left, run_summary):
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
