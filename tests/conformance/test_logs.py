"""Our decisions against the logs that the real engines wrote (promise 2).

Every field of every step, byte for byte: no tolerance and no exclusions.
"""

from __future__ import annotations

import gzip
import json
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from sim.errors import UserError
from sim.studies.conformance import (
    DecisionDriver,
    driver_of,
    first_difference,
    load_workload,
    read_log,
    write_log,
)
from tests.shared import SHARED, shared

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FOLDERS = (
    "cacheflow",
    "old",
    "sglang",
    "v0",
    "v1",
    "v1_33",
    "v1_async",
    "v1_hybrid",
    "v1_offload",
    "v1_pd",
    "v1_spec",
)
ENDING = ".workload.json"
NAMES = [
    f"{folder}/{path.name.removesuffix(ENDING)}"
    for folder in FOLDERS
    for path in sorted((SHARED / "conformance" / folder).glob(f"*{ENDING}"))
]


PROVED = (
    "pressure",
    "swap",
    "evict",
    "partial",
    "checkpoint",
    "small_chunk",
    "fail_recompute",
    "preempt_flush",
    "sync_load",
    "pd_aborts",
    "pd_reserve",
)
"""Names of logs after each call of which all invariants are checked besides."""
PROVE_EVERY = 7
"""Of so many calls one is followed by a proof where slow tests are left out.

It is odd, since calls to schedule and to update follow one another.
"""


def one_in(number: int, check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a check that is left out but for the first of so many calls."""
    calls = count()

    def sometimes(scheduler: Any) -> None:
        if next(calls) % number == 0:
            check(scheduler)

    return sometimes


@pytest.mark.parametrize("name", NAMES or ["cacheflow/light"])
def test_decisions_equal_the_real_engines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_quick: bool
) -> None:
    workload = load_workload(shared(f"conformance/{name}{ENDING}"))
    golden = shared(f"conformance/{name}.golden.jsonl.gz")
    ours = tmp_path / "ours.jsonl.gz"
    driver = driver_of(workload, check=any(each in name for each in PROVED))
    if is_quick:
        scheduler: Any = type(driver.scheduler)
        check = one_in(PROVE_EVERY, scheduler.check)
        monkeypatch.setattr(scheduler, "check", check)
    write_log(driver.lines(), ours)
    with gzip.open(golden) as theirs, gzip.open(ours) as mine:
        if mine.read() == theirs.read():
            return
    difference = first_difference(read_log(golden), read_log(ours))
    assert difference is not None, "the same decisions in other bytes"
    raise AssertionError(difference.in_words(("real engine", "kvsim")))


OLDER = {
    "0.30.0": ("gptoss_priority_a", "three_windows_a", "llama4_small_chunk_a"),
    "0.31.0": ("gemma3_small_window_a", "gptoss_evict_a"),
    "0.32.0": ("aborts_a", "two_page_sizes_a"),
}
"""Releases whose own schedulers wrote these logs of 0.33 again."""


@pytest.mark.parametrize(
    ("release", "name"), [(each, name) for each in OLDER for name in OLDER[each]]
)
def test_older_releases_decide_the_same(release: str, name: str) -> None:
    workload = load_workload(shared(f"conformance/v1_hybrid/{name}{ENDING}"))
    workload = workload.model_copy(update={"reference": f"vllm {release}"})
    golden = read_log(shared(f"conformance/v1_hybrid/{name}.golden.jsonl.gz"))
    assert first_difference(golden, DecisionDriver(workload).lines()) is None


@pytest.mark.parametrize(
    ("release", "name", "first"),
    [
        ("0.29.0", "gptoss_dense_a", "0.30 or later for layers that need KV caches"),
        ("0.32.0", "granite_small_a", "0.33 or later for layers with a state"),
        ("0.31.0", "two_page_sizes_a", "0.32 or later for prefix hits in blocks of"),
    ],
)
def test_releases_whose_rules_are_others_are_refused(
    release: str, name: str, first: str
) -> None:
    workload = load_workload(shared(f"conformance/v1_hybrid/{name}{ENDING}"))
    workload = workload.model_copy(update={"reference": f"vllm {release}"})
    with pytest.raises(UserError, match=f"engine_version must be {first}"):
        list(DecisionDriver(workload).lines())


def test_all_the_logs_are_compared() -> None:
    shared("conformance")
    assert len(NAMES) >= 244
    assert {name.partition("/")[0] for name in NAMES} == set(FOLDERS)


@pytest.mark.parametrize(
    "name",
    ["v1_33/prefix_evict_a", "v1_async/prefix_evict_a", "v1_offload/sync_load_a"],
)
def test_every_call_is_a_step(name: str) -> None:
    driver = driver_of(load_workload(shared(f"conformance/{name}{ENDING}")))
    lines = [line for line in driver.lines() if "t" in line]
    # What only waits for the output of a step in flight has no call.
    calls = [line for line in lines if {"sched", "mode", "error"} & line.keys()]
    assert len(calls) == driver.num_steps
    assert all(line in calls or line["upd"] < line["t"] for line in lines)


def test_a_changed_decision_is_found() -> None:
    path = shared("conformance/v1/light.golden.jsonl.gz")
    with gzip.open(path, "rt") as text:
        lines = [json.loads(row) for row in text]
    changed = [dict(line) for line in lines]
    changed[7]["free"] = [changed[7]["free"][0] - 1]
    difference = first_difference(lines, changed)
    assert difference is not None
    assert (difference.line, difference.field) == (8, "free")
