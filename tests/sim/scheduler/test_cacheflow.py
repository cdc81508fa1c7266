"""The scheduler of vLLM 0.1.0, rule by rule."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cache.sequences import SequenceStatus
from sim.errors import SchedulerError, SwapSpaceError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.block_space.cacheflow import Scheduler
from sim.scheduler.block_space.scheduler import FCFS, PolicyFactory
from sim.scheduler.groups.sequence import Sequence, SequenceGroup
from sim.scheduler.groups.settings import SchedulerConfig
from sim.scheduler.request import RequestStatus, SamplingParams
from sim.scheduler.settings import CacheConfig
from tests.sim.scheduler.group_steps import Steps, batch, make, preempted, queued


def steps(**changes: Any) -> Steps:
    return Steps(make(Scheduler, **changes))


# -- one step ---------------------------------------------------------------------


def test_a_prompt_joins_running_decodes() -> None:
    run = steps()
    first = run.add(5)
    assert batch(run.step()) == [(0, 5, "p")]
    run.add(6, width=2)
    output = run.step()
    assert batch(output) == [(0, 1, "d"), (1, 6, "p")]
    assert output.num_budgeted_tokens == 7
    assert run.table(first) == [19, 18]
    assert batch(run.step()) == [(0, 1, "d"), (1, 2, "d")]


def test_the_sequences_of_a_prompt_share_its_blocks_until_they_write() -> None:
    run = steps()
    request = run.add(6, width=3)
    run.step()
    assert [run.table(request, index) for index in range(3)] == [[19, 18]] * 3
    output = run.step()
    assert output.blocks_to_copy == [(18, 17), (18, 16)]
    assert [run.table(request, i)[1] for i in range(3)] == [17, 16, 18]
    assert output.shape.num_copied_blocks == 2


def test_a_head_that_does_not_fit_the_budget_blocks_those_behind() -> None:
    run = steps(max_num_batched_tokens=10)
    for length in (6, 5, 1):
        run.add(length)
    assert batch(run.step()) == [(0, 6, "p")]
    assert batch(run.step()) == [(0, 1, "d"), (1, 5, "p"), (2, 1, "p")]


def test_running_groups_count_once_whatever_their_sequences() -> None:
    run = steps(max_num_seqs=4)
    run.add(4, width=3)
    run.add(4, width=3)
    run.add(4, width=3)
    assert [entry[0] for entry in batch(run.step())] == [0, 1]
    assert queued(run.scheduler)[0] == [2]  # 2 groups + 3 sequences > 4


def test_the_watermark_keeps_blocks_from_prompts_but_not_from_decodes() -> None:
    run = steps(num_gpu_blocks=4, watermark=0.5)
    first = run.add(8)
    run.add(4)
    run.step()
    assert queued(run.scheduler) == ([1], [0], [])
    run.steps(5)
    assert len(run.table(first)) == 4  # 13 tokens


def test_a_prompt_that_never_fits_blocks_the_queue_until_it_is_aborted() -> None:
    run = steps(max_num_batched_tokens=10)
    long = run.add(11)
    run.add(5)
    for _ in range(3):
        output = run.step()
        assert not output.scheduled_seq_groups
        assert output.stuck
    run.scheduler.abort(long)
    assert batch(run.step()) == [(1, 5, "p")]
    assert long.status is RequestStatus.FINISHED_ABORTED


# -- preemption -------------------------------------------------------------------


def test_the_last_running_group_gives_up_its_blocks_and_waits_in_front() -> None:
    run = steps(num_gpu_blocks=5)
    run.add(7)
    victim = run.add(6)
    run.steps(2)
    run.add(4)
    output = run.step()  # the first takes the last block for its ninth token
    assert preempted(output) == [(1, "recompute")]
    assert output.preemptions[0].num_blocks_freed == 2
    assert queued(run.scheduler) == ([1, 2], [0], [])
    assert victim.num_preemptions == 1
    assert victim.num_recompute_tokens == 7
    with pytest.raises(ValueError, match="holds no block"):
        run.table(victim)


def test_several_sequences_are_swapped_and_come_back() -> None:
    run = steps(num_gpu_blocks=7)
    run.add(12, 4)
    victim = run.add(4, width=2)
    run.steps(2)
    tables = [len(run.table(victim, index)) for index in range(2)]
    output = run.step()
    assert preempted(output) == [(1, "swap")]
    assert len(output.blocks_to_swap_out) == 3
    assert tables == [2, 2]
    assert queued(run.scheduler) == ([], [0], [1])
    run.step()
    output = run.step()  # the first has ended
    assert len(output.blocks_to_swap_in) == 3
    assert batch(output) == [(1, 2, "d")]
    assert victim.num_preemptions == 1
    assert victim.num_recompute_tokens == 0


def test_prompts_wait_while_anything_is_swapped() -> None:
    run = steps(num_gpu_blocks=7)
    run.add(12)
    run.add(4, width=2)
    run.steps(3)
    assert run.scheduler.num_swapped == 1
    run.add(1)
    run.step()
    assert queued(run.scheduler) == ([2], [0], [1])


def test_a_group_with_one_running_sequence_left_is_recomputed() -> None:
    run = steps(num_gpu_blocks=6)
    run.add(12)
    run.add(4, branches=(1, 30))
    run.steps(2)
    assert preempted(run.step()) == [(1, "recompute")]


@pytest.mark.parametrize("mode", PreemptionMode)
def test_the_configuration_forces_a_mode(mode: PreemptionMode) -> None:
    run = steps(num_gpu_blocks=9, preemption_mode=mode)
    run.add(12, 8)
    run.add(4, 8)
    run.add(4, 8, width=2)
    run.run()
    modes = {r.num_preemptions and r.num_recompute_tokens > 0 for r in run.requests}
    assert (mode is PreemptionMode.RECOMPUTE) == (True in modes)
    assert any(request.num_preemptions for request in run.requests)


def test_too_little_swap_space_ends_the_run_and_keeps_what_was_decided() -> None:
    run = steps(num_gpu_blocks=7, num_cpu_blocks=1)
    run.add(8, width=2)
    run.add(4)
    run.add(8, width=2)
    scheduler = run.scheduler
    run.steps(1)
    with pytest.raises(SwapSpaceError, match=r"request 2 .* 1 CPU blocks are free"):
        run.steps(9)
    assert preempted(scheduler.partial_output) == []
    assert queued(scheduler) == ([], [0, 1, 2], [])
    scheduler.check()


def test_victims_before_the_failed_swap_are_reported() -> None:
    run = steps(num_gpu_blocks=5, num_cpu_blocks=0)
    run.add(4, width=3)
    run.add(4, width=2)
    run.add(4)
    run.step()
    with pytest.raises(SwapSpaceError, match="request 1 "):
        run.step()
    assert preempted(run.scheduler.partial_output) == [(2, "recompute")]
    assert queued(run.scheduler) == ([2], [0, 1], [])
    run.scheduler.check()


def test_recomputed_victims_do_not_keep_swapped_groups_out() -> None:
    run = steps(num_gpu_blocks=9)
    run.add(12)
    run.add(12)
    run.add(4, width=2)
    run.step()
    assert preempted(run.step()) == [(2, "swap")]
    run.steps(3)
    output = run.step()
    assert preempted(output) == [(1, "recompute")]
    assert batch(output) == [(0, 1, "d"), (2, 2, "d")]
    assert len(output.blocks_to_swap_in) == 1
    assert queued(run.scheduler) == ([1], [0, 2], [])


# -- the wart, and what is ours ---------------------------------------------------


def test_a_readmission_revives_finished_sequences() -> None:
    run = steps(num_gpu_blocks=8)
    run.add(12, 7)
    request = run.add(4, 10, branches=(1, 10))
    run.steps(6)
    short, long = run.seqs(request)
    assert short.status is SequenceStatus.FINISHED_STOPPED
    assert preempted(run.step()) == [(1, "recompute")]
    output = run.call()
    # As long as its first sequence, finished or not, and with one table for both.
    assert batch(output) == [(1, 5, "p")]
    assert output.shape.num_prefill_tokens == 5
    assert short.status is long.status is SequenceStatus.RUNNING
    assert run.table(request, 0) == run.table(request, 1) == [1, 3]
    assert long.get_len() == 10  # two tokens without a slot
    run.emit(output)
    run.step()
    assert len(run.table(request, 1)) == 3  # one block a step until it fits
    run.run()
    assert short.get_output_len() == long.get_output_len() == 10


def test_a_forced_recomputation_brings_several_sequences_back() -> None:
    run = steps(num_gpu_blocks=9, preemption_mode=PreemptionMode.RECOMPUTE)
    run.add(12, 18)
    request = run.add(6, 12, branches=(2, 12, 12))
    while not request.num_preemptions:
        output = run.step()
    assert preempted(output) == [(1, "recompute")]
    done, *others = run.seqs(request)
    lengths = [seq.get_len() for seq in others]
    assert done.is_finished()
    while True:
        output = run.call()
        if request.status is RequestStatus.RUNNING:
            break
        run.emit(output)
    num_output_tokens = sum(lengths) - 12
    assert (1, 6 + num_output_tokens, "p") in batch(output)
    assert done.is_finished()
    first, second = run.table(request, 1), run.table(request, 2)
    assert first[0] == second[0]  # the one full block of the prompt
    assert not set(first[1:]) & set(second[1:])
    assert [len(t) for t in (first, second)] == [-(-n // 4) for n in lengths]
    run.emit(output)
    run.run()
    assert all(r.status is RequestStatus.FINISHED_STOPPED for r in run.requests)


# -- names of the field -----------------------------------------------------------


def test_groups_can_be_added_and_aborted_under_vllms_names() -> None:
    scheduler = make(Scheduler)
    seqs = [Sequence(index, [1, 2, 3], 4) for index in range(2)]
    scheduler.add_seq_group(SequenceGroup("a", seqs, 0.0, SamplingParams(n=2)))
    assert scheduler.get_num_unfinished_seq_groups() == 1
    scheduler.schedule(0.0)
    scheduler.abort_seq_group("a")
    assert not scheduler.has_unfinished_seqs()
    scheduler.check()


def test_policies_sort_by_priority() -> None:
    groups = [
        SequenceGroup(index, [Sequence(index, [1], 4)], arrival)
        for index, arrival in enumerate([2.0, 0.0, 2.0, 1.0])
    ]
    policy = PolicyFactory.get_policy("fcfs")
    assert isinstance(policy, FCFS)
    assert policy.get_priority(5.0, groups[0]) == 3.0
    by_arrival = [g.request_id for g in policy.sort_by_priority(5.0, groups)]
    assert by_arrival == [1, 3, 0, 2]


def test_any_policy_puts_the_most_urgent_first() -> None:
    class LastComeFirst(FCFS):
        sort_by_priority = FCFS.__mro__[1].sort_by_priority  # type: ignore[attr-defined]

        def get_priority(self, now: float, seq_group: SequenceGroup) -> float:
            return seq_group.arrival_time - now

    groups = [SequenceGroup(i, [Sequence(i, [1], 4)], float(i)) for i in range(3)]
    ordered = LastComeFirst().sort_by_priority(9.0, groups)
    assert [g.request_id for g in ordered] == [2, 1, 0]


def test_an_unknown_policy_and_a_window_are_refused() -> None:
    with pytest.raises(SchedulerError, match="policy must be 'fcfs'"):
        make(Scheduler, policy="priority")
    with pytest.raises(SchedulerError, match="sliding_window must be null"):
        make(Scheduler, sliding_window=8)


# -- invariant 7 ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "length", "more", "reason"),
    [
        ({}, 4, {"width": 17}, "max_num_seqs"),
        ({"max_model_len": 9}, 10, {}, "max_model_len"),
        ({"max_num_batched_tokens": 9}, 10, {}, "exceeds max_num_batched_tokens"),
        ({"max_num_batched_tokens": 9}, 5, {}, "could not be recomputed"),
        ({"num_gpu_blocks": 9}, 4, {}, "the cache has 9"),
        ({"num_gpu_blocks": 10, "watermark": 0.1}, 4, {}, "1 below the watermark"),
    ],
)
def test_what_can_never_be_served_is_named(
    changes: dict[str, Any], length: int, more: dict[str, Any], reason: str
) -> None:
    run = steps(**changes)
    request = run.add(length, 30, **more)
    error = run.scheduler.admission_error(request)
    assert error is not None
    assert reason in error


@pytest.mark.parametrize("mode", [None, *PreemptionMode])
@pytest.mark.parametrize("width", [1, 3])
def test_what_is_admitted_alone_ends_in_the_smallest_pool(
    mode: PreemptionMode | None, width: int
) -> None:
    sizes = []
    for num_gpu_blocks in range(1, 40):
        run = steps(num_gpu_blocks=num_gpu_blocks, watermark=0.05, preemption_mode=mode)
        request = run.add(6, 19, width=width)
        if run.scheduler.admission_error(request) is None:
            sizes.append(num_gpu_blocks)
            run.run()
            assert request.num_generated_tokens == 19 * width
    assert sizes == list(range(sizes[0], 40))
    assert sizes[0] == (8 if width == 1 else 23)


@pytest.mark.parametrize("mode", [None, *PreemptionMode])
def test_the_longest_servable_sequence_is_just_admitted(
    mode: PreemptionMode | None,
) -> None:
    run = steps(
        num_gpu_blocks=12, max_model_len=99, watermark=0.2, preemption_mode=mode
    )
    longest = run.scheduler.max_servable_tokens
    assert longest == 36
    assert run.scheduler.admission_error(run.add(9, longest - 9)) is None
    assert run.scheduler.admission_error(run.add(9, longest - 8)) is not None


def test_the_budget_bounds_what_can_be_recomputed_but_not_what_is_swapped() -> None:
    budget = {"max_num_batched_tokens": 30}
    assert steps(**budget).scheduler.max_servable_tokens == 30
    swapping = steps(**budget, preemption_mode=PreemptionMode.SWAP)
    assert swapping.scheduler.max_servable_tokens == 76


# -- speed ------------------------------------------------------------------------


def test_a_slot_in_a_block_with_room_costs_little() -> None:
    config = SchedulerConfig(100_000, 256, 100_000)
    scheduler = Scheduler(config, CacheConfig(16, 20_000, watermark=0.01))
    seq = Sequence(0, [0] * 90_000, 16)
    scheduler.add_seq_group(SequenceGroup(0, [seq], 0.0))
    scheduler.schedule(0.0)
    append_slot = scheduler.block_manager.append_slot
    begin = time.perf_counter()
    for _ in range(10_000):
        append_slot(seq)
    assert time.perf_counter() - begin < 0.1  # 10 us each; a walk would take 1 ms
