"""Decisions with several steps in flight, on cases small enough to read."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import SchedulerError
from sim.scheduler.v1 import Settings
from sim.studies.conformance import DecisionDriver
from sim.studies.conformance.random_v1 import as_workload

CONFIG = {
    "block_size": 4,
    "num_gpu_blocks": 20,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 4,
    "max_model_len": 64,
}


def play(*requests: dict[str, Any], **config: Any) -> list[dict[str, Any]]:
    numbered = [
        {"id": f"r{index}", "arrival_step": 0, "out_seed": index} | request
        for index, request in enumerate(requests)
    ]
    workload = as_workload("case", "0.33.0", CONFIG | config, numbered)
    return list(DecisionDriver(workload, check=True).lines())


def batches(lines: list[dict[str, Any]]) -> list[dict[str, int] | None]:
    """Tokens by request of each line's call, None for a line without one."""
    return [
        {name: tokens for name, tokens, *_ in line["sched"]}
        if "sched" in line
        else None
        for line in lines
    ]


def test_a_step_is_formed_before_the_one_ahead_is_known() -> None:
    lines = play({"prompt": [[1, 10]], "output_len": 3}, async_scheduling=True)
    # Two chunks back to back; the call after the last step passes the request over.
    assert batches(lines) == [{"r0": 8}, {"r0": 2}, {"r0": 1}, {"r0": 1}, {}, {}, None]
    assert [line.get("ph") for line in lines[:5]] == [[0], [1], [2], [2], []]
    assert [line.get("upd") for line in lines] == [None, 0, 1, 2, 3, 4, 5]
    assert [line.get("out") for line in lines] == [
        None, None, [["r0", 1]], [["r0", 1]], [["r0", 1]], None, None,
    ]  # fmt: skip
    assert [line.get("fin") for line in lines].index(["r0"]) == 4


def test_a_stop_token_wastes_the_slot_of_the_step_in_flight() -> None:
    request = {"prompt": [[1, 3]], "output_len": 9, "stop_after": 2}
    lines = play(request, async_scheduling=True)
    assert batches(lines)[:3] == [{"r0": 3}, {"r0": 1}, {"r0": 1}]
    assert lines[2]["fin"] == ["r0"]
    assert lines[3]["wasted"] == ["r0"]
    assert "wasted" not in str(lines[:3])


def test_a_decode_in_a_pipeline_waits_for_its_token() -> None:
    lines = play({"prompt": [[1, 10]], "output_len": 3}, pipeline_parallel_size=3)
    # Chunks of one prompt follow each other; then one step in three is its own.
    assert batches(lines) == [
        {"r0": 8}, {"r0": 2}, {}, {}, {"r0": 1}, {}, {}, {"r0": 1}, {}, {}, {}, None,
        None,
    ]  # fmt: skip
    assert [line["upd"] for line in lines if "out" in line] == [1, 4, 7]


def test_requests_take_turns_in_a_pipeline() -> None:
    requests = [{"prompt": [[seed, 8]], "output_len": 3} for seed in (1, 2)]
    lines = play(*requests, pipeline_parallel_size=2)
    assert batches(lines)[:6] == [
        {"r0": 8}, {"r1": 8}, {"r0": 1}, {"r1": 1}, {"r0": 1}, {"r1": 1},
    ]  # fmt: skip


def test_both_together_keep_one_step_more_in_flight() -> None:
    requests = [{"prompt": [[seed, 8]], "output_len": 3} for seed in (1, 2)]
    lines = play(*requests, pipeline_parallel_size=2, async_scheduling=True)
    assert batches(lines)[:6] == [
        {"r0": 8}, {"r1": 8}, {"r0": 1}, {"r1": 1}, {"r0": 1}, {"r1": 1},
    ]  # fmt: skip
    assert [line.get("upd") for line in lines[:4]] == [None, None, 0, 1]


def test_a_preempted_request_waits_for_its_tokens_under_way() -> None:
    requests = [{"prompt": [[seed, 8]], "output_len": 12} for seed in (1, 2, 3)]
    tight = {"num_gpu_blocks": 8, "scheduler_reserve_full_isl": False}
    lines = play(*requests, **tight, pipeline_parallel_size=3, max_num_seqs=3)
    stale = [line["t"] for line in lines if "stale" in line]
    preempted = [line["t"] for line in lines if "preempt" in line]
    assert preempted
    assert stale
    assert all(any(0 <= t - p < 3 for p in preempted) for t in stale)
    # It stands at the head of the queue, and is not admitted before they are there.
    for p in preempted:
        victim = next(line for line in lines if line["t"] == p)["preempt"][0][0]
        known = [t for t in stale if p <= t < p + 3]
        again = [
            line["t"]
            for line in lines
            if line["t"] > p and victim in [row[0] for row in line.get("sched", [])]
        ]
        assert not known or not again or again[0] > known[0]


def test_what_a_release_does_not_have_is_refused() -> None:
    for key, value, first, since in (
        ("async_scheduling", True, 14, "built from 0.14 on"),
        ("pipeline_parallel_size", 2, 32, "known from 0.32 on"),
    ):
        Settings(8, 4, 64, engine_version=f"0.{first}", **{key: value})
        with pytest.raises(SchedulerError, match=f"{key} is {since}"):
            Settings(8, 4, 64, engine_version=f"0.{first - 1}", **{key: value})
    with pytest.raises(SchedulerError, match="must be at least 1, got 0"):
        Settings(8, 4, 64, pipeline_parallel_size=0)
