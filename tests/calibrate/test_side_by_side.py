"""Fits beside each other."""

from typing import Any

import numpy as np
import pytest

from calibrate.side_by_side import side_by_side


def _squares(first: int, second: int) -> int:
    return first * first + second


@pytest.mark.parametrize("size", [1, 5_000])
def test_results_come_in_the_order_of_the_jobs(size: int) -> None:
    seen: list[tuple[int, int]] = []
    jobs = [(number, 1) for number in range(5)]
    sizes = [size * (number % 3 + 1) for number in range(5)]
    found = side_by_side(_squares, jobs, sizes, lambda *done: seen.append(done))
    assert found == [1, 2, 5, 10, 17]
    assert seen == [(number, 5) for number in range(6)]
    assert side_by_side(_squares, [], []) == []


def test_arrays_arrive_whole() -> None:
    columns = np.arange(10_000.0)
    jobs = [(columns, 1.0), (columns, 2.0)]
    one, two = side_by_side(np.multiply, jobs, [len(columns)] * 2)
    assert (2.0 * one == two).all()


def _num_threads(_: int) -> int:
    """Return the most threads of a library below numpy."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    return max(each["num_threads"] for each in threadpoolctl.threadpool_info())


@pytest.mark.parametrize("size", [1, 5_000])
def test_libraries_below_start_no_threads_of_their_own(size: int) -> None:
    assert side_by_side(_num_threads, [(1,), (2,)], [size] * 2) == [1, 1]


def test_what_fails_anywhere_is_raised() -> None:
    jobs: list[tuple[Any, ...]] = [(n, None if n == 3 else 1) for n in range(4)]
    for size in (1, 5_000):
        with pytest.raises(TypeError, match="unsupported operand"):
            side_by_side(_squares, jobs, [size] * 4)
