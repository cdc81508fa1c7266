"""The whole command, as a user runs it: seconds, memory, and how both grow.

    python -m tests.bench.scale                       # all of it
    python -m tests.bench.scale --sizes 10000,100000  # less of it
    python -m tests.bench.scale --only trace --repeats 3

Each run is a process of its own. Seconds are medians: *CPU* of all its threads, start
of Python included, *wall* as on a clock; *loop* is the run's own figure
(`run.json`, wall), with rows of steps written and the summary computed. Compare CPU
seconds where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

from tests.bench.loops import AZURE, MAX_NUM_SEQS, NUM_AZURE_REQUESTS
from tests.shared import ROOT, SHARED

SIZES = (10_000, 100_000, 1_000_000)
# About as busy as the Azure conversation trace at three times its rate.
SYNTHETIC = """\
workload:
  synthetic:
    num_requests: 10000
    arrivals: {kind: poisson, rate: 16.0}
    prompt_tokens: {kind: lognormal, median: 800, sigma: 1.0, max: 8192}
    output_tokens: {kind: lognormal, median: 150, sigma: 0.8, max: 1000}
engine: {model: meta-llama/Llama-3.1-8B, gpu: h200_sxm, enable_prefix_caching: false}
cost: {kind: roofline}
seed: 0
"""
COMMAND = "from sim.cli.main import main; main()"


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds, memory and steps of one run."""

    wall_s: float
    cpu_s: float
    loop_s: float
    peak_mib: float
    num_steps: int


def run_command(config: Path, *arguments: str, figures: bool) -> Usage:
    """Run ``kvsim run`` in a process of its own.

    Raises
    ------
    SystemExit
        If the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results"
        command = [sys.executable, "-c", COMMAND, "run", str(config), *arguments]
        command += ["--set", f"engine.max_num_seqs={MAX_NUM_SEQS}"]
        command += ["--out", str(out), "--quiet"]
        if not figures:
            command.append("--no-figures")
        begin_s = perf_counter()
        process = subprocess.Popen(command, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = perf_counter() - begin_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"exit status {process.returncode}: {' '.join(command)}")
        info = json.loads((out / "run.json").read_text())
        summary = json.loads((out / "summary.json").read_text())
    return Usage(
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        loop_s=info["wall_seconds"]["loop"],
        # kibibytes, but bytes on macOS
        peak_mib=usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
        num_steps=summary["num_steps"],
    )


def middle(usages: list[Usage]) -> Usage:
    """Return the median of each figure."""
    return Usage(
        *(median(getattr(usage, name) for usage in usages) for name in Usage.__slots__)
    )


def row(name: str, num_requests: int, usage: Usage) -> str:
    """Return a line of the table."""
    return (
        f"| {name} | {usage.num_steps:,.0f} | {usage.wall_s:.2f} | {usage.cpu_s:.2f} | "
        f"{usage.loop_s:.2f} | {num_requests / usage.loop_s:,.0f} | "
        f"{usage.peak_mib:,.0f} |"
    )


def print_header(first: str) -> None:
    """Begin a table."""
    print(
        f"\n| {first} | steps | wall s | CPU s | loop s | requests/s | peak MiB |\n"
        "|---|---|---|---|---|---|---|"
    )


def trace_table(repeats: int) -> None:
    """The Azure conversation trace, with and without figures."""
    path = SHARED / AZURE
    if not path.exists():
        print(f"\n../shared/{AZURE} is not beside the project: no table of the trace")
        return
    print_header(f"{NUM_AZURE_REQUESTS:,} requests, medians of {repeats}")
    config = ROOT / "examples" / "azure_conv.yaml"
    for rate_scale in (1, 3):
        settings = (
            *("--set", f"workload.trace.path={path}"),
            *("--set", f"workload.trace.rate_scale={rate_scale}"),
        )
        for figures in (True, False):
            usages = [
                run_command(config, *settings, figures=figures) for _ in range(repeats)
            ]
            name = f"x{rate_scale}, {'figures' if figures else '--no-figures'}"
            print(row(name, NUM_AZURE_REQUESTS, middle(usages)), flush=True)


def growth_table(sizes: tuple[int, ...], repeats: int) -> None:
    """Synthetic requests, more and more of them."""
    print_header(f"synthetic requests, medians of {repeats}")
    usages: dict[int, Usage] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "synthetic.yaml"
        config.write_text(SYNTHETIC)
        for figures in (False, True):
            for size in sizes:
                runs = [
                    run_command(
                        config,
                        *("--set", f"workload.synthetic.num_requests={size}"),
                        figures=figures,
                    )
                    for _ in range(repeats)
                ]
                usage = middle(runs)
                if not figures:
                    usages[size] = usage
                name = f"{size:,}, {'figures' if figures else '--no-figures'}"
                print(row(name, size, usage), flush=True)
    print_growth(usages)


def print_growth(usages: dict[int, Usage]) -> None:
    """Say how far time and memory are from linear.

    Figures are per further request, between two sizes: start-up does not count.
    """
    print("\n| from | to | CPU µs a request more | MiB a million requests more |")
    print("|---|---|---|---|")
    for small, large in pairwise(sorted(usages)):
        before, after = usages[small], usages[large]
        num_more = large - small
        cpu_us = (after.cpu_s - before.cpu_s) / num_more * 1e6
        memory_mib = (after.peak_mib - before.peak_mib) / num_more * 1e6
        print(f"| {small:,} | {large:,} | {cpu_us:.1f} | {memory_mib:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the whole command.")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("trace", "growth"))
    arguments = parser.parse_args()
    if arguments.only != "growth":
        trace_table(arguments.repeats)
    if arguments.only != "trace":
        sizes = tuple(int(size) for size in arguments.sizes.split(","))
        growth_table(sizes, arguments.repeats)


if __name__ == "__main__":
    main()
