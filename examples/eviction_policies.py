"""Race the eviction policies of the prefix cache, and write docs/policies.md's tables.

    .venv/bin/python examples/eviction_policies.py --trace mooncake_conversation.jsonl

serves every workload below once with each policy and size of the cache, step by step
on one core (about a quarter of an hour), keeps what came out in results/eviction, where
the next call finds it, and puts the tables between the markers of `## Eviction`. A
workload of which nothing is kept there has its tables left as they are.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from cache.v1.policies import CACHE_POLICIES
from sim.config.tables import load_config
from sim.simulation.run import Simulation

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "policies.md"
BEGIN = "<!-- begin: examples/eviction_policies.py -->"
END = "<!-- end: examples/eviction_policies.py -->"
WINDOW_S = 120.0
NUM_RESAMPLES = 2000
SEED = 20231116


@dataclass(frozen=True)
class Race:
    """A workload, and the pools in which the policies meet.

    Parameters
    ----------
    name, title
        Of the files, and of the page.
    config
        Configuration beside this file.
    overrides
        What is changed in it.
    sizes
        Blocks of the pool, and what that is.
    """

    name: str
    title: str
    config: str
    overrides: tuple[str, ...]
    sizes: dict[int, str]


RACES = (
    Race(
        "mooncake",
        "Mooncake conversation trace, its first 4,000 requests at 0.4 times their "
        "rate, Llama-3.1-8B on an H200, blocks of 64 tokens",
        "mooncake_conversation.yaml",
        ("workload.trace.limit=4000", "engine.block_size=64"),
        {13_800: "0.9 of an H200", 55_000: "4 x", 166_000: "12 x"},
    ),
    Race(
        "agents",
        "Coding agents (examples/agents.yaml), Llama-3.1-8B on an H200, blocks of 64 "
        "tokens",
        "agents.yaml",
        ("engine.block_size=64",),
        {4_849: "0.4 of an H200"},
    ),
    Race(
        "chats",
        "Chats of 130 users (examples/chat_sessions.yaml, a closed loop), Qwen3-32B on "
        "an H200, blocks of 16 tokens",
        "chat_sessions.yaml",
        (),
        {15_446: "0.9 of an H200"},
    ),
)


def served(race: Race, num_blocks: int, policy: str, trace: str | None) -> pd.DataFrame:
    """Return the requests of a run, and the processor seconds of its loop."""
    overrides = [
        *race.overrides,
        "engine.async_scheduling=false",
        "cost.schedule_request_s=0.0",  # policies alone are compared
        f"engine.num_gpu_blocks_override={num_blocks}",
        f"engine.evictor={policy}",
    ]
    if trace is not None and race.name == "mooncake":
        overrides.append(f"workload.trace.path={trace}")
    simulation = Simulation(load_config(HERE / race.config, overrides), stepwise=True)
    before_s = time.process_time()
    results = simulation.run()
    cpu_s = time.process_time() - before_s
    columns = ["arrival_s", "num_prompt_tokens", "num_cached_tokens", "ttft_s"]
    # In a closed loop the order of arrivals is each run's own.
    requests = results.requests.sort_values("parent_id", ignore_index=True)
    return requests[columns].assign(cpu_s=cpu_s)


def kept(folder: Path, race: Race, num_blocks: int, policy: str) -> Path:
    """Return where the requests of a run lie."""
    return folder / f"{race.name}_{num_blocks}_{policy}.parquet"


def by_window(requests: pd.DataFrame) -> np.ndarray:
    """Return sums by window of arrival: cached and prompt tokens, TTFT and requests."""
    window = (requests["arrival_s"] // WINDOW_S).astype(int)
    sums = requests.assign(num=1).groupby(window)[
        ["num_cached_tokens", "num_prompt_tokens", "ttft_s", "num"]
    ]
    return sums.sum().to_numpy(dtype=float)


def rates(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return hit rate and mean TTFT in s of sums over windows."""
    return sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]


def row(policy: str, requests: pd.DataFrame, lru: pd.DataFrame) -> str:
    """Return a line of a table: what the policy does, and by how much it differs."""
    rng = np.random.default_rng(SEED)
    requests = requests.assign(arrival_s=lru["arrival_s"])
    ours, base = by_window(requests), by_window(lru)
    hit, ttft = rates(ours.sum(0))
    cost = requests["cpu_s"].iloc[0] / lru["cpu_s"].iloc[0]
    cells = [f"`{policy}`", f"{100 * hit:.2f}", "", f"{1000 * ttft:,.0f}", "", "1.0"]
    if policy != "lru":
        picks = rng.integers(len(ours), size=(NUM_RESAMPLES, len(ours)))
        hits, ttfts = rates(ours[picks].sum(1))
        base_hits, base_ttfts = rates(base[picks].sum(1))
        base_hit, base_ttft = rates(base.sum(0))
        cells[2] = span(100 * (hit - base_hit), 100 * (hits - base_hits), ".2f")
        change = 100 * (ttft / base_ttft - 1)
        cells[4] = span(change, 100 * (ttfts / base_ttfts - 1), ".1f")
        cells[5] = f"{cost:.1f}"
    return "| " + " | ".join(cells) + " |"


def span(value: float, resampled: np.ndarray, digits: str) -> str:
    """Return a value with the interval that holds 95 % of its resamples."""
    low, high = np.percentile(resampled, [2.5, 97.5])
    return f"{value:+{digits}} ({low:+{digits}} to {high:+{digits}})"


def table(race: Race, folder: Path) -> list[str]:
    """Return the tables of a race, a size each, of the runs that are there."""
    lines: list[str] = []
    for num_blocks, size in race.sizes.items():
        paths = {p: kept(folder, race, num_blocks, p) for p in CACHE_POLICIES}
        runs = {p: pd.read_parquet(path) for p, path in paths.items() if path.exists()}
        if "lru" not in runs:
            continue
        lines += [
            f"**{num_blocks:,} blocks ({size})**",
            "",
            "| policy | hit rate % | against lru, points | mean TTFT ms "
            "| against lru, % | time |",
            "|---|---|---|---|---|---|",
            *(row(policy, run, runs["lru"]) for policy, run in runs.items()),
            "",
        ]
    return [f"### {race.title}", "", *lines] if lines else []


def page_with(page: str, tables: dict[str, list[str]]) -> str:
    """Return the page with tables by title; those without lines stay as they are."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    for title, lines in tables.items():
        stands = old.partition(f"### {title}\n")[2].partition("\n### ")[0].strip("\n")
        if not lines and stands:
            tables[title] = [f"### {title}", "", stands, ""]
    lines = [line for table in tables.values() for line in table]
    return "\n".join([before + BEGIN, "", *lines, END]) + after


def main() -> None:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="the Mooncake conversation trace")
    parser.add_argument("--keep", type=Path, default=Path("results/eviction"))
    names = [race.name for race in RACES]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    given = parser.parse_args()
    given.keep.mkdir(parents=True, exist_ok=True)
    for race in RACES:
        for num_blocks in race.sizes if race.name in given.only else ():
            for policy in CACHE_POLICIES:
                path = kept(given.keep, race, num_blocks, policy)
                if not path.exists():
                    requests = served(race, num_blocks, policy, given.trace)
                    requests.to_parquet(path)
                    print(path.name, f"{requests['cpu_s'].iloc[0]:.1f} s", flush=True)
    tables = {race.title: table(race, given.keep) for race in RACES}
    PAGE.write_text(page_with(PAGE.read_text(), tables))


if __name__ == "__main__":
    main()
