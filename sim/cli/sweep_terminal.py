"""What ``kvsim sweep`` shows: a progress bar, and what came of the runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.studies.sweeps.session import Tally


@contextmanager
def progress_bar(num_runs: int) -> Iterator[Callable[[Tally], None]]:
    """Show runs ended, those that failed and the time left, on stderr."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} runs"),
        TextColumn("{task.fields[failed]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_runs, failed="")

        def update(tally: Tally) -> None:
            failed = f"{tally.num_failed:,} failed" if tally.num_failed else ""
            bar.update(task, completed=tally.num_ended, failed=failed)

        yield update


def print_tally(tally: Tally, dataset: str, num_workers: int, wall_s: float) -> None:
    """Print how many runs ended in which way, and where their results are."""
    counts = ", ".join(f"{n:,} {status}" for status, n in sorted(tally.counts.items()))
    print(f"runs     {tally.num_ended:,} of {tally.num_runs:,}: {counts}")
    rate = f"; {tally.run_wall_s:.1f} s of runs" if tally.run_wall_s else ""
    print(f"took     {wall_s:.1f} s on {num_workers:,} workers{rate}")
    print(f"dataset  {dataset}, a row each")
