"""Results of a session that goes on: what has come so far, simulated to its end."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sim.errors import OutputError
from sim.results.output import write_text
from sim.serving.joined import ARRIVALS, CONFIG, replayed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.config.tables import RunConfig

_MOST_SAID: Final = 500


async def write_so_far(
    config: RunConfig, arrivals: Path, withdrawn: Mapping[int, int], folder: Path
) -> None:
    """Write the results of what has come, as a process beside the server.

    A served run and one of its arrivals are the same, so nothing of the one that goes
    on is needed. Clients that left have had their tokens; open answers are completed.

    Parameters
    ----------
    arrivals
        What has come, as a trace.
    withdrawn
        By request, how many tokens its client had when it left.
    folder
        For the results.

    Raises
    ------
    OutputError
        If they cannot be written, or nothing has come.
    """
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / ARRIVALS
        if not _copy(arrivals, trace, withdrawn):
            raise OutputError("nothing has come yet; ask when something has")
        given = Path(name) / CONFIG
        write_text(given, replayed(config, trace).to_yaml())
        command = (sys.executable, "-m", "kvsim", "run", str(given))
        running = await asyncio.create_subprocess_exec(
            *(*command, "--out", str(folder)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, said = await running.communicate()
        finally:
            if running.returncode is None:
                running.kill()
        if running.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            raise OutputError((lines or ["kvsim run ended"])[-1][:_MOST_SAID])
        shutil.move(trace, folder / ARRIVALS)
    write_text(folder / CONFIG, replayed(config, folder / ARRIVALS).to_yaml())


def _copy(arrivals: Path, trace: Path, withdrawn: Mapping[int, int]) -> int:
    """Copy whole lines, with the tokens that clients had; return how many."""
    num = -1
    with arrivals.open() as source, trace.open("w") as target:
        for num, line in enumerate(source, -1):
            if not line.endswith("\n"):
                return num
            had = withdrawn.get(num)
            if had is None or num < 0:
                target.write(line)
            else:
                entry = json.loads(line) | {"num_output_tokens": max(1, had)}
                target.write(json.dumps(entry) + "\n")
    return num + 1
