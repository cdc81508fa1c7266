"""Compare what two checkouts write: every configuration of examples/, and notebooks.

::

    git worktree add --detach ../before 3eccc2b       # the commit before the house
    make -C ../before .venv/.installed-notebooks
    python -m tests.identity.same_bytes ../before . examples/

runs what BEFORE has in both, each with its environment ``.venv``, and compares
requests, steps and preemptions byte for byte, and column by column where columns were
added since; and the summary key by key. Sweeps are compared by their rows, the plan by
its ``plan.json``. Defaults that have changed since are set back in AFTER (``--back``).
Traces are looked for in ``../shared/traces`` beside the checkouts; an example whose
trace is missing is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet as pq
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BACK = (
    "engine.async_scheduling=false",
    "cost.efficiencies=common",
    "cost.schedule_request_s=0.0",
)
"""Later defaults, as they were at 3eccc2b; collectives cost what their size says."""
GONE = ("allreduce_latency_s is gone", "allreduce_efficiency is gone")
"""Lines of differences that say no more than that."""
TABLES = ("requests.parquet", "steps.parquet", "preemptions.parquet")
# The entry point, wherever a checkout has it.
_COMMAND = (
    "from importlib.metadata import entry_points; "
    "(kvsim,) = entry_points(group='console_scripts', name='kvsim'); kvsim.load()()"
)
SHARED_NAMES = {"mooncake_conversation.jsonl": "mooncake_fast25_conversation.jsonl"}


@dataclass(frozen=True)
class Case:
    """One thing to run in both checkouts.

    Parameters
    ----------
    name
        What the report calls it.
    command
        For the checkout's Python; ``OUT`` stands for a folder of its own, ``CHECKOUT``
        for the checkout, whose notebook imports from where things are in it.
    back
        What the command takes besides in AFTER.
    """

    name: str
    command: tuple[str, ...]
    back: tuple[str, ...] = ()


def cases(checkout: Path, traces: Path, back: Sequence[str]) -> Iterator[Case]:
    """Yield the examples that can be run, and the notebooks."""
    for path in sorted((checkout / "examples").glob("*.yaml")):
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        name = f"examples/{path.name}"
        if "currency" in told:
            continue  # a table of prices
        options = _trace_options(told, traces)
        if options is None:
            print(f"{name}: left out, its trace is not here")
            continue
        if "candidates" in told:
            verb: tuple[str, ...] = (
                "plan",
                str(path),
                "--out",
                "OUT",
                "--overwrite",
                "--quiet",
            )
        elif "base" in told:
            verb = ("sweep", str(path), "--out", "OUT", "--quiet")
        else:
            verb = ("run", str(path), "--out", "OUT", "--overwrite", "--no-figures")
        is_v1 = _generation(told, path.parent) == "v1"
        keys = [each for each in back if is_v1 or not each.startswith("engine.")]
        set_back = [word for each in keys for word in ("--set", each)]
        yield Case(name, ("-c", _COMMAND, *verb, *options), tuple(set_back))
    script = str(Path(__file__).with_name("notebook_runs.py"))
    for path in sorted((checkout / "notebooks").glob("[0-9]*.py")):
        command = (script, f"CHECKOUT/notebooks/{path.name}", "OUT")
        yield Case(f"notebooks/{path.name}", command, tuple(back))


def _generation(told: dict[str, Any], folder: Path) -> str:
    """Return the generation that a configuration, or the base of a sweep, names."""
    base = told.get("base", told)
    if isinstance(base, str):
        base = yaml.safe_load((folder / base).read_text(encoding="utf-8"))
    return str(base.get("engine", {}).get("scheduler", "v1"))


def _trace_options(told: dict[str, object], traces: Path) -> list[str] | None:
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


def run(case: Case, checkout: Path, out: Path, back: Sequence[str] = ()) -> None:
    """Run a case in a checkout; its output is shown if it fails."""
    there = {"CHECKOUT": str(checkout), "OUT": str(out)}
    command = [
        re.sub("CHECKOUT|OUT", lambda found: there[found[0]], word)
        for word in (*case.command, *back)
    ]
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


def differences(before: Path, after: Path) -> tuple[list[str], list[str]]:
    """Return how two folders of results differ, and what is new, a line each."""
    found: list[str] = []
    new: list[str] = []
    for path in sorted(before.rglob("*")):
        other, name = after / path.relative_to(before), str(path.relative_to(before))
        if path.name in TABLES:
            if path.read_bytes() != other.read_bytes():
                _compare_columns(path, other, name, found, new)
        elif path.name in {"summary.json", "plan.json"}:
            old, now = (json.loads(each.read_text("utf-8")) for each in (path, other))
            _compare_keys(old, now, name, found, new)
    sweeps = [sorted(folder.rglob("runs/*.parquet")) for folder in (before, after)]
    if sweeps[0]:
        _compare_rows(_rows(sweeps[0]), _rows(sweeps[1]), found, new)
    return found, new


def _compare_columns(
    path: Path, other: Path, name: str, found: list[str], new: list[str]
) -> None:
    old, now = pq.read_table(path), pq.read_table(other)
    num_before = len(found), len(new)
    _compare_rows(old.to_pandas(), now.to_pandas(), found, new, f"{name}: ")
    if (len(found), len(new)) == num_before:
        found.append(f"{name}: the same values in other bytes")


def _compare_rows(
    old: pd.DataFrame,
    now: pd.DataFrame,
    found: list[str],
    new: list[str],
    name: str = "rows: ",
) -> None:
    if len(old) != len(now):
        found.append(f"{name}{len(old)} rows were, {len(now)} are")
        return
    for column in old:
        if column not in now:
            found.append(f"{name}{column} is gone")
        elif old[column].equals(now[column]):
            continue
        elif (told := _told(old[column])) and (tells := _told(now[column])):
            of_column: tuple[list[str], list[str]] = [], []
            for pair in zip(told, tells, strict=True):
                _compare_keys(*pair, f"{name}{column}", *of_column)
            found += dict.fromkeys(of_column[0])
            new += dict.fromkeys(of_column[1])
        else:
            num = int((old[column] != now[column]).sum())
            found.append(f"{name}{column} differs in {num} of {len(old)} rows")
    new += [f"{name}{column}" for column in now if column not in old]


def _told(column: pd.Series[Any]) -> list[Any]:
    """Return what a column of JSON says, or nothing if it is none."""
    if not str(column.iloc[0]).startswith("{"):
        return []
    return [json.loads(text) for text in column]


def _compare_keys(
    old: Any, now: Any, name: str, found: list[str], new: list[str]
) -> None:
    if isinstance(old, dict) and isinstance(now, dict):
        for key, value in old.items():
            if key in now:
                _compare_keys(value, now[key], f"{name}: {key}", found, new)
            else:
                found.append(f"{name}: {key} is gone")
        new += [f"{name}: {key}" for key in now if key not in old]
    elif isinstance(old, list) and isinstance(now, list) and len(old) == len(now):
        for index, pair in enumerate(zip(old, now, strict=True)):
            _compare_keys(*pair, f"{name} {index}", found, new)
    elif old != now:
        found.append(f"{name} was {str(old)[:80]}, is {str(now)[:80]}")


def _rows(files: list[Path]) -> pd.DataFrame:
    frame = pd.concat(map(pd.read_parquet, files))
    return frame.sort_values("run", ignore_index=True)


def main() -> int:
    """Run and compare the cases that are asked for; return how many differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.identity.same_bytes")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--back", action="append", metavar="KEY=VALUE")
    asked = parser.parse_args()
    before, after = asked.before.resolve(), asked.after.resolve()
    traces = (after.parent / "shared" / "traces").resolve()
    num_differ = 0
    for case in cases(before, traces, asked.back or BACK):
        if asked.names and not any(name in case.name for name in asked.names):
            continue
        with TemporaryDirectory() as folder:
            outs = Path(folder, "before"), Path(folder, "after")
            run(case, before, outs[0])
            run(case, after, outs[1], case.back)
            num_files = sum(path.is_file() for path in outs[0].rglob("*"))
            found, new = differences(*outs)
        new += [line for line in found if line.endswith(GONE)]
        found = [line for line in found if not line.endswith(GONE)]
        num_differ += bool(found)
        print(f"{case.name}: {num_files} files, {'equal' if not found else 'differ'}")
        print(*(f"  {line}" for line in found), sep="\n", end="\n" if found else "")
        print(*(f"  new: {line}" for line in dict.fromkeys(new)), sep="\n", flush=True)
    return num_differ


if __name__ == "__main__":
    sys.exit(main())
