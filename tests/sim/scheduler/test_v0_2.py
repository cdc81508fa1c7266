"""The scheduler of vLLM 0.2.7, rule by rule."""

from __future__ import annotations

from typing import Any

import pytest

from cache.sequences import SequenceStatus
from sim.errors import SwapSpaceError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.block_space.v0_2 import Scheduler
from sim.scheduler.request import RequestStatus
from tests.sim.scheduler.group_steps import Steps, batch, make, preempted, queued


def steps(**changes: Any) -> Steps:
    return Steps(make(Scheduler, **changes))


# -- prompt steps -----------------------------------------------------------------


def test_prompts_and_decodes_do_not_share_a_step() -> None:
    run = steps()
    run.add(5)
    run.step()
    run.add(6)
    output = run.step()
    assert output.prompt_run
    assert batch(output) == [(1, 6, "p")]
    output = run.step()
    assert not output.prompt_run
    assert batch(output) == [(0, 1, "d"), (1, 1, "d")]


def test_prompts_are_padded_to_the_longest() -> None:
    run = steps(max_num_batched_tokens=20, max_paddings=3)
    for length in (7, 5, 6, 2):
        run.add(length)
    output = run.step()
    assert batch(output) == [(0, 7, "p"), (1, 5, "p")]  # 3 x 7 > 20
    assert output.num_budgeted_tokens == 14
    output = run.step()
    assert batch(output) == [(2, 6, "p")]  # the next would be padded by 4
    assert batch(run.step()) == [(3, 2, "p")]


def test_a_group_reserves_its_sequences_before_they_exist() -> None:
    run = steps(max_num_seqs=5)
    first = run.add(4, branches=(1, 1, 9))
    run.add(4, width=3)
    assert batch(run.step()) == [(0, 4, "p")]
    assert first.num_generated_tokens == 3
    # Two of three have ended: 1 + 3 sequences fit.
    assert batch(run.step()) == [(1, 4, "p")]


def test_beams_count_to_the_end() -> None:
    run = steps(max_num_seqs=5)
    run.add(4, width=3, use_beam_search=True)
    run.add(4, width=3)
    run.steps(3)
    assert queued(run.scheduler) == ([1], [0], [])


def test_what_can_never_be_admitted_is_ignored_with_a_reason() -> None:
    run = steps(num_gpu_blocks=8, watermark=0.25, max_num_batched_tokens=40)
    long = run.add(41)
    large = run.add(25)
    good = run.add(24)
    output = run.step()
    assert output.ignored == [long, large]
    assert batch(output) == [(2, 24, "p")]
    for request, reason in ((long, "exceed 40"), (large, "pool of 8 less 2")):
        assert request.status is RequestStatus.FINISHED_REJECTED
        assert reason in request.reason
    assert good.status is RequestStatus.RUNNING


def test_a_step_that_only_ignores_is_an_empty_prompt_step() -> None:
    run = steps()
    run.add(5)
    run.step()
    run.add(65)
    output = run.step()
    assert output.prompt_run
    assert batch(output) == []
    assert output.num_budgeted_tokens == 0
    assert batch(run.step()) == [(0, 1, "d")]


def test_a_victim_that_has_grown_past_the_limit_is_ignored() -> None:
    run = steps(num_gpu_blocks=6, max_num_batched_tokens=8, max_model_len=64)
    run.add(7, 9)
    victim = run.add(7, 30)
    while not victim.num_preemptions:
        run.step()
    output = run.step()
    assert output.ignored == [victim]
    assert victim.status is RequestStatus.FINISHED_REJECTED
    run.run()


def test_a_prompt_takes_no_more_than_its_window() -> None:
    run = steps(num_gpu_blocks=4, sliding_window=8)
    request = run.add(16, 12)
    run.step()
    assert run.table(request) == [3, 2, 3, 2]
    run.steps(2)
    assert run.table(request) == [3, 2, 3, 2, 3]
    assert run.scheduler.block_manager.get_num_free_gpu_blocks() == 2
    run.run()
    assert request.num_output_tokens == 12


# -- decode steps -----------------------------------------------------------------


def test_the_tail_is_preempted_and_waits_in_front() -> None:
    run = steps(num_gpu_blocks=6)
    run.add(7)
    run.add(6)
    run.add(6)
    run.step()  # all 6 blocks
    run.add(1)
    output = run.step()
    assert preempted(output) == [(2, "recompute")]
    assert [entry[0] for entry in batch(output)] == [0, 1]
    assert queued(run.scheduler) == ([2, 3], [0, 1], [])


def test_any_preemption_keeps_swapped_groups_out() -> None:
    run = steps(num_gpu_blocks=9)
    run.add(12)
    run.add(12)
    run.add(4, width=2)
    run.step()
    assert preempted(run.step()) == [(2, "swap")]
    run.steps(3)
    output = run.step()
    assert preempted(output) == [(1, "recompute")]
    assert not output.blocks_to_swap_in
    output = run.step()
    assert [entry[0] for entry in batch(output)] == [0, 2]
    assert len(output.blocks_to_swap_in) == 1


def test_beams_are_swapped_even_when_one_is_left() -> None:
    scheduler = make(Scheduler)
    run = Steps(scheduler)
    beam = run.add(4, width=2, use_beam_search=True)
    plain = run.add(4, branches=(1, 9))
    run.steps(2)
    groups = {g.request_id: g for g in scheduler.running}
    first = run.seqs(beam)[0]
    first.status = SequenceStatus.FINISHED_STOPPED
    scheduler.free_seq(first)
    mode = scheduler._preemption_mode
    assert mode(groups[beam.request_id]) is PreemptionMode.SWAP
    assert mode(groups[plain.request_id]) is PreemptionMode.RECOMPUTE


def test_a_copy_is_made_in_mid_beam() -> None:
    run = steps()
    request = run.add(6, width=2, use_beam_search=True, beam_seed=3, beam_percent=100)
    copies = []
    for _ in range(8):
        copies += run.step().blocks_to_copy
    assert copies
    assert request.num_generated_tokens == 16
    run.run()
    assert run.scheduler.block_manager.get_num_free_gpu_blocks() == 20


def test_too_little_swap_space_ends_the_run() -> None:
    run = steps(num_gpu_blocks=5, num_cpu_blocks=0)
    run.add(8)
    run.add(4, width=2)
    with pytest.raises(SwapSpaceError, match=r"request 1 .* 0 CPU blocks are free"):
        run.steps(9)
    run.scheduler.check()


def test_a_forced_recomputation_brings_several_sequences_back() -> None:
    run = steps(num_gpu_blocks=9, preemption_mode=PreemptionMode.RECOMPUTE)
    run.add(12, 18)
    request = run.add(6, 12, branches=(2, 12, 12))
    while not request.num_preemptions:
        run.step()
    lengths = [seq.get_len() for seq in run.seqs(request) if not seq.is_finished()]
    assert len(lengths) == 2
    while True:
        output = run.call()
        if request.status is RequestStatus.RUNNING:
            break
        run.emit(output)
    assert batch(output) == [(1, sum(lengths) - 6, "p")]
    assert sum(seq.is_finished() for seq in run.seqs(request)) == 1
    run.emit(output)
    run.run()
    assert all(r.status is RequestStatus.FINISHED_STOPPED for r in run.requests)


# -- invariant 7 ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "length", "more", "reason"),
    [
        ({}, 4, {"width": 17}, "max_num_seqs"),
        ({"max_model_len": 9}, 10, {}, "max_model_len"),
        ({"max_num_batched_tokens": 9}, 10, {}, "exceeds max_num_batched_tokens"),
        ({"max_num_batched_tokens": 9}, 5, {}, "could not be recomputed"),
        ({"num_gpu_blocks": 9}, 4, {}, "the cache has 9"),
    ],
)
def test_what_can_never_be_served_is_named(
    changes: dict[str, Any], length: int, more: dict[str, Any], reason: str
) -> None:
    run = steps(**changes)
    error = run.scheduler.admission_error(run.add(length, 30, **more))
    assert error is not None
    assert reason in error


@pytest.mark.parametrize("mode", [None, *PreemptionMode])
@pytest.mark.parametrize(
    ("width", "beam", "window"),
    [(1, False, None), (3, False, None), (3, True, None), (1, False, 8), (3, True, 28)],
)
def test_what_is_admitted_alone_ends_in_the_smallest_pool(
    mode: PreemptionMode | None, width: int, beam: bool, window: int | None
) -> None:
    sizes = []
    for num_gpu_blocks in range(1, 30):
        run = steps(
            num_gpu_blocks=num_gpu_blocks,
            watermark=0.05,
            preemption_mode=mode,
            sliding_window=window,
        )
        request = run.add(
            6, 19, width=width, use_beam_search=beam, beam_seed=5, beam_percent=40
        )
        if run.scheduler.admission_error(request) is None:
            sizes.append(num_gpu_blocks)
            run.run()
            assert request.num_generated_tokens >= 19 * width
    assert sizes == list(range(sizes[0], 30))


def test_several_sequences_that_outgrow_the_window_are_refused() -> None:
    run = steps(num_gpu_blocks=40, sliding_window=8)
    error = run.scheduler.admission_error(run.add(6, 3, width=2))
    assert error is not None
    assert "2 sequences of 9 tokens outgrow sliding_window" in error
    assert run.scheduler.admission_error(run.add(6, 2, width=2)) is None


@pytest.mark.parametrize("window", [None, 8, 200])
def test_the_longest_servable_sequence_is_just_admitted(window: int | None) -> None:
    run = steps(num_gpu_blocks=12, max_model_len=999, sliding_window=window)
    longest = run.scheduler.max_servable_tokens
    assert longest == (64 if window == 8 else 44)
    assert run.scheduler.admission_error(run.add(9, longest - 9)) is None
    assert run.scheduler.admission_error(run.add(9, longest - 8)) is not None
