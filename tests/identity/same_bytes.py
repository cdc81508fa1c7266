"""Compare what two checkouts write: every configuration of examples/ and the notebooks.

``python -m tests.identity.same_bytes BEFORE AFTER [NAME ...]`` runs each in both, with
the environment ``.venv`` of each, and compares requests, steps and preemptions byte for
byte, and the summary key by key. Sweeps are compared by their rows, the plan by its
``plan.json``. Traces are looked for in ``../shared/traces`` beside the checkouts; an
example whose trace is missing is left out, and named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import yaml

TABLES = ("requests.parquet", "steps.parquet", "preemptions.parquet")
_COMMAND = "from sim.cli.main import main; main()"  # in older checkouts, too
SHARED_NAMES = {"mooncake_conversation.jsonl": "mooncake_fast25_conversation.jsonl"}


@dataclass(frozen=True)
class Case:
    """One thing to run in both checkouts.

    Parameters
    ----------
    name
        What the report calls it.
    command
        For the checkout's Python; ``OUT`` stands for a folder of its own.
    """

    name: str
    command: tuple[str, ...]


def cases(checkout: Path, traces: Path) -> list[Case]:
    """Return the examples that can be run, and the notebooks."""
    found = []
    for path in sorted((checkout / "examples").glob("*.yaml")):
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        name = f"examples/{path.name}"
        if "currency" in told:
            continue  # a table of prices
        options = _trace_options(told, traces, path.stem.startswith("plan"))
        if options is None:
            print(f"{name}: left out, its trace is not here")
            continue
        if path.stem.startswith("plan"):
            verb = ("plan", name, "--out", "OUT", "--overwrite", "--quiet")
        elif path.stem.startswith("sweep"):
            verb = ("sweep", name, "--out", "OUT", "--quiet")
        else:
            verb = ("run", name, "--out", "OUT", "--overwrite", "--no-figures")
        found.append(Case(name, ("-c", _COMMAND, *verb, *options)))
    script = str(Path(__file__).with_name("notebook_runs.py"))
    for path in sorted((checkout / "notebooks").glob("[0-9]*.py")):
        name = f"notebooks/{path.name}"
        found.append(Case(name, (script, name, "OUT")))
    return found


def _trace_options(
    told: dict[str, object], traces: Path, is_plan: bool
) -> list[str] | None:
    """Return what makes an example read its trace where it lies, or None."""
    workload = told.get("workload", {})
    trace = workload.get("trace") if isinstance(workload, dict) else None
    if trace is None:
        return []
    file_name = Path(trace["path"]).name
    path = traces / SHARED_NAMES.get(file_name, file_name)
    if not path.exists():
        return None
    return ["--set", f"workload.trace.path={path}"]


def run(case: Case, checkout: Path, out: Path) -> None:
    """Run a case in a checkout; its output is shown if it fails."""
    command = [word.replace("OUT", str(out)) for word in case.command]
    done = subprocess.run(
        [str(checkout / ".venv" / "bin" / "python"), *command],
        cwd=checkout,
        env={"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{case.name} in {checkout}: {done.stdout}{done.stderr}")


def differences(before: Path, after: Path) -> list[str]:
    """Return how two folders of results differ, a line each."""
    found = []
    for path in sorted(before.rglob("*")):
        other = after / path.relative_to(before)
        name = str(path.relative_to(before))
        if path.name in (*TABLES, "plan.json"):
            if path.read_bytes() != other.read_bytes():
                found.append(f"{name} differs")
        elif path.name == "summary.json":
            found += _summary_differences(path, other, name)
    sweeps = [sorted(folder.rglob("runs/*.parquet")) for folder in (before, after)]
    if sweeps[0] and not _same_rows(*sweeps):
        found.append("rows of the sweep differ")
    return found


def _summary_differences(path: Path, other: Path, name: str) -> list[str]:
    old, new = (json.loads(p.read_text(encoding="utf-8")) for p in (path, other))
    keys = dict.fromkeys((*old, *new))
    return [
        f"{name}: {key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in keys
        if old.get(key) != new.get(key)
    ]


def _same_rows(before: list[Path], after: list[Path]) -> bool:
    old, new = (
        pd.concat(map(pd.read_parquet, files)).sort_values("run", ignore_index=True)
        for files in (before, after)
    )
    return bool(old.equals(new))


def main(before: Path, after: Path, names: list[str]) -> int:
    """Run and compare all cases; return how many differ."""
    traces = (after.parent / "shared" / "traces").resolve()
    num_differ = 0
    for case in cases(after, traces):
        if names and not any(name in case.name for name in names):
            continue
        with TemporaryDirectory() as folder:
            outs = Path(folder, "before"), Path(folder, "after")
            for checkout, out in zip((before, after), outs, strict=True):
                run(case, checkout, out)
            num_files = sum(path.is_file() for path in outs[0].rglob("*"))
            found = differences(*outs)
        num_differ += bool(found)
        print(f"{case.name}: {num_files} files, {'; '.join(found) or 'equal'}")
    return num_differ


if __name__ == "__main__":
    here = [Path(word).resolve() for word in sys.argv[1:3]]
    sys.exit(main(here[0], here[1], sys.argv[3:]))
