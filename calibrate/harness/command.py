"""The work of ``kvsim calibrate``, apart from reading its arguments."""

from __future__ import annotations

import math
import sys
import time
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from calibrate.harness.checkpoint import Checkpoint
from calibrate.harness.grid import PRESETS
from calibrate.harness.output import profile_of
from calibrate.harness.session import Session
from calibrate.harness.summary import Row, rows
from calibrate.measurement import OPERATIONS, canonical
from calibrate.writing import write_whole
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from calibrate.harness.device import Device
    from calibrate.harness.outcome import Progress as Done
    from calibrate.harness.outcome import Settings

SECONDS_A_LINE = 15.0
"""Between two lines of progress where no terminal is."""
WIDTH = 100
"""Columns of the summary where no terminal says how many there are."""
BACKENDS = ("auto", "vllm", "flashinfer", "cuda", "triton", "torch", "dry-run")


class Write(Enum):
    """The rule for files that are already there."""

    NEW = "new"
    """They stay, and the calibration is refused."""
    OVER = "over"
    """Profile and checkpoint may be replaced."""
    ON = "on"
    """The checkpoint is gone on with."""
    END = "end"
    """The checkpoint is taken as it is, and kept."""


def checked_operations(operations: Sequence[str] | None) -> tuple[str, ...]:
    """Return the operations asked for, in order; all of them by default."""
    if not operations:
        return OPERATIONS
    named = [name for given in operations for name in given.split(",") if name]
    for name in named:
        if name not in OPERATIONS:
            raise UserError(f"unknown operation: {name!r}; use {', '.join(OPERATIONS)}")
    return tuple(name for name in OPERATIONS if name in named)


def check_arguments(
    preset: str,
    backend: str,
    out: Path,
    write: Write,
    time_limit: float | None = None,
) -> None:
    """Refuse arguments that cannot be meant, before anything is imported or timed."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset: {preset!r}; use {', '.join(PRESETS)}")
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise UserError(
            f"time_limit must be a number of seconds above 0; got {time_limit}"
        )
    if backend not in BACKENDS:
        raise UserError(f"unknown backend: {backend!r}; use {', '.join(BACKENDS)}")
    if out.exists() and not (write is Write.OVER and out.is_file()):
        raise UserError(f"'{out}' exists; take another name, or --overwrite a file")
    if not out.parent.is_dir():
        raise UserError(f"there is no folder '{out.parent}' for the profile; make it")
    left = checkpoint_of(out).path
    if write is Write.NEW and left.exists():
        raise UserError(
            f"a calibration was cut short and left '{left}'; go on with --resume, or"
            " start again with --overwrite"
        )


def checkpoint_of(out: Path) -> Checkpoint:
    return Checkpoint(out.with_name(out.name + ".checkpoint"))


def calibrate_device(
    device: Device, settings: Settings, out: Path, write: Write, quiet: bool
) -> dict[str, Any]:
    """Calibrate, write the profile, show the summary; else the checkpoint stays."""
    checkpoint = checkpoint_of(out)
    with _progress(quiet) as update:
        session = Session(device, settings, checkpoint, update)
        try:
            outcome = session.run(write is Write.ON, finish=write is Write.END)
        except KeyboardInterrupt:
            note = f"kvsim: finished blocks are in {checkpoint.path}; add --resume"
            print(note, file=sys.stderr)
            raise
    profile = profile_of(outcome, settings, device)
    write_whole(canonical(profile), out)
    if outcome.visits.are_all:
        checkpoint.remove()
    if not quiet:
        name = profile["provenance"]["device"]["name"]
        omitted = [Row("not timed", what, "") for what in settings.geometry.omissions]
        absent = profile["provenance"].get("missing_backends", {})
        missing = [Row("backend", which, why) for which, why in absent.items()]
        _show([*rows(outcome, device, name), *omitted, *missing], profile, out)
    return profile


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Done], None]]:
    """Show visits done, the phase and the time left, on stderr.

    A bar on a terminal; elsewhere a line now and then, so that a log shows life.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield (lambda _: None) if quiet else Lines(sys.stderr, time.monotonic).update
        return
    columns = (
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} visits"),
        TextColumn("{task.description}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("gate", total=1)

        def update(done: Done) -> None:
            bar.update(
                task, completed=done.done, total=done.total, description=done.phase
            )

        yield update


class Lines:
    """Progress where there is no terminal: a line every so many seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._phase = ""
        self._begin = (0, 0.0)
        """Visits and time at which the phase began for this process."""
        self._said_s = clock()

    def update(self, done: Done) -> None:
        """Say how far it is, if the last line is old enough."""
        now_s = self._clock()
        if done.phase != self._phase:
            self._phase, self._begin = done.phase, (done.done, now_s)
        if now_s - self._said_s < SECONDS_A_LINE:
            return
        self._said_s = now_s
        visits, begin_s = self._begin
        passed_s = now_s - begin_s
        left = ""
        if done.done > visits:
            left_s = passed_s * (done.total - done.done) / (done.done - visits)
            left = f", about {left_s:.0f} s left"
        line = f"kvsim: {done.phase}: {done.done}/{done.total}, {passed_s:.0f} s{left}"
        print(line, file=self._stream, flush=True)


def _show(lines: Sequence[Row], profile: dict[str, Any], out: Path) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    provenance = profile["provenance"]
    leading = [table for table in profile["ops"] if "." not in table["operation"]]
    num_points = sum(len(table["n"]) for table in leading)
    title = f"{provenance['device']['name']}: {provenance['model']['model']}"
    console.print(Text(title, style="bold"))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for _ in range(4):
        table.add_column(overflow="fold")
    for line in lines:
        table.add_row(
            *map(Text, (line.what, line.measured, line.reference, line.remark))
        )
    console.print(table)
    last = f"{num_points} points in {provenance['duration_s']:.0f} s; profile in {out}"
    console.print(Text(last), soft_wrap=True)
