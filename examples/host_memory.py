"""Run traffic with several sizes of host memory; make the README's table and figure.

    .venv/bin/python examples/host_memory.py --trace MOONCAKE_JSONL --figure FILE.png

runs Mooncake's conversations on an H200 with each size of host memory at several rates
(some minutes), prints the table, and draws hits, and first tokens by arrivals.

    .venv/bin/python examples/host_memory.py --agents TESTER_JSONL_GZ --figure FILE.png

does so with coding agents of kv-cache-tester's recordings, by how many are at work.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from sim.config.tables import load_config, parse_config
from sim.simulation.run import Simulation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.config.tables import RunConfig

HERE = Path(__file__).parent
SIZES = (0, 64, 256, 1024)
RATES = (0.4, 0.5, 0.6)
SHOWN, ALL_WAIT = 0.5, 0.8
COLORS = ("#e69f00", "#888888", "#009e73", "#0072b2")
NUM_AGENTS = (8, 16, 32, 64)
LARGE = 1024

Row = dict[str, Any]


def runs(trace: Path) -> Iterator[Row]:
    """Yield what came of each size at each rate of the recorded one."""
    for rate in (*RATES, ALL_WAIT):
        for gib in SIZES:
            settings = [
                f"workload.trace.path={trace}",
                f"workload.trace.rate_scale={rate}",
                "cost_intervals=false",
            ]
            settings += [f"engine.kv_offloading_size={gib}"] if gib else []
            config = load_config(HERE / "mooncake_conversation.yaml", settings)
            yield {"gib": gib, "rate": rate, **found(config)}


def agent_runs(trace: Path) -> Iterator[Row]:
    """Yield what came of so many agents at work, without host memory and with it."""
    recorded = {"kind": "kv_cache_tester", "path": str(trace), "num_sessions": 128}
    engine = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h200_sxm"}
    for num_agents in NUM_AGENTS:
        for gib in (0, LARGE):
            config = {
                "workload": {
                    "trace": {**recorded, "max_context_tokens": 131_072},
                    "max_concurrent_users": num_agents,
                },
                "engine": {**engine, **({"kv_offloading_size": gib} if gib else {})},
                "cost_intervals": False,
            }
            yield {"gib": gib, "agents": num_agents, **found(parse_config(config))}


def found(config: RunConfig) -> Row:
    """Run, and return the shares of prompt tokens that were found, and first tokens."""
    told = Simulation(config).run().summary
    num_tokens = told["prefix_cache_queries"]
    return {
        "hits": told["prefix_cache_hits"] / num_tokens,
        "loaded": told.get("external_prefix_cache_hits", 0) / num_tokens,
        "ttft_s": told["mean_ttft_ms"] / 1e3,
        "p50_ttft_s": told["p50_ttft_ms"] / 1e3,
        "p90_ttft_s": told["p90_ttft_ms"] / 1e3,
        "throughput": told["request_throughput"],
    }


def table(rows: Sequence[Row]) -> str:
    """Return the README's table."""
    by = {(row["gib"], row["rate"]): row for row in rows}
    lines = [
        "| host memory | hits, GPU and host | mean TTFT, p90 | requests/s at most |",
        "|---|---|---|---|",
    ]
    for gib in SIZES:
        row, most = by[gib, SHOWN], by[gib, ALL_WAIT]["throughput"]
        name = f"{gib:,} GiB" if gib else "none"
        hits = f"{row['hits']:.1%} + {row['loaded']:.1%}".replace("%", " %")
        ttft = f"{row['ttft_s']:.1f}, {row['p90_ttft_s']:.1f} s"
        lines.append(f"| {name} | {hits} | {ttft} | {most:.2f} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw hits by size, and the mean TTFT by arrivals."""
    mpl.use("agg")
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    names = [f"{gib:,} GiB" if gib else "none" for gib in SIZES]
    at = {row["gib"]: row for row in rows if row["rate"] == SHOWN}
    local = [100 * at[gib]["hits"] for gib in SIZES]
    loaded = [100 * at[gib]["loaded"] for gib in SIZES]
    left.bar(names, local, color="#56b4e9", label="found on the GPU")
    left.bar(names, loaded, bottom=local, color="#0072b2", label="loaded from the host")
    left.set_ylabel("share of prompt tokens (%)")
    left.set_xlabel("host memory")
    for gib, name, color in zip(SIZES, names, COLORS, strict=True):
        own = [row for row in rows if row["gib"] == gib and row["rate"] in RATES]
        offered = [RECORDED_PER_S * row["rate"] for row in own]
        ttft_s = [row["ttft_s"] for row in own]
        right.plot(offered, ttft_s, "o-", color=color, label=name)
    right.set_yscale("log")
    right.set_xlabel("requests/s that arrive")
    right.set_ylabel("mean TTFT (s)")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    plt.savefig(path, dpi=110)


def agent_table(rows: Sequence[Row]) -> str:
    """Return the table of agents."""
    by = {(row["agents"], row["gib"]): row for row in rows}
    lines = [
        "| agents | hits, GPU | TTFT p50, p90 "
        "| with 1 TiB: GPU, host | TTFT p50, p90 |",
        "|---|---|---|---|---|",
    ]
    for num_agents in NUM_AGENTS:
        none, large = by[num_agents, 0], by[num_agents, LARGE]
        lines.append(
            f"| {num_agents} | {100 * none['hits']:.0f} % "
            f"| {of_two(none)} "
            f"| {100 * large['hits']:.0f}, {100 * large['loaded']:.0f} % "
            f"| {of_two(large)} |"
        )
    return "\n".join(lines)


def of_two(row: Row) -> str:
    """Return the median and the 90th percentile of first tokens, to two digits."""
    values = row["p50_ttft_s"], row["p90_ttft_s"]
    digits = [2 if each < 1 else 1 if each < 10 else 0 for each in values]
    median, p90 = (f"{v:.{d}f}" for v, d in zip(values, digits, strict=True))
    return f"{median}, {p90} s"


def draw_agents(rows: Sequence[Row], path: Path) -> None:
    """Draw hits, and first tokens, by the number of agents at work."""
    mpl.use("agg")
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    own, more = ([row for row in rows if row["gib"] == gib] for gib in (0, LARGE))
    for bars, aside, color, name in (
        (own, -0.2, "#bbbbbb", "no host memory"),
        (more, 0.2, "#56b4e9", "1 TiB"),
    ):
        at = [place + aside for place in range(len(bars))]
        hits = [100 * row["hits"] for row in bars]
        left.bar(at, hits, 0.38, color=color, label=f"found on the GPU, {name}")
        if any(row["loaded"] for row in bars):
            loaded = [100 * row["loaded"] for row in bars]
            label = f"loaded from the host, {name}"
            left.bar(at, loaded, 0.38, bottom=hits, color="#0072b2", label=label)
    left.set_xticks(range(len(NUM_AGENTS)), map(str, NUM_AGENTS))
    left.set_ylim(0, 135)
    left.set_yticks(range(0, 101, 20))
    left.set_ylabel("share of prompt tokens (%)")
    for line, color, name in ((own, "#e69f00", "none"), (more, "#0072b2", "1 TiB")):
        for key, style, of in (("p50", "-", "median"), ("p90", "--", "p90")):
            ttft_s = [row[f"{key}_ttft_s"] for row in line]
            label = f"{name}, {of}"
            right.plot(NUM_AGENTS, ttft_s, f"o{style}", color=color, label=label)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(NUM_AGENTS, map(str, NUM_AGENTS))
    right.set_ylabel("TTFT (s)")
    for axes in (left, right):
        axes.set_xlabel("agents at work")
        axes.legend(frameon=False, fontsize="small", loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    plt.savefig(path, dpi=110)


RECORDED_PER_S = 12_031 / 3_537.0
"""Requests/s of the trace as it was recorded."""


def main() -> None:
    parser = argparse.ArgumentParser(description="What host memory is worth.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--trace", type=Path)
    which.add_argument("--agents", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--rows", type=Path, help="keep what was run in a file")
    given = parser.parse_args()
    if given.rows is not None and given.rows.exists():
        rows = json.loads(given.rows.read_text(encoding="utf-8"))
    else:
        rows = list(runs(given.trace) if given.trace else agent_runs(given.agents))
        if given.rows is not None:
            given.rows.write_text(json.dumps(rows), encoding="utf-8")
    print(table(rows) if given.trace else agent_table(rows))
    if given.figure is not None:
        (draw if given.trace else draw_agents)(rows, given.figure)


if __name__ == "__main__":
    main()
