"""Requests that wait for blocks: the V1 scheduler with a CPU tier behind its pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.errors import SchedulerError
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.connectors.base import StepTransfers, TransferReport
from sim.scheduler.v1.connectors.queues import HoldingQueues
from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler
from sim.scheduler.v1.connectors.settings import OffloadSettings
from sim.scheduler.v1.settings import Settings
from sim.studies.conformance import DecisionDriver
from sim.studies.conformance.played_worker import PlayedWorker, WorkerPace
from sim.studies.conformance.random_offload import random_offload_workload
from sim.studies.conformance.random_v1 import as_workload

if TYPE_CHECKING:
    from sim.scheduler.log.lines import Line

CONFIG = {
    "block_size": 4,
    "num_gpu_blocks": 9,  # 8 are usable
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 32,
    "scheduler_reserve_full_isl": True,
}
TIER = {"cpu_chunks": 20, "blocks_per_chunk": 1}


def driver(*requests: tuple[int, list[list[int]], int], **more: Any) -> DecisionDriver:
    """Requests: arrival step, prompt, output length."""
    raw = [
        {
            "id": f"r{index}",
            "arrival_step": step,
            "prompt": prompt,
            "output_len": output_len,
            "out_seed": 100 + index,
        }
        for index, (step, prompt, output_len) in enumerate(requests)
    ]
    config = CONFIG | {"offload": TIER, "worker": {"load": [2, 0]}} | more
    workload = as_workload("case", "0.33.0", config, raw)
    return DecisionDriver(workload, check=True)


DOCUMENT = [[1, 24]]
OTHER = [[2, 28]]
AGAIN = (0, DOCUMENT, 1), (3, OTHER, 1), (6, [*DOCUMENT, [3, 2]], 2)
"""The second request takes all blocks of the first, whose prompt then comes again."""


def steps(lines: list[Line], key: str) -> dict[int, Any]:
    return {line["t"]: line[key] for line in lines if line.get(key)}


def test_what_the_pool_has_lost_comes_back_from_the_tier() -> None:
    lines = list(driver(*AGAIN).lines())
    # One block of the first prompt is in the pool still.
    assert steps(lines, "look")[6] == [["r2", 4, 20]]
    assert steps(lines, "load")[6][0][:3] == [2, "r2", 1]
    assert steps(lines, "holding") == {6: ["r2"], 7: ["r2"], 8: ["r2"]}
    assert steps(lines, "recv") == {8: ["r2"]}
    # It computes what was not loaded, and counts all of it as cached.
    assert steps(lines, "cached")[9] == {"r2": 24}
    assert next(line for line in lines if line["t"] == 9)["sched"] == [
        ["r2", 2, "n", 24]
    ]


def test_a_load_that_fails_ends_the_request_with_an_error() -> None:
    case = driver(*AGAIN, worker={"load": [2, 0], "fail_loads": [[0, 2]]})
    lines = list(case.lines())
    assert steps(lines, "errors") == {8: ["r2"]}
    assert len(steps(lines, "bad")[8]) == 1
    assert lines[-1]["free_end"] == [8]
    request = case.requests["r2"]
    assert request.status is RequestStatus.FINISHED_ERROR
    assert "could not be read" in request.reason


def test_or_it_computes_what_was_not_loaded() -> None:
    case = driver(
        *AGAIN,
        offload=TIER | {"kv_load_failure_policy": "recompute"},
        worker={"load": [2, 0], "fail_loads": [[0, 2]]},
    )
    lines = list(case.lines())
    assert not steps(lines, "errors")
    assert steps(lines, "cached")[9] == {"r2": 12}  # one hit, two loaded
    assert case.requests["r2"].status is RequestStatus.FINISHED_STOPPED


def test_a_request_that_ends_keeps_its_blocks_until_they_are_filled() -> None:
    case = driver(*AGAIN)
    lines = case.lines()
    for line in lines:
        if line["t"] == 6:
            break
    scheduler = case.scheduler
    assert isinstance(scheduler, ConnectorScheduler)
    request = case.requests["r2"]
    num_free = scheduler.tables.num_free_blocks
    scheduler.abort(request)
    scheduler.check()
    assert list(scheduler.delayed) == [request]
    assert scheduler.tables.num_free_blocks == num_free
    rest = list(lines)
    assert steps(rest, "delayed") == {7: ["r2"], 8: ["r2"]}
    assert rest[-1]["free_end"] == [8]


def test_a_load_of_few_tokens_is_part_of_the_batch() -> None:
    lines = list(driver(*AGAIN, offload=TIER | {"sync_load_budget_tokens": 20}).lines())
    assert steps(lines, "load")[6][0][-1] == "sync"
    assert not steps(lines, "holding")
    assert next(line for line in lines if line["t"] == 6)["sched"] == [
        ["r2", 2, "n", 24]
    ]


def test_stores_must_end_before_their_blocks_are_taken() -> None:
    lines = list(driver(*AGAIN, worker={"store": [50, 0]}).lines())
    assert steps(lines, "flush")[3] == [0]
    assert 0 in steps(lines, "done")[3]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_invariants_hold_at_every_call(seed: int, asynchronous: bool) -> None:
    workload = random_offload_workload(seed, "0.33.0", async_scheduling=asynchronous)
    case = DecisionDriver(workload, check=True)
    for _ in case.lines():
        pass
    scheduler = case.scheduler
    assert isinstance(scheduler, ConnectorScheduler)
    if case.ending != "done":  # an aborted tail, or a prompt of max_model_len
        return
    assert not scheduler.connector.jobs
    assert not scheduler.delayed
    assert scheduler.tables.num_free_blocks == scheduler.tables.num_usable_blocks


def test_blocks_that_a_step_in_flight_writes_come_free_when_it_has_ended() -> None:
    # It ends at a stop token; its place in the next step is wasted, and written.
    case = driver((0, [[1, 6]], 8), async_scheduling=True)
    case.requests["r0"].oracle_num_tokens = 8
    lines = list(case.lines())
    assert steps(lines, "fin") == {2: ["r0"]}
    assert steps(lines, "wasted") == {3: ["r0"]}
    assert [line["free_end"] for line in lines] == [[6], [6], [6], [8], [8]]


def test_a_request_with_tokens_in_flight_is_not_preempted() -> None:
    two = (0, [[1, 15]], 9), (0, [[2, 15]], 9)
    lines = list(driver(*two, async_scheduling=True).lines())
    # Both lack a block in step 2, and the victim has a token in flight.
    assert [len(line["sched"]) for line in lines[:4]] == [2, 2, 0, 1]
    assert steps(lines, "preempt") == {3: [["r1", "recompute"]]}
    assert not steps(lines, "stale")
    lines = list(driver(*two).lines())
    assert [len(line["sched"]) for line in lines[:4]] == [2, 2, 1, 1]
    assert steps(lines, "preempt") == {2: [["r1", "recompute"]]}


def test_all_that_end_together_store_before_one_of_them_is_forgotten() -> None:
    # What the first one used moves behind when it is forgotten; what the second one
    # stores must make room before that.
    both = (0, [[1, 7]], 10), (0, [[2, 7]], 10)
    tier = TIER | {"cpu_chunks": 7, "offload_prompt_only": False}
    more = {"offload": tier | {"eviction_policy": "arc"}, "async_scheduling": True}
    lines = list(driver(*both, num_gpu_blocks=20, **more).lines())
    (step, stores), (at, evicted) = [
        list(steps(lines, key).items())[-1] for key in ("store", "evict")
    ]
    assert [job[1] for job in stores] == ["r0", "r1"]
    assert (at, evicted) == (step, [0])  # the oldest one, of the first request


def test_what_was_set_aside_keeps_its_order() -> None:
    queues = HoldingQueues("fcfs")
    requests: list[Any] = ["a", "b", "c", "d"]
    for request in requests:
        queues.add_request(request)
    queues.set_aside(["x", "y"], [])  # type: ignore[list-item]
    assert queues.peek_request() == "x"
    passed = [queues.pop_request() for _ in range(4)]
    queues.set_aside(passed[:2], passed[2:])
    assert list(queues) == ["x", "y", "a", "b", "c", "d"]
    queues.remove("c")  # type: ignore[arg-type]
    assert len(queues) == 5


def test_a_worker_ends_jobs_one_after_the_other() -> None:
    case = driver(*AGAIN, worker={"store": [1, 2]})
    first = next(case.lines())
    assert [job[0] for job in first["store"]] == [0]
    scheduler = case.scheduler
    assert isinstance(scheduler, ConnectorScheduler)
    worker = PlayedWorker(WorkerPace(store=(1, 2)))
    assert worker.step(0, scheduler.transfers) == TransferReport([], [])
    later = [worker.step(step, StepTransfers()) for step in range(1, 6)]
    # Six blocks, submitted in step 1: one step, and one more for every two.
    assert [report.done for report in later] == [[], [], [], [], [0]]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"engine_version": "0.27"}, "a CPU tier is known from 0.28 on"),
        ({"pipeline_parallel_size": 2}, "not built beside pipelines"),
    ],
)
def test_engines_of_which_it_is_not_known_are_refused(
    arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(SchedulerError, match=match):
        Settings(
            max_num_batched_tokens=64,
            max_num_seqs=8,
            max_model_len=32,
            offload=OffloadSettings(num_chunks=1),
            **arguments,
        )


def test_a_lone_window_comes_back_from_the_tier_in_part() -> None:
    lines = list(driver(*AGAIN, sliding_window=8).lines())
    stored = steps(lines, "store")[0]
    assert stored == [[0, "r0", 0, [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5]]]
    ((_, name, first, blocks, chunks),) = next(iter(steps(lines, "load").values()))
    assert (name, first, len(blocks), chunks) == ("r2", 4, 2, [4, 5])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_chunks": 0}, "num_chunks must be at least 1, got 0"),
        (
            {"num_chunks": 1, "eviction_policy": "fifo"},
            "next_use, keep_ttl, got 'fifo'",
        ),
        ({"num_chunks": 1, "kv_load_failure_policy": "x"}, "one of fail, recompute"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(
    arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(SchedulerError, match=match):
        OffloadSettings(**arguments)
