"""Engines with connectors against logs of vLLM's own schedulers (promise 2).

In `v1_pools` prefillers and decoders, in `v1_tiers` CPU tiers of several groups.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.studies.conformance import (
    driver_of,
    first_difference,
    load_workload,
    read_log,
    write_log,
)
from sim.studies.conformance.conform import Comparison, Coverage

HERE = Path(__file__).parent
ENDING = ".workload.json"
NAMES = {
    folder: sorted(
        f"{folder}/{path.name.removesuffix(ENDING)}"
        for path in (HERE / folder).glob(f"*{ENDING}")
    )
    for folder in ("v1_pools", "v1_tiers")
}


@pytest.mark.parametrize("name", [each for names in NAMES.values() for each in names])
def test_decisions_equal_the_real_engines(name: str, tmp_path: Path) -> None:
    golden, ours = HERE / f"{name}.golden.jsonl.gz", tmp_path / "ours.jsonl.gz"
    driver = driver_of(load_workload(HERE / f"{name}{ENDING}"), check=True)
    write_log(driver.lines(), ours)
    difference = first_difference(read_log(golden), read_log(ours))
    assert difference is None, difference.in_words(("real engine", "kvsim"))


def rules_met(folder: str) -> set[str]:
    coverage = Coverage()
    for name in NAMES[folder]:
        lines = list(read_log(HERE / f"{name}.golden.jsonl.gz"))
        workload = load_workload(HERE / f"{name}{ENDING}")
        coverage.add(workload, Comparison(None, lines))
    return {*(+coverage.workloads_with)}


def test_the_logs_meet_the_rules_of_tiers_with_groups() -> None:
    missing = {
        *("loads", "loads in the step", "stores", "evicted chunks", "refused stores"),
        *("flushes", "preemptions", "aborts", "junctions", "wasted tokens"),
        *("groups of windows", "groups of chunked attention", "several groups"),
        "blocks of several sizes",
    } - rules_met("v1_tiers")
    assert not missing


def test_the_logs_meet_the_rules_of_pools() -> None:
    missing = {
        *("several prefillers", "several decoders", "heartbeats to several"),
        *("leases that end while another decoder pulls", "prompts of decoders"),
        *("preemptions beside pulls", "aborts beside pulls", "failed pulls"),
        *("prefix hits", "wasted tokens", "groups of windows", "junctions"),
        *("groups of chunked attention", "blocks of several sizes"),
        *("stale tokens", "accepted drafts", "padded admissions"),
        *("loads", "stores", "evicted chunks", "refused stores", "failed loads"),
        *("groups of states", "hits inside blocks", "copied blocks"),
    } - rules_met("v1_pools")
    assert not missing
