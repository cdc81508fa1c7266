"""Where the time of the loop goes, as Markdown tables.

    python -m tests.bench.profile_loop "loaded x3"

Shares are samples, a look at the running function every few milliseconds of processor
time, since cProfile makes small functions look expensive; it only counts the calls.
What C code takes counts for the function that calls it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import signal
import sysconfig
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from tests.bench.loops import PATHS, REGIMES, make_loop
from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from sim.config.tables import RunConfig

INTERVAL_S = 0.001
STDLIB = sysconfig.get_path("stdlib")


class Function(NamedTuple):
    """A function, by where it begins."""

    file: str
    line: int
    name: str


def function_of(code: CodeType) -> Function:
    return Function(code.co_filename, code.co_firstlineno, code.co_qualname)


LOOPS = {"Engine._run", "PlainEngine.steps"}


class Samples:
    """Counts of the function that runs, and of what the loop itself called last.

    Attributes
    ----------
    functions
        By own time.
    parts
        By time with all that they call; the loop stands for its own lines, and what
        runs outside of it for itself.
    """

    def __init__(self) -> None:
        self.functions: Counter[Function] = Counter()
        self.parts: Counter[Function] = Counter()

    def look(self, _: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self.functions[function_of(frame.f_code)] += 1
        at = frame
        while at.f_code.co_qualname not in LOOPS and at.f_back is not None:
            if at.f_back.f_code.co_qualname in LOOPS:
                break
            at = at.f_back
        if at.f_back is None:
            at = frame
        self.parts[function_of(at.f_code)] += 1

    def during(self, call: Callable[[], object]) -> None:
        """Sample while `call` runs, by the processor's time."""
        before = signal.signal(signal.SIGPROF, self.look)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
        gc.disable()
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
            gc.enable()


def count_calls(config: RunConfig, path: str) -> dict[tuple[str, int], int]:
    """Return how often each function is called, by file and line."""
    loop, profile = make_loop(config, path), cProfile.Profile()
    profile.runcall(loop.run)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return {(file, line): calls for (file, line, _), (_, calls, *_) in stats.items()}


def short(file: str) -> str:
    """Return a file's name as it is known in the project."""
    file = file.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
    return file.removeprefix(f"{STDLIB}/")


def print_functions(
    title: str,
    functions: Counter[Function],
    calls: dict[tuple[str, int], int],
    most: int,
) -> None:
    total = functions.total()
    print(f"\n| {title} | share | calls |\n|---|---|---|")
    for function, number in functions.most_common(most):
        where = short(function.file)
        name = f"`{where}` `{function.name}`"
        share = number / total
        num_calls = calls.get((function.file, function.line), 0)
        print(f"| {name} | {share:.1%} | {num_calls:,} |")


def print_files(functions: Counter[Function], most: int) -> None:
    files: Counter[str] = Counter()
    for function, number in functions.items():
        files[short(function.file)] += number
    print("\n| file | share |\n|---|---|")
    for file, number in files.most_common(most):
        print(f"| `{file}` | {number / files.total():.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile a whole run's loop.")
    parser.add_argument("regime", nargs="?", default="loaded x3", choices=REGIMES)
    parser.add_argument("--path", default="fast", choices=PATHS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--most", type=int, default=20)
    arguments = parser.parse_args()
    config = REGIMES[arguments.regime].config()
    samples = Samples()
    for _ in range(arguments.rounds):
        samples.during(make_loop(config, arguments.path).run)
    calls = count_calls(config, arguments.path)
    print(f"{arguments.regime}, {arguments.path}, {samples.functions.total()} samples")
    print_functions("part of the loop", samples.parts, calls, 8)
    print_functions("function, own time", samples.functions, calls, arguments.most)
    print_files(samples.functions, arguments.most)


if __name__ == "__main__":
    main()
