"""What ``kvsim run`` shows: a progress bar, and the summary as a table."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def clock(seconds: float) -> str:
    """Format simulated seconds as h:mm:ss."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


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


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a summary as (name, text), without wall time."""
    s = summary
    unserved = ", ".join(
        f"{s[key]:,} {key.replace('_', ' ')}"
        for key in ("rejected", "aborted", "unsent", "unfinished", "length_capped")
        if s[key]
    )
    rows = [
        (
            "requests",
            f"{s['completed']:,} of {s['num_requests']:,} completed"
            + (f", {unserved}" if unserved else ""),
        ),
        ("simulated time", f"{clock(s['duration'])} in {s['num_steps']:,} steps"),
        (
            "throughput",
            f"{s['request_throughput']:.2f} requests/s{_offered(s)}, "
            f"{s['output_throughput']:,.0f} output tokens/s",
        ),
        (
            "KV cache",
            f"{s['num_gpu_blocks']:,} blocks{_interval(s)} of {s['block_size']} "
            f"tokens; usage mean {s['kv_cache_usage_mean']:.1%}, max "
            f"{s['kv_cache_usage_max']:.1%}",
        ),
        (
            "preemptions",
            f"{s['num_preemptions']:,}, of {s['num_requests_preempted']:,} requests; "
            f"{s['recomputed_tokens']:,} tokens recomputed",
        ),
        *_moves(s),
        (
            "running",
            f"mean {s['num_running_mean']:.1f}, max {s['num_running_max']:,} of "
            f"{s['max_num_seqs']:,}; waiting mean {s['num_waiting_mean']:.1f}, max "
            f"{s['num_waiting_max']:,}",
        ),
    ]
    if s.get("prefix_cache_queries"):
        hits = s["prefix_cache_hits"] / s["prefix_cache_queries"]
        evicted = s.get("num_evictions")
        rows.append(
            (
                "prefix cache",
                f"{hits:.2%} of {s['prefix_cache_queries']:,} prompt tokens hit"
                + ("" if evicted is None else f"; {evicted:,} blocks evicted"),
            )
        )
    return [*rows, *_uncertainty(s), *_groups(s)]


def _uncertainty(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how far the cost model may be off, where it says so."""
    ttft, tpot = summary["mean_ttft_ms_interval"], summary["mean_tpot_ms_interval"]
    said = [
        f"{name} mean {found[0]:,.1f} to {found[1]:,.1f} ms"
        for name, found in (("TTFT", ttft), ("TPOT", tpot))
        if found
    ]
    if share := summary["extrapolated_share"]:
        said.append(f"{share:.2%} of busy time extrapolated")
    if said:
        yield "kernel bounds", ", ".join(said)


def _groups(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of sessions and of service levels, where there are any."""
    if s := summary.get("sessions"):
        mean_s = s["mean_duration_s"]
        lasted = "" if mean_s is None else f", {mean_s:,.1f} s each on average"
        yield (
            "sessions",
            f"{s['num_completed']:,} of {s['num_sessions']:,} completed{lasted}; "
            f"{s['mean_turns']:.1f} turns on average",
        )
    for name, numbers in summary.get("by_slo_class", {}).items():
        if not numbers["completed"]:
            yield f"class {name}", f"0 of {numbers['num_requests']:,} completed"
            continue
        parts = (
            f"{label} p50 {numbers[f'p50_{key}_ms']:,.0f}, "
            f"p99 {numbers[f'p99_{key}_ms']:,.0f} ms"
            for key, label in (("ttft", "TTFT"), ("e2el", "E2E"))
        )
        yield f"class {name}", f"{numbers['completed']:,} completed; {'; '.join(parts)}"


def _moves(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row of blocks swapped and copied, where there are any."""
    s = summary
    moves = []
    if s["swapped_out_blocks"]:
        moves.append(
            f"{s['num_preemptions_swap']:,} preemptions by swapping, "
            f"{s['swapped_out_blocks']:,} blocks out, {s['swapped_in_blocks']:,} in"
        )
    if s["copied_blocks"]:
        moves.append(f"{s['copied_blocks']:,} copied on write")
    return [("blocks moved", "; ".join(moves))] if moves else []


def _offered(summary: Mapping[str, Any]) -> str:
    """Return the rate of arrivals, where it has one."""
    rate = summary["request_rate"]
    return "" if rate is None else f" of {rate:.2f} offered"


def _interval(summary: Mapping[str, Any]) -> str:
    """Return the range that the number of blocks lies in, where it is a prediction."""
    low, high = summary["num_gpu_blocks_low"], summary["num_gpu_blocks_high"]
    return "" if low == high else f" ({low:,} to {high:,})"


def _latencies(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("ms", style="dim")
    statistics = ("mean", "p50", "p90", "p95", "p99")
    for statistic in statistics:
        table.add_column(statistic, justify="right")
    for key, name in (
        ("ttft", "TTFT"),
        ("tpot", "TPOT"),
        ("itl", "ITL"),
        ("e2el", "E2E"),
    ):
        cells = (summary[f"{statistic}_{key}_ms"] for statistic in statistics)
        table.add_row(name, *("-" if c is None else f"{c:,.1f}" for c in cells))
    return table
