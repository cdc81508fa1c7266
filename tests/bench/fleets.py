"""Many engines behind a router beside one engine alone: rates, and how both grow.

    python -m tests.bench.fleets                                # shares of one engine's
    python -m tests.bench.fleets --requests 200000 --routers llm_d
    python -m tests.bench.fleets --growth 100000,200000,400000  # memory, and linearity

Shares are of processor time, each fleet in turn with the loop of one engine at the same
load, in one process. Growth is that of the whole command, each in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import pandas as pd

from tests.bench.loops import AZURE, ONE_STEP, REGIMES, X3, Regime, make_loop, timed
from tests.shared import ROOT, shared

ROUTERS = ("round_robin", "least_requests", "llm_d")
START = pd.Timestamp("2023-11-16")
FORMAT = "%Y-%m-%d %H:%M:%S.%f"
LOAD = 3
"""Times the trace's rate that comes to each engine."""
COMMAND = "from sim.cli.main import main; main()"


def repeated(num_requests: int, folder: Path) -> Path:
    """Write the trace again and again, end to end; return the file."""
    path = folder / f"repeated_{num_requests}.csv"
    if not path.exists():
        trace = pd.read_csv(shared(AZURE), parse_dates=["TIMESTAMP"])
        at = trace["TIMESTAMP"] - trace["TIMESTAMP"][0]
        span = at.iloc[-1] + at.iloc[-1] / (len(at) - 1)
        times = -(-num_requests // len(trace))
        copies = [trace.assign(TIMESTAMP=START + at + span * i) for i in range(times)]
        pd.concat(copies)[:num_requests].to_csv(path, index=False, date_format=FORMAT)
    return path


def settings_of(router: str, num_engines: int, path: Path) -> list[str]:
    """Return settings of so many engines, each at the load of one at `LOAD`."""
    pools = f"pools: [{{name: main, replicas: {num_engines}}}]"
    return [
        f"workload.trace.path={path}",
        f"workload.trace.rate_scale={LOAD * num_engines}",
        f"fleet={{{pools}, router: {{kind: {router}}}}}",
    ]


def regime_of(router: str, num_engines: int, path: Path, mode: str) -> Regime:
    """Return a fleet ready to be run."""
    return Regime(
        "azure_conv.yaml", AZURE, [mode, *settings_of(router, num_engines, path)]
    )


def rate_of(regime: Regime) -> float:
    """Return requests a second of processor time."""
    loop = make_loop(regime.config(), "fast")
    seconds = timed(loop.run).cpu
    num_requests = loop.outcome().num_requests
    del loop
    gc.collect()
    return num_requests / seconds


def print_shares(arguments: argparse.Namespace, folder: Path) -> None:
    """Time fleets in turn with one engine, round by round."""
    alone = REGIMES["loaded x3"]._replace(settings=(X3, arguments.mode))
    print("| router | one engine | fleet | share |\n|---|---|---|---|", flush=True)
    for router in arguments.routers:
        path = repeated(arguments.requests, folder)
        regime = regime_of(router, arguments.engines, path, arguments.mode)
        ones, fleets, shares = [], [], []
        for _ in range(arguments.rounds):
            before = rate_of(alone)
            fleet = rate_of(regime)
            one = (before + rate_of(alone)) / 2
            ones.append(one)
            fleets.append(fleet)
            shares.append(fleet / one)
        print(
            f"| {router} | {median(ones):,.0f} | {median(fleets):,.0f} | "
            f"{median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f}) |",
            flush=True,
        )


def print_growth(arguments: argparse.Namespace, folder: Path) -> None:
    """Run the whole command with more and more requests."""
    print("| router | engines | requests | CPU s | loop s | peak MiB |")
    print("|---|---|---|---|---|---|", flush=True)
    for router in arguments.routers:
        for size in map(int, arguments.growth.split(",")):
            path = repeated(size, folder)
            print(_row(router, arguments.engines, path, arguments.mode), flush=True)


def _row(router: str, num_engines: int, path: Path, mode: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results"
        settings = [
            "engine.max_num_seqs=256",
            mode,
            *settings_of(router, num_engines, path),
        ]
        command = [sys.executable, "-c", COMMAND, "run", "examples/azure_conv.yaml"]
        for each in settings:
            command += ["--set", each]
        command += ["--out", str(out), "--quiet", "--no-figures"]
        process = subprocess.Popen(command, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"exit status {process.returncode}: {' '.join(command)}")
        loop_s = json.loads((out / "run.json").read_text())["wall_seconds"]["loop"]
        completed = json.loads((out / "summary.json").read_text())["completed"]
    peak_mib = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    cpu_s = usage.ru_utime + usage.ru_stime
    return (
        f"| {router} | {num_engines} | {completed:,} | {cpu_s:.1f} | {loop_s:.1f} | "
        f"{peak_mib:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time fleets.")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--routers", type=lambda s: s.split(","), default=ROUTERS)
    parser.add_argument("--growth", help="numbers of requests, by comma")
    parser.add_argument(
        "--ahead",
        dest="mode",
        action="store_const",
        const="engine.async_scheduling=true",
        default=ONE_STEP,
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (print_growth if arguments.growth else print_shares)(arguments, Path(folder))


if __name__ == "__main__":
    main()
