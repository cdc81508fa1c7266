"""Schedulers of sequence groups, called as vLLM's are: no engine, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cache.sequences import SequenceStatus
from sim.errors import SchedulerError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.block_space import cacheflow, v0_2
from sim.scheduler.groups.sequence import Sequence, SequenceGroup
from sim.scheduler.groups.settings import SchedulerConfig
from sim.scheduler.settings import CacheConfig
from sim.scheduler.v0 import scheduler as v0

if TYPE_CHECKING:
    from sim.scheduler.groups.output import GroupSchedulerOutput

RUNNING, STOPPED = SequenceStatus.RUNNING, SequenceStatus.FINISHED_STOPPED
SIZE = 4

every_generation = pytest.mark.parametrize(
    "kind", [cacheflow.Scheduler, v0_2.Scheduler, v0.Scheduler]
)


def make(kind: Any, num_blocks: int = 8, **rules: Any) -> Any:
    return kind(
        SchedulerConfig(64, 4, 16, **rules),
        CacheConfig(SIZE, num_blocks, num_blocks, watermark=0.0),
    )


def group(seq_id: int, num_tokens: int = SIZE, **more: Any) -> SequenceGroup:
    seq = Sequence(seq_id, list(range(num_tokens)), SIZE)
    return SequenceGroup(str(seq_id), [seq], float(seq_id), **more)


def sample(output: GroupSchedulerOutput) -> None:
    for entry in output.scheduled_seq_groups:
        for seq in entry.seq_group.get_seqs(RUNNING):
            seq.append_token_id(0, {0: 0.0})


@every_generation
def test_groups_are_added_scheduled_and_aborted_by_name(kind: Any) -> None:
    scheduler = make(kind)
    groups = [group(i) for i in range(4)]
    for seq_group in groups:
        scheduler.add_seq_group(seq_group)
    output = scheduler.schedule()
    assert [entry.seq_group for entry in output.scheduled_seq_groups] == groups
    assert (output.num_prefill_groups, output.num_batched_tokens) == (4, 16)
    assert (output.running_queue_size, output.preempted) == (4, 0)
    assert not output.is_empty()
    sample(output)
    output = scheduler.schedule()
    assert (output.num_prefill_groups, output.num_batched_tokens) == (0, 4)
    scheduler.abort_seq_group("0")
    scheduler.add_seq_group(group(4))  # is not taken for one of those that are there
    scheduler.abort_seq_group(str(i) for i in (1, 2))
    scheduler.check()
    assert scheduler.get_num_unfinished_seq_groups() == 2
    scheduler.abort_seq_group({"3", "4"})
    assert not scheduler.has_unfinished_seqs()
    assert scheduler.schedule().is_empty()


@every_generation
def test_a_group_is_queued_once(kind: Any) -> None:
    scheduler = make(kind)
    seq_group = group(7)
    scheduler.add_seq_group(seq_group)
    with pytest.raises(SchedulerError, match=r"group 7 \(sequence 7\) is queued"):
        scheduler.add_seq_group(seq_group)
    assert scheduler.get_num_unfinished_seq_groups() == 1
    scheduler.check()


@every_generation
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preemption_mode_may_be_named(kind: Any, mode: str) -> None:
    scheduler = make(kind, num_blocks=2, preemption_mode=mode)
    for i in range(2):
        scheduler.add_seq_group(group(i))
    sample(scheduler.schedule())
    output = scheduler.schedule()
    assert output.preempted == 1
    assert output.preemptions[0].mode is PreemptionMode(mode)
    assert len(scheduler.swapped) == (mode == "swap")


def test_an_unknown_preemption_mode_is_refused() -> None:
    with pytest.raises(SchedulerError, match="recompute, swap, got 'drop'"):
        make(v0.Scheduler, preemption_mode="drop")


def test_v0_frees_what_its_caller_finished() -> None:
    scheduler = make(v0.Scheduler)
    seq_group = group(0, 6)
    scheduler.add_seq_group(seq_group)
    sample(scheduler.schedule())
    parent = seq_group.first_seq
    child = parent.fork(1)
    seq_group.add(child)
    scheduler.fork_seq(parent, child)
    child.status = STOPPED
    scheduler.free_finished_seq_groups()
    assert set(scheduler.block_manager.block_tables) == {0}
    parent.status = STOPPED
    scheduler.free_finished_seq_groups()
    assert not scheduler.block_manager.block_tables
    assert not scheduler.has_unfinished_seqs()
    assert scheduler.get_and_reset_finished_requests_ids() == ["0"]


@pytest.mark.parametrize("end", ["abort", "finish", "preempt"])
def test_v0_gives_up_the_blocks_of_an_encoder(end: str) -> None:
    scheduler = make(v0.Scheduler, num_blocks=4)
    other, seq_group = (
        group(i, encoder_seq=Sequence(10 + i, [7] * SIZE, SIZE)) for i in range(2)
    )
    scheduler.add_seq_group(other)
    scheduler.add_seq_group(seq_group)
    sample(scheduler.schedule())
    tables = scheduler.block_manager.cross_block_tables
    assert set(tables) == {"0", "1"}
    if end == "abort":
        scheduler.abort_seq_group("1")
    elif end == "finish":
        seq_group.first_seq.status = STOPPED
        scheduler.free_finished_seq_groups()
    else:
        assert scheduler.schedule().preempted == 1
    assert set(tables) == {"0"}
    assert scheduler.block_manager.get_num_free_gpu_blocks() == 2 - (end == "preempt")
    scheduler.abort_seq_group("0")
    if end == "preempt":
        scheduler.schedule()
        assert set(tables) == {"1"}
    scheduler.check()


def test_v0_tells_its_lookahead_slots_and_knows_no_adapters() -> None:
    scheduler = make(v0.Scheduler, num_lookahead_slots=3)
    scheduler.add_seq_group(group(0))
    output = scheduler.schedule()
    assert output.num_lookahead_slots == 0
    sample(output)
    assert scheduler.schedule().num_lookahead_slots == 3
    configs = scheduler.scheduler_config, scheduler.cache_config
    v0.Scheduler(*configs, None)
    with pytest.raises(SchedulerError, match="adapters are not modelled"):
        v0.Scheduler(*configs, "lora")
