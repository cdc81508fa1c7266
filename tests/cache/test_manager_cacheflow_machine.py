"""The 2023 allocator and manager against models in random order (invariants 2, 9)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cache.cacheflow.manager import BlockAllocator, BlockSpaceManager
from cache.errors import BlockTableError, DoubleFreeError, NoFreeBlocksError
from cache.sequences import AllocStatus, Device, SequenceStatus
from tests.cache.cacheflow_groups import BLOCK_SIZE, group, grow, run

if TYPE_CHECKING:
    from cache.block import KVCacheBlock
    from sim.scheduler.groups.sequence import Sequence, SequenceGroup

NUM_BLOCKS = 12
NUM_CPU_BLOCKS = 9


class AllocatorMachine(RuleBasedStateMachine):
    """References come and go; the model is a list of holders and the free stack."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(Device.GPU, BLOCK_SIZE, 5)
        self.free = list(range(5))
        self.held: list[KVCacheBlock] = []
        self.known: dict[int, KVCacheBlock] = {}

    @rule()
    def allocate(self) -> None:
        if not self.free:
            with pytest.raises(NoFreeBlocksError):
                self.allocator.allocate()
            return
        block = self.allocator.allocate()
        assert block.block_id == self.free.pop()
        self.held.append(block)
        self.known[block.block_id] = block

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.allocator.share(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.allocator.free(block)
        if block not in self.held:
            self.free.append(block.block_id)

    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        twice = sorted(set(self.known) & set(self.free))
        if twice:
            block = self.known[data.draw(st.sampled_from(twice))]
            with pytest.raises(DoubleFreeError, match=f"block {block.block_id} of"):
                self.allocator.free(block)

    @invariant()
    def equals_the_model(self) -> None:
        assert self.allocator.get_num_free_blocks() == len(self.free)
        self.allocator.check([[block] for block in self.held])


class SpaceMachine(RuleBasedStateMachine):
    """Groups are admitted, grow, fork, swap and end; the model knows tables as ids."""

    @initialize(window=st.sampled_from([None, 2, 3]), watermark=st.sampled_from([0, 2]))
    def start(self, window: int | None, watermark: int) -> None:
        self.window = window
        self.watermark = watermark
        self.space = BlockSpaceManager(
            BLOCK_SIZE,
            NUM_BLOCKS,
            NUM_CPU_BLOCKS,
            watermark / NUM_BLOCKS + 0.001,
            None if window is None else window * BLOCK_SIZE,
        )
        self.free = {
            Device.GPU: list(range(NUM_BLOCKS)),
            Device.CPU: list(range(NUM_CPU_BLOCKS)),
        }
        self.tables: dict[Device, dict[int, list[int]]] = {d: {} for d in Device}
        self.counts: dict[Device, Counter[int]] = {d: Counter() for d in Device}
        self.groups: list[SequenceGroup] = []
        self.num_seqs = 0

    # -- the model --------------------------------------------------------------------

    def take(self, device: Device, table: list[int]) -> None:
        table.append(self.free[device].pop())
        self.counts[device][table[-1]] = 1

    def drop(self, device: Device, block_id: int) -> bool:
        """Take a reference away, unless that frees a block that a table still holds."""
        counts = self.counts[device]
        is_held = any(block_id in table for table in self.tables[device].values())
        if counts[block_id] <= is_held:
            return False
        counts[block_id] -= 1
        if not counts[block_id]:
            self.free[device].append(block_id)
        return True

    def give_up(self, device: Device, seq_id: int) -> None:
        for block_id in dict.fromkeys(self.tables[device].pop(seq_id, [])):
            self.drop(device, block_id)

    def lengthened(self, table: list[int], num_blocks: int) -> list[int]:
        while len(table) < num_blocks:
            if self.window is not None and len(table) >= self.window:
                table.append(table[len(table) % self.window])
            else:
                self.take(Device.GPU, table)
        return table

    def physical(self, num_blocks: int) -> int:
        return num_blocks if self.window is None else min(num_blocks, self.window)

    def state(self) -> object:
        """Return the state that must not change when an operation is refused."""
        return (
            self.space.get_num_free_gpu_blocks(),
            self.space.get_num_free_cpu_blocks(),
            self.space.num_logical_blocks,
            [self.space.get_block_table(seq) for seq in self.holders()],
        )

    def holders(self) -> list[Sequence]:
        return [seq for each in self.groups for seq in each.get_unfinished_seqs()]

    def drawn(
        self, data: st.DataObject, status: SequenceStatus
    ) -> SequenceGroup | None:
        found = [g for g in self.groups if g.num_seqs(status)]
        return data.draw(st.sampled_from(found)) if found else None

    # -- the actions ------------------------------------------------------------------

    @rule(num_tokens=st.integers(1, 18), width=st.integers(1, 3))
    def allocate(self, num_tokens: int, width: int) -> None:
        ids = range(self.num_seqs, self.num_seqs + width)
        self.num_seqs += width
        new = group(num_tokens, *ids)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        need = self.physical(num_blocks)
        num_free = len(self.free[Device.GPU])
        status = self.space.can_allocate(new)
        if NUM_BLOCKS - need < self.watermark:
            assert status is AllocStatus.NEVER
        else:
            fits = num_free - need >= self.watermark
            assert status is (AllocStatus.OK if fits else AllocStatus.LATER)
        if need > num_free:
            before = self.state()
            with pytest.raises(NoFreeBlocksError):
                self.space.allocate(new)
            assert self.state() == before
            return
        self.space.allocate(new)
        table = self.lengthened([], num_blocks)
        for block_id in table:
            self.counts[Device.GPU][block_id] = width
        for seq_id in ids:
            self.tables[Device.GPU][seq_id] = table.copy()
        run(new)
        self.groups.append(new)

    @rule(num_tokens=st.integers(1, 9), outputs=st.lists(st.integers(1, 7), min_size=2))
    def allocate_with_outputs(self, num_tokens: int, outputs: list[int]) -> None:
        ids = range(self.num_seqs, self.num_seqs + len(outputs))
        new = group(num_tokens, *ids)
        for seq, num_output_tokens in zip(new.get_seqs(), outputs, strict=True):
            grow(seq, num_output_tokens)
        lengths = [-(-seq.get_len() // BLOCK_SIZE) for seq in new.get_seqs()]
        goes_round = self.window is not None and max(lengths) > self.window
        num_shared = 0 if goes_round else num_tokens // BLOCK_SIZE
        need = num_shared + sum(self.physical(n) - num_shared for n in lengths)
        if need > len(self.free[Device.GPU]):
            before = self.state()
            with pytest.raises(NoFreeBlocksError):
                self.space.allocate(new, num_tokens)
            assert self.state() == before
            return
        self.num_seqs += len(outputs)
        self.space.allocate(new, num_tokens)
        shared = self.lengthened([], num_shared)
        for block_id in shared:
            self.counts[Device.GPU][block_id] = len(outputs)
        for seq_id, length in zip(ids, lengths, strict=True):
            self.tables[Device.GPU][seq_id] = self.lengthened(shared.copy(), length)
        run(new)
        self.groups.append(new)

    @rule(data=st.data(), num_tokens=st.integers(1, 4))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        running = self.drawn(data, SequenceStatus.RUNNING)
        if running is None:
            return
        seq = data.draw(st.sampled_from(running.get_seqs(SequenceStatus.RUNNING)))
        table = self.tables[Device.GPU][seq.seq_id]
        for _ in range(num_tokens):
            grow(seq)
            if not self.append_one(seq, table):
                seq.tokens.pop()  # type: ignore[union-attr]
                return

    def append_one(self, seq: Sequence, table: list[int]) -> bool:
        short = len(table) * BLOCK_SIZE < seq.get_len()
        wraps = short and self.window is not None and len(table) >= self.window
        last = table[len(table) % self.window] if wraps else table[-1]  # type: ignore[operator]
        is_new = short and not wraps
        copies = not is_new and self.counts[Device.GPU][last] > 1
        if (is_new or copies) and not self.free[Device.GPU]:
            before = self.state()
            with pytest.raises(NoFreeBlocksError, match=f"sequence {seq.seq_id} "):
                self.space.append_slot(seq)
            assert self.state() == before
            return False
        pair = self.space.append_slot(seq)
        if is_new:
            self.take(Device.GPU, table)
            assert pair is None
            return True
        if wraps:
            table.append(last)
        if not copies:
            assert pair is None
            return True
        table.pop()
        self.take(Device.GPU, table)
        self.drop(Device.GPU, last)
        assert pair == (last, table[-1])
        return True

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        running = self.drawn(data, SequenceStatus.RUNNING)
        if running is None:
            return
        parent = data.draw(st.sampled_from(running.get_seqs(SequenceStatus.RUNNING)))
        child = parent.fork(self.num_seqs)
        self.num_seqs += 1
        self.space.fork(parent, child)
        running.add(child)
        tables = self.tables[Device.GPU]
        tables[child.seq_id] = tables[parent.seq_id].copy()
        self.counts[Device.GPU].update(tables[parent.seq_id])  # once an entry

    @rule(data=st.data(), out=st.booleans())
    def swap(self, data: st.DataObject, out: bool) -> None:
        before, after = SequenceStatus.RUNNING, SequenceStatus.SWAPPED
        source, target = Device.GPU, Device.CPU
        if not out:
            before, after, source, target = after, before, target, source
        moving = self.drawn(data, before)
        if moving is None:
            return
        seqs = moving.get_unfinished_seqs()
        need = len({b for s in seqs for b in self.tables[source][s.seq_id]})
        num_free = len(self.free[target])
        if out:
            assert self.space.can_swap_out(moving) == (need <= num_free)
        else:
            fits = num_free - need - len(seqs) >= self.watermark
            assert self.space.can_swap_in(moving) == fits
        move = self.space.swap_out if out else self.space.swap_in
        if need > num_free:
            state = self.state()
            with pytest.raises(NoFreeBlocksError, match=f"group {moving.request_id} "):
                move(moving)
            assert self.state() == state
            return
        mapping: dict[int, int] = {}
        for seq in seqs:
            table = self.tables[source].pop(seq.seq_id)
            for index, block_id in enumerate(table):
                if block_id in table[:index]:
                    if self.drop(source, block_id):
                        self.counts[target][mapping[block_id]] += 1
                    continue
                if block_id not in mapping:
                    mapping[block_id] = self.free[target].pop()
                self.counts[target][mapping[block_id]] += 1
                self.drop(source, block_id)
            self.tables[target][seq.seq_id] = [mapping[b] for b in table]
        assert list(move(moving).items()) == list(mapping.items())
        for seq in seqs:
            seq.status = after

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seqs = self.holders()
        if not seqs:
            return
        seq = data.draw(st.sampled_from(seqs))
        self.space.free(seq)
        for device in Device:
            self.give_up(device, seq.seq_id)
        seq.status = SequenceStatus.FINISHED_STOPPED
        self.space.free(seq)  # has none any more: nothing to do
        with pytest.raises(BlockTableError, match=f"sequence {seq.seq_id} "):
            self.space.fork(seq, seq.fork(self.num_seqs))

    @precondition(lambda self: len(self.groups) > 4)
    @rule()
    def reset(self) -> None:
        self.space.reset()
        for device, allocator in (
            (Device.GPU, self.space.gpu_allocator),
            (Device.CPU, self.space.cpu_allocator),
        ):
            self.free[device] = [block.block_id for block in allocator.free_blocks]
            assert sorted(self.free[device]) == list(range(allocator.num_blocks))
            self.tables[device].clear()
            self.counts[device].clear()
        self.groups.clear()

    @invariant()
    def equals_the_model(self) -> None:
        holders = self.holders()
        self.space.check(holders)
        for seq in holders:
            swapped = seq.status is SequenceStatus.SWAPPED
            device = Device.CPU if swapped else Device.GPU
            assert self.space.get_block_table(seq) == self.tables[device][seq.seq_id]
        gpu, cpu = self.free[Device.GPU], self.free[Device.CPU]
        assert self.space.get_num_free_gpu_blocks() == len(gpu)
        assert self.space.get_num_free_cpu_blocks() == len(cpu)
        for each in self.groups:
            num_seqs = each.num_seqs(SequenceStatus.RUNNING)
            assert self.space.can_append_slot(each) == (num_seqs <= len(gpu))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(stateful_step_count=30)
TestSpace = SpaceMachine.TestCase
TestSpace.settings = settings(stateful_step_count=30)
