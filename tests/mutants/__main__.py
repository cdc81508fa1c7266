"""``make mutants MUTANTS=400``: sample faults, run the tests that cover them.

One pytest session collects all tests and measures which blocks of statements each of
them runs. Each mutant is a fork of it: the functions of a module get changed code, and
tests that run the changed block follow, the quickest first, until one fails. Results go
to a file as they come: what is in it is not run again, survivors are with --again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.mutants.core import core_mutants
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.server import Server
from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.mutants.operators import Mutant

SEED = 29
MOST_UNEXPLAINED = 0.03
LEFT_OUT = (
    *("notebooks", "hosted", "faults", "bench", "doors", "mutants", "test_*.py"),
    *("sim/views", "sim/serving", "sim/api"),
    *("sim/studies/sweeps", "sim/studies/planning", "sim/studies/validation"),
    *("calibrate/test_[!c]*", "calibrate/test_c[!a]*"),
)
"""Tests that are about pages, processes, pictures and the like."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("number", type=int, nargs="?", default=400)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", nargs="*", default=[""], help="what names begin with")
    parser.add_argument("--again", action="store_true", help="run survivors again")
    parser.add_argument("--slow", action="store_true", help="slow tests, too")
    parser.add_argument("--at-once", type=int, default=1, help="mutants")
    parser.add_argument("--measured", action="store_true", help="only known tests")
    parser.add_argument("--budget-s", type=float, default=60.0, help="of tests, each")
    parser.add_argument("--log", type=Path, default=ROOT / "results/mutants.jsonl")
    parser.add_argument("--tests", nargs="*", default=["tests"])
    asked = parser.parse_args(arguments)
    every = core_mutants()
    drawn = random.Random(asked.seed).sample([*every], min(asked.number, len(every)))
    sampled = [name for name in drawn if name.startswith(tuple(asked.only))]
    number = len(sampled)
    told: dict[str, dict[str, Any]] = {}
    if asked.log.exists():
        for line in asked.log.read_text(encoding="utf-8").splitlines():
            told.update(json.loads(line))

    def work(server: Server) -> None:
        names_of = {id(every[name]): name for name in sampled}
        left = [
            every[name]
            for name in sampled
            if name not in told
            or (asked.again and not told[name]["by"] and name not in EQUIVALENT)
        ]
        chosen = {id(mutant): _tests_for(server, mutant) for mutant in left}
        trials = ((mutant, chosen[id(mutant)]) for mutant in left)
        with asked.log.open("a", encoding="utf-8") as log:
            for mutant, by in server.first_failures(trials, asked.at_once):
                name, tests = names_of[id(mutant)], chosen[id(mutant)]
                told[name] = {"by": by, "run": len(tests)}
                log.write(json.dumps({name: told[name]}) + "\n")
                log.flush()
                outcome = "noticed " if by else "survived"
                done = sum(name in told for name in sampled)
                print(f"{done}/{number} {outcome} {name}", flush=True)

    def _tests_for(server: Server, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant, as many as its time allows."""
        covering = server.tests_of(mutant)
        chosen: list[str] = []
        left_s = asked.budget_s
        for test in [*covering, *server.beside(covering)]:
            left_s -= server.seconds(test) + 0.01
            if left_s < 0:
                break
            chosen.append(test)
        return chosen

    asked.log.parent.mkdir(parents=True, exist_ok=True)
    kept = "coverage-slow.npz" if asked.slow else "coverage.npz"
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
    options += [] if asked.slow else ["-m", "not slow"]
    options += [f"--ignore-glob={ROOT / 'tests' / path}" for path in LEFT_OUT]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    server = Server(asked.log.with_name(kept), work, measures=not asked.measured)
    pytest.main([*options, *asked.tests], plugins=[server])
    survivors = [name for name in sampled if not told[name]["by"]]
    open_ones = [name for name in survivors if name not in EQUIVALENT]
    print(
        f"{number} of {len(every):,} faults: {number - len(survivors)} noticed, "
        f"{len(survivors) - len(open_ones)} equivalent, {len(open_ones)} not noticed"
    )
    for name in open_ones:
        print(f"  line {every[name].line} of {name}")
    for name in EQUIVALENT.keys() - every.keys():
        print(f"  explained, and gone: {name}")
    return int(len(open_ones) > MOST_UNEXPLAINED * number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
