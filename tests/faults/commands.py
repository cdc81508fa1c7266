"""Commands that write, and what each of them writes if nothing stops it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import yaml

from tests.shared import ROOT, shared
from tests.sim.commands import files
from tests.sim.studies.planning.plans import small, written
from tests.sim.studies.sweeps.files import tiny, write_sweep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Whole:
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
    "import": "profile import llmservingsim --path tables --no-tables --quiet "
    "--out out.json",
    "convert": "workload convert run.yaml --to kvsim --quiet --out out.jsonl",
}
"""Commands that write, each with its output last."""
RESUMED = {"sweep": "", "plan": ".answers.jsonl", "calibrate": ".checkpoint"}
"""Commands that go on, by what they leave for that beside their output."""


def start(
    words: Sequence[str],
    place: Path,
    *,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start a command in a folder; `before` it may stand another that runs it."""
    if env is None:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*before, sys.executable, "-m", "kvsim", *words],
        cwd=place,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        restore_signals=True,
    )


def written_files(out: Path) -> dict[str, bytes]:
    """Return what was written, but for when and where."""
    if out.is_file():
        return {"": out.read_bytes()}
    found = files(out)
    found.pop("run.json", None)
    return found


def prepared(name: str, place: Path) -> list[str]:
    """Write what a command reads into a new folder; return its words."""
    place.mkdir()
    (place / "run.yaml").write_text(yaml.safe_dump(tiny()))
    write_sweep(place, repeats=6)
    written(small(search={"num_seeds": 3, "curve": [0.5], "curve_seeds": 1}), place)
    if name == "import":
        tables = shared("profiles/llmservingsim/RTXPRO6000/Llama-3.1-8B")
        shutil.copytree(tables, place / "tables")
    if name == "report":
        finish(["run", "run.yaml", "--no-figures", "--quiet", "--out", "done"], place)
    return COMMANDS[name].split()


def finish(words: Sequence[str], place: Path) -> dict[str, bytes]:
    """Run a command to its end; return what it wrote."""
    process = start(words, place)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return written_files(place / words[-1])


@cache
def whole(name: str, root: Path) -> Whole:
    place = root / name
    words = prepared(name, place)
    began_s = time.monotonic()
    output = finish(words, place)
    took_s = time.monotonic() - began_s
    remove(place / words[-1])
    return Whole(place, took_s, output)


def remove(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)
