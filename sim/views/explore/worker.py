"""One worker process, and the run that it is at: started, listened to, killed."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

from sim.studies.sweeps.forks import signals_held_back, start_method, warm_up
from sim.views.explore.work import Refused, serve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from sim.views.explore.work import Said, Wanted

_MODULE = "sim.views.explore.work"
_PATIENCE_S = 2.0


class Worker:
    """A process that simulates one configuration at a time.

    Parameters
    ----------
    traces
        That were read already; see `sim.studies.sweeps.supplies.Supplies`.
    niceness
        By how much others go first.

    Attributes
    ----------
    is_busy
        Whether it is at a run whose last word has not come.
    """

    def __init__(self, traces: Mapping[str, bytes], niceness: int = 0) -> None:
        self._traces = traces
        self._niceness = niceness
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self.is_busy = False

    @property
    def pid(self) -> int | None:
        """Its process, if there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if there is none, or if it died."""
        if self._process is not None and self._process.is_alive():
            return
        self.kill()
        warm_up(_MODULE)
        context: Any = multiprocessing.get_context(start_method())
        ours, theirs = context.Pipe()
        with signals_held_back():
            process = context.Process(
                target=serve,
                args=(theirs, dict(self._traces), self._niceness),
                daemon=True,
            )
            process.start()
        theirs.close()  # so that its end is heard of
        self._process, self._connection = process, ours

    def begin(self, data: Mapping[str, Any], wanted: Wanted = "kept") -> Connection:
        """Have it simulate a configuration; return the connection to `listen` to."""
        assert not self.is_busy
        self.start()
        assert self._connection is not None
        self._connection.send((dict(data), wanted))
        self.is_busy = True
        return self._connection

    def kill(self) -> None:
        """End the process in any state; a listener hears of that.

        The pipe is not closed here: a thread may be reading it.
        """
        process, self._process, self._connection = self._process, None, None
        self.is_busy = False
        if process is not None:
            process.kill()
            process.join(_PATIENCE_S)


def listen(connection: Connection) -> Said:
    """Wait for the next word of a worker; that it died is one, too."""
    try:
        said: Said = connection.recv()
    except (EOFError, OSError, TypeError):
        return Refused(
            "the process that simulated this died, or was killed; too little memory, "
            "maybe: change something, or run it again",
            is_fault=True,
        )
    return said
