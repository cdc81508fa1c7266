"""Block manager v2 by literals, and what it refuses."""

from __future__ import annotations

import pytest

from cache.errors import (
    BlockTableError,
    CacheConfigError,
    CacheError,
    NoFreeBlocksError,
    UnallocatedSequenceError,
)
from cache.sequences import AllocStatus, Device, SequenceStatus
from cache.tokens import TokenRuns
from cache.v0.manager import SelfAttnBlockSpaceManager
from sim.scheduler.groups.sequence import Sequence, SequenceGroup
from tests.cache.groups import SIZE, fork, group, move, run

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER
RUNNING, SWAPPED = SequenceStatus.RUNNING, SequenceStatus.SWAPPED
WAITING = SequenceStatus.WAITING


def make(num_gpu: int = 10, num_cpu: int = 6, watermark: float = 0.0, **keys):
    return SelfAttnBlockSpaceManager(SIZE, num_gpu, num_cpu, watermark, **keys)


# -- admission ---------------------------------------------------------------------


def test_admission_keeps_the_watermark():
    manager = make(watermark=0.19)
    assert manager.watermark_blocks == 1
    run(manager, group(0, 16))
    assert manager.can_allocate(group(1, 20)) is OK
    assert manager.can_allocate(group(1, 21)) is LATER
    assert manager.can_allocate(group(1, 20), num_lookahead_slots=1) is LATER
    assert manager.can_allocate(group(1, 36)) is LATER
    assert manager.can_allocate(group(1, 37)) is NEVER


def test_allocate_gives_ascending_blocks():
    manager = make()
    seq = run(manager, group(0, 9))
    assert manager.get_block_table(seq) == [0, 1, 2]
    assert manager.num_logical_blocks == 3
    assert manager.get_num_free_gpu_blocks() == 7
    manager.check([seq])


def test_sequences_of_one_prompt_share_its_blocks():
    manager = make()
    seq_group = SequenceGroup("r", [Sequence(i, [1] * 6, SIZE) for i in range(3)], 0.0)
    assert manager.can_allocate(seq_group) is OK
    run(manager, seq_group)
    tables = [manager.get_block_table(seq) for seq in seq_group.get_seqs()]
    assert tables == [[0, 1]] * 3
    assert manager.num_logical_blocks == 6
    assert manager.get_num_free_gpu_blocks() == 8
    manager.check(seq_group.get_seqs())


@pytest.mark.parametrize("enable_caching", [False, True])
def test_a_forked_group_computed_anew_shares_its_prompt(enable_caching):
    manager = make(enable_caching=enable_caching)
    seq_group = group(0, 6)
    first = run(manager, seq_group)
    second = fork(manager, seq_group, 1)
    for seq, num_new in ((first, 5), (second, 3)):
        for index in range(num_new):
            seq.append_token_id(100 * seq.seq_id + index)
        manager.append_slots(seq, 0)
        manager.free(seq)
        seq.move_to(WAITING)
        seq.reset_for_recompute()
    manager.check([])
    # The prompt's full block, then 2 and 2 of their own.
    assert manager.can_allocate(seq_group, num_shared_tokens=6) is OK
    manager.allocate(seq_group, num_shared_tokens=6)
    move(seq_group, RUNNING)
    tables = [manager.get_block_table(seq) for seq in (first, second)]
    assert tables[0][0] == tables[1][0]
    assert [len(table) for table in tables] == [3, 3]
    assert manager.get_num_free_gpu_blocks() == 5
    manager.check([first, second])


def test_a_forked_group_that_does_not_fit_is_told_so():
    def waiting(num_gpu):
        seq_group = group(0, 6)
        other = seq_group.first_seq.fork(1)
        seq_group.add(other)
        for seq in seq_group.get_seqs():
            for index in range(3):
                seq.append_token_id(10 * seq.seq_id + index)
        return make(num_gpu), seq_group

    manager, seq_group = waiting(5)  # 1 shared, 2 and 2
    assert manager.can_allocate(seq_group, num_shared_tokens=6) is OK
    manager, seq_group = waiting(4)
    assert manager.can_allocate(seq_group, num_shared_tokens=6) is NEVER
    with pytest.raises(NoFreeBlocksError, match="group r0 needs 5 GPU blocks, 4 are"):
        manager.allocate(seq_group, num_shared_tokens=6)
    assert manager.get_num_free_gpu_blocks() == 4
    manager.check([])


def test_the_first_sequence_stands_for_all_unless_told_otherwise():
    # As in 0.7.3, whose admission knows prompts only.
    seqs = [Sequence(i, [1] * 8, SIZE) for i in range(4)]
    for seq in seqs:
        for index in range(4):
            seq.append_token_id(index)
    manager = make(num_gpu=3)
    seq_group = SequenceGroup("r", seqs, 0.0)
    assert manager.can_allocate(seq_group) is OK
    assert manager.can_allocate(seq_group, 1) is NEVER
    manager.allocate(seq_group)
    assert [manager.get_block_table(seq) for seq in seqs] == [[0, 1, 2]] * 4


def test_allocate_twice_is_refused():
    manager = make()
    seq_group = group(0, 9)
    manager.allocate(seq_group)
    with pytest.raises(BlockTableError, match=r"sequence 0 holds blocks \[0, 1, 2\]"):
        manager.allocate(seq_group)
    move(seq_group, RUNNING)
    with pytest.raises(BlockTableError, match="group r0 has no waiting sequence"):
        manager.allocate(seq_group)
    manager.check(seq_group.get_seqs())


def test_allocate_without_room_changes_nothing():
    manager = make(num_gpu=2)
    with pytest.raises(NoFreeBlocksError, match=r"sequence 0\): 3 blocks are needed"):
        manager.allocate(group(0, 9))
    assert manager.get_num_free_gpu_blocks() == 2
    manager.check([])


def test_a_sequence_computed_anew_without_room_changes_nothing():
    # Its prompt's two blocks are placed before the two of its answer fail.
    manager = make(num_gpu=3, sliding_window=8)
    seq_group = group(0, 8)
    for index in range(5):
        seq_group.first_seq.append_token_id(index)
    with pytest.raises(NoFreeBlocksError, match="ask can_allocate first"):
        manager.allocate(seq_group, num_shared_tokens=8)
    assert manager.get_num_free_gpu_blocks() == 3
    manager.check([])


# -- growth ------------------------------------------------------------------------


def test_a_decode_counts_one_block_whether_it_needs_it():
    manager = make(num_gpu=3)
    seq_group = group(0, 7)
    seq = run(manager, seq_group)
    seq.append_token_id(1)
    assert manager.can_append_slots(seq_group, 0)
    assert manager.append_slots(seq, 0) == []
    assert manager.get_block_table(seq) == [0, 1]
    seq.append_token_id(2)
    assert not manager.can_append_slots(seq_group, 4)
    assert manager.append_slots(seq, 0) == []
    assert manager.get_block_table(seq) == [0, 1, 2]
    seq.append_token_id(3)
    assert not manager.can_append_slots(seq_group, 0)  # though the slot is there
    assert manager.append_slots(seq, 0) == []
    manager.check([seq])


def test_forked_sequences_copy_what_they_write():
    manager = make()
    seq_group = group(0, 6)
    parent = run(manager, seq_group)
    child = fork(manager, seq_group, 1)
    assert manager.num_logical_blocks == 4
    parent.append_token_id(7)
    child.append_token_id(8)
    assert manager.append_slots(parent, 0) == [(1, 2)]
    assert manager.append_slots(child, 0) == []
    assert manager.get_block_table(parent) == [0, 2]
    assert manager.get_block_table(child) == [0, 1]
    manager.check([parent, child])
    manager.free(parent)
    manager.check([child])
    manager.free(child)
    assert manager.get_num_free_gpu_blocks() == 10
    assert manager.num_logical_blocks == 0


def test_append_without_room_changes_nothing():
    manager = make(num_gpu=2)
    seq = run(manager, group(0, 8))
    seq.append_token_id(1)
    with pytest.raises(NoFreeBlocksError, match=r"sequence 0: .* needs 1 more GPU"):
        manager.append_slots(seq, 0)
    assert manager.get_block_table(seq) == [0, 1]
    manager.check([seq])


def test_what_was_freed_cannot_be_forked_grown_or_shown():
    manager = make()
    seq_group = group(3, 8)
    seq = run(manager, seq_group)
    manager.free(seq)
    manager.free(seq)  # as in the reference: aborts free in any state
    child = seq.fork(4)
    for misuse, verb in [
        (lambda: manager.fork(seq, child), "fork"),
        (lambda: manager.append_slots(seq, 0), "append slots to"),
        (lambda: manager.get_block_table(seq), "show the blocks of"),
        (lambda: manager.swap_out(seq_group), "swap"),
        (lambda: manager.can_swap_out(seq_group), "swap"),
    ]:
        with pytest.raises(
            UnallocatedSequenceError, match=f"cannot {verb} sequence 3: it holds no"
        ):
            misuse()
    manager.check([])
    assert manager.get_num_free_gpu_blocks() == 10


def test_what_holds_no_blocks_is_not_asked_to_grow():
    manager = make()
    seq_group = group(3, 8)
    move(seq_group, RUNNING)
    with pytest.raises(UnallocatedSequenceError, match="append slots to sequence 3"):
        manager.can_append_slots(seq_group, 0)


def test_fork_into_a_sequence_with_blocks_is_refused():
    manager = make()
    first, second = run(manager, group(0, 4)), run(manager, group(1, 4))
    with pytest.raises(BlockTableError, match=r"sequence 1 holds blocks \[1\]"):
        manager.fork(first, second)
    manager.check([first, second])


def test_a_sliding_window_drops_what_it_cannot_see():
    manager = make(sliding_window=4)
    assert manager.max_block_sliding_window == 3
    assert manager.can_allocate(group(0, 36)) is OK
    assert manager.can_allocate(group(0, 400)) is OK  # the estimate is capped
    seq_group = group(0, 16)
    seq = run(manager, seq_group)
    assert manager.get_block_table(seq) == [0, 1, 2, 3]
    for index in range(4):
        seq.append_token_id(index)
        manager.append_slots(seq, 0)
        seq.num_computed_tokens += 1
        manager.check([seq])
    assert manager.get_block_table(seq) == [4, 1, 2, 3, 0]  # 0 was dropped, and taken
    assert manager.num_logical_blocks == 4
    manager.free(seq)
    manager.check([])
    assert manager.get_num_free_gpu_blocks() == 9  # the null block stays taken


def test_windowed_sequences_are_swapped_without_the_null_block():
    manager = make(sliding_window=4)
    seq_group = group(0, 20)
    seq = run(manager, seq_group)
    seq.append_token_id(1)
    manager.append_slots(seq, 0)
    assert manager.get_block_table(seq) == [5, 5, 2, 3, 4, 1]
    assert manager.swap_out(seq_group) == [(2, 0), (3, 1), (4, 2), (1, 3)]
    seq.move_to(SWAPPED)
    manager.check([seq])
    manager.swap_in(seq_group)
    seq.move_to(RUNNING)
    manager.check([seq])


# -- swapping ----------------------------------------------------------------------


def test_swap_out_and_in_again():
    manager = make()
    seq_group = group(0, 9)
    seq = run(manager, seq_group)
    assert manager.can_swap_out(seq_group)
    assert manager.swap_out(seq_group) == [(0, 0), (1, 1), (2, 2)]
    seq.move_to(SWAPPED)
    manager.check([seq])
    assert manager.get_block_table(seq) == [10, 11, 12]
    assert manager.num_logical_blocks == 0
    assert manager.get_num_free_cpu_blocks() == 3
    assert manager.can_swap_in(seq_group, 0) is OK
    assert manager.swap_in(seq_group) == [(0, 2), (1, 1), (2, 0)]
    seq.move_to(RUNNING)
    manager.check([seq])


def test_sharing_is_lost_by_a_swap():
    manager = make()
    seq_group = group(0, 9)
    run(manager, seq_group)
    fork(manager, seq_group, 1)
    assert manager.get_num_free_gpu_blocks() == 7
    pairs = manager.swap_out(seq_group)
    assert pairs == [(0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5)]
    move(seq_group, SWAPPED)
    manager.swap_in(seq_group)
    move(seq_group, RUNNING)
    assert manager.get_num_free_gpu_blocks() == 4
    manager.check(seq_group.get_seqs())


def test_swap_without_room_changes_nothing():
    manager = make(num_cpu=2)
    seq_group = group(0, 9)
    seq = run(manager, seq_group)
    assert not manager.can_swap_out(seq_group)
    with pytest.raises(
        NoFreeBlocksError, match=r"sequences \[0\] need 3 blocks on the cpu, 2 are"
    ):
        manager.swap_out(seq_group)
    assert manager.get_block_table(seq) == [0, 1, 2]
    manager.check([seq])


def test_swap_in_keeps_the_watermark():
    manager = make(watermark=0.1)
    swapped = group(0, 9)
    run(manager, swapped)
    manager.swap_out(swapped)
    move(swapped, SWAPPED)
    for num_held, status in [(6, OK), (7, LATER)]:
        other = run(manager, group(num_held, 4 * num_held))
        # 2 full blocks and the one that the next token touches
        assert manager.can_swap_in(swapped, 0) is status
        manager.free(other)
    assert manager.can_swap_in(swapped, 100) is NEVER


def test_blocks_ahead_of_need_count_for_a_swap():
    """The reference says yes here, and fails in the swap."""
    manager = make(num_cpu=2)
    seq_group = group(0, 5)
    seq = run(manager, seq_group)
    seq.append_token_id(1)
    manager.append_slots(seq, 4)
    assert len(manager.get_block_table(seq)) == 3
    assert not manager.can_swap_out(seq_group)


def test_swaps_from_the_wrong_tier_are_refused():
    manager = make()
    seq_group = group(0, 9)
    seq = run(manager, seq_group)
    manager.swap_out(seq_group)
    with pytest.raises(BlockTableError, match=r"sequence 0: its blocks .* on the gpu"):
        manager.swap_out(seq_group)
    with pytest.raises(BlockTableError, match="cannot append slots to sequence 0"):
        manager.append_slots(seq, 0)
    seq.move_to(SWAPPED)
    child = seq.fork(1)
    manager.fork(seq, child)
    manager.check([seq, child])
    manager.free(child)
    manager.free(seq)
    manager.check([])


# -- prefix caching ----------------------------------------------------------------


def test_hits_count_once_computed_and_are_frozen():
    manager = make(enable_caching=True)
    first = group(0, [7] * 10)
    manager.allocate(first)
    early = group(1, [7] * 12)
    assert manager.get_num_cached_tokens(early.first_seq) == 0
    manager.allocate(early)
    assert manager.get_block_table(early.first_seq) == [0, 1, 3]  # shared all the same
    manager.mark_blocks_as_computed(first, 10)
    late = group(2, [7] * 12)
    assert manager.get_num_cached_tokens(early.first_seq) == 0
    assert manager.get_num_cached_tokens(late.first_seq) == 12
    manager.allocate(late)
    seqs = [seq_group.first_seq for seq_group in (first, early, late)]
    assert manager.get_common_computed_block_ids([seqs[2]]) == [0, 1, 3]
    assert manager.get_common_computed_block_ids(seqs) == [0, 1]
    manager.free(seqs[1])
    assert manager.get_num_cached_tokens(seqs[1]) == 12
    manager.remove_seq_from_computed_blocks_tracker(seqs[1])
    manager.check([seqs[0], seqs[2]])
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == pytest.approx(5 / 8)


def test_last_access_decides_what_is_evicted():
    manager = make(num_gpu=4, enable_caching=True)
    old, new = run(manager, group(0, 8)), run(manager, group(1, 8))
    manager.access_all_blocks_in_seq(new, 1.0)
    manager.access_all_blocks_in_seq(old, 2.0)
    manager.free(old)
    manager.free(new)
    third = run(manager, group(2, 12))
    assert manager.get_block_table(third) == [3, 2, 1]
    manager.check([third])
    assert not manager.reset_prefix_cache(Device.GPU)
    manager.free(third)
    assert manager.reset_prefix_cache()


def test_a_swapped_sequence_may_be_freed():
    manager = make(enable_caching=True)
    seq_group = group(0, 9)
    seq = run(manager, seq_group)
    manager.access_all_blocks_in_seq(seq, 1.0)
    manager.swap_out(seq_group)
    seq.move_to(SWAPPED)
    manager.check([seq])
    manager.free(seq)
    manager.check([])
    assert manager.get_num_free_cpu_blocks() == 6


def test_without_caching_nothing_is_found():
    manager = make()
    seq = run(manager, group(0, 9))
    manager.access_all_blocks_in_seq(seq, 1.0)
    assert manager.get_num_cached_tokens(seq) == 0
    assert manager.get_common_computed_block_ids([seq]) == []
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == -1


# -- encoder and decoder -----------------------------------------------------------


def test_the_encoder_has_a_table_of_its_own():
    manager = make()
    seq_group = group(0, 5, encoder=9)
    assert manager.can_allocate(seq_group) is OK
    seq = run(manager, seq_group)
    assert manager.get_block_table(seq) == [0, 1]
    assert manager.get_cross_block_table(seq_group) == [2, 3, 4]
    assert manager.num_logical_blocks == 5
    seq.append_token_id(1)
    manager.append_slots(seq, 0)
    manager.check([seq])
    manager.free(seq)
    manager.check([])
    assert manager.get_num_free_gpu_blocks() == 7
    manager.free_cross(seq_group)
    manager.free_cross(seq_group)  # as in the reference
    manager.check([])
    assert manager.get_num_free_gpu_blocks() == 10
    assert manager.num_logical_blocks == 0


def test_the_encoder_counts_at_admission():
    manager = make()
    assert manager.can_allocate(group(0, 4, encoder=36)) is OK
    assert manager.can_allocate(group(0, 5, encoder=36)) is NEVER
    run(manager, group(1, 4))
    assert manager.can_allocate(group(0, 4, encoder=36)) is LATER
    with pytest.raises(NoFreeBlocksError, match="group r0 needs 10 GPU blocks"):
        manager.allocate(group(0, 4, encoder=36))
    assert manager.get_num_free_gpu_blocks() == 9


def test_encoder_misuse_is_refused():
    manager = make()
    seq_group = group(0, 4, encoder=4)
    with pytest.raises(UnallocatedSequenceError, match="encoder of group r0"):
        manager.get_cross_block_table(seq_group)
    manager.allocate(seq_group)
    manager.free(seq_group.first_seq)
    with pytest.raises(
        BlockTableError, match=r"encoder of group r0 holds blocks \[1\]"
    ):
        manager.allocate(seq_group)
    for keys, what in [
        ({"enable_caching": True}, "prefix caching"),
        ({"sliding_window": 8}, "a sliding window"),
    ]:
        with pytest.raises(CacheConfigError, match=f"does not go with {what}"):
            make(**keys).can_allocate(seq_group)
        with pytest.raises(CacheConfigError, match=f"does not go with {what}"):
            make(**keys).allocate(seq_group)


# -- the whole ---------------------------------------------------------------------


def test_impossible_managers_are_refused():
    with pytest.raises(ValueError, match="watermark must be from 0 to 1"):
        make(watermark=-0.1)
    with pytest.raises(CacheConfigError, match=r"sliding window \(8\)"):
        make(sliding_window=8, enable_caching=True)
    with pytest.raises(ValueError, match="no evictor is named 'fifo'"):
        make(enable_caching=True, evictor="fifo")


def test_check_finds_sequences_without_tables_and_leaks():
    manager = make()
    seq_group = group(0, 9)
    seq = run(manager, seq_group)
    with pytest.raises(CacheError, match=r"sequences \[\] should hold blocks"):
        manager.check([])
    other = group(1, 4).first_seq
    with pytest.raises(CacheError, match=r"sequences \[0, 1\] should"):
        manager.check([seq, other])
    manager.block_allocator.allocate_mutable_block(None, Device.GPU)
    with pytest.raises(CacheError, match="block 3 counts 1 references, 0 tables"):
        manager.check([seq])


@pytest.mark.parametrize("enable_caching", [False, True])
def test_plain_ids_and_runs_give_the_same_blocks(enable_caching):
    def history(as_runs):
        manager = make(enable_caching=enable_caching, num_gpu=16)

        def tokens(*pieces):
            if as_runs:
                return TokenRuns(pieces)
            return [
                1000 * s + i for s, start, n in pieces for i in range(start, start + n)
            ]

        log = []
        first = group(0, tokens((1, 0, 6), (2, 0, 5)))
        second = group(1, tokens((1, 0, 6), (2, 0, 3), (3, 0, 4)))
        seqs = [run(manager, seq_group) for seq_group in (first, second)]
        seqs.append(fork(manager, second, 2))
        for index in range(9):
            for seq in seqs:
                stream = 50 + seq.seq_id // 2
                seq.append_token_id(
                    (stream, index) if as_runs else 1000 * stream + index
                )
                log.append(manager.append_slots(seq, 0))
            log.append([manager.get_block_table(seq) for seq in seqs])
            manager.check(seqs)
        return log

    assert history(as_runs=True) == history(as_runs=False)
