"""The 2023 memory analysis: what sharing saves and what fragmentation wastes."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.sequences import SequenceStatus
from sim.scheduler.base import PreemptionMode
from sim.scheduler.block_space import cacheflow, v0_2
from sim.scheduler.block_space.stats import Stats
from tests.sim.scheduler.group_steps import Steps, make

KINDS = (cacheflow.Scheduler, v0_2.Scheduler)


def record(stats: Stats, index: int = -1) -> dict[str, float]:
    return {each.name: getattr(stats, each.name)[index] for each in fields(stats)}


def test_one_sequence_wastes_the_end_of_its_last_block() -> None:
    stats = Stats()
    run = Steps(make(cacheflow.Scheduler, stats=stats))
    run.add(6)
    run.scheduler.schedule(2.5)
    assert record(stats) == {
        "timestamps": 2.5,
        "input_lens": 6,
        "swap_in_lens": 0,
        "swap_out_lens": 0,
        "num_preemption": 0,
        "num_waiting": 0,
        "num_running": 1,
        "num_swapped": 0,
        "gpu_cache_usage": pytest.approx(0.1),
        "cpu_cache_usage": 0.0,
        "num_logical_blocks": 2,
        "num_logical_tokens": 6,
        "num_physical_blocks": 2,
        "num_physical_tokens": 6,
        "num_reserved_blocks": 0,
        "num_reserved_tokens": 2,
    }
    assert stats.fragmentation == [0.25]
    assert stats.sharing_saved == [0.0]


def test_a_shared_partial_block_is_counted_once_until_it_is_copied() -> None:
    stats = Stats()
    run = Steps(make(cacheflow.Scheduler, stats=stats))
    run.add(6, width=3)
    run.step()
    shared = record(stats)
    assert (shared["num_logical_blocks"], shared["num_physical_blocks"]) == (6, 2)
    assert (shared["num_logical_tokens"], shared["num_physical_tokens"]) == (18, 6)
    assert stats.sharing_saved == [pytest.approx(2 / 3)]
    run.step()  # two copies: the full block is shared still
    copied = record(stats)
    assert (copied["num_logical_blocks"], copied["num_physical_blocks"]) == (6, 4)
    assert (copied["num_logical_tokens"], copied["num_physical_tokens"]) == (21, 13)
    assert copied["num_reserved_tokens"] == 3
    assert stats.fragmentation[-1] == 3 / 16


def test_a_fork_shares_the_partial_block() -> None:
    stats = Stats()
    run = Steps(make(v0_2.Scheduler, stats=stats))
    run.add(6, width=2)
    run.step()
    assert record(stats)["num_logical_tokens"] == 6  # forked only after the call
    run.step()
    forked = record(stats)
    assert (forked["num_logical_tokens"], forked["num_physical_tokens"]) == (14, 10)
    assert (forked["num_logical_blocks"], forked["num_physical_blocks"]) == (4, 3)


def test_swaps_and_queues_are_recorded() -> None:
    stats = Stats()
    run = Steps(make(cacheflow.Scheduler, num_gpu_blocks=7, stats=stats))
    run.add(12, 4)
    run.add(4, 4, width=2)
    run.steps(2)
    run.add(3, 1)
    run.step()
    assert stats.num_preemption == [0, 0, 1]
    assert stats.swap_out_lens == [0, 0, 12]
    assert (stats.num_waiting[-1], stats.num_running[-1]) == (1, 1)
    assert stats.num_swapped[-1] == 1
    assert stats.cpu_cache_usage[-1] == pytest.approx(3 / 20)
    assert stats.num_logical_blocks[-1] == 4  # the GPU's only
    run.run()
    assert sum(stats.swap_in_lens) == 12
    frame = stats.to_frame()
    assert len(frame) == len(stats) == run.num_steps
    assert list(frame.columns)[-2:] == ["sharing_saved", "fragmentation"]
    assert list(frame["input_lens"]) == stats.input_lens


def test_a_call_that_leaves_nothing_running_is_not_recorded() -> None:
    stats = Stats()
    run = Steps(make(v0_2.Scheduler, stats=stats))
    run.add(65)
    run.step()
    assert len(stats) == 0
    assert stats.to_frame().empty


def test_blocks_of_a_longer_table_are_reserved() -> None:
    stats = Stats()
    run = Steps(make(cacheflow.Scheduler, stats=stats))
    request = run.add(9, 9)
    run.step()
    run.seqs(request)[0].num_computed_tokens = 4
    stats.record(1.0, run.scheduler.partial_output, run.scheduler)
    assert stats.num_reserved_blocks == [0, 2]
    assert stats.num_reserved_tokens == [3, 8]


def counted(run: Steps) -> tuple[int, int, int, int]:
    """Physical and logical blocks, physical and logical tokens, slot by slot."""
    scheduler = run.scheduler
    slots: set[tuple[int, int]] = set()
    held: set[int] = set()
    num_entries = num_tokens = 0
    for group in scheduler.running:
        for seq in group.get_seqs(SequenceStatus.RUNNING):
            table = scheduler.block_manager.get_block_table(seq)
            held.update(table)
            num_entries += len(table)
            for position in range(min(seq.num_computed_tokens, 4 * len(table))):
                slots.add((table[position // 4], position % 4))
                num_tokens += 1
    return len(held), num_entries, len(slots), num_tokens


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from([None, *PreemptionMode]),
    window=st.sampled_from([None, 8]),
    requests=st.lists(
        st.tuples(
            st.integers(1, 12),
            st.lists(st.integers(1, 10), min_size=1, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_the_analysis_equals_a_count_slot_by_slot(
    kind: type[cacheflow.Scheduler] | type[v0_2.Scheduler],
    mode: PreemptionMode | None,
    window: int | None,
    requests: list[tuple[int, list[int], bool]],
) -> None:
    stats = Stats()
    run = Steps(
        make(
            kind,
            num_gpu_blocks=16,
            num_cpu_blocks=99,
            preemption_mode=mode,
            sliding_window=window if kind is v0_2.Scheduler else None,
            stats=stats,
        )
    )
    for num_prompt_tokens, drawn, beam in requests:
        ends = drawn
        if kind is v0_2.Scheduler and mode is not PreemptionMode.SWAP:
            # 0.2.7 loses blocks of groups whose sequences end one by one.
            ends = [max(drawn)] * len(drawn)
        if beam:
            run.add(
                num_prompt_tokens,
                max(ends),
                width=len(ends),
                use_beam_search=len(ends) > 1,
                beam_seed=7,
                beam_percent=60,
            )
        else:
            run.add(num_prompt_tokens, max(ends), branches=tuple(ends))
        if run.scheduler.admission_error(run.requests[-1]) is not None:
            run.scheduler.abort(run.requests[-1])
    while run.scheduler.has_unfinished_seqs():
        output = run.call()
        if run.scheduler.running:
            now = record(stats)
            assert counted(run) == (
                now["num_physical_blocks"],
                now["num_logical_blocks"],
                now["num_physical_tokens"],
                now["num_logical_tokens"],
            )
            free = 4 * now["num_physical_blocks"] - now["num_physical_tokens"]
            assert now["num_reserved_tokens"] == free
        run.emit(output)
        assert run.num_steps < 2_000
