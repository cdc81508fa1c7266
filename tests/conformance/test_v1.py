"""The V1 scheduler against decision logs that vLLM wrote (promise 2)."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from tests.conformance.replay import Replay
from tests.shared import SHARED, shared

if TYPE_CHECKING:
    from pathlib import Path

FOLDERS = ("conformance/v1", "conformance/v1_33")
WORKLOADS = [
    path
    for folder in FOLDERS
    for path in sorted((SHARED / folder).glob("*.workload.json"))
]


@pytest.mark.parametrize(
    "path", WORKLOADS, ids=lambda path: f"{path.parent.name}-{path.name.split('.')[0]}"
)
def test_decisions_equal_the_real_engines(path: Path) -> None:
    workload = json.loads(path.read_text())
    log = path.name.replace(".workload.json", ".golden.jsonl.gz")
    with gzip.open(path.with_name(log), "rt") as lines:
        golden = [json.loads(line) for line in lines]
    ours = Replay(workload).run()
    for expected, got in zip(golden, ours, strict=False):
        assert got == expected, f"step {expected['t']}"
    assert len(ours) == len(golden)


def test_both_sets_are_there() -> None:
    for folder in FOLDERS:
        shared(folder)
    assert len(WORKLOADS) >= 47
