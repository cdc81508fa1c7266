"""Runs on this machine: in this process, one after the other, or in processes."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from sim.config.plugins import refuses_plugins
from sim.errors import UserError
from sim.studies.sweeps.forks import signals_held_back, start_method, warm_up
from sim.studies.sweeps.job import Attempt, Attempts
from sim.studies.sweeps.supplies import NOTHING, Supplies
from sim.studies.sweeps.task import begin, perform, perform_several, ready

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

    from sim.studies.sweeps.job import Job, Outcome, Task

_SHORT_S = 0.1
"""Of runs shorter than this, a worker has the next one with it, so that it never waits.
Of longer ones it has not: at the end, one worker would have two and another none."""
_TOGETHER_S = 0.05
"""Of runs shorter than this, so many go to a worker at once as take about that long: a
message costs as much as the tenth part of a run of some milliseconds."""
_MOST_TOGETHER = 64
_MOST_TOGETHER_S = 0.1
"""When a worker hands over what it has done, and gives back the rest."""
_LAST_S = 0.5
"""Seconds that a stopped sweep waits for results that workers still hold."""
_POLL_S = 0.1
"""How soon a request to stop is seen."""
_MOST_FALSE_STARTS = 3


def num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class SerialExecutor:
    """Carries runs out in this process; other executors give the same."""

    num_workers = 1

    def __init__(self, supplies: Supplies = NOTHING) -> None:
        self._supplies = supplies
        self._stopping = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def run(self, jobs: Iterable[Job], task: Task) -> Iterator[Outcome]:
        shelf = self._supplies.shelf()
        for job in jobs:
            if self._stopping:
                return
            with shelf.at_hand():
                outcome = perform(job, task)
            yield outcome

    def stop(self) -> None:
        self._stopping = True


class LocalExecutor:
    """Carries runs out in a pool of one process for each worker.

    A pool each, because a process that dies breaks its pool: the others do not notice.
    What was running in it is tried again, the last time alone; see `Attempts`.

    Parameters
    ----------
    num_workers
        Processes; as many as there are processors unless given.
    supplies
        Traces that are read already.
    """

    def __init__(
        self, num_workers: int | None = None, supplies: Supplies = NOTHING
    ) -> None:
        self.num_workers = num_workers or num_cpus()
        context = _context()
        self._ended: SimpleQueue[Future[list[Outcome]]] = SimpleQueue()
        self._slots = [
            _Slot(context, supplies, self._ended) for _ in range(self.num_workers)
        ]
        self._stopping = False
        self._latest_s = _SHORT_S

    def __enter__(self) -> Self:
        warm_up()
        return self

    def __exit__(self, *error: object) -> None:
        """End all workers, at once if they are at work."""
        for slot in self._slots:
            slot.kill()
        for slot in self._slots:
            slot.join()

    def stop(self) -> None:
        self._stopping = True

    def run(self, jobs: Iterable[Job], task: Task) -> Iterator[Outcome]:
        attempts = Attempts(jobs)
        try:
            while not self._stopping:
                self._hand_out(attempts, task)
                if not any(slot.going for slot in self._slots):
                    return
                yield from self._collected(attempts, wait_s=_POLL_S)
            yield from self._last(attempts)
        finally:  # nothing will ask for what is still going on
            for slot in self._slots:
                slot.give_up()

    def _hand_out(self, attempts: Attempts, task: Task) -> None:
        """Give every worker one run before any has two."""
        most = 2 if self._latest_s < _SHORT_S else 1
        for depth in range(1, most + 1):
            for slot in self._slots:
                if len(slot.going) >= depth:
                    continue
                few = attempts.next_few(self._num_together(), self.num_workers)
                if not few:
                    return
                slot.submit(few, task)

    def _num_together(self) -> int:
        if self._latest_s > _TOGETHER_S / 2:
            return 1
        return min(_MOST_TOGETHER, int(_TOGETHER_S / max(self._latest_s, 1e-6)))

    def _last(self, attempts: Attempts) -> Iterator[Outcome]:
        """Yield outcomes of ended runs, those included that a worker still has."""
        until_s = perf_counter() + _LAST_S
        while True:
            yield from self._collected(attempts, wait_s=0.0)
            left_s = until_s - perf_counter()
            if left_s <= 0 or not any(slot.has_several for slot in self._slots):
                return
            yield from self._collected(attempts, wait_s=left_s)

    def _collected(self, attempts: Attempts, wait_s: float) -> Iterator[Outcome]:
        """Yield outcomes of ended runs; wait for the first."""
        for future in _arrived(self._ended, wait_s):
            slot = next((slot for slot in self._slots if future in slot.going), None)
            if slot is None:
                continue  # given up, or went down with the one before it
            if isinstance(future.exception(), BrokenProcessPool):
                outcome = _buried(slot, attempts)
                if outcome is not None:
                    yield outcome
                continue
            few, _ = slot.going.pop(future)
            outcomes = future.result()
            for attempt in few[len(outcomes) :]:
                attempts.innocent(attempt)
            self._latest_s = fmean(outcome.wall_s for outcome in outcomes)
            for outcome in outcomes:
                attempts.ended()
                yield outcome


def _arrived(
    ended: SimpleQueue[Future[list[Outcome]]], wait_s: float
) -> Iterator[Future[list[Outcome]]]:
    """Yield the futures that are in a queue once there is one."""
    try:
        yield ended.get(timeout=wait_s)
    except Empty:
        return
    for _ in range(ended.qsize()):
        yield ended.get_nowait()


def _buried(slot: _Slot, attempts: Attempts) -> Outcome | None:
    """Clear a slot whose process died: the first in line was at work.

    Of several that it had at once each is run again, by itself.
    """
    (suspects, started_s), *waiting = slot.going.values()
    is_false_start = slot.bury()
    for few, _ in waiting:
        for attempt in few:
            attempts.innocent(attempt)
    if is_false_start or len(suspects) > 1:
        for attempt in suspects:
            attempts.innocent(attempt)
        return None
    return attempts.died(suspects[0], perf_counter() - started_s)


class _Slot:
    """Room for one worker process, and the runs that it has before it, in order."""

    def __init__(
        self,
        context: _Context,
        supplies: Supplies,
        ended: SimpleQueue[Future[list[Outcome]]],
    ) -> None:
        self._context = context
        self._supplies = supplies
        self._ended = ended
        self._pool: ProcessPoolExecutor | None = None
        self._ready: Future[int] | None = None
        self._processes: list[BaseProcess] = []
        self._num_false_starts = 0
        self.going: dict[Future[list[Outcome]], tuple[list[Attempt], float]] = {}

    @property
    def has_several(self) -> bool:
        """Whether the worker may have finished runs that it has not handed over."""
        return any(len(few) > 1 for few, _ in self.going.values())

    def submit(self, few: list[Attempt], task: Task) -> None:
        """Put runs before the worker, which is started if there is none."""
        jobs = [attempt.job for attempt in few]
        try:
            future = self._running_pool().submit(
                perform_several, jobs, task, _MOST_TOGETHER_S
            )
        except BrokenProcessPool as error:
            if not self.going:  # it died of nothing that is known
                self.join()
                self.submit(few, task)
                return
            future = Future()
            future.set_exception(error)
        self.going[future] = (few, perf_counter())
        future.add_done_callback(self._ended.put)

    def _running_pool(self) -> ProcessPoolExecutor:
        if self._pool is not None:
            return self._pool
        with signals_held_back(), self._context.watched() as processes:
            self._pool = ProcessPoolExecutor(
                1,
                mp_context=self._context.context,
                initializer=begin,
                initargs=(dict(self._supplies.traces), refuses_plugins()),
            )
            self._ready = self._pool.submit(ready)
        self._processes = processes
        return self._pool

    def give_up(self) -> None:
        """End the worker if it is at work, and forget its runs."""
        if self.going:
            self.going.clear()
            self.kill()
            self.join()

    def bury(self) -> bool:
        """Give up a worker that died; return whether it never came to work."""
        self.going.clear()
        assert self._ready is not None
        is_false_start = self._ready.exception() is not None
        self._num_false_starts = self._num_false_starts + 1 if is_false_start else 0
        self.kill()
        self.join()
        if self._num_false_starts >= _MOST_FALSE_STARTS:
            raise UserError(
                "worker processes die as they start; a script that runs a sweep needs "
                "if __name__ == '__main__', and the machine room for them"
            )
        return is_false_start

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def join(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool, self._ready, self._processes = None, None, []


class _Context:
    """A multiprocessing context that tells which processes were started."""

    def __init__(self, context: BaseContext) -> None:
        self.context = context
        self._started: list[BaseProcess] = []
        make = context.Process  # type: ignore[attr-defined]

        def remembered(*args: Any, **more: Any) -> BaseProcess:
            process: BaseProcess = make(*args, **more)
            self._started.append(process)
            return process

        context.Process = remembered  # type: ignore[attr-defined]

    @contextmanager
    def watched(self) -> Iterator[list[BaseProcess]]:
        """Yield a list of the processes that are started in this context."""
        started: list[BaseProcess] = []
        self._started = started
        yield started


def _context() -> _Context:
    """Return how processes are started; a context of our own: others keep theirs."""
    return _Context(type(multiprocessing.get_context(start_method()))())
