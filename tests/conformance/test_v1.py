"""The V1 scheduler against decision logs that vLLM 0.11.2 wrote (promise 2)."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.conformance.replay import Replay
from tests.shared import SHARED, shared

FOLDER = "conformance/v1"
NAMES = [
    # first come, first served, chunked prefill: what this generation does so far
    "bs32_cap",
    "bs8_preempt",
    "burst",
    "chunked_small_a",
    "clones_a",
    "full_hit_a",
    "len_cap",
    "light",
    "long_prefill_threshold",
    "prefix_evict_a",
    "prefix_multiturn_a",
    "recompute_heavy_a",
    "tiny_pool",
]


@pytest.mark.parametrize("name", NAMES)
def test_decisions_equal_the_real_engines(name: str) -> None:
    workload = json.loads(shared(f"{FOLDER}/{name}.workload.json").read_text())
    with gzip.open(shared(f"{FOLDER}/{name}.golden.jsonl.gz"), "rt") as lines:
        golden = [json.loads(line) for line in lines]
    ours = Replay(workload).run()
    for expected, got in zip(golden, ours, strict=False):
        assert got == {"nbt": 0} | expected, f"step {expected['t']}"
    assert len(ours) == len(golden)


def test_every_log_of_our_policies_is_compared() -> None:
    shared(FOLDER)
    ours = set()
    for path in (SHARED / FOLDER).glob("*.workload.json"):
        config = json.loads(path.read_text())["config"]
        if config["policy"] == "fcfs" and config["chunked_prefill"]:
            ours.add(path.name.removesuffix(".workload.json"))
    assert ours == set(NAMES)
