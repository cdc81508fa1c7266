"""What ``kvsim run`` shows: a progress bar, and the summary as a table."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.results.summary import (
    SHOWN_STATISTICS,
    clock,
    latency_rows,
    summary_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from sim.simulation.run import Progress as RunProgress


_BOUNDS = {"lo": "lower", "hi": "upper"}

WIDTH = 100
"""Columns of the summary where no terminal says how many there are."""


@contextmanager
def progress_bar(num_requests: int) -> Iterator[Callable[[RunProgress], None]]:
    """Show simulated time, requests done and the time left, on stderr."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} requests"),
        TextColumn("simulated {task.fields[simulated]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_requests, simulated="0:00:00")

        def update(progress: RunProgress) -> None:
            simulated = clock(progress.now_s)
            if progress.bound:
                simulated += f" at the {_BOUNDS[progress.bound]} bound"
            bar.update(task, completed=progress.num_done, simulated=simulated)

        yield update


def print_summary(summary: Mapping[str, Any], directory: Path, loop_s: float) -> None:
    """Print the summary table on stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(Text(summary["title"], style="bold"))
    console.print(_facts(summary, loop_s))
    console.print(_latencies(summary))
    reason = f" ({summary['path_reason']})" if summary["path_reason"] else ""
    path = f"{summary['path']} path{reason}"
    last = f"{summary['scheduling']}, {path}; results in {directory}"
    console.print(Text(last), soft_wrap=True)


def _facts(summary: Mapping[str, Any], loop_s: float) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, text in summary_rows(summary):
        table.add_row(name, text)
    rate = summary["num_requests"] / loop_s if loop_s > 0 else 0.0
    table.add_row("simulated in", f"{loop_s:.2f} s ({rate:,.0f} requests/s)")
    return table


def _latencies(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("ms", style="dim")
    for statistic in SHOWN_STATISTICS:
        table.add_column(statistic, justify="right")
    for row in latency_rows(summary):
        table.add_row(*row)
    return table
