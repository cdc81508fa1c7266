"""The block pool against a dictionary model, in random order (invariants 2 and 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import DoubleFreeError, NoFreeBlocksError
from cache.v1.block_pool import BlockPool

if TYPE_CHECKING:
    from cache.block import KVCacheBlock

NUM_BLOCKS = 9
blocks_at = st.integers(0, NUM_BLOCKS - 2)


class PoolMachine(RuleBasedStateMachine):
    """Tables come and go; the model keeps references, hashes and the free order."""

    unhashed_first = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(
            NUM_BLOCKS, enable_caching=True, unhashed_first=self.unhashed_first
        )
        self.free = list(range(1, NUM_BLOCKS))
        self.tables: list[list[KVCacheBlock]] = []
        self.hashes: dict[int, int] = {}  # block id to hash, oldest entry first
        self.next_hash = 100

    @rule(num_blocks=st.integers(0, 5))
    def take(self, num_blocks: int) -> None:
        if num_blocks > len(self.free):
            with pytest.raises(NoFreeBlocksError):
                self.pool.get_new_blocks(num_blocks)
            return
        taken = self.pool.get_new_blocks(num_blocks)
        assert [block.block_id for block in taken] == self.free[:num_blocks]
        for block_id in self.free[:num_blocks]:
            self.hashes.pop(block_id, None)
        del self.free[:num_blocks]
        self.tables.append(taken)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), same=st.booleans())
    def cache(self, data: st.DataObject, same: bool) -> None:
        held = [block for table in self.tables for block in table]
        fresh = [block for block in held if block.block_id not in self.hashes]
        if not fresh:
            return
        block = data.draw(st.sampled_from(fresh))
        if not (same and self.hashes):
            self.next_hash += 1
        self.pool.cache_full_blocks([block], [self.next_hash])
        self.hashes[block.block_id] = self.next_hash

    @precondition(lambda self: self.hashes)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from(sorted(set(self.hashes.values()))))
        block = self.pool.get_cached_block(wanted)
        assert block is not None
        first = next(i for i, known in self.hashes.items() if known == wanted)
        assert block.block_id == first
        self.pool.touch([block])
        if block.block_id in self.free:
            self.free.remove(block.block_id)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        ordered = table[::-1]
        self.pool.free_blocks(ordered)
        held = {block.block_id for other in self.tables for block in other}
        freed = [b.block_id for b in ordered if b.block_id not in held]
        front = [i for i in freed if self.unhashed_first and i not in self.hashes]
        self.free = front + self.free + [i for i in freed if i not in front]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        block = self.pool.blocks[data.draw(st.sampled_from(self.free))]
        with pytest.raises(DoubleFreeError, match=f"block {block.block_id} is free"):
            self.pool.free_blocks([block])

    @invariant()
    def equals_the_model(self) -> None:
        self.pool.check()
        assert [block.block_id for block in self.pool.free_block_queue] == self.free
        held = [block.block_id for table in self.tables for block in table]
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == held.count(block.block_id)
            assert block.block_hash == self.hashes.get(block.block_id)
        assert len(self.pool.cached_blocks) == len(set(self.hashes.values()))
        assert self.pool.usage == len(set(held)) / (NUM_BLOCKS - 1)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=40)


class UnhashedFirstMachine(PoolMachine):
    """The same with the free order of vLLM 0.24."""

    unhashed_first = True


TestUnhashedFirst = UnhashedFirstMachine.TestCase
TestUnhashedFirst.settings = settings(stateful_step_count=40)
