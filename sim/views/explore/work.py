"""The other side: a process that simulates configurations, one run after the other.

It is started from a process that has imported all it needs, ends with its parent, and
may be killed at any time: nothing is kept in it.
"""

from __future__ import annotations

import gc
import io
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal
from zipfile import ZIP_DEFLATED, ZipFile

from sim.config.plug import fault_in_user_code
from sim.config.plugins import refuses_plugins
from sim.config.tables import parse_config
from sim.errors import UserError
from sim.simulation.run import Simulation
from sim.simulation.simulate import with_intervals
from sim.studies.sweeps.task import begin, summed_steps
from sim.views.explore.kept import Kept
from sim.views.report import build_page
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from sim.results.run import Results
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


@dataclass(frozen=True, slots=True)
class File:
    """A file to download: its name, and the bytes."""

    name: str
    content: bytes


Wanted = Literal["kept", "numbers", "report", "results"]
"""The form of a run's result: `Kept`, the numbers of its summary alone, or a `File`."""

Done = Kept | File | dict[str, Any]
Said = Far | Refused | Done


def serve(
    connection: Connection, traces: Mapping[str, bytes], niceness: int = 0
) -> None:
    """Take configurations from a pipe and answer each, until the pipe is closed.

    Parameters
    ----------
    connection
        Gives complete configurations as plain data, and what is wanted of each; takes
        `Far` and, as the last word on each, what is `Done` or `Refused`.
    traces
        That were read already, as of `sim.studies.sweeps.supplies.Supplies`.
    niceness
        By how much others go first.
    """
    begin(traces, refuses_plugins())
    if niceness and hasattr(os, "nice"):
        os.nice(niceness)
    while True:
        try:
            data, wanted = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(answer(data, wanted, connection))
        gc.collect()  # a run ends in cycles, 20 MB for an hour of traffic


def answer(
    data: Mapping[str, Any], wanted: Wanted, connection: Connection
) -> Done | Refused:
    """Simulate a configuration; a failure is in the answer."""
    try:
        simulation = Simulation(parse_config(dict(data)))
        if wanted == "numbers":
            simulation.recorder.sink = summed_steps(simulation.recorder.step_kinds)
        tell = _teller(connection)
        results = simulation.run(tell, progress_every=256)
        if wanted == "kept":
            return Kept.of(simulation, results)
        if wanted == "numbers":
            return dict(results.summary)
        return _file(with_intervals(simulation, results, tell), wanted)
    except (UserError, WorkloadError) as error:
        return Refused(" ".join(str(error).split()))
    except Exception as error:
        line = fault_in_user_code(error)
        if line is None:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.name}, line {last.lineno}"
            line = f"a fault of kvsim's: {type(error).__name__}: {error} ({place})"
        return Refused(" ".join(line.split()), is_fault=True)


def _file(results: Results, wanted: Wanted) -> File:
    """Return the results as ``kvsim run`` writes them, or the page on them."""
    with TemporaryDirectory() as directory:
        folder = Path(directory) / "explored"
        folder.mkdir()
        results.write(folder)
        if wanted == "report":
            return File("explored.html", build_page([folder]).encode())
        packed = io.BytesIO()
        with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
            for path in sorted(folder.iterdir()):
                archive.write(path, f"explored/{path.name}")
        return File("explored.zip", packed.getvalue())


def _teller(connection: Connection) -> Any:
    """Return a callback that tells of progress, no more often than a page can show."""
    told_s = monotonic()

    def tell(progress: Progress) -> None:
        nonlocal told_s
        if monotonic() - told_s < TELL_EVERY_S:
            return
        told_s = monotonic()
        share = progress.num_done / max(progress.num_requests, 1)
        connection.send(Far(share, progress.now_s))

    return tell
