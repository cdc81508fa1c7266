"""``make mutants N=400``: sample faults, run the tests that cover them, tell survivors.

Each mutant is a process forked from one that has imported what tests need, with the
changed module in place of its file. Results go to a file as they come: what is in it is
not run again.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.mutants.coverage import CORE, tests_of
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.operators import Mutant, mutants_of, mutated
from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

SEED = 29
LIMIT_S = 60
"""Of a test: one that takes longer goes round in circles, which is noticed."""
MEMORY_BYTES = 6 * 2**30
_NOTICED = (1, 2)
"""What pytest ends with where a test fails, or a module cannot be imported."""
MOST_UNEXPLAINED = 0.03


class _InPlace(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module another source."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        is_package = self._path.name == "__init__.py"
        return importlib.util.spec_from_file_location(
            fullname,
            self._path,
            loader=self,
            submodule_search_locations=[str(self._path.parent)] if is_package else None,
        )

    def exec_module(self, module: Any) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def core() -> list[Mutant]:
    """Return all faults of the core, in order."""
    found = []
    for pattern in CORE:
        for path in sorted(ROOT.glob(pattern)):
            found += mutants_of(path, str(path.relative_to(ROOT)))
    return found


def outcome(mutant: Mutant) -> str:
    """Return ``killed`` or ``survived``."""
    path = ROOT / mutant.path
    source = mutated(path.read_text(encoding="utf-8"), mutant.number)
    pid = os.fork()
    if not pid:
        _run_tests(mutant, path, source)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    code = os.WEXITSTATUS(status)
    if code and code not in _NOTICED:
        raise RuntimeError(f"{mutant.name}: pytest itself failed, with {code}")
    return "killed" if code else "survived"


def _run_tests(mutant: Mutant, path: Path, source: str) -> None:
    """Run the tests in this process, which ends with their status."""
    import pytest  # noqa: PLC0415 - what forks needs it, not what samples

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    name = mutant.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    sys.meta_path.insert(0, _InPlace(name, path, source))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    options = ["-x", "-q", "-m", "not slow", f"--timeout={LIMIT_S}", "--tb=no"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    for group in tests_of(mutant.path):
        code = pytest.main([*options, *group])
        if code:
            os._exit(int(code))
    os._exit(0)


def _warm_up() -> None:
    """Import what no mutant is in, so that a fork has it."""
    for name in ("numpy", "pandas", "pyarrow.parquet", "pytest", "yaml"):
        __import__(name)
    for name in ("scipy.stats", "simpy", "pydantic", "cyclopts", "rich.table"):
        __import__(name)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("number", type=int, nargs="?", default=400)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", default="", help="modules that begin so")
    parser.add_argument("--log", type=Path, default=ROOT / "results/mutants.jsonl")
    asked = parser.parse_args(arguments)
    every = [each for each in core() if each.path.startswith(asked.only)]
    number = min(asked.number, len(every))
    sampled = random.Random(asked.seed).sample(every, number)
    asked.log.parent.mkdir(parents=True, exist_ok=True)
    told: dict[str, str] = {}
    if asked.log.exists():
        for line in asked.log.read_text(encoding="utf-8").splitlines():
            told.update(json.loads(line))
    _warm_up()
    with asked.log.open("a", encoding="utf-8") as log:
        for done, mutant in enumerate(sampled):
            if mutant.name not in told:
                began_s = time.monotonic()
                told[mutant.name] = outcome(mutant)
                log.write(json.dumps({mutant.name: told[mutant.name]}) + "\n")
                log.flush()
                took_s = time.monotonic() - began_s
                print(f"{done + 1}/{number} {told[mutant.name]:<14} {took_s:5.1f} s  "
                      f"{mutant.name}", flush=True)  # fmt: skip
    survivors = [each for each in sampled if told[each.name] == "survived"]
    open_ones = [each for each in survivors if each.name not in EQUIVALENT]
    print(
        f"{number} of {len(every):,} faults: {number - len(survivors)} noticed, "
        f"{len(survivors) - len(open_ones)} equivalent, {len(open_ones)} not noticed"
    )
    for each in open_ones:
        print(f"  {each.name}")
    return int(len(open_ones) > MOST_UNEXPLAINED * number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
