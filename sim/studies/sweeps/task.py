"""The task of one run of a sweep, in any process, and the set-up of a worker process.

Workers are forked from a process that has imported this module: with it comes what
nearly every run needs.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import traceback
from multiprocessing import parent_process
from multiprocessing.connection import wait
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sim.config.plug import fault_in_user_code
from sim.config.plugins import refuse_as
from sim.config.tables import parse_config
from sim.config.trace_shelf import PackedShelf, keep_at_hand
from sim.errors import UserError
from sim.results.tables.steps import MemorySteps
from sim.simulation.run import Simulation
from sim.studies.sweeps.forks import STOP_SIGNALS
from sim.studies.sweeps.job import Outcome
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.studies.sweeps.job import Job, Status, Task

_SUMMED = ("step", "start_s", "latency_s", "num_waiting")
"""Columns of steps that a summary is made of, beside the recorder's totals: 28 bytes a
step in place of 240."""
_LONG_S = 0.02
"""A task of so many seconds may leave more memory than looking for it costs."""


def run_summary(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Simulate a complete configuration and return its summary.

    Parameters
    ----------
    config
        Plain data, see `sim.config.tables.parse_config`.

    Raises
    ------
    UserError, WorkloadError
        If it cannot be run.
    """
    simulation = Simulation(parse_config(dict(config)))
    simulation.recorder.sink = summed_steps(simulation.recorder.step_kinds)
    return simulation.run().summary


def summed_steps(kinds: Mapping[str, str]) -> MemorySteps:
    """Return a sink for steps of these columns that keeps what a summary needs.

    A fleet over time, which is made before the summary, counts what runs.
    """
    of_fleets = ("num_running",) if "engine" in kinds else ()
    return MemorySteps(_SUMMED + of_fleets, kinds)


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
        own = fault_in_user_code(fault)
        status, error = ("refused", own) if own else ("failed", _traceback(fault))
    wall_s = perf_counter() - started_s
    if wall_s > _LONG_S:
        gc.collect(1)  # a run ends in cycles, few objects with all of its arrays
    return Outcome(job.index, status, summary, error, wall_s)


def perform_several(jobs: Sequence[Job], task: Task, most_s: float) -> list[Outcome]:
    """Carry out at least one job, and no further one after `most_s` seconds."""
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


def begin(traces: Mapping[str, bytes], parent_refuses: bool) -> None:
    """Set a worker process up: it leaves when its parent says so, or is gone.

    `traces` are those of `sim.studies.sweeps.supplies.Supplies`; files of users are run
    unless the parent refuses them.
    """
    refuse_as(parent_refuses)
    # Ctrl-C reaches all processes of a terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    keep_at_hand(PackedShelf(traces))
    # Many runs at once on one terminal: what matters of them is in their rows.
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def ready() -> int:
    return os.getpid()
