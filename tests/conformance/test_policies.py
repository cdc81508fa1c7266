"""Policies that name a generation's own rule decide as it does, log by log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.scheduler.admission import FullPrompt, Watermark
from sim.scheduler.victims import LatestArrival, LowestPriority
from sim.studies.conformance import (
    DecisionDriver,
    first_difference,
    load_workload,
    read_log,
)
from sim.studies.conformance.driver import make_scheduler
from tests.shared import SHARED, shared

if TYPE_CHECKING:
    from sim.studies.conformance import DecisionWorkload

ENDING = ".workload.json"
V1_FOLDERS = ("v1", "v1_33")
CHUNKS = "chunked_prefill"


def names(*folders: str) -> list[str]:
    return [
        f"{folder}/{path.name.removesuffix(ENDING)}"
        for folder in folders
        for path in sorted((SHARED / "conformance" / folder).glob(f"*{ENDING}"))
    ]


def decides_as_logged(
    name: str, asked: DecisionWorkload, **policies: Any
) -> tuple[bool, int]:
    """Whether each line is the log's, and how many preemptions there were."""
    golden = shared(f"conformance/{name}.golden.jsonl.gz")
    driver = DecisionDriver(asked, scheduler=make_scheduler(asked, **policies))
    found = first_difference(read_log(golden), driver.lines())
    return found is None, driver.num_preemptions


def load(name: str) -> DecisionWorkload:
    return load_workload(shared(f"conformance/{name}{ENDING}"))


def test_who_arrived_last_is_whom_v1_preempts() -> None:
    shared("conformance/v1_33")
    policy = LatestArrival()
    num_logs = num_preemptions = 0
    for name in names(*V1_FOLDERS):
        asked = load(name)
        if asked.config["policy"] == "fcfs":
            same, num = decides_as_logged(name, asked, preemption_victim=policy)
            # Up to 0.11 a head over the budget is set aside without chunking, and comes
            # back in reverse: the last that runs is not the last that came.
            assert same or (name.startswith("v1/") and not asked.config[CHUNKS]), name
            num_logs += same
            num_preemptions += num
    assert num_logs >= 33
    assert num_preemptions > 500


def test_who_is_least_urgent_is_whom_the_priority_policy_preempts() -> None:
    shared("conformance/v1_33")
    policy = LowestPriority()
    num_logs = num_preemptions = 0
    for name in names(*V1_FOLDERS):
        asked = load(name)
        if asked.config["policy"] == "priority":
            same, num = decides_as_logged(name, asked, preemption_victim=policy)
            assert same, name
            num_logs += 1
            num_preemptions += num
    assert num_logs >= 8
    assert num_preemptions > 100


def test_the_watermark_rule_is_the_watermark_key() -> None:
    shared("conformance/v1_33")
    marked = [name for name in names("v1_33") if load(name).config["watermark"]]
    assert len(marked) >= 2
    for name in marked:
        asked = load(name)
        rule = Watermark(asked.config["watermark"])
        without = asked.model_copy(update={"config": asked.config | {"watermark": 0.0}})
        assert decides_as_logged(name, without, admission=rule)[0], name
        # ... and it decides something: without either the log is another one.
        assert not decides_as_logged(name, without)[0], name


@pytest.mark.slow
def test_the_full_prompt_rule_is_the_reserve_key() -> None:
    shared("conformance/v1_33")
    key = "scheduler_reserve_full_isl"
    num_decided = 0
    reserved = [name for name in names("v1_33") if load(name).config.get(key)]
    assert reserved
    for name in reserved:
        asked = load(name)
        without = asked.model_copy(update={"config": asked.config | {key: False}})
        assert decides_as_logged(name, without, admission=FullPrompt())[0], name
        num_decided += not decides_as_logged(name, without)[0]
    assert num_decided


def keeps_its_order(asked: DecisionWorkload) -> bool:
    """Whether 0.7.3 runs by arrival: chunks and swapping reorder its running queue."""
    config = asked.config
    return not (
        config[CHUNKS]
        or config["preemption_mode"] == "swap"
        or any(raw.n > 1 for raw in asked.requests)
    )


@pytest.mark.parametrize(
    ("folder", "num_logs"),
    [
        ("old", 16),
        pytest.param("cacheflow", 13, marks=pytest.mark.slow),
        pytest.param("v0", 12, marks=pytest.mark.slow),
    ],
)
def test_who_arrived_last_is_whom_groups_preempt(folder: str, num_logs: int) -> None:
    shared(f"conformance/{folder}")
    policy = LatestArrival()
    num_compared = num_preemptions = 0
    for name in names(folder):
        asked = load(name)
        if folder != "v0" or (
            asked.config["policy"] == "fcfs" and keeps_its_order(asked)
        ):
            same, num = decides_as_logged(name, asked, preemption_victim=policy)
            assert same, name
            num_compared += 1
            num_preemptions += num
    assert num_compared >= num_logs
    assert num_preemptions > 100
