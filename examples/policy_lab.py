"""The policy lab: what victims and admission rules cost and gain, with intervals.

    .venv/bin/python examples/policy_lab.py --trace AZURE_CSV --write docs/policies.md

runs every policy on the same traffic (some ten minutes), and prints a table for each
kind of traffic. ``--write`` puts them between the markers of a page as well; ``--only``
picks tables by the beginning of their names. Samples are seeds, or parts of a trace;
policies are compared sample by sample, so that what differs is the policy.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import t as student

from sim.config.tables import load_config
from sim.simulation.run import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

HERE = Path(__file__).parent
DEFAULT = "the engine's own"

VICTIMS: Mapping[str, str] = {
    DEFAULT: "",
    "least_progress": "preemption_victim=least_progress",
    "most_blocks": "preemption_victim=most_blocks",
    "cheapest_to_recompute": "preemption_victim=cheapest_to_recompute",
}
ADMISSION: Mapping[str, str] = {
    DEFAULT: "",
    "no full_prompt": "scheduler_reserve_full_isl=false",
    "watermark, 1 %": "admission={kind: watermark, share: 0.01}",
    "watermark, 5 %": "admission={kind: watermark, share: 0.05}",
    "conservative": "admission=conservative",
    "conservative, 0.5": "admission={kind: conservative, conservativeness: 0.5}",
    "past_future": "admission=past_future",
}

TIERS: Mapping[str, str] = {
    name: "kv_transfer_config={kv_connector_extra_config: "
    f"{{offload_prompt_only: false, eviction_policy: {policy}}}}}"
    for name, policy in (
        (DEFAULT, "lru"),
        ("arc", "arc"),
        ("pin_shared", "pin_shared"),
        ("session_end", "session_end"),
        ("next_use", "next_use"),
    )
}


@dataclass(frozen=True)
class Column:
    """A number of the summary: its heading, key, unit, digits, and how it compares."""

    heading: str
    key: str
    unit: float = 1.0
    digits: int = 0
    by_ratio: bool = True

    def of(self, summary: Mapping[str, Any]) -> float:
        """Return the number of a run."""
        return float(summary[self.key]) / self.unit


COLUMNS = (
    Column("preemptions", "num_preemptions", by_ratio=False),
    Column("recomputed, k tokens", "recomputed_tokens", 1e3, 0, by_ratio=False),
    Column("TTFT mean, s", "mean_ttft_ms", 1e3, 2),
    Column("TTFT p99, s", "p99_ttft_ms", 1e3, 2),
    Column("TPOT mean, ms", "mean_tpot_ms", 1, 1),
    Column("E2E mean, s", "mean_e2el_ms", 1e3, 2),
    Column("E2E p99, s", "p99_e2el_ms", 1e3, 1),
    Column("output tokens/s", "output_throughput"),
)
TIER_COLUMNS = (
    Column("found, % of prompt tokens", "found_percent", 1, 1, by_ratio=False),
    Column("loaded, GB", "loaded_bytes", 1e9, 0, by_ratio=False),
    Column("stored, GB", "stored_bytes", 1e9, 0, by_ratio=False),
    Column("TTFT mean, s", "mean_ttft_ms", 1e3, 2),
    Column("TTFT p99, s", "p99_ttft_ms", 1e3, 2),
    Column("E2E mean, s", "mean_e2el_ms", 1e3, 2),
    Column("output tokens/s", "output_throughput"),
)
CLASS_COLUMNS = tuple(
    Column(
        f"{statistic} of {name}, {unit}",
        f"{name}_{key}",
        1e3 if unit == "s" else 1,
        2 if unit == "s" else 1,
    )
    for name in ("gold", "bronze")
    for statistic, key, unit in (
        ("TPOT mean", "mean_tpot_ms", "ms"),
        ("E2E mean", "mean_e2el_ms", "s"),
        ("E2E p99", "p99_e2el_ms", "s"),
    )
)


@dataclass(frozen=True)
class Traffic:
    """A configuration under pressure, and the samples of it."""

    name: str
    config: str
    overrides: tuple[str, ...]
    samples: tuple[str, ...]


def traffics(trace: Path) -> dict[str, Traffic]:
    """Return the kinds of traffic by the names of their tables."""
    seeds = tuple(f"seed={seed}" for seed in range(5))
    parts = tuple(
        f"workload.trace.window=[{start}, {start + 580}]"
        for start in range(0, 3480, 580)
    )
    demo = ("workload.preset.rate_scale=1.2", "workload.preset.duration_s=900")
    classes = (
        "workload.slo_class={gold: 0.3, bronze: 0.7}",
        "workload.priority={gold: 0, bronze: 1}",
    )
    chats = (
        "workload.max_concurrent_users=220",
        "workload.sessions.num_sessions=350",
    )
    return {
        "demo": Traffic("demo", "demo.yaml", demo, seeds),
        "azure": Traffic(
            "azure",
            "azure_conv_pressure.yaml",
            (f"workload.trace.path={trace}",),
            parts,
        ),
        "chats": Traffic("chats", "chat_sessions.yaml", chats, seeds),
        "classes": Traffic("classes", "demo.yaml", demo + classes, seeds),
        "tiers": Traffic(
            "tiers",
            "chat_offloading.yaml",
            (
                "engine.kv_offloading_size=40",
                "engine.num_gpu_blocks_override=6000",
                "workload.sessions.num_sessions=150",
            ),
            seeds[:3],
        ),
    }


# -- runs -------------------------------------------------------------------------


def run(traffic: Traffic, sample: str, policy: str) -> dict[str, float]:
    """Simulate a sample under a policy; return its summary and processor time."""
    overrides = [*traffic.overrides, sample, "engine.async_scheduling=false"]
    if policy:
        overrides.append(f"engine.{policy}")
    simulation = Simulation(load_config(HERE / traffic.config, overrides))
    start_s = time.process_time()
    summary: dict[str, Any] = dict(simulation.run().summary)
    summary["cpu_s"] = time.process_time() - start_s
    if (loaded := summary.get("external_prefix_cache_hits")) is not None:
        found = summary["prefix_cache_hits"] + loaded
        summary["found_percent"] = 100 * found / summary["prefix_cache_queries"]
    for name, numbers in summary.get("by_slo_class", {}).items():
        summary |= {f"{name}_{key}": value for key, value in numbers.items()}
    return summary


def runs(traffic: Traffic, policies: Mapping[str, str]) -> dict[str, list[Any]]:
    """Simulate every sample under every policy."""
    found = {}
    for name, policy in policies.items():
        found[name] = [run(traffic, sample, policy) for sample in traffic.samples]
        print(f"{traffic.name}: {name} done", flush=True)
    return found


# -- tables -----------------------------------------------------------------------


def cell(column: Column, own: list[Any], default: list[Any]) -> str:
    """Return a mean, and the 95 % interval of how it compares with the default's.

    Counts by their difference. Times and rates by their ratio, whose logarithm is
    averaged: queues make some samples many times slower than others.
    """
    values = np.array([column.of(summary) for summary in own])
    theirs = np.array([column.of(summary) for summary in default])
    shown = f"{values.mean():,.{column.digits}f}"
    if own is default:
        return shown
    if (values == theirs).all():
        return f"{shown} (same)"
    if column.by_ratio:
        low, high = np.exp(interval(np.log(values / theirs)))
        return f"{shown} (x {low:.2f} to {high:.2f})"
    low, high = interval(values - theirs)
    return f"{shown} ({low:+,.{column.digits}f} to {high:+,.{column.digits}f})"


def interval(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ends of Student's 95 % interval of a mean."""
    half = student.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps))
    return np.array([gaps.mean() - half, gaps.mean() + half])


def cpu_cell(own: list[Any], default: list[Any]) -> str:
    """Return the median ratio of processor times."""
    pairs = zip(own, default, strict=True)
    return (
        f"{np.median([mine['cpu_s'] / theirs['cpu_s'] for mine, theirs in pairs]):.1f}"
    )


def table(found: Mapping[str, list[Any]], columns: Iterable[Column]) -> str:
    """Return the table of some runs in Markdown."""
    columns = list(columns)
    default = found[DEFAULT]
    head = ["policy", *(column.heading for column in columns), "processor time, x"]
    rows = [
        [name]
        + [cell(column, own, default) for column in columns]
        + [cpu_cell(own, default)]
        for name, own in found.items()
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def victims_table(traffic: Traffic) -> str:
    """Return what victims cost and gain."""
    return table(runs(traffic, VICTIMS), COLUMNS)


def classes_table(traffic: Traffic) -> str:
    """Return what victims do to two classes of requests."""
    policies = {
        DEFAULT: "",
        "lowest_priority": "preemption_victim=lowest_priority",
        "a priority queue": "scheduling_policy=priority",
    }
    return table(runs(traffic, policies), CLASS_COLUMNS)


def tiers_table(traffic: Traffic) -> str:
    """Return what a tier's policies find and cost."""
    return table(runs(traffic, TIERS), TIER_COLUMNS)


def admission_table(traffic: Traffic) -> str:
    """Return what admission rules cost and gain."""
    return table(runs(traffic, ADMISSION), COLUMNS)


def tables(trace: Path) -> dict[str, Callable[[], str]]:
    """Return what makes each table, by its name."""
    traffic = traffics(trace)
    made: dict[str, Callable[[], str]] = {}
    for name in ("demo", "azure", "chats"):
        made[f"victims {name}"] = partial(victims_table, traffic[name])
        made[f"admission {name}"] = partial(admission_table, traffic[name])
    made["tiers"] = partial(tiers_table, traffic["tiers"])
    made["victims classes"] = partial(classes_table, traffic["classes"])
    return made


def written(page: str, name: str, text: str) -> str:
    """Return a page with a table between its markers.

    Raises
    ------
    SystemExit
        If the page has no such markers.
    """
    begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    if not re.search(pattern, page, re.DOTALL):
        raise SystemExit(f"the page has no markers '{begin.strip()}' and '{end}'")
    return re.sub(pattern, lambda _: f"{begin}{text}\n{end}", page, flags=re.DOTALL)


def main() -> None:
    """Run the lab."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--trace", type=Path, default=Path("traces/azure_llm_2023_conv.csv")
    )
    parser.add_argument("--write", type=Path, help="a page with markers for the tables")
    parser.add_argument("--only", default="", help="the beginning of tables' names")
    given = parser.parse_args()
    for name, make in tables(given.trace).items():
        if not name.startswith(given.only):
            continue
        text = make()
        print(f"\n{name}\n\n{text}\n", flush=True)
        if given.write:
            page = given.write.read_text(encoding="utf-8")
            given.write.write_text(written(page, name, text), encoding="utf-8")


if __name__ == "__main__":
    main()
