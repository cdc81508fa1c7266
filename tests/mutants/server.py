"""A pytest session that has collected all tests, and forks for each mutant."""

from __future__ import annotations

import importlib
import math
import os
import resource
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from tests.mutants.core import core_files, module_name
from tests.mutants.in_place import Functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tests.mutants.operators import Mutant

MEMORY_BYTES = 4 * 2**30
"""Of a mutant, beyond what the session has."""


class Server:
    """A plugin in place of pytest's loop: `work` is given this object.

    Which tests run a block of statements, and how long each takes, is measured once and
    kept in a file; tests that are not in it yet are measured first.
    """

    def __init__(
        self, coverage: Path, work: Callable[[Server], None], *, measures: bool
    ) -> None:
        self._path = coverage
        self._work = work
        self._measures = measures
        self._items: dict[str, pytest.Item] = {}
        self._seconds: dict[str, float] = {}
        self._runners: dict[str, list[str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Have Hypothesis tell a failure at once, and keep none."""
        settings.register_profile(
            "mutants",
            settings.get_profile("quick"),
            phases=(Phase.explicit, Phase.generate),
            database=None,
        )
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        for path in core_files():
            importlib.import_module(module_name(path))
        self._functions = Functions()
        known = self._measured()
        new = [item for item in session.items if item.nodeid not in known]
        if new and self._measures:
            _, status = os.waitpid(self._fork(lambda: self._measure(new)), 0)
            assert status == 0, "the tests could not be measured"
        self._read()
        self._items = {
            test: self._items[test]
            for test in self._items.keys() & self._seconds.keys()
        }
        self._work(self)
        return True

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's block, the quickest first."""
        found = self._runners.get(f"{mutant.path}:{mutant.block}", [])
        return sorted(found, key=lambda test: self._seconds[test])

    def beside(self, tests: list[str]) -> list[str]:
        """Return other tests of the same files: they may share results of one."""
        files = {test.partition("::")[0] for test in tests}
        found = [
            test
            for test in self._items
            if test.partition("::")[0] in files and test not in set(tests)
        ]
        return sorted(found, key=lambda test: self._seconds[test])

    def seconds(self, test: str) -> float:
        return self._seconds[test]

    def first_failures(
        self, asked: Iterable[tuple[Mutant, list[str]]], num_at_once: int
    ) -> Iterator[tuple[Mutant, str | None]]:
        """Yield each mutant with the first of its tests that notices it, if any."""
        running: list[_Trial] = []
        for mutant, tests in asked:
            running.append(self._begin(mutant, tests))
            while len(running) >= num_at_once:
                yield from _ended(running)
        while running:
            yield from _ended(running)

    def _begin(self, mutant: Mutant, tests: list[str]) -> _Trial:
        at, to = os.pipe()

        def run() -> None:
            self._functions.mutate(mutant)
            items = [self._items[test] for test in tests]
            for number, item in enumerate(items):
                os.write(to, f"{number}\n".encode())
                _limit_processor_time(5 + 10 * self._seconds[item.nodeid])
                _run(item, items[number + 1 : number + 2])
                if item.session.testsfailed:
                    os._exit(1)

        limit_s = 300 + 50 * sum(map(self.seconds, tests))
        pid = self._fork(run)
        os.close(to)
        return _Trial(mutant, tests, pid, at, time.monotonic() + limit_s)

    def _fork(self, work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            work()
        except BaseException:  # a fault may raise anything
            os._exit(3)
        os._exit(0)

    # Which tests run which blocks

    def _measured(self) -> set[str]:
        if not self._path.exists():
            return set()
        with np.load(self._path) as kept:
            return set(kept["tests"].tolist())

    def _measure(self, items: list[pytest.Item]) -> None:
        hits: set[str] = set()
        self._functions.probe(hits)
        fixtures = _FixtureHits(hits)
        items[0].config.pluginmanager.register(fixtures)
        told: dict[str, tuple[float, set[str]]] = {}
        for number, item in enumerate(items):
            hits.clear()
            began_s = sum(os.times()[:4])
            _run(item, items[number + 1 : number + 2])
            took_s = sum(os.times()[:4]) - began_s
            told[item.nodeid] = took_s, hits | fixtures.of(item)
            if len(told) % 500 == 0:
                self._keep(told)
        self._keep(told)

    def _keep(self, told: dict[str, tuple[float, set[str]]]) -> None:
        """Add the measurements to the file."""
        told = dict(told)
        if self._path.exists():
            with np.load(self._path) as kept:
                names = kept["blocks"]
                rows = zip(kept["tests"], kept["seconds"], kept["runs"], strict=True)
                for test, took_s, bits in rows:
                    run = names[np.unpackbits(bits, count=len(names)).astype(bool)]
                    told.setdefault(str(test), (float(took_s), set(run.tolist())))
        blocks = sorted(set().union(*(run for _, run in told.values())))
        place = {block: index for index, block in enumerate(blocks)}
        bits = np.zeros((len(told), len(blocks)), dtype=bool)
        for row, (_, run) in enumerate(told.values()):
            bits[row, [place[block] for block in run]] = True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".new.npz")
        np.savez_compressed(
            unfinished,
            tests=np.array(list(told)),
            seconds=np.array([took_s for took_s, _ in told.values()]),
            blocks=np.array(blocks),
            runs=np.packbits(bits, axis=1),
        )
        unfinished.replace(self._path)

    def _read(self) -> None:
        with np.load(self._path) as kept:
            tests = kept["tests"].tolist()
            self._seconds = dict(zip(tests, kept["seconds"].tolist(), strict=True))
            names = kept["blocks"].tolist()
            bits = np.unpackbits(kept["runs"], axis=1, count=len(names))
        here = np.array([test in self._items for test in tests], dtype=bool)
        for index, name in enumerate(names):
            rows = np.flatnonzero(bits[:, index].astype(bool) & here)
            self._runners[name] = [tests[row] for row in rows]


class _FixtureHits:
    """Blocks that fixtures run: they count for every test that uses the fixture."""

    def __init__(self, hits: set[str]) -> None:
        self._hits = hits
        self._by_fixture: dict[Any, set[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = set(self._hits)
        self._hits.clear()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._by_fixture[fixturedef] = set(self._hits)
            self._hits |= before

    def of(self, item: Any) -> set[str]:
        found: set[str] = set()
        for each in item._fixtureinfo.name2fixturedefs.values():
            found |= self._by_fixture.get(each[-1], set())
        return found


def _run(item: pytest.Item, following: list[pytest.Item]) -> None:
    """Run a test; fixtures that the following one needs, too, are kept."""
    following_one = following[0] if following else None
    item.ihook.pytest_runtest_protocol(item=item, nextitem=following_one)


def _limit_processor_time(more_s: float) -> None:
    """Have this process end by a signal if it goes round in circles."""
    used_s = time.process_time()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used_s + more_s), hard))


@dataclass(frozen=True, slots=True)
class _Trial:
    """A mutant whose tests run in a fork."""

    mutant: Mutant
    tests: list[str]
    pid: int
    at: int
    """Where the fork says which test it begins."""
    until_s: float

    def ended(self) -> bool:
        """Whether the tests are over: one failed, none did, or they took too long."""
        if time.monotonic() > self.until_s:
            os.kill(self.pid, signal.SIGKILL)
        return bool(os.waitid(os.P_PID, self.pid, _LOOK))

    def noticed_by(self) -> str | None:
        """Return the test that failed; processes that the fork started end with it."""
        _, status = os.waitpid(self.pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with os.fdopen(self.at) as said:
            begun = said.read().split()
        return self.tests[int(begun[-1])] if status and begun else None


_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def _ended(running: list[_Trial]) -> Iterator[tuple[Mutant, str | None]]:
    """Wait a little; yield and remove trials that have ended."""
    over = [trial for trial in running if trial.ended()]
    for trial in over:
        running.remove(trial)
        yield trial.mutant, trial.noticed_by()
    if not over:
        time.sleep(0.02)
