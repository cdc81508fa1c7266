"""Block tables on two tiers in random order (invariants 2 and 9)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import BlockTableError, NoFreeBlocksError
from cache.sequences import Device
from cache.v0.block_table import BlockTable
from cache.v0.tiered import CpuGpuBlockAllocator

SIZE, NUM_GPU, NUM_CPU = 2, 8, 5
OTHER = {Device.GPU: Device.CPU, Device.CPU: Device.GPU}


class TieredMachine(RuleBasedStateMachine):
    """Tables come, grow, fork, move between tiers and go."""

    allocator_type = "naive"

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CpuGpuBlockAllocator.create(
            self.allocator_type, NUM_GPU, NUM_CPU, SIZE
        )
        self.tables: list[tuple[BlockTable, Device, list[int]]] = []

    def snapshot(self):
        return (
            [table.physical_block_ids for table, _, _ in self.tables],
            [table.num_full_slots for table, _, _ in self.tables],
            [self.allocator.get_num_free_blocks(device) for device in Device],
        )

    def refused(self, action) -> bool:
        """Whether `action` is refused for want of blocks, without a trace."""
        before = self.snapshot()
        try:
            action()
        except NoFreeBlocksError:
            assert self.snapshot() == before
            return True
        return False

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.tables) - 1))

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        device=st.sampled_from(Device),
    )
    def allocate(self, tokens: list[int], device: Device) -> None:
        table = BlockTable(SIZE, self.allocator)
        num_free = self.allocator.get_num_free_blocks(device)
        if self.refused(lambda: table.allocate(tokens, device)):
            assert BlockTable.get_num_required_blocks(tokens, SIZE) > num_free
            assert not table.is_allocated
        else:
            self.tables.append((table, device, tokens))

    @precondition(lambda self: self.tables)
    @rule(
        data=st.data(),
        new=st.lists(st.integers(0, 1), max_size=4),
        num_lookahead_slots=st.integers(0, 3),
        by_view=st.booleans(),
    )
    def append(self, data, new, num_lookahead_slots, by_view) -> None:
        table, device, tokens = self.tables[self.pick(data)]
        if device is not Device.GPU:
            return
        touched = table.get_num_blocks_touched_by_append_slots(new, num_lookahead_slots)
        num_free = self.allocator.get_num_free_blocks(Device.GPU)
        if by_view:
            refused = self.refused(
                lambda: table.append_unseen([*tokens, *new], num_lookahead_slots)
            )
        else:
            refused = self.refused(
                lambda: table.append_token_ids(new, num_lookahead_slots)
            )
        if refused:
            assert touched > num_free  # whoever asks first is never refused
        else:
            tokens.extend(new)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, device, tokens = self.tables[self.pick(data)]
        self.tables.append((table.fork(), device, list(tokens)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        index = self.pick(data)
        table, device, tokens = self.tables[index]
        target = OTHER[device]
        before = table.physical_block_ids
        needed = self.allocator.get_num_blocks_for_swap_in(table.blocks, target)
        num_free = self.allocator.get_num_free_blocks(target)
        pairs: dict[int, int] = {}
        refused = self.refused(
            lambda: pairs.update(self.allocator.swap(table.blocks, device, target))
        )
        assert refused == (needed > num_free)
        if not refused:
            self.tables[index] = (table, target, tokens)
            assert list(pairs) == before
            assert list(pairs.values()) == table.physical_block_ids
            assert self.allocator.get_num_free_blocks(target) == num_free - needed

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table, _, _ = self.tables.pop(self.pick(data))
        table.free()
        before = self.snapshot()
        with pytest.raises(BlockTableError, match="cannot be freed"):
            table.free()
        assert self.snapshot() == before

    @rule()
    def compute(self) -> None:
        self.allocator.mark_blocks_as_computed([])

    @invariant()
    def blocks_are_conserved(self) -> None:
        references: Counter[int] = Counter()
        for table, device, tokens in self.tables:
            table.check()
            held = table.physical_block_ids
            assert all((i < NUM_GPU) == (device is Device.GPU) for i in held)
            assert [t for block in table.blocks for t in block.token_ids] == tokens
            references.update(held)
        self.allocator.check(references)
        assert self.allocator.clear_copy_on_writes() is not None


class CachingTieredMachine(TieredMachine):
    """The same with prefix caching."""

    allocator_type = "prefix_caching"


TestNaive = TieredMachine.TestCase
TestNaive.settings = settings(stateful_step_count=40)
TestCaching = CachingTieredMachine.TestCase
TestCaching.settings = settings(stateful_step_count=40)
