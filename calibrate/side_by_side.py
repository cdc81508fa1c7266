"""Independent fits beside each other, on all cores that this process may use."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from calibrate.threads import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    ShowFits = Callable[[int, int], None]
    """Is told how many fits of how many are done."""

_FEW_POINTS: Final = 4_000
"""Points of all fits below which starting processes takes longer than it saves."""

_ONE_EACH: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def side_by_side(
    function: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    sizes: Sequence[int],
    show: ShowFits | None = None,
) -> list[Any]:
    """Return ``function(*job)`` of each job, in order.

    Parameters
    ----------
    function
        A function of a module; it gives the same wherever it is called.
    jobs
        Its arguments, which are sent to other processes where that pays.
    sizes
        Points of each job: the largest begin first.
    show
        Told how many there are, then of each that is done.
    """
    order = sorted(range(len(jobs)), key=lambda place: -sizes[place])
    found: list[Any] = [None] * len(jobs)
    if show is not None:
        show(0, len(jobs))
    with one_thread():
        for done, (place, result) in enumerate(_results(function, jobs, order, sizes)):
            found[place] = result
            if show is not None:
                show(done + 1, len(jobs))
    return found


def _results(
    function: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    order: Sequence[int],
    sizes: Sequence[int],
) -> Iterator[tuple[int, Any]]:
    if sum(sizes) < _FEW_POINTS or len(jobs) == 1:
        return ((place, function(*jobs[place])) for place in order)
    import joblib  # noqa: PLC0415 - of scikit-learn, which fits of so many points need

    workers = min(joblib.cpu_count(), len(jobs))
    if workers == 1:
        return ((place, function(*jobs[place])) for place in order)
    return _shared_out(function, jobs, order, workers)


def _shared_out(
    function: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    order: Sequence[int],
    workers: int,
) -> Iterator[tuple[int, Any]]:
    """Yield results as they come, of this process and of `workers - 1` others.

    This one loads scikit-learn in any case, to read what the others learned. The others
    are ended in the end: they would wait for further jobs.
    """
    from joblib.externals.loky import (  # noqa: PLC0415 - see `_results`
        get_reusable_executor,
    )

    others = get_reusable_executor(max_workers=workers - 1, reuse=False, env=_ONE_EACH)
    waiting: SimpleQueue[int] = SimpleQueue()
    for place in order:
        waiting.put(place)
    found: SimpleQueue[tuple[int, Any] | BaseException] = SimpleQueue()

    def work(call: Callable[..., Any]) -> None:
        try:
            while True:
                place = waiting.get_nowait()
                with one_thread():  # of OpenMP each thread has its own number
                    found.put((place, call(*jobs[place])))
        except Empty:
            return
        except BaseException as error:  # is raised where the results are waited for
            found.put(error)

    def elsewhere(*job: Any) -> Any:
        return others.submit(function, *job).result()

    calls = [function, *[elsewhere] * (workers - 1)]
    threads = [Thread(target=work, args=(call,), daemon=True) for call in calls]
    kill = True
    try:
        for thread in threads:
            thread.start()
        for _ in jobs:
            result = found.get()
            if isinstance(result, BaseException):
                raise result
            yield result
        kill = False
    finally:
        with suppress(Empty):
            while True:
                waiting.get_nowait()
        others.shutdown(wait=True, kill_workers=kill)
