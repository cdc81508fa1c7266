"""Terminal tools of all commands: Ctrl-C, progress bars, JSON, notes and tables."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

T = TypeVar("T")

WIDTH = 100
"""Columns of the output where no terminal says how many there are."""


@contextmanager
def stopping_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C ask for a `stop` that loses nothing, the second end at once.

    So does SIGTERM, by which a batch system says that time is up.
    """

    def ask_to_stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, ask_to_stop)
    before_term = signal.signal(signal.SIGTERM, ask_to_stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, before_term)


class ShowProgress(Protocol):
    """Shows how much is done; `said` in words, `phase` and `total` at its beginning."""

    def __call__(
        self, done: float, said: str = "", phase: str = "", total: float = ...
    ) -> None: ...


class LoggedProgress:
    """Progress as lines on stderr, one every so many seconds while it is open."""

    EVERY_S = 10.0

    def __init__(self, total: float, unit: str) -> None:
        self._total = total
        self._unit = unit and f" {unit}"
        self._began_s = self._told_s = monotonic()
        self._done = 0.0
        self._words = ""
        self._closing = Event()
        self._ticking = Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        self._ticking.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._ticking.join()

    def _tick(self) -> None:
        while not self._closing.wait(self.EVERY_S):
            self.say()

    def __call__(
        self, done: float, said: str = "", phase: str = "", total: float | None = None
    ) -> None:
        """Take note of the progress."""
        if not done:
            self._total = total or self._total
        if done != self._done:
            self._done, self._told_s = done, monotonic()
        self._words = ", ".join(each for each in (phase, said) if each)

    def say(self) -> None:
        """Print a line of the progress, and about how long the rest takes.

        By the latest news. Once that time has passed without any, or while there is
        none, it says how long it has taken.
        """
        words, done = self._words, self._done
        line = f"{words and words + ': '}{done:,.0f} of {self._total:,.0f}{self._unit}"
        now_s, left_s = monotonic(), 0.0
        if done:
            left_s = (self._told_s - self._began_s) * (self._total / done - 1)
            left_s -= now_s - self._told_s
        if left_s >= 0.5:
            line += f", about {_minutes(left_s)} left"
        else:
            line += f", {_minutes(now_s - self._began_s)} so far"
        note(line)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"


@contextmanager
def progress_bar(
    reporter: Callable[[ShowProgress], T], total: float, unit: str = "", *, shown: bool
) -> Iterator[T | None]:
    """Open a bar on stderr and yield what `reporter` makes to be told of progress.

    Yields None if a bar is not wanted. Where stderr is no terminal, such as in a log,
    there is a line every ten seconds instead.
    """
    if not shown:
        yield None
        return
    if not sys.stderr.isatty():
        with LoggedProgress(total, unit) as progress:
            yield reporter(progress)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    columns = (
        "{task.description}",
        BarColumn(),
        f"{{task.completed:,.0f}}/{{task.total:,.0f}}{unit and ' ' + unit}",
        "{task.fields[said]}",
        "left",
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, said="")

        def show(
            done: float, said: str = "", phase: str = "", total: float = total
        ) -> None:
            if not done:
                bar.reset(task, total=max(total, 1.0), description=phase)
            bar.update(task, completed=done, said=said)
            if phase:
                bar.update(task, description=phase)

        yield reporter(show)


def print_json(found: object) -> None:
    from json import dumps

    print(dumps(found, indent=2, allow_nan=False))


def note(line: str) -> None:
    """Print a line on stderr, where it is seen although results are piped."""
    print(f"kvsim: {line}", file=sys.stderr)


def note_plugins(configs: Iterable[object]) -> None:
    """Say which files of users' own will be run."""
    from sim.config.plugins import plugin_files

    for path in plugin_files(list(configs)):
        note(f"runs the file '{path}' (--no-plugins refuses that)")


def warn(lines: Iterable[object]) -> None:
    for line in lines:
        note(f"warning: {line}")


def output_console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and facts."""
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def number_table(
    *columns: str,
    texts: Collection[str] = (),
    no_wrap: bool = False,
    header_style: str = "dim",
) -> Table:
    """Return an empty table of numbers, but for the columns that are `texts`."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style=header_style)
    for name in columns:
        justify: Any = "left" if name in texts else "right"
        table.add_column(name, justify=justify, no_wrap=no_wrap)
    return table


def table_or_lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: Collection[str],
    width: int,
) -> Iterator[RenderableType]:
    """Yield a table or, where that is wider than `width`, lines a row: nothing is cut.

    Columns without any text are left out of the lines.
    """
    from rich.padding import Padding
    from rich.text import Text

    columns = zip(headings, *rows, strict=True)
    if sum(max(map(len, column)) + 2 for column in columns) <= width:
        table = number_table(*headings, texts=texts, no_wrap=True)
        for row in rows:
            table.add_row(*row)
        yield table
        return
    for name, *facts in rows:
        yield Text(name, style="bold")
        for line in _fact_lines(headings[1:], facts):
            yield Padding(Text(line), (0, 0, 0, 4))


def _fact_lines(headings: Sequence[str], facts: Sequence[str]) -> Iterator[str]:
    """Yield sentences alone, and the other facts behind their headings."""
    said = []
    for heading, fact in zip(headings, facts, strict=True):
        if fact.endswith(".") or len(facts) == 1:
            yield fact
        elif fact:
            said.append(f"{heading}: {fact}" if heading else fact)
    if said:
        yield ", ".join(said)
