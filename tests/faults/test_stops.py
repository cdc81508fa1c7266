"""Commands that are stopped at any moment leave nothing half-written, and no process.

Moments are drawn anew from `SEED` with KVSIM_STOPS=N, N for each command and signal.
"""

from __future__ import annotations

import os
import signal
import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.faults.commands import (
    COMMANDS,
    RESUMED,
    finish,
    remove,
    start,
    whole,
    written_files,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.commands import Whole

SEED = 29
NUM_STOPS = int(os.environ.get("KVSIM_STOPS", "2"))
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def _wait_for_the_group(group: int) -> None:
    """Wait until no process of a group is left; zombies of ours have none."""
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("a process was left")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stops")


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.name)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_stop_at_any_moment(name: str, stop: signal.Signals, root: Path) -> None:
    complete = whole(name, root)
    words = COMMANDS[name].split()
    out = complete.place / words[-1]
    random = Random(f"{SEED} {name} {stop}")
    for _ in range(NUM_STOPS):
        process = start(words, complete.place)
        after_s = random.uniform(0.0, 1.1) * complete.took_s
        time.sleep(after_s)
        process.send_signal(stop)
        _, err = process.communicate()
        moment = f"{name}: {stop.name} after {after_s:.2f} s of {complete.took_s:.2f}"
        _wait_for_the_group(process.pid)
        if process.returncode in (0, 130) and out.exists() and name not in RESUMED:
            found = written_files(out)
            kept = b'"interrupted": true' in found.get("summary.json", b"")
            assert kept or found == complete.output, moment
        if process.returncode == 130:
            assert "Traceback" not in err, moment
            assert err.count("\n") <= 2, err
        elif process.returncode:
            assert process.returncode in (-stop, 128 + stop), (moment, err)
        if stop is signal.SIGKILL and name not in RESUMED and out.exists():
            assert written_files(out) == complete.output, moment
        assert _again(name, words, out, complete) == complete.output, moment
        left = [path.name for path in complete.place.iterdir()]
        known = {"run.yaml", "sweep.yaml", "plan.yaml", "done", "tables"}
        known.add("__pycache__")
        assert {each for each in left if not each.startswith(".kvsim")} <= known, moment


def _again(name: str, words: list[str], out: Path, complete: Whole) -> dict[str, bytes]:
    """Go on with what there is, or begin anew; return and remove what is written."""
    kept = out.with_name(out.name + RESUMED.get(name, ""))
    if name in RESUMED and kept.exists():
        words = [*words[:-2], "--resume", *words[-2:]]
    elif out.exists():
        words = [*words[:-2], "--overwrite", *words[-2:]]
    found = finish(words, complete.place)
    remove(out)
    return found
