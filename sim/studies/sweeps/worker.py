"""What runs in a worker process on this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from sim.config.trace_shelf import PackedShelf, keep_at_hand
from sim.studies.sweeps.forks import STOP_SIGNALS

# What nearly every run needs: imported once, where workers are forked from.
from sim.studies.sweeps import task as _task  # noqa: F401  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Mapping


def begin(traces: Mapping[str, bytes]) -> None:
    """Set this process up: it leaves when its parent says so, or is gone.

    Parameters
    ----------
    traces
        See `sim.studies.sweeps.supplies.Supplies`.
    """
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
    """Return the number of this process."""
    return os.getpid()
