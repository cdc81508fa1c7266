"""Run traffic with several sizes of host memory; make the README's table and figure.

    .venv/bin/python examples/host_memory.py --trace MOONCAKE_JSONL --figure FILE.png

runs Mooncake's conversations on an H200 with each size of host memory at several rates
(some minutes), prints the table, and draws hits, and first tokens by arrivals.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from sim.config.tables import load_config
from sim.simulation.run import Simulation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).parent
SIZES = (0, 64, 256, 1024)
RATES = (0.4, 0.5, 0.6)
SHOWN, ALL_WAIT = 0.5, 0.8
COLORS = ("#e69f00", "#888888", "#009e73", "#0072b2")

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
            told = Simulation(config).run().summary
            num_tokens = told["prefix_cache_queries"]
            yield {
                "gib": gib,
                "rate": rate,
                "hits": told["prefix_cache_hits"] / num_tokens,
                "loaded": told.get("external_prefix_cache_hits", 0) / num_tokens,
                "ttft_s": told["mean_ttft_ms"] / 1e3,
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


RECORDED_PER_S = 12_031 / 3_537.0
"""Requests/s of the trace as it was recorded."""


def main() -> None:
    parser = argparse.ArgumentParser(description="What host memory is worth.")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--rows", type=Path, help="keep what was run in a file")
    given = parser.parse_args()
    if given.rows is not None and given.rows.exists():
        rows = json.loads(given.rows.read_text(encoding="utf-8"))
    else:
        rows = list(runs(given.trace))
        if given.rows is not None:
            given.rows.write_text(json.dumps(rows), encoding="utf-8")
    print(table(rows))
    if given.figure is not None:
        draw(rows, given.figure)


if __name__ == "__main__":
    main()
