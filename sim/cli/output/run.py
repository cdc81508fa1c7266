"""Output of ``kvsim run``: a progress bar, and the summary as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from sim.cli.console import facts_table, number_table, output_console
from sim.results.fleet.ranks import parts_of
from sim.results.schema import SHOWN_STATISTICS
from sim.results.summary.rows import clock, latency_rows, summary_rows
from sim.results.summary.verdict import verdict_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rich.table import Table

    from sim.cli.console import ShowProgress
    from sim.simulation.progress import Progress

_BOUNDS = {"lo": "lower", "hi": "upper"}


def run_reporter(show: ShowProgress) -> Callable[[Progress], None]:
    def update(progress: Progress) -> None:
        told = []
        if progress.now_s > 0:  # else engines run ahead of the clock, one by one
            told.append(f"simulated {clock(progress.now_s)}")
        if progress.bound:
            told.append(f"at the {_BOUNDS[progress.bound]} bound")
        show(progress.num_done, " ".join(told))

    return update


def print_summary(summary: Mapping[str, Any], directory: Path, loop_s: float) -> None:
    num_sent = summary["num_requests"] - summary["unsent"]
    rate = num_sent / loop_s if loop_s > 0 else 0.0
    took = ("simulated in", f"{loop_s:.2f} s ({rate:,.0f} requests/s)")
    console = output_console()
    console.print(Text(summary["title"], style="bold"))
    for line in verdict_lines(summary):
        console.print(Text(line))
    console.print(facts_table([*summary_rows(summary), took]))
    console.print(_latencies(summary))
    reason = f" ({summary['path_reason']})" if summary["path_reason"] else ""
    path = f"{summary['path']} path{reason}"
    console.print(Text(f"{summary['scheduling']}, {path}"), soft_wrap=True)
    console.print(Text(f"results in {directory}"), soft_wrap=True)
    holds = summary.get("verdict", {"holds": True})["holds"]
    if not (holds or parts_of(summary)[1]):  # advice is built for one engine
        advice = f"what would help: kvsim advise {directory}"
        console.print(Text(advice), soft_wrap=True)


def _latencies(summary: Mapping[str, Any]) -> Table:
    table = number_table("ms", *SHOWN_STATISTICS, texts=["ms"])
    table.columns[0].style = "dim"
    for row in latency_rows(summary):
        table.add_row(*row)
    return table
