"""Prefillers and decoders against logs of vLLM's own schedulers (promise 2)."""

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

FOLDER = Path(__file__).parent / "v1_pools"
ENDING = ".workload.json"
NAMES = sorted(path.name.removesuffix(ENDING) for path in FOLDER.glob(f"*{ENDING}"))


@pytest.mark.parametrize("name", NAMES)
def test_decisions_equal_the_real_engines(name: str, tmp_path: Path) -> None:
    golden, ours = FOLDER / f"{name}.golden.jsonl.gz", tmp_path / "ours.jsonl.gz"
    driver = driver_of(load_workload(FOLDER / f"{name}{ENDING}"), check=True)
    write_log(driver.lines(), ours)
    difference = first_difference(read_log(golden), read_log(ours))
    assert difference is None, difference.in_words(("real engine", "kvsim"))


def test_the_logs_meet_the_rules_of_pools() -> None:
    coverage = Coverage()
    for name in NAMES:
        lines = list(read_log(FOLDER / f"{name}.golden.jsonl.gz"))
        workload = load_workload(FOLDER / f"{name}{ENDING}")
        coverage.add(workload, Comparison(None, lines))
    met = coverage.workloads_with
    missing = {
        *("several prefillers", "several decoders", "heartbeats to several"),
        *("leases that end while another decoder pulls", "prompts of decoders"),
        *("preemptions beside pulls", "aborts beside pulls", "failed pulls"),
        *("prefix hits", "wasted tokens", "groups of windows", "junctions"),
        *("groups of chunked attention", "blocks of several sizes"),
        *("stale tokens", "accepted drafts", "padded admissions"),
        *("loads", "stores", "evicted chunks", "refused stores", "failed loads"),
        *("groups of states", "hits inside blocks", "copied blocks"),
    } - (+met).keys()
    assert not missing
