"""How many threads the libraries below numpy and scikit-learn may use."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


def one_thread() -> Any:
    """Keep OpenMP and BLAS to one thread, where threadpoolctl is installed.

    Fits are many small products and trees. Where others use the cores too, threads
    that wait for each other at every one of them took four fifths of the processor
    time of a small table, and a hundred times the time of a large one.
    """
    try:
        from threadpoolctl import threadpool_limits  # noqa: PLC0415 - of scikit-learn
    except ImportError:
        return nullcontext()
    return threadpool_limits(1)
