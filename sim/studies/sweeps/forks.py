"""How worker processes of this machine are started; imports nothing heavy."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})

_WORKER = "sim.studies.sweeps.task"


def start_method() -> str:
    """Return how processes begin: forked from one that has imported what they need."""
    methods = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in methods else "spawn"


def warm_up(module: str = _WORKER) -> None:
    """Start the process that workers are forked from; does not wait for it.

    It imports `module`, unless it has been started already.
    """
    if start_method() != "forkserver":
        return
    from multiprocessing import forkserver  # noqa: PLC0415  (not everywhere)

    multiprocessing.set_forkserver_preload([module])
    with signals_held_back():
        forkserver.ensure_running()


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Start processes that no Ctrl-C can reach before they know what to do with it.

    They begin with it held back, and `sim.studies.sweeps.task.begin` decides.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
