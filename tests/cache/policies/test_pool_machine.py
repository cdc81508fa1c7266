"""A pool with each policy, in random order: blocks conserved, none in use evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import NoFreeBlocksError
from cache.v1.block_pool import BlockPool
from cache.v1.policies import CACHE_POLICIES, LRU, CachePolicy
from cache.v1.policy_pool import PolicyBlockPool

if TYPE_CHECKING:
    from cache.block import KVCacheBlock

NUM_BLOCKS = 12


class NoFuture:
    """The oracle of contents that nobody reads again, but for small ones."""

    def readers(self, content: int) -> list[int]:
        return [content * step for step in range(1, 6)] if content < 20 else []

    def contents(self, request_id: int) -> list[int]:
        return [c for c in range(1, 20) if request_id in self.readers(c)]


def make(kind: str) -> CachePolicy:
    given = {
        "s3_fifo": {"num_blocks": NUM_BLOCKS - 1, "small": 0.3},
        "arc": {"num_blocks": NUM_BLOCKS - 1},
        "tiny_lfu": {"num_blocks": NUM_BLOCKS - 1, "window": 0.2, "sample": 3.0},
        "clairvoyant": {"future": NoFuture()},
    }
    return CACHE_POLICIES[kind](**given.get(kind, {}))


class PolicyPoolMachine(RuleBasedStateMachine):
    """Tables come and go; some contents come back, some stand in two blocks."""

    kind = "lru"
    unhashed_first = True

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.make_pool()
        self.tables: list[list[KVCacheBlock]] = []
        self.num_requests = 0

    def make_pool(self) -> BlockPool:
        return PolicyBlockPool(
            NUM_BLOCKS, make(self.kind), unhashed_first=self.unhashed_first
        )

    def expect(self, contents: list[int]) -> None:
        assert isinstance(self.pool, PolicyBlockPool)
        self.num_requests += 1
        self.pool.begins(self.num_requests)
        self.pool.expect(contents)

    @rule(
        contents=st.lists(st.integers(1, 30), max_size=5),
        num_more=st.integers(0, 2),
        is_told=st.booleans(),
    )
    def take(self, contents: list[int], num_more: int, is_told: bool) -> None:
        num_blocks = len(contents) + num_more
        if num_blocks > self.pool.num_free_blocks:
            with pytest.raises(NoFreeBlocksError):
                self.pool.get_new_blocks(num_blocks)
            return
        if not num_blocks:
            return
        in_use = {block.block_id for table in self.tables for block in table}
        self.expect(contents if is_told else [])
        taken = self.pool.get_new_blocks(num_blocks)
        ids = [block.block_id for block in taken]
        assert len(set(ids)) == num_blocks
        assert in_use.isdisjoint(ids)
        assert 0 not in ids
        self.pool.cache_full_blocks(taken[: len(contents)], contents, 0)
        self.tables.append(taken)

    @rule(contents=st.lists(st.integers(1, 30), min_size=1, max_size=6))
    def hit(self, contents: list[int]) -> None:
        found = [self.pool.get_cached_block(content) for content in contents]
        blocks = list(dict.fromkeys(block for block in found if block is not None))
        self.pool.touch(blocks)
        if blocks:
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free_blocks(table[::-1])

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        in_use = {block.block_id for table in self.tables for block in table}
        assert self.pool.num_used_blocks == len(in_use)


class TwinMachine(PolicyPoolMachine):
    """`lru` against the pool's own order: the same blocks, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = BlockPool(
            NUM_BLOCKS, enable_caching=True, unhashed_first=self.unhashed_first
        )

    def make_pool(self) -> BlockPool:
        machine = self

        class Both(PolicyBlockPool):
            def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
                taken = super().get_new_blocks(num_blocks)
                expected = machine.twin.get_new_blocks(num_blocks)
                assert [b.block_id for b in taken] == [b.block_id for b in expected]
                return taken

            def touch(self, blocks: list[KVCacheBlock]) -> None:
                super().touch(blocks)
                machine.twin.touch(machine.twin.blocks[b.block_id] for b in blocks)

            def cache_full_blocks(
                self, blocks: list[KVCacheBlock], hashes: list[int], depth: int = 0
            ) -> None:
                super().cache_full_blocks(blocks, hashes, depth)
                twins = [machine.twin.blocks[b.block_id] for b in blocks]
                machine.twin.cache_full_blocks(twins, hashes)

            def free_blocks(self, blocks: list[KVCacheBlock]) -> None:
                super().free_blocks(blocks)
                machine.twin.free_blocks(
                    [machine.twin.blocks[b.block_id] for b in blocks]
                )

        return Both(NUM_BLOCKS, LRU(), unhashed_first=self.unhashed_first)

    @invariant()
    def stands_in_the_same_order(self) -> None:
        ours = [block.block_id for block in self.pool.free_block_queue]
        theirs = [block.block_id for block in self.twin.free_block_queue]
        assert ours == theirs
        assert self.pool.num_evictions == self.twin.num_evictions


def case(base: type, kind: str, unhashed_first: bool) -> type:
    machine = type(
        f"{kind}Machine", (base,), {"kind": kind, "unhashed_first": unhashed_first}
    )
    found = machine.TestCase
    found.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    return found


TestLru = case(PolicyPoolMachine, "lru", True)
TestFifo = case(PolicyPoolMachine, "fifo", True)
TestFifoOld = case(PolicyPoolMachine, "fifo", False)
TestLfu = case(PolicyPoolMachine, "lfu", True)
TestS3Fifo = case(PolicyPoolMachine, "s3_fifo", True)
TestArc = case(PolicyPoolMachine, "arc", True)
TestTinyLfu = case(PolicyPoolMachine, "tiny_lfu", True)
TestClairvoyant = case(PolicyPoolMachine, "clairvoyant", True)
TestLruIsTheQueue = case(TwinMachine, "lru", True)
TestLruIsTheOldQueue = case(TwinMachine, "lru", False)


def test_every_policy_has_its_machine() -> None:
    machines = {"lru", "fifo", "lfu", "s3_fifo", "arc", "tiny_lfu", "clairvoyant"}
    assert set(CACHE_POLICIES) == machines
