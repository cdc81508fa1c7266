"""Chunked prefill, prefix caching and partial prefills of the V0 scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from cache.sequences import Device
from cache.v0.evictor import LRUEvictor
from sim.errors import SchedulerError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.v0.scheduler import Scheduler
from tests.sim.scheduler.group_steps import Steps, batch, chunks, make, queued

RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP


def steps(**changes: Any) -> Steps:
    return Steps(make(Scheduler, **changes))


# -- chunked prefill ----------------------------------------------------------------


def test_decodes_and_chunks_share_the_budget() -> None:
    run = steps(enable_chunked_prefill=True, max_num_batched_tokens=10)
    run.add(4)
    run.add(14)
    run.add(5)
    assert chunks(run.step()) == [(0, 4, 0, 0), (1, 6, 0, 0)]
    output = run.step()
    assert batch(output) == [(2, 1, "p"), (1, 8, "p"), (0, 1, "d")]
    assert chunks(output) == [(2, 1, 0, 0), (1, 8, 6, 0)]
    assert queued(run.scheduler)[1] == [0, 1, 2]
    assert batch(run.step()) == [(2, 4, "p"), (0, 1, "d"), (1, 1, "d")]


def test_what_gets_no_tokens_stays_in_front() -> None:
    run = steps(enable_chunked_prefill=True, max_num_batched_tokens=2)
    for _ in range(2):
        run.add(1)
    run.step()
    run.add(1)
    output = run.step()
    assert batch(output) == [(0, 1, "d"), (1, 1, "d")]
    assert queued(run.scheduler) == ([2], [0, 1], [])


def test_with_prefix_caching_what_is_left_is_used_in_whole_blocks() -> None:
    run = steps(
        enable_chunked_prefill=True,
        max_num_batched_tokens=11,
        enable_prefix_caching=True,
    )
    run.add(20)
    run.add(1)
    assert chunks(run.step()) == [(0, 8, 0, 0)]  # 11 rounded down; 3 are no block
    assert chunks(run.step()) == [(0, 8, 8, 0)]
    # The last chunk is not rounded; 7 are left, so a block's worth for the other.
    assert chunks(run.step()) == [(1, 1, 0, 0), (0, 4, 16, 0)]


def test_cached_blocks_cost_nothing_and_a_full_hit_one_token() -> None:
    run = steps(enable_prefix_caching=True, max_num_batched_tokens=20)
    shared = ((99, 8),)
    run.add(8, 1, prompt=shared)
    assert run.step().num_hit_tokens == {0: 0}
    run.add(8, 1, prompt=shared)
    for own in (5, 7):  # 1 + 11 + 11 > 20
        run.add(19, 1, prompt=(*shared, (own, 11)))
    output = run.step()
    assert output.num_hit_tokens == {1: 8, 2: 8}
    assert chunks(output) == [(1, 8, 0, 7), (2, 19, 0, 8)]
    assert output.num_budgeted_tokens == 27  # 12 computed, 15 cached
    assert output.num_scheduled_tokens == [1, 11]
    assert run.scheduler.get_prefix_cache_hit_rate(Device.GPU) > 0.0


def test_equal_prompts_of_one_call_share_blocks_but_hit_nothing() -> None:
    run = steps(enable_prefix_caching=True)
    pair = [run.add(8, prompt=((99, 8),)) for _ in range(2)]
    assert run.step().num_hit_tokens == {0: 0, 1: 0}
    assert run.table(pair[0]) == run.table(pair[1])


def test_hits_are_looked_up_once_while_a_request_waits() -> None:
    run = steps(enable_prefix_caching=True, num_gpu_blocks=5, watermark=0.0)
    run.add(12, 3, prompt=((99, 12),))
    run.step()
    late = run.add(12, 3, prompt=((99, 12),))  # 3 blocks, 2 are free
    run.step()
    group = run.scheduler.group_of(late)
    assert run.scheduler.block_manager.get_num_cached_tokens(group.first_seq) == 12
    run.step()
    assert run.step().num_hit_tokens == {1: 12}


# -- partial prefills ---------------------------------------------------------------


def test_partial_prefills_share_the_budget_and_long_ones_are_passed_over() -> None:
    run = steps(
        enable_chunked_prefill=True,
        max_num_batched_tokens=12,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=8,
    )
    for length in (20, 20, 7):
        run.add(length)
    output = run.step()
    assert chunks(output) == [(0, 6, 0, 0), (2, 6, 0, 0)]
    assert queued(run.scheduler)[0] == [1]
    # 0 is still long with 14 tokens left: 1 waits, and 0 shares with 2.
    assert chunks(run.step()) == [(0, 6, 6, 0), (2, 1, 6, 0)]
    # 8 left are not long any more.
    assert chunks(run.step()) == [(1, 5, 0, 0), (0, 6, 12, 0)]


def test_long_without_a_threshold_is_a_share_of_the_longest_sequence() -> None:
    scheduler = make(
        Scheduler,
        enable_chunked_prefill=True,
        max_num_partial_prefills=2,
        max_model_len=1000,
        num_gpu_blocks=300,
    )
    rules = scheduler.chunk_rule.partial_prefills
    assert rules.long_prefill_token_threshold == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_partial_prefills": 2}, "needs chunked prefill"),
        (
            {
                "enable_chunked_prefill": True,
                "max_num_partial_prefills": 2,
                "max_long_partial_prefills": 3,
            },
            "must not exceed max_num_partial_prefills",
        ),
        (
            {
                "enable_chunked_prefill": True,
                "enable_prefix_caching": True,
                "max_num_batched_tokens": 3,
            },
            "at least 4 for each of 1 partial prefills",
        ),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchedulerError, match=message):
        make(Scheduler, **changes)


def test_a_users_own_evictor_decides_what_goes_first() -> None:
    made: list[LRUEvictor] = []

    def make_one() -> LRUEvictor:
        made.append(LRUEvictor())
        return made[-1]

    run = steps(enable_prefix_caching=True, evictor=make_one)
    run.add(8, 1)
    run.step()
    assert sorted(evictor.num_blocks for evictor in made) == [0, 2]  # CPU and GPU


@pytest.mark.parametrize("width", [1, 2])
def test_sequences_that_run_count_against_max_num_seqs(width: int) -> None:
    """Decodes and chunks take places before a prompt is admitted."""
    run = steps(
        enable_chunked_prefill=True, max_num_seqs=width + 1, max_num_batched_tokens=40
    )
    run.add(4, width=width)
    run.step()
    run.add(30)
    run.add(4)
    assert batch(run.step()) == [(1, 30, "p"), (0, width, "d")]
    for _ in range(3):
        assert {request_id for request_id, _, _ in batch(run.step())} == {0, 1}
        assert queued(run.scheduler)[0] == [2]
