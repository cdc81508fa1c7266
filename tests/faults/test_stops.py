"""Commands that are stopped at any moment leave nothing half-written, and no process.

Moments are drawn anew from `SEED` with KVSIM_STOPS=N, N for each command and signal.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.shared import ROOT
from tests.sim.commands import files
from tests.sim.planning.plans import small, written
from tests.sim.sweep_files import tiny, write_sweep

if TYPE_CHECKING:
    from pathlib import Path

SEED = 29
NUM_STOPS = int(os.environ.get("KVSIM_STOPS", "2"))
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Whole:
    """The output of a command that ran to its end, and the seconds it took."""

    place: Path
    took_s: float
    output: dict[str, bytes]


COMMANDS = {
    "run": "run run.yaml --no-figures --quiet --out out",
    "sweep": "sweep sweep.yaml --workers 2 --quiet --out out",
    "plan": "plan plan.yaml --workers 2 --quiet --out out",
    "calibrate": "calibrate --model Qwen/Qwen3-8B --preset quick --dry-run --quiet "
    "--out out.json",
    "report": "report done --out out.html",
    "convert": "workload convert run.yaml --to kvsim --quiet --out out.jsonl",
}
"""Commands that write, each with its output last."""
RESUMED = {"sweep": "", "plan": ".answers.jsonl", "calibrate": ".checkpoint"}
"""Commands that go on, by what they leave for that beside their output."""


def _start(words: list[str], place: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvsim", *words],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        restore_signals=True,
    )


def _files(out: Path) -> dict[str, bytes]:
    """Return what was written, but for when and where."""
    if out.is_file():
        return {"": out.read_bytes()}
    found = files(out)
    found.pop("run.json", None)
    return found


@cache
def _whole(name: str, root: Path) -> _Whole:
    place = root / name
    place.mkdir()
    (place / "run.yaml").write_text(yaml.safe_dump(tiny()))
    write_sweep(place, repeats=6)
    written(small(search={"num_seeds": 3, "curve": [0.5], "curve_seeds": 1}), place)
    done = ["run", "run.yaml", "--no-figures", "--quiet", "--out", "done"]
    for words in ([done] if name == "report" else []) + [COMMANDS[name].split()]:
        began_s = time.monotonic()
        process = _start(words, place)
        _, err = process.communicate()
        assert process.returncode == 0, err
    out = place / words[-1]
    whole = _Whole(place, time.monotonic() - began_s, _files(out))
    _remove(out)
    return whole


def _remove(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)


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
    whole = _whole(name, root)
    words = COMMANDS[name].split()
    out = whole.place / words[-1]
    random = Random(f"{SEED} {name} {stop}")
    for _ in range(NUM_STOPS):
        process = _start(words, whole.place)
        after_s = random.uniform(0.0, 1.1) * whole.took_s
        time.sleep(after_s)
        process.send_signal(stop)
        _, err = process.communicate()
        moment = f"{name}: {stop.name} after {after_s:.2f} s of {whole.took_s:.2f}"
        _wait_for_the_group(process.pid)
        if process.returncode in (0, 130) and out.exists() and name not in RESUMED:
            found = _files(out)
            kept = b'"interrupted": true' in found.get("summary.json", b"")
            assert kept or found == whole.output, moment
        if process.returncode == 130:
            assert "Traceback" not in err, moment
            assert err.count("\n") <= 2, err
        elif process.returncode:
            assert process.returncode in (-stop, 128 + stop), (moment, err)
        if stop is signal.SIGKILL and name not in RESUMED and out.exists():
            assert _files(out) == whole.output, moment
        assert _again(name, words, out, whole) == whole.output, moment
        left = [path.name for path in whole.place.iterdir()]
        known = {"run.yaml", "sweep.yaml", "plan.yaml", "done", "__pycache__"}
        assert {each for each in left if not each.startswith(".kvsim")} <= known, moment


def _again(name: str, words: list[str], out: Path, whole: _Whole) -> dict[str, bytes]:
    """Go on with what there is, or begin anew; return and remove what is written."""
    kept = out.with_name(out.name + RESUMED.get(name, ""))
    if name in RESUMED and kept.exists():
        words = [*words, "--resume"]
    elif out.exists():
        words = [*words, "--overwrite"]
    process = _start(words, whole.place)
    _, err = process.communicate()
    assert process.returncode == 0, err
    found = _files(out)
    _remove(out)
    return found
