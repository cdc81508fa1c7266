"""Decisions with draft tokens, on cases small enough to read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cache.errors import CacheConfigError
from sim.errors import SchedulerError
from sim.scheduler.settings import CacheConfig
from sim.scheduler.v1 import V1, Settings, V1Scheduler
from sim.scheduler.v1.speculative import SpeculativeScheduler
from sim.scheduler.v1.speculative_config import SpeculativeConfig, SpeculativeMethod
from sim.studies.conformance import DecisionDriver
from sim.studies.conformance.random_groups import random_group_workload
from sim.studies.conformance.random_v1 import random_workload
from tests.sim.engine.test_batch_queue import batches, play

EAGLE = {"method": "eagle", "num_speculative_tokens": 2}
NGRAM = EAGLE | {"method": "ngram"}
SURE = {"acc_pct": 100}


def entries(lines: list[dict[str, Any]], name: str = "r0") -> list[int]:
    """Length of a request's block table, line by line."""
    lengths, length = [], 0
    for line in lines:
        if name in line.get("bt", {}):
            keep, ids = line["bt"][name]
            length = keep + len(ids)
        lengths.append(length)
    return lengths


def test_drafts_are_verified_beside_the_last_token() -> None:
    request = {"prompt": [[1, 5]], "output_len": 6} | SURE
    lines = play(request, speculative=EAGLE)
    # The first output has no drafts before it; each later step brings three more.
    assert batches(lines) == [{"r0": 5}, {"r0": 3}, {"r0": 3}, {}]
    assert [line.get("spec") for line in lines] == [None, {"r0": 2}, {"r0": 2}, None]
    assert [line.get("acc") for line in lines[1:3]] == [[["r0", 2, 2]]] * 2
    # Six outputs end it: the last is one of three.
    assert [line.get("out") for line in lines[:3]] == [
        [["r0", 1]], [["r0", 3]], [["r0", 2]],
    ]  # fmt: skip


def test_rejected_drafts_are_computed_in_vain() -> None:
    request = {"prompt": [[1, 5]], "output_len": 3, "acc_pct": 0}
    lines = play(request, speculative=EAGLE)
    assert batches(lines) == [{"r0": 5}, {"r0": 3}, {"r0": 3}, {}]
    assert [entry for line in lines for entry in line.get("sched", [])] == [
        ["r0", 5, "n", 0], ["r0", 3, "r", 5], ["r0", 3, "r", 6],
    ]  # fmt: skip


def test_a_drafter_with_a_cache_has_slots_behind_the_tokens() -> None:
    request = {"prompt": [[1, 7]], "output_len": 4, "acc_pct": 0}
    # 7 + 2 slots are three blocks of four, then 10 + 2 as well, then 11 + 2.
    assert entries(play(request, speculative=EAGLE))[:3] == [3, 3, 4]
    assert entries(play(request, speculative=NGRAM))[:3] == [2, 3, 3]


def test_a_small_budget_cuts_drafts_off() -> None:
    requests = [{"prompt": [[seed, 2]], "output_len": 9} | SURE for seed in (1, 2)]
    lines = play(*requests, speculative=NGRAM, max_num_batched_tokens=4)
    assert batches(lines)[1] == {"r0": 3, "r1": 1}
    assert lines[1]["spec"] == {"r0": 2}


def test_each_request_takes_a_slot_for_its_draft_model() -> None:
    requests = [{"prompt": [[seed, 2]], "output_len": 9} | SURE for seed in (1, 2)]
    drafts = EAGLE | {"method": "draft_model"}
    lines = play(*requests, speculative=drafts, max_num_batched_tokens=6)
    # Of six slots a request's first chunk takes three, its verification four.
    assert batches(lines)[:2] == [{"r0": 2, "r1": 2}, {"r0": 3, "r1": 1}]


def test_a_key_covers_the_token_behind_its_block() -> None:
    first = {"prompt": [[1, 9]], "output_len": 1}
    other = {"prompt": [[1, 8], [2, 4]], "output_len": 1, "arrival_step": 2}
    hits = {
        name: play(first, other, speculative=EAGLE | more)[2]["cached"]
        for name, more in (
            ("lookahead", {}),
            ("drop", {"disable_lookahead_block_hashes": True}),
            ("none", {"disable_eagle_block_drop": True}),
        )
    }
    assert hits == {"lookahead": {"r1": 4}, "drop": {"r1": 4}, "none": {"r1": 8}}


def test_a_full_hit_is_admitted_with_empty_drafts() -> None:
    first = {"prompt": [[1, 9]], "output_len": 1}
    again = {"prompt": [[1, 9]], "output_len": 3, "arrival_step": 3} | SURE
    lines = play(first, again, speculative=NGRAM, max_num_batched_tokens=16)
    (line,) = (each for each in lines if "cached" in each and "r1" in each["cached"])
    assert line["sched"] == [["r1", 3, "n", 8]]
    assert line["acc"] == [["r1", 2, 0]]


def test_drafts_are_scheduled_ahead_of_their_content() -> None:
    request = {"prompt": [[1, 5]], "output_len": 9, "acc_pct": 0}
    lines = play(request, speculative=EAGLE, async_scheduling=True)
    assert batches(lines)[:3] == [{"r0": 5}, {"r0": 3}, {"r0": 3}]
    # One of the step in flight and of this one, and two drafts of each decode.
    assert [line["ph"] for line in lines[:4]] == [[1], [4], [6], [6]]
    assert [line["out"] for line in lines[1:4]] == [[["r0", 1]]] * 3


def test_a_chunk_that_loses_its_blocks_in_the_same_call_begins_the_interval() -> None:
    lines = play(
        {"prompt": [[1, 1]], "output_len": 1, "acc_pct": 0},
        {"prompt": [[2, 12]], "output_len": 1, "priority": 1, "acc_pct": 0},
        {"prompt": [[3, 2]], "output_len": 15, "arrival_step": 1} | SURE,
        speculative={"method": "mtp", "num_speculative_tokens": 3},
        enable_prefix_caching=False, policy="priority", block_size=2,
        num_gpu_blocks=17, max_num_batched_tokens=64, max_num_seqs=8,
        max_model_len=26, long_prefill_token_threshold=4,
        prefill_schedule_interval=3,
    )  # fmt: skip
    # r1 was to get a chunk, gave its blocks to r2, and waits until that has ended.
    (preempting,) = (index for index, line in enumerate(lines) if "preempt" in line)
    assert lines[preempting]["preempt"] == [["r1", "recompute"]]
    assert batches(lines)[preempting:][:3] == [{"r2": 4}, {"r2": 4}, {"r1": 12}]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"engine_version": "0.32"}, "speculative decoding is known of 0.33 only"),
        ({"pipeline_parallel_size": 2}, "is not known with stages"),
        ({"long_prefill_token_threshold": 2}, "must be above num_speculative_tokens"),
        ({"max_num_batched_tokens": 2}, "must be above num_speculative_tokens"),
    ],
)
def test_what_does_not_go_with_drafts_is_refused(
    more: dict[str, Any], message: str
) -> None:
    drafts = SpeculativeConfig(SpeculativeMethod.EAGLE, 2)
    arguments = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "max_model_len": 64}
    with pytest.raises(SchedulerError, match=message):
        Settings(**arguments | more, speculative_config=drafts)


def test_evictors_know_no_drafts() -> None:
    drafts = SpeculativeConfig(SpeculativeMethod.NGRAM, 2)
    arguments = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "max_model_len": 64}
    settings = Settings(**arguments, speculative_config=drafts)
    cache = CacheConfig(
        4, 20, enable_prefix_caching=True, evictor=V1.parts().evictors["fifo"]
    )
    with pytest.raises(CacheConfigError, match="eviction policies know no draft"):
        V1.parts().construct(settings, cache)


def test_a_class_without_drafts_refuses_them() -> None:
    arguments: Any = {
        "max_num_batched_tokens": 8, "max_num_seqs": 4, "max_model_len": 64,
    }  # fmt: skip
    drafts = SpeculativeConfig(SpeculativeMethod.NGRAM, 2)
    for more in (
        {"speculative_config": drafts},
        {"async_scheduling": True},
        {"pipeline_parallel_size": 2},
    ):
        with pytest.raises(SchedulerError, match=rf"^{next(iter(more))}: V1Scheduler"):
            V1Scheduler(20, 4, **arguments, **more)


def test_there_is_a_draft() -> None:
    with pytest.raises(SchedulerError, match="must be at least 1, got 0"):
        SpeculativeConfig(SpeculativeMethod.MTP, 0)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("draw", [random_workload, random_group_workload])
def test_random_drafts_keep_the_invariants_and_bring_all_outputs(
    draw: Any, ahead: bool
) -> None:
    for seed in range(12):
        workload = draw(seed, "0.33", async_scheduling=ahead, speculative=True)
        driver = DecisionDriver(workload, check=True)
        lines = list(driver.lines())
        if driver.ending != "done":
            continue
        received = Counter[str]()
        for line in lines:
            received.update(dict(line.get("out", ())))
        for request in workload.requests:
            if request.abort_step is None:
                most = workload.engine.max_model_len - request.num_prompt_tokens
                last = min(request.stop_after or request.output_len, max(most, 1))
                assert received[request.id] == last, (seed, request.id)


@pytest.mark.parametrize("ahead", [False, True])
def test_decodes_taken_together_are_those_taken_one_by_one(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = [
        random_workload(seed, "0.33", async_scheduling=ahead, speculative=True)
        for seed in range(8)
    ]
    found = [list(DecisionDriver(workload).lines()) for workload in workloads]
    monkeypatch.setattr(
        SpeculativeScheduler, "_decodes_that_get_on", lambda self, budget: None
    )
    assert [list(DecisionDriver(each).lines()) for each in workloads] == found
