"""The block manager of 2023 on small cases, with block ids in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cache.cacheflow.manager import BlockAllocator, BlockSpaceManager
from cache.errors import (
    BlockTableError,
    CacheError,
    DoubleFreeError,
    InvariantError,
    NoFreeBlocksError,
)
from cache.sequences import AllocStatus, Device, SequenceStatus
from tests.cache.cacheflow_groups import BLOCK_SIZE, group, grow, run, sequence

if TYPE_CHECKING:
    from sim.scheduler.groups.sequence import SequenceGroup


def manager(
    num_gpu_blocks: int = 8,
    num_cpu_blocks: int = 6,
    watermark: float = 0.0,
    sliding_window: int | None = None,
) -> BlockSpaceManager:
    return BlockSpaceManager(
        BLOCK_SIZE, num_gpu_blocks, num_cpu_blocks, watermark, sliding_window
    )


def admitted(space: BlockSpaceManager, num_tokens: int, *ids: int) -> SequenceGroup:
    seq_group = group(num_tokens, *ids)
    space.allocate(seq_group)
    run(seq_group)
    return seq_group


def swapped_out(space: BlockSpaceManager, seq_group: SequenceGroup) -> dict[int, int]:
    moved = space.swap_out(seq_group)
    for seq in seq_group.get_unfinished_seqs():
        seq.status = SequenceStatus.SWAPPED
    return moved


# -- the allocator ----------------------------------------------------------------


def test_the_block_freed_last_is_used_next() -> None:
    allocator = BlockAllocator(Device.GPU, BLOCK_SIZE, 3)
    first, second, third = (allocator.allocate() for _ in range(3))
    assert [b.block_id for b in (first, second, third)] == [2, 1, 0]
    allocator.free(second)
    allocator.free(first)
    assert [allocator.allocate().block_id for _ in range(2)] == [2, 1]
    assert allocator.get_num_free_blocks() == 0


def test_a_shared_block_is_free_after_its_last_reference() -> None:
    allocator = BlockAllocator(Device.CPU, BLOCK_SIZE, 1)
    block = allocator.allocate()
    allocator.share(block, 2)
    for num_free in (0, 0, 1):
        allocator.free(block)
        assert allocator.get_num_free_blocks() == num_free


def test_the_allocator_refuses_what_is_not_there() -> None:
    allocator = BlockAllocator(Device.GPU, BLOCK_SIZE, 1)
    block = allocator.allocate()
    with pytest.raises(NoFreeBlocksError, match="none of the 1 blocks of the GPU"):
        allocator.allocate()
    allocator.free(block)
    with pytest.raises(DoubleFreeError, match="block 0 of the GPU pool"):
        allocator.free(block)
    with pytest.raises(CacheError, match="block 0 of the GPU pool is free"):
        allocator.share(block)
    assert allocator.get_num_free_blocks() == 1
    stranger = BlockAllocator(Device.CPU, BLOCK_SIZE, 1).allocate()
    with pytest.raises(CacheError, match="block 0 is not of this GPU pool"):
        allocator.free(stranger)


def test_misuse_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="out of memory"):
        BlockAllocator(Device.GPU, BLOCK_SIZE, 0).allocate()


# -- admission --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "status"),
    [
        (24, AllocStatus.OK),  # 6 of 8 blocks, 2 below the watermark
        (25, AllocStatus.NEVER),
        (1, AllocStatus.OK),
    ],
)
def test_the_watermark_bounds_admission(num_tokens: int, status: AllocStatus) -> None:
    assert manager(watermark=0.25).can_allocate(group(num_tokens, 0)) is status


def test_blocks_in_use_make_a_group_wait() -> None:
    space = manager(watermark=0.25)
    admitted(space, 16, 0)
    assert space.can_allocate(group(8, 1)) is AllocStatus.OK
    assert space.can_allocate(group(9, 1)) is AllocStatus.LATER


def test_a_group_shares_the_blocks_of_its_prompt() -> None:
    space = manager()
    seqs = admitted(space, 6, 0, 1, 2).get_seqs()
    assert [space.get_block_table(seq) for seq in seqs] == [[7, 6]] * 3
    assert space.get_num_free_gpu_blocks() == 6
    assert space.num_logical_blocks == 6
    space.check(seqs)


def test_sequences_with_ends_of_their_own_share_full_prompt_blocks() -> None:
    space = manager()
    seq_group = group(6, 0, 1)
    first, second = seq_group.get_seqs()
    grow(first, 1)
    grow(second, 5)
    assert space.can_allocate(seq_group, 6) is AllocStatus.OK
    space.allocate(seq_group, 6)
    assert space.get_block_table(first) == [7, 6]
    assert space.get_block_table(second) == [7, 5, 4]
    run(seq_group)
    assert space.append_slot(first) is None
    space.check([first, second])


@pytest.mark.parametrize(
    "arguments",
    [(0, 1, 1), (1, -1, 1), (1, 1, -1), (1, 1, 1, -0.1), (4, 1, 1, 0.0, 6)],
)
def test_arguments_are_checked(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        BlockSpaceManager(*arguments)


# -- growth -----------------------------------------------------------------------


def test_a_slot_takes_a_block_when_the_last_one_is_full() -> None:
    space = manager()
    seq = admitted(space, 3, 0).first_seq
    for table in ([7], [7, 6]):
        grow(seq)
        assert space.append_slot(seq) is None
        assert space.get_block_table(seq) == table


def test_the_first_writer_into_a_shared_block_gets_a_copy() -> None:
    space = manager()
    seq_group = admitted(space, 6, 0, 1)
    first, second = seq_group.get_seqs()
    grow(first)
    grow(second)
    assert space.append_slot(first) == (6, 5)
    assert space.append_slot(second) is None  # the last holder writes in place
    assert space.get_block_table(first) == [7, 5]
    assert space.get_block_table(second) == [7, 6]
    space.check(seq_group.get_seqs())


def test_a_fresh_block_is_not_asked_whether_it_is_shared() -> None:
    space = manager()
    parent = admitted(space, 4, 0).first_seq
    child = parent.fork(1)
    space.fork(parent, child)
    grow(child)
    assert space.append_slot(child) is None
    assert space.get_block_table(child) == [7, 6]
    space.check([parent, child])


def test_a_slot_is_reserved_for_every_running_sequence_needed_or_not() -> None:
    space = manager(num_gpu_blocks=3)
    seq_group = admitted(space, 5, 0, 1)  # 2 blocks with room in the last
    assert not space.can_append_slot(seq_group)
    seq_group.get_seqs()[1].status = SequenceStatus.FINISHED_STOPPED
    assert space.can_append_slot(seq_group)


# -- sliding window ---------------------------------------------------------------


def test_a_table_goes_round_in_its_window() -> None:
    space = manager(sliding_window=2 * BLOCK_SIZE)
    seq_group = group(13, 0)
    assert space.num_blocks_for(13) == 2
    space.allocate(seq_group)
    run(seq_group)
    seq = seq_group.first_seq
    assert space.get_block_table(seq) == [7, 6, 7, 6]
    assert space.get_num_free_gpu_blocks() == 6
    grow(seq, 4)
    assert space.append_slot(seq) is None
    assert space.get_block_table(seq) == [7, 6, 7, 6, 7]
    space.check([seq])
    space.free(seq)
    assert [space.gpu_allocator.allocate().block_id for _ in range(2)] == [6, 7]


def test_a_shared_window_is_copied_where_it_is_written() -> None:
    space = manager(sliding_window=2 * BLOCK_SIZE)
    parent = admitted(space, 8, 0).first_seq
    child = parent.fork(1)
    space.fork(parent, child)
    grow(child)
    assert space.append_slot(child) == (7, 5)
    # A wart: only the entry written to is replaced, and the child's reference is gone.
    assert space.get_block_table(child) == [7, 6, 5]
    space.check([parent, child])
    assert space.swap_out(_of(parent, child)) == {7: 5, 6: 4, 5: 3}
    for seq in (parent, child):
        seq.status = SequenceStatus.SWAPPED
    assert space.get_block_table(child) == [5, 4, 3]
    space.check([parent, child])
    for seq in (parent, child):
        space.free(seq)
    space.check([])
    assert space.get_num_free_gpu_blocks() == 8
    assert space.get_num_free_cpu_blocks() == 6


def test_a_fork_counts_every_entry_of_a_table_that_goes_round() -> None:
    """As 0.2.7: what is counted for the repeated entry is never given back."""
    space = manager(sliding_window=2 * BLOCK_SIZE)
    parent = admitted(space, 11, 0).first_seq
    child = parent.fork(1)
    space.fork(parent, child)
    assert space.get_block_table(child) == [7, 6, 7]
    space.free(child)
    assert space.get_block_table(parent) == [7, 6, 7]
    assert space.append_slot(parent) == (7, 5)  # 7 counts two, and nobody else has it
    assert space.get_block_table(parent) == [7, 6, 5]
    space.check([parent])
    space.free(parent)
    space.check([])
    assert space.get_num_free_gpu_blocks() == 8


def test_a_repeated_block_takes_its_counts_along() -> None:
    """A table that goes round and its fork count block 7 for three entries."""
    space = manager(sliding_window=2 * BLOCK_SIZE)
    parent = admitted(space, 11, 0).first_seq
    child = parent.fork(1)
    space.fork(parent, child)
    counted = space.gpu_allocator.block(7).ref_cnt
    assert space.swap_out(_of(parent, child)) == {7: 5, 6: 4}
    for seq in (parent, child):
        seq.status = SequenceStatus.SWAPPED
        assert space.get_block_table(seq) == [5, 4, 5]
    assert space.cpu_allocator.block(5).ref_cnt == counted
    space.check([parent, child])


def _of(*seqs: object) -> SequenceGroup:
    seq_group = group(1, 99)
    seq_group.remove(99)
    for seq in seqs:
        seq_group.add(seq)  # type: ignore[arg-type]
    return seq_group


# -- swapping ---------------------------------------------------------------------


def test_a_swap_keeps_what_is_shared_and_updates_the_tables() -> None:
    space = manager()
    seq_group = admitted(space, 6, 0, 1)
    first, second = seq_group.get_seqs()
    grow(first)
    space.append_slot(first)
    assert swapped_out(space, seq_group) == {7: 5, 5: 4, 6: 3}
    assert space.get_block_table(first) == [5, 4]
    assert space.get_block_table(second) == [5, 3]
    assert space.num_logical_blocks == 0
    space.check([first, second])
    assert space.swap_in(seq_group) == {5: 6, 4: 7, 3: 5}
    run(seq_group)
    assert space.get_block_table(first) == [6, 7]
    assert space.get_block_table(second) == [6, 5]
    assert space.num_logical_blocks == 4
    space.check([first, second])


def test_swapping_in_needs_a_block_more_for_each_sequence_and_the_watermark() -> None:
    space = manager(num_gpu_blocks=8, watermark=0.25)
    seq_group = admitted(space, 8, 0, 1)  # 2 blocks
    swapped_out(space, seq_group)
    blocker = admitted(space, 8, 2)
    assert space.can_swap_in(seq_group)  # 6 free - (2 + 2) >= 2
    grow(blocker.first_seq)
    space.append_slot(blocker.first_seq)
    assert not space.can_swap_in(seq_group)


def test_finished_sequences_are_not_moved() -> None:
    space = manager()
    seq_group = admitted(space, 6, 0, 1)
    first, second = seq_group.get_seqs()
    first.status = SequenceStatus.FINISHED_STOPPED
    space.free(first)
    assert swapped_out(space, seq_group) == {7: 5, 6: 4}
    space.check([second])


# -- the end ----------------------------------------------------------------------


def test_a_table_is_freed_front_to_back() -> None:
    space = manager()
    seq = admitted(space, 12, 0).first_seq
    space.free(seq)
    assert [space.gpu_allocator.allocate().block_id for _ in range(3)] == [5, 6, 7]


def test_freeing_a_sequence_without_a_table_does_nothing() -> None:
    space = manager()
    space.free(sequence(0, 9))
    assert space.get_num_free_gpu_blocks() == 8


def test_reset_gives_up_both_tiers() -> None:
    space = manager()
    swapped_out(space, admitted(space, 6, 0, 1))
    admitted(space, 9, 2)
    space.reset()
    assert space.get_num_free_gpu_blocks() == 8
    assert space.get_num_free_cpu_blocks() == 6
    space.check([])


# -- refusals ---------------------------------------------------------------------


def test_a_second_table_is_refused() -> None:
    space = manager()
    seq_group = admitted(space, 6, 0)
    seq = seq_group.first_seq
    seq.status = SequenceStatus.WAITING
    with pytest.raises(BlockTableError, match=r"sequence 0 holds blocks \[7, 6\]"):
        space.allocate(seq_group)
    run(seq_group)
    other = admitted(space, 4, 1).first_seq
    with pytest.raises(BlockTableError, match=r"sequence 1 holds blocks \[5\]"):
        space.fork(seq, other)
    space.check([seq, other])


def test_only_a_waiting_group_is_allocated() -> None:
    seq_group = group(3, 0)
    run(seq_group)
    with pytest.raises(BlockTableError, match="group 0 has no waiting sequence"):
        manager().allocate(seq_group)


def test_allocation_without_room_is_refused() -> None:
    space = manager(num_gpu_blocks=2)
    with pytest.raises(NoFreeBlocksError, match=r"sequences 0, 1\) needs 3 blocks"):
        space.allocate(group(9, 0, 1))
    assert space.get_num_free_gpu_blocks() == 2
    space.check([])


def test_a_slot_without_room_is_refused() -> None:
    space = manager(num_gpu_blocks=2)
    seq_group = admitted(space, 6, 0, 1)
    first, second = seq_group.get_seqs()
    grow(first)
    with pytest.raises(NoFreeBlocksError, match="sequence 0 needs 1 blocks"):
        space.append_slot(first)  # a copy
    grow(first, 2)
    with pytest.raises(NoFreeBlocksError, match="sequence 0 needs 1 blocks"):
        space.append_slot(first)  # a block
    assert space.get_block_table(first) == [1, 0]
    space.check([first, second])


def test_a_window_that_cannot_copy_is_refused() -> None:
    space = manager(num_gpu_blocks=2, sliding_window=2 * BLOCK_SIZE)
    parent = admitted(space, 8, 0).first_seq
    child = parent.fork(1)
    space.fork(parent, child)
    grow(child)
    with pytest.raises(NoFreeBlocksError, match="sequence 1 needs 1 blocks"):
        space.append_slot(child)
    assert space.get_block_table(child) == [1, 0]
    space.check([parent, child])


def test_a_freed_sequence_is_not_forked_nor_grown_nor_shown() -> None:
    space = manager()
    seq = admitted(space, 6, 0).first_seq
    space.free(seq)
    with pytest.raises(BlockTableError, match=r"sequence 0 \(running\) holds no block"):
        space.fork(seq, seq.fork(1))
    with pytest.raises(BlockTableError, match="sequence 0"):
        space.append_slot(seq)
    with pytest.raises(KeyError, match="sequence 0"):  # as the release has it
        space.get_block_table(seq)
    space.check([])


def test_blocks_and_tables_can_be_looked_at() -> None:
    space = manager()
    on_gpu, on_cpu = admitted(space, 6, 0), admitted(space, 4, 1)
    swapped_out(space, on_cpu)
    numbers = {
        seq_id: [(block.block_number, block.ref_count) for block in table]
        for seq_id, table in space.block_tables.items()
    }
    (cpu_block,) = space.get_block_table(on_cpu.first_seq)
    first, second = space.get_block_table(on_gpu.first_seq)
    assert numbers == {0: [(first, 1), (second, 1)], 1: [(cpu_block, 1)]}
    free = space.gpu_allocator.free_blocks
    assert len(free) == space.get_num_free_gpu_blocks()
    assert space.gpu_allocator.allocate() is free[-1]


def test_swapping_without_room_is_refused() -> None:
    space = manager(num_gpu_blocks=3, num_cpu_blocks=3)
    small, large = admitted(space, 4, 0), admitted(space, 8, 1)
    swapped_out(space, large)
    blocker = admitted(space, 4, 2)
    with pytest.raises(NoFreeBlocksError, match=r"group 1 .* 2 blocks of the GPU"):
        space.swap_in(large)
    swapped_out(space, blocker)
    with pytest.raises(NoFreeBlocksError, match=r"group 0 .* 1 blocks of the CPU"):
        space.swap_out(small)
    assert not space.can_swap_out(small)
    space.check([g.first_seq for g in (small, large, blocker)])


def test_swapping_the_wrong_way_is_refused() -> None:
    space = manager()
    seq_group = admitted(space, 4, 0)
    with pytest.raises(BlockTableError, match=r"blocks on the GPU, \[7\]: only"):
        space.swap_in(seq_group)
    swapped_out(space, seq_group)
    with pytest.raises(BlockTableError, match="blocks on the CPU"):
        space.swap_out(seq_group)
    with pytest.raises(BlockTableError, match="blocks on the CPU"):
        space.append_slot(seq_group.first_seq)
    space.check(seq_group.get_seqs())


def test_the_proof_finds_what_is_wrong() -> None:
    space = manager()
    seq_group = admitted(space, 6, 0)
    seq = seq_group.first_seq
    with pytest.raises(InvariantError, match="should hold a table"):
        space.check([])
    seq.status = SequenceStatus.SWAPPED
    with pytest.raises(InvariantError, match="sequence 0 is in the wrong tier"):
        space.check([seq])
    seq.status = SequenceStatus.RUNNING
    space.num_logical_blocks += 1
    with pytest.raises(InvariantError, match="2 table entries"):
        space.check([seq])
    space.num_logical_blocks -= 1
    space.gpu_allocator.allocate()
    with pytest.raises(InvariantError, match="block 5 counts 1 references"):
        space.check([seq])


def test_a_group_with_finished_sequences_loses_blocks_as_the_release_does() -> None:
    """0.2.7 counts a reference for every sequence, and gives finished ones no table."""
    space = BlockSpaceManager(BLOCK_SIZE, 10, 0, watermark=0.0)
    seqs = group(6, 0, 1, 2)
    first, second, third = seqs.get_seqs()
    for seq in (first, second):
        seq.status = SequenceStatus.FINISHED_STOPPED
    space.allocate(seqs)
    third.status = SequenceStatus.RUNNING
    assert space.get_block_table(third) == [9, 8]
    grow(third)
    # The last block counts three references, so it is copied before it is written to.
    assert space.append_slot(third) == (8, 7)
    space.check([third])
    space.free(third)
    space.check([])
    assert space.get_num_free_gpu_blocks() == 8  # 7 came back, 9 and 8 never will
    space.reset()
    assert space.get_num_free_gpu_blocks() == 10
    space.check([])
