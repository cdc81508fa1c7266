"""Compare what examples write on other Pythons, hash seeds, locales and processes.

``python -m tests.identity.ways [--python COMMAND ...] [NAME ...]`` runs each example
that this machine can run in a first way (this Python, hash seed 0, one process) and in
others: this Python once more and each command given, every time with another hash seed,
locale, time zone and number of processes. All that is written is compared byte for
byte, but for `run.json`, which tells when and where, and the Python that is named. With
``--short``, examples of `SHORT` take less of their traffic, fewer seeds or candidates.
An interpreter must find kvsim's packages: the Python of another environment, or
``"env PYTHONPATH=... python3.14"``.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from tests.identity.same_bytes import cases, differences
from tests.shared import ROOT, SHARED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.identity.same_bytes import Case

SURROUNDINGS: Final = (
    {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"},
    {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "Asia/Kathmandu"},
    {"PYTHONHASHSEED": "4242", "LC_ALL": "tr_TR.UTF-8", "TZ": "America/St_Johns"},
    {"PYTHONHASHSEED": "random", "LANG": "POSIX", "OMP_NUM_THREADS": "1"},
    {"PYTHONHASHSEED": "99", "LC_ALL": "de_DE.UTF-8", "PYTHONUTF8": "0"},
)
SHORT: Final[Mapping[str, tuple[str, ...]]] = {
    "agents": ("workload.sessions.duration_s=60.0",),
    "chat_offloading": ("workload.sessions.num_sessions=8",),
    "deepseek_ranks": ("workload.preset.num_requests=80",),
    "fleet_autoscaler": ("workload.synthetic.duration_s=600.0",),
    "fleet_death": ("workload.synthetic.num_requests=300",),
    "fleet_prefill_decode": ("workload.trace.limit=300",),
    "fleet_prefix": ("workload.trace.limit=1000",),
    "fleet_sglang_pd": ("workload.preset.num_requests=200",),
    "mooncake_conversation": ("workload.trace.limit=1000",),
    "plan_chat": (
        "workload.resample.num_windows=4",
        "candidates={model: [meta-llama/Llama-3.1-8B], gpu: [h100_sxm, l40s]}",
        "search={num_seeds: 3, curve: [0.6], curve_seeds: 1}",
        "sensitivity=null",
    ),
    "plan_host_memory": (
        "workload.sessions.num_sessions=40",
        "search={num_seeds: 3, tolerance: 0.2, curve: [0.75], curve_seeds: 1}",
        "replicas={num_seeds: 1}",
    ),
    "speculative_chat": ("workload.synthetic.duration_s=5.0",),
    "speculative_plan": (
        "workload.synthetic.num_requests=150",
        "search={num_seeds: 3, tolerance: 0.2, curve: [0.9], curve_seeds: 1}",
    ),
    "speculative_sweep": ("workload.synthetic.duration_s=2.0",),
    "vllm_or_sglang": ("workload.sessions.num_sessions=160",),
}
"""Examples, and what makes a short one of each."""
_UNLIKE = ("run.json",)
_PYTHON_OF_ROWS = "rows: versions: python was "
_PYTHON = re.compile(rb'"python": "[0-9.]+"')


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """An interpreter, and what is around it."""

    python: tuple[str, ...]
    surroundings: dict[str, str]
    num_workers: int

    def __str__(self) -> str:
        told = " ".join(f"{key}={value}" for key, value in self.surroundings.items())
        return f"{self.python[-1]} {told}, {self.num_workers} at once"

    def run(self, case: Case, out: Path) -> None:
        """Run a case.

        Raises
        ------
        SystemExit
            If the case fails.
        """
        words = [word.replace("OUT", str(out)) for word in case.command]
        if "run" not in words:
            words += ["--workers", str(self.num_workers)]
        env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/bin"}
        done = subprocess.run(
            [*self.python, *words],
            cwd=ROOT,
            env=env | self.surroundings,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{case.name} with {self}: {done.stdout}{done.stderr}")


def shortened(case: Case) -> Case:
    settings = SHORT.get(Path(case.name).stem, ())
    options = (word for each in settings for word in ("--set", each))
    return replace(case, command=(*case.command, *options))


def ways(others: Sequence[str] = ()) -> list[Way]:
    """Return the first way and those compared with it."""
    pythons = [(sys.executable,), (sys.executable,), *map(shlex.split, others)]
    return [
        Way(tuple(python), SURROUNDINGS[index % len(SURROUNDINGS)], 1 + index % 2)
        for index, python in enumerate(pythons)
    ]


def compared(case: Case, every: Sequence[Way], place: Path) -> dict[Way, list[str]]:
    """Return how the output of each way but the first differs from the first's."""
    first = place / "0"
    every[0].run(case, first)
    found = {}
    for number, way in enumerate(every[1:], start=1):
        out = place / str(number)
        way.run(case, out)
        found[way] = _differences(first, out)
    return found


def _differences(first: Path, other: Path) -> list[str]:
    """Return what differs: files by their bytes, rows of sweeps as rows."""
    one, two = (
        {path.relative_to(out): path for path in out.rglob("*") if path.is_file()}
        for out in (first, other)
    )
    is_sweep = any("runs" in path.parts for path in one)
    if is_sweep:
        found, new = differences(first, other)
        return [line for line in found + new if not line.startswith(_PYTHON_OF_ROWS)]
    if one.keys() != two.keys():
        return [f"{path} is in one only" for path in one.keys() ^ two.keys()]
    return [
        f"{path} differs"
        for path in one
        if path.name not in _UNLIKE and _content(one[path]) != _content(two[path])
    ]


def _content(path: Path) -> bytes:
    """Return what a file holds, but for the Python that it names."""
    return _PYTHON.sub(b"", path.read_bytes())


def main(arguments: Sequence[str]) -> int:
    """Compare all cases; return how many differ somewhere."""
    parser = argparse.ArgumentParser(prog="python -m tests.identity.ways")
    parser.add_argument("names", nargs="*", help="parts of the names of examples")
    parser.add_argument("--short", action="store_true", help="less of each")
    parser.add_argument("--python", action="append", default=[], help="others' command")
    asked = parser.parse_args(arguments)
    every = ways(asked.python)
    for way in every:
        print(way)
    num_differ = 0
    place = ROOT / "results"
    place.mkdir(exist_ok=True)
    for case in cases(ROOT, (SHARED / "traces").resolve(), ()):
        is_asked = not asked.names or any(name in case.name for name in asked.names)
        if not is_asked or not case.name.startswith("examples/"):
            continue
        with TemporaryDirectory(dir=place) as folder:
            short = shortened(case) if asked.short else case
            found = compared(short, every, Path(folder))
        different = [f"{way}: {'; '.join(each)}" for way, each in found.items() if each]
        num_differ += bool(different)
        print(f"{case.name}: {' | '.join(different) or 'equal'}", flush=True)
    return num_differ


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
