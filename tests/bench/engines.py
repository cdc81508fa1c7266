"""Processor time of a request behind each router, with few engines and with many.

    python -m tests.bench.engines                       # 64 and 256, 400 requests each
    python -m tests.bench.engines --engines 8,64 --each 1600 --routers llm_d

Needs no trace: arrivals and lengths are drawn from the bundled preset of the Azure
conversation trace, at three times its rate an engine, one step at a time. Every run is
a process of its own, and sizes take turns; least processor times, in microseconds a
request: of the loop, and with the tables made. Rounds end when `--seconds` are over,
but for the first.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
from multiprocessing import get_context
from time import perf_counter
from typing import NamedTuple

from sim.config.tables import load_config
from tests.bench.fleets import LOAD, ROUTERS
from tests.bench.loops import MAX_NUM_SEQS, ONE_STEP, make_loop, timed
from tests.shared import ROOT


class Cost(NamedTuple):
    """Processor time a request, in microseconds."""

    loop: float
    tables: float


def cost_of(run: tuple[str, int, int]) -> Cost:
    """Run a router's engines with so many requests each, on average."""
    router, num_engines, each = run
    pools = f"pools: [{{name: main, replicas: {num_engines}}}]"
    preset = f"{{name: azure_conv_2023, num_requests: {num_engines * each}"
    config = load_config(
        ROOT / "examples" / "azure_conv.yaml",
        [
            "workload.trace=null",
            f"workload.preset={preset}, rate_scale: {LOAD * num_engines}}}",
            f"engine.max_num_seqs={MAX_NUM_SEQS}",
            f"fleet={{{pools}, router: {{kind: {router}}}}}",
            ONE_STEP,
        ],
    )
    loop = make_loop(config, "fast")
    parts = [timed(call).cpu * 1e6 / (num_engines * each) for call in loop]
    return Cost(parts[0], sum(parts))


def processor() -> str:
    """Return the name of the processor, if the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line for line in lines if line.startswith("model name")]
        return names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return platform.processor()


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time few engines beside many.")
    parser.add_argument("--engines", type=numbers, default=[64, 256])
    parser.add_argument("--each", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--routers", type=lambda s: s.split(","), default=ROUTERS)
    arguments = parser.parse_args()
    until_s = perf_counter() + arguments.seconds
    runs = [
        (router, num_engines, arguments.each)
        for router in arguments.routers
        for num_engines in arguments.engines
    ]
    found: dict[tuple[str, int, int], list[Cost]] = {run: [] for run in runs}
    wall_s = dict.fromkeys(runs, 0.0)
    gc.freeze()
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for number in range(arguments.rounds):
            for run in runs if number % 2 == 0 else runs[::-1]:
                begin_s = perf_counter()
                if number and begin_s + wall_s[run] > until_s:
                    continue
                found[run].append(pool.apply(cost_of, (run,)))
                wall_s[run] = perf_counter() - begin_s
    print(f"{processor()}, Python {platform.python_version()}, {sys.platform}")
    print(f"{arguments.each} requests an engine, us a request: loop, with tables")
    print("| router | engines | rounds | loop | times | with tables | times |")
    print("|---|---|---|---|---|---|---|")
    for router in arguments.routers:
        first = None
        for num_engines in arguments.engines:
            costs = found[router, num_engines, arguments.each]
            least = Cost(*map(min, zip(*costs, strict=True)))
            first = first or least
            print(
                f"| {router} | {num_engines} | {len(costs)} | {least.loop:.1f} | "
                f"{least.loop / first.loop:.2f} | {least.tables:.1f} | "
                f"{least.tables / first.tables:.2f} |"
            )


if __name__ == "__main__":
    main()
