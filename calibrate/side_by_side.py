"""Independent fits beside each other, on all cores that this process may use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from calibrate.threads import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    ShowFits = Callable[[int, int], None]
    """Is told how many fits of how many are done."""

_FEW_POINTS: Final = 4_000
"""Points of all fits below which starting processes takes longer than it saves."""


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
) -> Any:
    if sum(sizes) < _FEW_POINTS or len(jobs) == 1:
        return ((place, function(*jobs[place])) for place in order)
    import joblib  # noqa: PLC0415 - of scikit-learn, which fits of so many points need

    workers = min(joblib.cpu_count(), len(jobs))
    if workers == 1:
        return ((place, function(*jobs[place])) for place in order)
    each = joblib.Parallel(n_jobs=workers, return_as="generator_unordered")
    return _ended(each(joblib.delayed(_placed)(p, function, jobs[p]) for p in order))


def _ended(results: Iterable[Any]) -> Iterator[Any]:
    """Yield results, and end the processes that would wait for further jobs."""
    from joblib.externals.loky import (  # noqa: PLC0415 - see `_results`
        get_reusable_executor,
    )

    try:
        yield from results
    finally:
        get_reusable_executor(reuse=True).shutdown(wait=True)


def _placed(
    place: int, function: Callable[..., Any], job: tuple[Any, ...]
) -> tuple[int, Any]:
    return place, function(*job)
