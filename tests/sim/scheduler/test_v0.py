"""The V0 scheduler's default mode, rule by rule."""

from __future__ import annotations

from typing import Any

import pytest

from cache.sequences import SequenceStatus
from sim.errors import SwapSpaceError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.groups.sequence import Sequence, SequenceGroup
from sim.scheduler.request import RequestStatus, SamplingParams
from sim.scheduler.v0.scheduler import Scheduler
from tests.sim.scheduler.group_steps import (
    Steps,
    batch,
    chunks,
    make,
    preempted,
    queued,
)

RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP


def steps(**changes: Any) -> Steps:
    return Steps(make(Scheduler, **changes))


# -- default mode -----------------------------------------------------------------


def test_prompts_come_first_and_alone() -> None:
    run = steps()
    run.add(5)
    assert batch(run.step()) == [(0, 5, "p")]
    run.add(6)
    assert batch(run.step()) == [(1, 6, "p")]
    output = run.step()
    assert batch(output) == [(0, 1, "d"), (1, 1, "d")]
    assert output.num_budgeted_tokens == 2


def test_an_over_budget_head_blocks_those_behind() -> None:
    run = steps(max_num_batched_tokens=10)
    for length in (6, 5, 1):
        run.add(length)
    assert batch(run.step()) == [(0, 6, "p")]
    assert batch(run.step()) == [(1, 5, "p"), (2, 1, "p")]


def test_a_group_counts_one_sequence_until_it_has_forked() -> None:
    run = steps(max_num_seqs=3)
    run.add(4, width=2)
    run.add(4, width=2)
    run.add(4)
    run.add(4)
    assert len(batch(run.step())) == 3
    assert batch(run.step()) == [(0, 2, "d"), (1, 2, "d"), (2, 1, "d")]  # five run
    assert queued(run.scheduler)[0] == [3]


def test_only_ignoring_lets_decodes_go_on() -> None:
    run = steps(max_num_batched_tokens=16)
    run.add(5)
    run.step()
    long = run.add(17)
    output = run.step()
    assert batch(output) == [(0, 1, "d")]
    assert output.ignored == [long]
    assert long.status is RequestStatus.FINISHED_REJECTED
    assert "17 tokens to prefill exceed 16" in long.reason
    assert run.scheduler.get_and_reset_finished_requests_ids() == []


def test_a_prompt_beyond_the_pool_is_ignored_and_one_beyond_what_is_free_waits() -> (
    None
):
    run = steps(num_gpu_blocks=6, watermark=0.2)  # one block below the watermark
    run.add(16)
    run.step()
    never, later = run.add(21), run.add(20)
    output = run.step()
    assert output.ignored == [never]
    assert queued(run.scheduler)[0] == [later.request_id]


def test_victims_return_in_arrival_order() -> None:
    run = steps(num_gpu_blocks=7)
    for _ in range(3):
        run.add(8)
    run.add(8)
    run.step()
    output = run.step()  # one block is free: 0 takes it, 1 needs one of 2's
    assert preempted(output) == [(2, "recompute")]
    assert batch(output) == [(0, 1, "d"), (1, 1, "d")]
    assert queued(run.scheduler) == ([2, 3], [0, 1], [])


def test_a_group_that_nobody_makes_room_for_preempts_itself() -> None:
    run = steps(num_gpu_blocks=2)
    request = run.add(8)
    run.step()
    output = run.step()
    assert preempted(output) == [(0, "recompute")]
    assert not output.stuck
    assert request.num_recompute_tokens == 8
    assert run.scheduler.admission_error(request) is not None


def test_several_sequences_are_swapped_without_sharing_and_come_back() -> None:
    run = steps(num_gpu_blocks=7)
    run.add(12, 3)
    group = run.add(8, 3, width=2)
    run.step()
    assert run.table(group, 0) == run.table(group, 1) == [3, 4]
    output = run.step()  # two are free: 0 takes one, and two sequences need one each
    assert preempted(output) == [(1, "swap")]
    assert output.blocks_to_swap_out == [(3, 0), (4, 1), (3, 2), (4, 3)]
    assert output.preemptions[0].num_blocks_moved == 4
    assert queued(run.scheduler) == ([], [0], [1])
    assert batch(run.step()) == [(0, 1, "d")]  # four full blocks and two to write to
    output = run.step()
    assert batch(output) == [(1, 2, "d")]
    assert [pair[0] for pair in output.blocks_to_swap_in] == [0, 1, 2, 3]
    assert [len(run.table(group, index)) for index in range(2)] == [3, 3]


def test_without_cpu_blocks_a_swap_ends_the_run_with_queues_in_order() -> None:
    run = steps(num_gpu_blocks=7, num_cpu_blocks=1, preemption_mode=SWAP)
    for _ in range(3):
        run.add(8)
    run.step()
    with pytest.raises(SwapSpaceError, match="request 2 has to be swapped out"):
        run.call()
    assert queued(run.scheduler) == ([], [0, 1, 2], [])
    assert run.scheduler.partial_output.preemptions == []
    run.scheduler.check()


def test_lookahead_slots_are_taken_ahead_for_decodes_only() -> None:
    run = steps(num_lookahead_slots=5)
    request = run.add(4)
    run.step()
    assert len(run.table(request)) == 1
    run.step()
    assert len(run.table(request)) == 3  # 5 tokens and 5 slots


@pytest.mark.parametrize("num_gpu_blocks", range(14, 30))
def test_what_one_group_takes_is_not_promised_to_the_next(num_gpu_blocks: int) -> None:
    run = steps(num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=99, num_lookahead_slots=6)
    run.add(7, 12)
    run.add(8, 12, width=2)
    run.add(5, 12)
    run.add(6, 12, width=3)
    run.add(9, 12)
    run.run()  # and no append lacks a block


# -- swapping ---------------------------------------------------------------------


def test_swapped_groups_hold_back_prompts_and_return_first() -> None:
    run = steps(num_gpu_blocks=7, preemption_mode=SWAP)
    run.add(8, 4)
    run.add(8, 4)
    run.add(8, 4)
    run.step()
    output = run.step()
    assert preempted(output) == [(2, "swap")]
    assert output.blocks_to_swap_out == [(4, 0), (5, 1)]
    run.add(4)
    output = run.step()
    assert batch(output) == [(0, 1, "d"), (1, 1, "d")]
    assert queued(run.scheduler) == ([3], [0, 1], [2])
    run.step()  # 0 and 1 are done
    output = run.step()
    assert [pair[0] for pair in output.blocks_to_swap_in] == [0, 1]
    assert batch(output) == [(2, 1, "d")]
    assert output.admitted == [run.requests[2]]
    assert batch(run.step()) == [(3, 4, "p")]


def test_a_group_too_large_without_sharing_is_ignored_and_its_cpu_blocks_are_lost() -> (
    None
):
    run = steps(num_gpu_blocks=10, num_cpu_blocks=40, max_num_batched_tokens=32)
    run.add(3, 20)
    group = run.add(27, 20, width=2)
    assert run.scheduler.admission_error(group) is not None
    while not run.scheduler.swapped:
        run.step()
    num_free = run.scheduler.block_manager.get_num_free_cpu_blocks()
    assert num_free < 40
    output = run.step()
    assert output.ignored == [group]
    assert "no longer share blocks" in group.reason
    assert run.scheduler.block_manager.get_num_free_cpu_blocks() == num_free
    run.run()


# -- priority ---------------------------------------------------------------------


def test_an_urgent_head_evicts_less_urgent_groups_until_it_fits() -> None:
    run = steps(num_gpu_blocks=7, policy="priority")
    run.add(8, priority=2)
    run.add(8, priority=1)
    run.add(8, priority=3)
    run.step()
    run.add(12, priority=1)
    run.add(4, priority=0)
    output = run.step()
    assert preempted(output) == [(2, "recompute")]
    assert [p.reason for p in output.preemptions] == ["a more urgent group waits"]
    # 12 tokens fit the three free blocks, and the rest decodes in its new order ...
    assert queued(run.scheduler)[0][0] == 4
    # ... but 4 is more urgent than the group that made room.
    output = run.step()
    assert batch(output)[0] == (4, 4, "p")


def test_evicted_groups_are_recomputed_even_if_swapping_is_forced() -> None:
    run = steps(num_gpu_blocks=6, policy="priority", preemption_mode=SWAP)
    run.add(8, priority=1)
    run.add(8, width=2, priority=2)
    run.step()
    run.add(12, priority=0)
    output = run.step()
    assert preempted(output)[0] == (1, "recompute")
    run.run()


# -- delay ------------------------------------------------------------------------


def test_prompts_wait_for_company_while_something_runs() -> None:
    scheduler = make(Scheduler, delay_factor=2.0)
    run = Steps(scheduler)
    run.add(4)
    run.emit(scheduler.schedule(10.0))  # nothing runs: no delay
    run.emit(scheduler.schedule(13.0))  # so the prompt step took 3 s
    late = run.add(4)
    late_group = scheduler.group_of(late)
    late_group.arrival_time = 14.0
    run.emit(output := scheduler.schedule(20.0))
    assert batch(output) == [(0, 1, "d")]  # 6 s are not more than 2 x 3 s
    run.emit(output := scheduler.schedule(20.5))
    assert batch(output) == [(1, 4, "p")]
    assert not output.stuck


# -- recomputing several sequences --------------------------------------------------


def test_a_forked_group_is_recomputed_as_a_whole_if_that_is_forced() -> None:
    run = steps(num_gpu_blocks=8, preemption_mode=RECOMPUTE)
    run.add(12, 6)
    group = run.add(9, 6, width=2)
    while not (output := run.step()).preemptions:
        pass
    assert preempted(output) == [(1, "recompute")]
    outputs = [seq.get_output_len() for seq in run.seqs(group)]
    while chunks(output := run.step()) == []:
        pass
    assert chunks(output) == [(1, 9 + sum(outputs), 0, 0)]
    assert output.num_recomputed_tokens == 9  # the newest tokens are new
    tables = [run.table(group, index) for index in range(2)]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    run.run()


def test_a_recomputation_larger_than_the_budget_runs_alone() -> None:
    run = steps(
        enable_chunked_prefill=True,
        max_num_batched_tokens=12,
        num_gpu_blocks=14,
        preemption_mode=RECOMPUTE,
    )
    first = run.add(9, 16)
    group = run.add(9, 14, width=2)
    large = []
    while run.scheduler.has_unfinished_seqs():
        output = run.step()
        large += [c for c in chunks(output) if c[1] > 12]
        if large and large[-1] in chunks(output):
            assert len(output.scheduled) == 1
        assert run.num_steps < 300
    assert large
    assert {c[0] for c in large} == {group.request_id}
    assert first.status is group.status is RequestStatus.FINISHED_STOPPED


# -- life cycles ---------------------------------------------------------------------


def test_plain_token_lists_and_names_of_the_field() -> None:
    scheduler = make(Scheduler)
    seq = Sequence(0, [1, 2, 3, 4, 5], 4)
    scheduler.add_seq_group(SequenceGroup("a", [seq], 0.0, SamplingParams(n=1)))
    assert scheduler.has_unfinished_seqs()
    assert scheduler.get_num_unfinished_seq_groups() == 1
    output = scheduler.schedule(0.0)
    assert batch(output) == [("a", 5, "p")]
    child = seq.fork(1)
    scheduler.fork_seq(seq, child)
    manager = scheduler.block_manager
    assert manager.get_block_table(child) == manager.get_block_table(seq)
    scheduler.free_seq(child)
    seq.move_to(SequenceStatus.FINISHED_STOPPED)
    scheduler.free_seq(seq)
    scheduler.free_finished_seq_groups()
    assert not scheduler.has_unfinished_seqs()
    assert scheduler.get_and_reset_finished_requests_ids() == ["a"]
    assert scheduler.get_and_reset_finished_requests_ids() == []


def test_aborts_free_blocks_wherever_the_group_stands() -> None:
    run = steps(num_gpu_blocks=7, preemption_mode=SWAP)
    for _ in range(3):
        run.add(8)
    run.steps(2)
    run.add(8)
    assert queued(run.scheduler) == ([3], [0, 1], [2])
    run.scheduler.abort_seq_group(i for i in range(4))
    assert not run.scheduler.has_unfinished_seqs()
    assert run.scheduler.block_manager.get_num_free_gpu_blocks() == 7
    assert run.scheduler.block_manager.get_num_free_cpu_blocks() == 20
    assert run.scheduler.get_and_reset_finished_requests_ids() == [3, 0, 1, 2]
