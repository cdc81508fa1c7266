"""Block manager v2 in random order (invariants 1, 2 and 9 after each action)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import NoFreeBlocksError
from cache.sequences import AllocStatus, SequenceStatus
from cache.v0.manager import SelfAttnBlockSpaceManager
from tests.cache.groups import SIZE, fork, group, move

if TYPE_CHECKING:
    from sim.scheduler.groups.sequence import Sequence, SequenceGroup

NUM_GPU, NUM_CPU, MAX_LEN = 12, 9, 24
WAITING = SequenceStatus.WAITING
RUNNING = SequenceStatus.RUNNING
SWAPPED = SequenceStatus.SWAPPED


class ManagerMachine(RuleBasedStateMachine):
    """Groups are admitted, grow, fork, are swapped, recomputed and finished."""

    keys: dict[str, object] = {}  # noqa: RUF012  (of the subclass, not changed)

    def __init__(self) -> None:
        super().__init__()
        self.manager = SelfAttnBlockSpaceManager(
            SIZE, NUM_GPU, NUM_CPU, 0.1, **self.keys
        )
        self.groups: list[SequenceGroup] = []
        self.next_id = 0
        self.now = 0.0

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def with_status(self, status: SequenceStatus) -> list[SequenceGroup]:
        return [g for g in self.groups if g.first_seq.status is status]

    def pick(self, data: st.DataObject, status: SequenceStatus) -> SequenceGroup | None:
        groups = self.with_status(status)
        return data.draw(st.sampled_from(groups)) if groups else None

    def placed(self) -> list[Sequence]:
        return [
            seq
            for g in self.groups
            if g.first_seq.status is not WAITING
            for seq in g.get_seqs()
        ]

    def snapshot(self):
        manager = self.manager
        return (
            {i: t.physical_block_ids for i, t in manager.block_tables.items()},
            {i: t.physical_block_ids for i, t in manager.cross_block_tables.items()},
            manager.get_num_free_gpu_blocks(),
            manager.get_num_free_cpu_blocks(),
            manager.num_logical_blocks,
        )

    def refused(self, action) -> bool:
        before = self.snapshot()
        try:
            action()
        except NoFreeBlocksError:
            assert self.snapshot() == before
            return True
        return False

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18),
        encoder=st.none() | st.integers(0, 9),
    )
    def arrive(self, tokens: list[int], encoder: int | None) -> None:
        if self.keys:
            encoder = None
        self.groups.append(group(self.new_id(), tokens, encoder=encoder))

    @precondition(lambda self: self.with_status(WAITING))
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        waiting = self.pick(data, WAITING)
        assert waiting is not None
        shared = None
        if any(seq.get_output_len() for seq in waiting.get_seqs()):
            shared = waiting.first_seq.get_prompt_len()
        status = self.manager.can_allocate(waiting, num_shared_tokens=shared)
        cached = {
            seq.seq_id: self.manager.get_num_cached_tokens(seq)
            for seq in waiting.get_seqs()
        }
        refused = self.refused(
            lambda: self.manager.allocate(waiting, num_shared_tokens=shared)
        )
        if refused:
            assert status is not AllocStatus.OK or "sliding_window" in self.keys
            return
        for seq in waiting.get_seqs():
            assert cached[seq.seq_id] <= seq.get_len()
            assert self.manager.get_num_cached_tokens(seq) == cached[seq.seq_id]
        move(waiting, RUNNING)
        for seq in waiting.get_seqs():
            seq.num_computed_tokens = seq.get_len()

    @precondition(lambda self: self.with_status(RUNNING))
    @rule(
        data=st.data(),
        num_new=st.integers(0, 3),
        num_lookahead_slots=st.sampled_from([0, 0, 2, 5]),
    )
    def grow(self, data, num_new: int, num_lookahead_slots: int) -> None:
        running = self.pick(data, RUNNING)
        assert running is not None
        if running.first_seq.get_len() + num_new > MAX_LEN:
            return
        for seq in running.get_seqs():
            for _ in range(num_new):
                seq.append_token_id(data.draw(st.integers(0, 1)))
        could = self.manager.can_append_slots(running, num_lookahead_slots)
        first_window = bool(self.keys.get("sliding_window")) and not (
            self.manager.block_allocator.has_null_block
        )
        self.now += 1
        for seq in running.get_seqs():
            append = partial(self.manager.append_slots, seq, num_lookahead_slots)
            if self.refused(append):
                assert not could or first_window
            else:
                seq.num_computed_tokens = seq.get_len()
                self.manager.access_all_blocks_in_seq(seq, self.now)
        self.manager.mark_blocks_as_computed(running, 1)

    @precondition(lambda self: self.with_status(RUNNING))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        running = self.pick(data, RUNNING)
        assert running is not None
        if running.num_seqs() < 3:
            fork(self.manager, running, self.new_id())

    @precondition(lambda self: self.with_status(RUNNING))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        running = self.pick(data, RUNNING)
        assert running is not None
        could = self.manager.can_swap_out(running)
        tables = [self.manager.get_block_table(seq) for seq in running.get_seqs()]
        pairs: list[tuple[int, int]] = []
        if self.refused(lambda: pairs.extend(self.manager.swap_out(running))):
            assert not could
            return
        move(running, SWAPPED)
        if not self.keys:
            assert [gpu for gpu, _ in pairs] == [i for table in tables for i in table]

    @precondition(lambda self: self.with_status(SWAPPED))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        swapped = self.pick(data, SWAPPED)
        assert swapped is not None
        status = self.manager.can_swap_in(swapped, 0)
        if self.refused(lambda: self.manager.swap_in(swapped)):
            assert status is not AllocStatus.OK
            return
        move(swapped, RUNNING)

    @precondition(lambda self: self.with_status(RUNNING))
    @rule(data=st.data())
    def recompute(self, data: st.DataObject) -> None:
        running = self.pick(data, RUNNING)
        assert running is not None
        for seq in running.get_seqs():
            self.manager.free(seq)
            seq.move_to(WAITING)
            seq.reset_for_recompute()
        self.manager.free_cross(running)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        aborted = data.draw(st.sampled_from(self.groups))
        self.groups.remove(aborted)
        for seq in aborted.get_seqs():
            self.manager.free(seq)
            before = self.snapshot()
            self.manager.free(seq)
            assert self.snapshot() == before
        self.manager.free_cross(aborted)

    @precondition(lambda self: not self.placed())
    @rule()
    def reset(self) -> None:
        null = self.manager.block_allocator.has_null_block
        if self.keys.get("enable_caching"):
            assert self.manager.reset_prefix_cache()
        assert self.manager.get_num_free_gpu_blocks() == NUM_GPU - null
        assert self.manager.get_num_free_cpu_blocks() == NUM_CPU

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.manager.check(self.placed())
        for g in self.with_status(RUNNING):
            for seq in g.get_seqs():
                table = self.manager.block_tables[seq.seq_id]
                assert len(table.blocks) * SIZE >= table.num_full_slots


class CachingMachine(ManagerMachine):
    """With prefix caching."""

    keys = {"enable_caching": True}  # noqa: RUF012


class WindowMachine(ManagerMachine):
    """With a sliding window."""

    keys = {"sliding_window": 8}  # noqa: RUF012


TestPlain = ManagerMachine.TestCase
TestPlain.settings = settings(stateful_step_count=40)
TestCaching = CachingMachine.TestCase
TestCaching.settings = settings(stateful_step_count=40)
TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(stateful_step_count=40)
