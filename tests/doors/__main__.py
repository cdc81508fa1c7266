"""``make fuzz-inputs INPUTS=20000``: malformed files, and what became of each."""

from __future__ import annotations

import argparse
import io
import signal
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from sim.cli.main import run as kvsim
from tests.doors.doors import Door, doors

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_S = 20
"""Of processor time, for one file."""


class TooSlowError(BaseException):
    """A command that was not done in time."""


def through(door: Door, random: Random, place: Path) -> tuple[str, str]:
    """Send one changed file through a door; return what became of it, and details."""
    content = door.change(door.content, random)
    path = place / f"input{door.suffix}"
    if door.suffix.startswith("@"):
        path = Path(door.suffix[1:])
    path.write_bytes(content)
    said = io.StringIO()
    arguments = [*door.arguments(path), "--no-plugins"]
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            status = kvsim(arguments)
    except TooSlowError:
        return "too slow", ""
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next(f for f in reversed(frames) if "/.venv/" not in f.filename)
        where = f"{Path(last.filename).name}:{last.lineno}"
        return "traceback", f"{type(error).__name__} in {where}: {str(error)[:90]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if door.suffix.startswith("@"):
            path.write_bytes(door.content)
    lines = [
        line
        for line in said.getvalue().splitlines()
        if "warning:" not in line and " is read as " not in line
    ]
    if status == 0 or (status == 1 and "--diff" in arguments):
        return "read", ""
    if status == 2 and len(lines) == 1 and lines[0].startswith("kvsim: "):
        return "refused", ""
    if status == 2 and lines and arguments[:2] == ["profile", "validate"]:
        return "refused", ""  # it says all that is wrong, a line each
    return "not one line", f"status {status}: {' / '.join(lines)[:200]}"


def fuzz(
    number: int, seed: int, place: Path, only: str = "", without: str = ""
) -> tuple[Counter[tuple[str, str]], dict[str, str]]:
    """Send `number` files through all doors in turn; return outcomes and faults.

    `only` is a part of the names of doors, `without` a command that is left out.
    """

    def stop(*_: Any) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, stop)
    outcomes: Counter[tuple[str, str]] = Counter()
    faults: dict[str, str] = {}
    try:
        with redirect_stderr(io.StringIO()), chdir(place):
            every = [
                each
                for each in doors(place)
                if only in each.name and each.words[0] != without
            ]
            for index in range(number):
                door = every[index % len(every)]
                random = Random(f"{seed} {index}")
                outcome, details = through(door, random, place)
                outcomes[door.name, outcome] += 1
                if outcome not in ("read", "refused"):
                    faults.setdefault(f"{door.name}: {outcome}: {details}", str(index))
    finally:
        signal.signal(signal.SIGPROF, before)
    return outcomes, faults


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.doors")
    parser.add_argument("number", type=int, nargs="?", default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="doors whose name holds this")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        outcomes, faults = fuzz(asked.number, asked.seed, Path(folder), asked.only)
    kinds = ("read", "refused", "not one line", "too slow", "traceback")
    print(f"{'door':<28}", *(f"{kind:>13}" for kind in kinds))
    total: Counter[str] = Counter()
    for name in dict.fromkeys(door for door, _ in outcomes):
        counts = {kind: outcomes[name, kind] for kind in kinds}
        total.update(counts)
        print(f"{name:<28}", *(f"{counts[kind]:>13}" for kind in kinds))
    print(f"{'all':<28}", *(f"{total[kind]:>13}" for kind in kinds))
    for fault, index in faults.items():
        print(f"  {fault} (input {index})")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
