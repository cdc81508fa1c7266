"""The copies of a decision workload: jobs of a connector, with durations in steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field

from sim.scheduler.v1.connectors.base import JobKind, TransferReport
from sim.scheduler.v1.connectors.settings import OffloadSettings
from sim.studies.conformance.fields import Count, Pair, Positive, Table

if TYPE_CHECKING:
    from sim.scheduler.v1.connectors.base import StepTransfers, TransferJob


class OffloadTier(Table):
    """The CPU tier of a workload; vLLM's keys, and its size in chunks."""

    cpu_chunks: Positive
    blocks_per_chunk: Positive = 1
    eviction_policy: Literal["lru", "arc"] = "lru"
    offload_prompt_only: bool = True
    store_threshold: Count = 0
    max_tracker_size: Positive = 64_000
    sync_load_budget_tokens: Count = 0
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"

    def settings(self) -> OffloadSettings:
        """Return the settings that schedulers take."""
        values = self.model_dump()
        return OffloadSettings(num_chunks=values.pop("cpu_chunks"), **values)


class WorkerPace(Table):
    """How long jobs take, in steps: so many, and one more for so many blocks."""

    store: Pair = (0, 0)
    load: Pair = (0, 0)
    fail_loads: list[Pair] = Field(default_factory=list)


class JobQueue:
    """Jobs that end one after the other; `pace` as in `WorkerPace`."""

    def __init__(self, pace: tuple[int, int]) -> None:
        self._steps, self._blocks_per_step = pace
        self._jobs: list[list[int]] = []  # number and last step
        self._last_end = 0

    def submit(self, job: TransferJob, step: int) -> None:
        size = self._blocks_per_step
        num_steps = self._steps + (len(job.block_ids) // size if size else 0)
        start = max(step, self._jobs[-1][1] if self._jobs else self._last_end)
        self._jobs.append([job.job_id, start + num_steps])

    def wait_for(self, job_ids: set[int], step: int) -> None:
        """Let jobs end now, and each that stands ahead of one of them."""
        last = max(
            (i for i, (n, _) in enumerate(self._jobs) if n in job_ids), default=-1
        )
        for entry in self._jobs[: last + 1]:
            entry[1] = step

    def done(self, step: int) -> list[int]:
        """Take out the jobs that have ended."""
        ended = [number for number, end in self._jobs if end <= step]
        if ended:
            self._last_end = self._jobs[-1][1]
            self._jobs = [entry for entry in self._jobs if entry[1] > step]
        return ended


class Worker(Protocol):
    """Plays the copies that the calls of a scheduler ask for."""

    def step(self, step: int, transfers: Any) -> TransferReport:
        """Play the jobs of a call; return those that end with the step's output."""
        ...


class PlayedWorkers:
    """Plays the copies of an engine of a pair that has a tier, too.

    Parameters
    ----------
    tier, side
        Its workers.
    """

    def __init__(self, tier: Worker, side: Worker) -> None:
        self._tier, self._side = tier, side

    def step(self, step: int, transfers: Any) -> TransferReport:
        """Play the jobs of a call; return those that end with the step's output."""
        jobs, moves = (each.step(step, transfers) for each in (self._tier, self._side))
        return replace(moves, done=jobs.done, invalid_block_ids=jobs.invalid_block_ids)


class PlayedWorker:
    """Plays the copies of all workers, in steps of the engine.

    Stores are submitted a step after their own, unless the step must wait for them;
    loads at once.

    Parameters
    ----------
    pace
        Of the workload.

    Notes
    -----
    Source: vLLM 0.33,
    ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py``; durations are
    the workload's.
    """

    def __init__(self, pace: WorkerPace) -> None:
        self._stores = JobQueue(pace.store)
        self._loads = JobQueue(pace.load)
        self._sync_loads = JobQueue(pace.load)
        self._failing = dict(pace.fail_loads)
        self._bad_blocks: dict[int, int] = {}  # by job
        self._num_loads = 0
        self._later: list[TransferJob] = []

    def step(self, step: int, transfers: StepTransfers) -> TransferReport:
        """Play the jobs of a call; return those that end with the step's output."""
        for job in self._later:
            self._stores.submit(job, step)
        flush = set(transfers.flush)
        for job in transfers.stores:
            if job.job_id in flush:
                self._stores.submit(job, step)
        self._later = [job for job in transfers.stores if job.job_id not in flush]
        if flush:
            for queue in (self._stores, self._loads):
                queue.wait_for(flush, step)
        for job in transfers.loads:
            if job.kind is JobKind.SYNC_LOAD:
                self._sync_loads.submit(job, step)
                self._sync_loads.wait_for({job.job_id}, step)
            else:
                self._loads.submit(job, step)
                self._note_failure(job)
        done = self._stores.done(step) + self._loads.done(step)
        bad = [self._bad_blocks.pop(each) for each in done if each in self._bad_blocks]
        return TransferReport(done + self._sync_loads.done(step), bad)

    def _note_failure(self, job: TransferJob) -> None:
        index = self._failing.get(self._num_loads)
        self._num_loads += 1
        if index is not None:
            self._bad_blocks[job.job_id] = job.block_ids[index % len(job.block_ids)]
