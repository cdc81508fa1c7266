"""The other side: a process that simulates what it is sent, one run after the other.

It is started from a process that has imported all it needs, ends with its parent, and
may be killed at any time: nothing is kept in it.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal

from sim.config.plug import fault_in_user_code
from sim.config.tables import parse_config
from sim.errors import UserError
from sim.simulation.run import Simulation
from sim.studies.sweeps.task import begin
from sim.views.explore.kept import Kept
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from sim.simulation.progress import Progress

TELL_EVERY_S: Final = 0.1
"""How often a run says how far it has come."""


@dataclass(frozen=True, slots=True)
class Far:
    """How far a run has come."""

    share: float
    now_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Why there is no result, in a line."""

    line: str
    is_fault: bool = False
    """Whether it is a fault of ours, or of a user's class."""


Said = Far | Refused | Kept
Wanted = Literal["kept", "summary"]


def serve(connection: Connection, traces: Mapping[str, bytes]) -> None:
    """Take configurations from a pipe and answer each, until the pipe is closed.

    Parameters
    ----------
    connection
        Gives complete configurations as plain data; takes `Far` and, as the last word
        on each, `Kept` or `Refused`.
    traces
        That were read already, as of `sim.studies.sweeps.supplies.Supplies`.
    """
    begin(traces)
    while True:
        try:
            data = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(answer(data, connection))


def answer(data: Mapping[str, Any], connection: Connection) -> Kept | Refused:
    """Simulate a configuration; whatever goes wrong is in the answer."""
    try:
        simulation = Simulation(parse_config(dict(data)))
        results = simulation.run(_teller(connection), progress_every=256)
        return Kept.of(simulation, results)
    except (UserError, WorkloadError) as error:
        return Refused(" ".join(str(error).split()))
    except Exception as error:
        line = fault_in_user_code(error)
        if line is None:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.name}, line {last.lineno}"
            line = f"a fault of kvsim's: {type(error).__name__}: {error} ({place})"
        return Refused(" ".join(line.split()), is_fault=True)


def _teller(connection: Connection) -> Any:
    """Return what tells of progress, no more often than a page can show it."""
    told_s = monotonic()

    def tell(progress: Progress) -> None:
        nonlocal told_s
        if monotonic() - told_s < TELL_EVERY_S:
            return
        told_s = monotonic()
        share = progress.num_done / max(progress.num_requests, 1)
        connection.send(Far(share, progress.now_s))

    return tell
