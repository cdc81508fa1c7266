"""One run, wherever it runs: what it returns or raises becomes an `Outcome`."""

from __future__ import annotations

import json
import traceback
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sim.errors import UserError
from sim.studies.sweeps.job import Outcome
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.studies.sweeps.job import Job, Status, Task


def perform(job: Job, task: Task) -> Outcome:
    """Carry out a job in this process.

    Whatever goes wrong is in the outcome. The same job and task give the same outcome
    but for `Outcome.wall_s`, in any process of any machine with the same packages.
    """
    started_s = perf_counter()
    status: Status = "done"
    summary: Mapping[str, Any] | None = None
    error: str | None = None
    try:
        # As text and back: plain data only, whichever way it travels on.
        summary = json.loads(json.dumps(task(job.config), allow_nan=False))
    except (UserError, WorkloadError) as refusal:
        status, error = "refused", " ".join(str(refusal).split())
    except (Exception, SystemExit) as fault:
        status, error = "failed", _traceback(fault)
    return Outcome(job.index, status, summary, error, perf_counter() - started_s)


def perform_several(jobs: Sequence[Job], task: Task, most_s: float) -> list[Outcome]:
    """Carry out jobs one after the other, and no further one after `most_s` seconds.

    Returns
    -------
    list of Outcome
        Of the first jobs, at least one.
    """
    started_s = perf_counter()
    outcomes = []
    for job in jobs:
        outcomes.append(perform(job, task))
        if perf_counter() - started_s >= most_s:
            break
    return outcomes


def _traceback(fault: BaseException) -> str:
    """Return the traceback from the task on: what called it is the engine's affair."""
    frames = fault.__traceback__
    inner = frames.tb_next if frames is not None else None
    lines = traceback.format_exception(type(fault), fault, inner or frames)
    return "".join(lines).rstrip("\n")
