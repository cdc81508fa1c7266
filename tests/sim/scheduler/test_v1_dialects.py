"""Each rule that changed between releases, before and after, in small literals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cache.errors import CacheError
from sim.errors import SchedulerError
from sim.scheduler.v1.dialect import KEYS_SINCE, dialect_of
from tests.sim.build import request_from_spec, scheduler, spec
from tests.sim.scheduler.test_v1 import Steps

if TYPE_CHECKING:
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request


def ids(requests: Any) -> list[int]:
    return [request.request_id for request in requests]


def chunks(output: SchedulerOutput) -> dict[int, int]:
    return dict(zip(ids(output.scheduled), output.num_scheduled_tokens, strict=True))


# -- releases and keys ----------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "minor"), [("0.33", 33), ("0.11.2", 11), ("v0.24.0rc1", 24)]
)
def test_versions_as_users_write_them(version: str, minor: int) -> None:
    assert dialect_of(version).minor == minor


@pytest.mark.parametrize("version", ["", "abc", "33", "0.33 beta", "0.1234"])
def test_what_is_no_release_is_refused(version: str) -> None:
    with pytest.raises(SchedulerError, match="must be a vLLM release such as"):
        dialect_of(version)


@pytest.mark.parametrize("version", ["0.7.3", "0.34", "1.0"])
def test_releases_that_nobody_recorded_are_refused(version: str) -> None:
    with pytest.raises(SchedulerError, match=r"must be from 0\.8 to 0\.33"):
        dialect_of(version)


def test_a_release_between_two_that_were_recorded_is_as_the_older_one() -> None:
    rules = ("puts_unhashed_blocks_first", "reserves_full_isl", "spares_lone_requests")
    for between, older in (("0.23", "0.22"), ("0.17", "0.16"), ("0.28", "0.26")):
        for rule in rules:
            theirs = getattr(dialect_of(older), rule)
            assert getattr(dialect_of(between), rule) == theirs


USED: dict[str, Any] = {
    "max_num_scheduled_tokens": 100,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.1,
    "prefill_schedule_interval": 4,
    "max_num_active_seqs": 3,
    "long_prefill_token_threshold_adaptive": True,
}
UNUSED: dict[str, Any] = {
    "max_num_scheduled_tokens": None,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.0,
    "prefill_schedule_interval": 1,
    "max_num_active_seqs": None,
    "long_prefill_token_threshold_adaptive": False,
}


@pytest.mark.parametrize("key", KEYS_SINCE)
def test_a_key_that_the_release_does_not_have_is_refused(key: str) -> None:
    since = KEYS_SINCE[key]
    older = f"0.{since - 1}"
    with pytest.raises(SchedulerError, match=rf"{key} exists from 0\.{since} on"):
        scheduler(engine_version=older, **{key: USED[key]})
    scheduler(engine_version=older, **{key: UNUSED[key]})
    scheduler(engine_version=f"0.{since}", **{key: USED[key]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_active_seqs": 257}, "max_num_active_seqs must be at most max_num_s"),
        ({"max_num_active_seqs": 0}, "max_num_active_seqs must be at least 1, got 0"),
        ({"max_num_scheduled_tokens": 2049}, "must be at most max_num_batched_tokens"),
        ({"max_num_scheduled_tokens": 0}, "must be at least 1, got 0"),
        ({"watermark": 1.0}, "watermark must be at least 0 and below 1, got 1.0"),
        ({"watermark": -0.1}, "watermark must be at least 0 and below 1, got -0.1"),
        (
            {"prefill_schedule_interval": 0},
            "prefill_schedule_interval must be at least",
        ),
        ({"long_prefill_token_threshold": -1}, "must be at least 0, got -1"),
        ({"scheduling_policy": "lifo"}, "must be one of fcfs, priority, got 'lifo'"),
        ({"enable_chunked_prefill": False}, "without chunked prefill max_num_batched"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        (
            {"engine_version": "0.9", "scheduling_policy": "priority"},
            "before 0.11 only fcfs with chunked prefill is known",
        ),
        (
            {
                "engine_version": "0.8.5",
                "enable_chunked_prefill": False,
                "max_model_len": 2048,
            },
            "before 0.11 only fcfs with chunked prefill is known",
        ),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((SchedulerError, CacheError), match=message):
        scheduler(**changes)


def test_a_release_without_a_patch_is_the_last_of_them() -> None:
    """As it is for capacity: no run mixes the rules of two patches."""
    assert dialect_of("0.11") == dialect_of("0.11.2") != dialect_of("0.11.0")


# -- admission ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "waiting", "scheduled"),
    [("0.11", [2, 1], {0: 60, 3: 20}), ("0.12", [1, 2, 3], {0: 60})],
)
def test_a_head_over_the_budget_without_chunking(
    version: str, waiting: list[int], scheduled: dict[int, int]
) -> None:
    policy = scheduler(
        engine_version=version,
        enable_chunked_prefill=False,
        max_num_batched_tokens=100,
        max_model_len=100,
    )
    steps = Steps(policy)
    for i, length in enumerate((60, 50, 45, 20)):
        steps.add(spec(i, 0.0, length, 5))
    # 40 tokens are left: 1 and 2 are skipped and come back in reverse, 3 is admitted.
    output = policy.schedule(0.0)
    assert chunks(output) == scheduled
    assert ids(policy.waiting) == waiting


@pytest.mark.parametrize(("reserve", "admitted"), [(True, [0]), (False, [0, 1])])
def test_the_whole_prompt_must_fit(reserve: bool, admitted: list[int]) -> None:
    policy = scheduler(
        num_gpu_blocks=11,
        max_num_batched_tokens=64,
        scheduler_reserve_full_isl=reserve,
    )
    steps = Steps(policy)
    # 3 of 10 blocks taken; 8 are needed for all of 120 tokens, 1 for the chunk of 16.
    steps.add(spec(0, 0.0, 48, 5))
    steps.add(spec(1, 0.0, 120, 5))
    assert ids(policy.schedule(0.0).scheduled) == admitted


def test_the_whole_prompt_is_asked_for_from_0_20_on() -> None:
    for version, reserves in (("0.19", False), ("0.20", True), ("0.33", True)):
        settings = scheduler(engine_version=version).settings
        assert settings.reserve_full_isl is reserves
    settings = scheduler(scheduler_reserve_full_isl=False).settings
    assert not settings.reserve_full_isl


def test_the_watermark_holds_only_while_something_runs() -> None:
    policy = scheduler(num_gpu_blocks=11, watermark=0.3, max_model_len=160)
    steps = Steps(policy)
    steps.add(spec(0, 0.0, 140, 1))  # 9 of 10 blocks
    assert ids(steps.step().scheduled) == [0]
    steps.add(spec(1, 0.0, 100, 3))  # 7 blocks
    steps.add(spec(2, 0.0, 10, 1))  # 1 block, and 3 to be left
    assert ids(steps.step().scheduled) == [1]
    assert ids(policy.waiting) == [2]
    steps.step()
    steps.step()
    assert ids(steps.step().scheduled) == [2]


def test_no_more_than_max_num_active_seqs_run() -> None:
    steps = Steps(scheduler(max_num_active_seqs=2, max_num_seqs=3))
    for i in range(4):
        steps.add(spec(i, 0.0, 5, 3))
    assert ids(steps.step().scheduled) == [0, 1]


def test_max_num_scheduled_tokens_is_the_budget() -> None:
    steps = Steps(scheduler(max_num_scheduled_tokens=30))
    steps.add(spec(0, 0.0, 40, 2))
    steps.add(spec(1, 0.0, 40, 2))
    assert chunks(steps.step()) == {0: 30}
    assert chunks(steps.step()) == {0: 10, 1: 20}


@pytest.mark.parametrize(
    ("adaptive", "expected"),
    [(False, {0: 10, 1: 10, 2: 10}), (True, {0: 33, 1: 33, 2: 30})],
)
def test_an_adaptive_threshold_is_a_fair_share(
    adaptive: bool, expected: dict[int, int]
) -> None:
    policy = scheduler(
        max_num_batched_tokens=100,
        max_num_scheduled_tokens=96,
        long_prefill_token_threshold=10,
        long_prefill_token_threshold_adaptive=adaptive,
    )
    steps = Steps(policy)
    for i in range(3):
        steps.add(spec(i, 0.0, 60, 2))
    # A third of max_num_batched_tokens, though the budget is lower: 33, 33, the rest.
    assert chunks(steps.step()) == expected


# -- blocks ---------------------------------------------------------------------


@pytest.mark.parametrize(("version", "table"), [("0.23", [3, 4]), ("0.24", [2, 3])])
def test_where_freed_blocks_without_a_hash_go(version: str, table: list[int]) -> None:
    policy = scheduler(
        num_gpu_blocks=9, enable_prefix_caching=True, engine_version=version
    )
    steps = Steps(policy)
    steps.add(spec(0, 0.0, 20, 1))  # blocks 1 (full) and 2
    steps.step()
    later = steps.add(spec(1, 0.0, 20, 2))
    steps.step()
    assert policy.tables.block_ids(later) == table


def test_what_lies_behind_the_window_is_not_counted() -> None:
    steps = Steps(scheduler(sliding_window=20, max_num_batched_tokens=40))
    steps.add(spec(0, 0.0, 100, 5))
    steps.step()
    steps.step()
    steps.step()
    # 80 tokens were computed before: from 61 on they are read, so 3 blocks are gone.
    usage = steps.policy.cache_usage()
    assert (usage.num_physical_blocks, usage.num_logical_blocks) == (4, 4)
    assert (usage.num_physical_tokens, usage.num_logical_tokens) == (52, 52)


# -- preemption by priority -----------------------------------------------------


def three_of_different_urgency(version: str) -> tuple[Steps, list[Request]]:
    """9 blocks for three requests of 3 blocks; with 48 tokens each wants a fourth."""
    policy = scheduler(
        num_gpu_blocks=10,
        max_model_len=100,
        scheduling_policy="priority",
        engine_version=version,
        scheduler_reserve_full_isl=False,
    )
    steps = Steps(policy)
    requests = [
        steps.add(spec(i, 0.0, 48, 9, priority=priority))
        for i, priority in enumerate((1, 2, 0))
    ]
    output = steps.step()
    assert ids(output.scheduled) == [2, 0, 1]
    return steps, requests


def test_the_least_urgent_request_is_preempted() -> None:
    steps, _ = three_of_different_urgency("0.33")
    output = steps.step()
    (preemption,) = output.preemptions
    assert (preemption.request.request_id, preemption.for_request.request_id) == (1, 2)
    assert "the least urgent one goes" in preemption.reason
    assert (preemption.num_tokens_lost, preemption.num_blocks_freed) == (48, 3)
    assert ids(output.scheduled) == [2, 0]


@pytest.mark.parametrize(("version", "scheduled"), [("0.32", []), ("0.33", [1])])
def test_after_a_self_preemption_the_next_one_is_tried(
    version: str, scheduled: list[int]
) -> None:
    policy = scheduler(
        num_gpu_blocks=8,
        max_model_len=100,
        scheduling_policy="priority",
        engine_version=version,
    )
    steps = Steps(policy)
    steps.add(spec(0, 0.0, 63, 9, priority=5))
    steps.step()
    steps.add(spec(1, 0.0, 40, 9, priority=1))
    assert chunks(steps.step()) == {0: 1, 1: 40}
    # All 7 blocks are taken, and 0 wants a fifth: it stands ahead, being older, but is
    # the less urgent one.
    output = steps.step()
    assert ids(p.request for p in output.preemptions) == [0]
    assert ids(output.scheduled) == scheduled


def test_a_victim_that_was_scheduled_already_returns_its_tokens() -> None:
    policy = scheduler(
        num_gpu_blocks=7,
        max_model_len=80,
        max_num_batched_tokens=64,
        scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
    )
    steps = Steps(policy)
    low = steps.add(spec(0, 0.0, 40, 20, priority=5))
    steps.step()
    high = steps.add(spec(1, 0.0, 48, 20, priority=1))
    steps.step()
    output = steps.step()
    assert ids(p.request for p in output.preemptions) == [0]
    assert chunks(output) == {1: 1}
    assert output.num_batched_tokens == 1
    assert low.num_recompute_tokens == 41  # nothing of this step's is lost
    assert high.num_computed_tokens == 49


# -- prefill interval -----------------------------------------------------------


@pytest.mark.parametrize(("version", "first"), [("0.32", 1), ("0.33", 3)])
def test_prefill_waits_for_its_interval(version: str, first: int) -> None:
    policy = scheduler(engine_version=version, prefill_schedule_interval=4)
    steps = Steps(policy)
    steps.add(spec(0, 0.0, 20, 50))
    steps.step()
    late = steps.add(spec(1, 0.0, 20, 5))
    waited = 0
    while not late.num_computed_tokens:
        output = steps.step()
        assert 0 in chunks(output)
        waited += 1
    assert waited == first + (version == "0.33")


def test_a_full_hit_does_not_wait_for_the_interval() -> None:
    policy = scheduler(prefill_schedule_interval=9, enable_prefix_caching=True)
    steps = Steps(policy)
    steps.add(spec(0, 0.0, 33, 50, prompt=((2, 33),)))
    steps.step()
    steps.add(spec(1, 0.0, 33, 5, prompt=((2, 33),)))
    assert chunks(steps.step()) == {0: 1, 1: 1}


def test_an_idle_engine_does_not_wait_for_the_interval() -> None:
    steps = Steps(scheduler(prefill_schedule_interval=9, max_num_batched_tokens=16))
    steps.add(spec(0, 0.0, 40, 2))
    # Its own prompt goes on, since no decode runs that it could disturb.
    assert [chunks(steps.step()) for _ in range(3)] == [{0: 16}, {0: 16}, {0: 8}]


# -- never to be served (invariant 7) -------------------------------------------


def error(policy: Any, num_prompt_tokens: int, max_tokens: int) -> str | None:
    request = spec(0, 0.0, num_prompt_tokens, 1, max_tokens=max_tokens)
    message: str | None = policy.admission_error(
        request_from_spec(request, policy.max_model_len)
    )
    return message


def test_without_chunking_a_sequence_must_fit_into_a_step() -> None:
    policy = scheduler(
        enable_chunked_prefill=False,
        max_model_len=200,
        max_num_batched_tokens=200,
        max_num_scheduled_tokens=100,
    )
    assert error(policy, 60, 40) is None
    assert "a prompt of 101 tokens must be computed in one step" in str(
        error(policy, 101, 1)
    )
    # Preempted after 60 tokens of output it would block the queue for ever.
    assert "longest output of 120 tokens must be computed in one step" in str(
        error(policy, 60, 60)
    )


def test_before_0_31_a_threshold_cuts_prompts_without_chunking() -> None:
    settings = {
        "enable_chunked_prefill": False,
        "max_model_len": 200,
        "max_num_batched_tokens": 200,
        "max_num_scheduled_tokens": 100,
        "long_prefill_token_threshold": 100,
    }
    assert error(scheduler(engine_version="0.30", **settings), 150, 10) is None
    assert "in one step" in str(error(scheduler(**settings), 150, 10))


def test_a_window_lets_in_what_the_pool_could_never_hold() -> None:
    settings = {"num_gpu_blocks": 8, "max_num_batched_tokens": 32}
    assert "needs 12 blocks" in str(error(scheduler(**settings), 190, 10))
    # 39 + 32 tokens are held at most: 5 blocks and one that begins before them.
    assert error(scheduler(sliding_window=40, **settings), 190, 10) is None
    assert "needs 8 blocks; the cache has 7" in str(
        error(scheduler(sliding_window=66, **settings), 190, 10)
    )


def test_a_lone_request_that_can_never_go_on_is_told_as_stuck() -> None:
    policy = scheduler(num_gpu_blocks=4, max_num_batched_tokens=16)
    steps = Steps(policy)
    steps.add(spec(0, 0.0, 100, 1))
    assert steps.step().stuck  # all of it must fit, and never will
    policy = scheduler(
        num_gpu_blocks=4, max_num_batched_tokens=16, scheduler_reserve_full_isl=False
    )
    steps = Steps(policy)
    steps.add(spec(0, 0.0, 100, 1))
    assert [steps.step().stuck for _ in range(4)] == [False, False, False, True]


def test_who_waits_for_others_is_not_stuck() -> None:
    policy = scheduler(num_gpu_blocks=4, max_model_len=48)
    steps = Steps(policy)
    steps.add(spec(0, 0.0, 30, 3))
    steps.add(spec(1, 0.0, 30, 3))
    assert not any(steps.step().stuck for _ in range(6))
    assert policy.num_waiting == policy.num_running == 0


# -- aborts ---------------------------------------------------------------------


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_aborts_wherever_a_request_stands(scheduling_policy: str) -> None:
    policy = scheduler(max_num_seqs=2, scheduling_policy=scheduling_policy)
    steps = Steps(policy)
    requests = [steps.add(spec(i, 0.0, 40, 5, priority=i % 2)) for i in range(5)]
    steps.step()
    for request in (requests[3], next(iter(policy.running))):
        policy.abort(request)
        policy.check()
    assert policy.cache_usage().num_physical_blocks == 3
    assert (policy.num_running, policy.num_waiting) == (1, 2)


def test_each_rule_begins_with_its_release() -> None:
    first = {
        "has_priority_policy": 11,
        "reserves_full_isl": 20,
        "puts_unhashed_blocks_first": 24,
        "puts_unhashed_window_blocks_first": 23,
        "spares_lone_requests": 31,
        "passes_over_self_preempted": 33,
        "steps_back_for_unplanned_victims": 28,
        "spaces_prefills": 33,
        "knows_async_scheduling": 28,
        "knows_pipelines": 32,
        "knows_drafts": 33,
        "knows_offloading": 33,
        "has_tiers_as_here": 28,
        "preempts_what_is_written": 24,
    }
    for rule, minor in first.items():
        assert getattr(dialect_of(f"0.{minor}"), rule), rule
        assert not getattr(dialect_of(f"0.{minor - 1}"), rule), rule
    assert dialect_of("0.29").preempts_what_is_written
    assert not dialect_of("0.30").preempts_what_is_written
    assert dialect_of("0.11").skips_over_budget_heads
    assert not dialect_of("0.12").skips_over_budget_heads
    without = [
        m
        for m in range(8, 34)
        if not dialect_of(f"0.{m}").puts_blocks_first_without_caching
    ]
    assert without == [27]
