"""Both one-tier allocators against a model, in random order (invariants 2 and 9)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import DoubleFreeError, ImmutableBlockError, NoFreeBlocksError
from cache.v0.allocator import NaiveBlockAllocator
from cache.v0.prefix_caching import PrefixCachingBlockAllocator

if TYPE_CHECKING:
    from cache.v0.interfaces import Block

NUM_BLOCKS, SIZE = 7, 2
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=7)
Prefix = tuple[int, ...]


class Model:
    """A model of the allocators, with whole prefixes instead of hashes."""

    def __init__(self, *, caching: bool) -> None:
        self.caching = caching
        self.free = list(range(NUM_BLOCKS))  # the next one first
        self.references: Counter[int] = Counter()
        self.cached: dict[Prefix, int] = {}
        self.evictable: dict[int, tuple[float, int, int]] = {}
        self.last_access: dict[int, float] = {}
        self.tables: list[list[int]] = []
        self.tokens: list[list[int]] = []

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.evictable)

    def take(self) -> int:
        if self.free:
            block_id = self.free.pop(0)
        else:
            block_id = min(self.evictable, key=lambda held: self.evictable[held])
            del self.evictable[block_id]
            self.cached = {p: i for p, i in self.cached.items() if i != block_id}
        self.references[block_id] = 1
        return block_id

    def hold(self, block_id: int) -> int:
        self.evictable.pop(block_id, None)
        self.references[block_id] += 1
        return block_id

    def drop(self, block_id: int, num_tokens: int) -> None:
        self.references[block_id] -= 1
        if self.references[block_id]:
            return
        last = self.last_access.pop(block_id, -1.0)
        if block_id in self.cached.values():
            self.evictable[block_id] = (last, -num_tokens, block_id)
        else:
            self.free.insert(0, block_id)

    def num_needed(self, tokens: list[int]) -> int:
        full = range(SIZE, len(tokens) + 1, SIZE)
        hits = [self.cached.get(tuple(tokens[:end])) for end in full]
        in_use = sum(hit is not None and self.references[hit] > 0 for hit in hits)
        return -(-len(tokens) // SIZE) - in_use

    def allocate(self, tokens: list[int]) -> None:
        table = []
        for start in range(0, len(tokens), SIZE):
            prefix = tuple(tokens[: start + SIZE])
            full = len(tokens) >= start + SIZE
            if full and prefix in self.cached:
                table.append(self.hold(self.cached[prefix]))
            else:
                table.append(self.take())
                if full and self.caching:
                    self.cached[prefix] = table[-1]
        self.tables.append(table)
        self.tokens.append(list(tokens))

    def append(self, index: int, token: int) -> None:
        """Into the last block, which has room (and is free to copy to if shared)."""
        table, tokens = self.tables[index], self.tokens[index]
        if self.references[table[-1]] > 1:
            copied = self.take()
            self.references[table[-1]] -= 1
            table[-1] = copied
        tokens.append(token)
        if len(tokens) % SIZE == 0 and self.caching:
            known = self.cached.setdefault(tuple(tokens), table[-1])
            if known != table[-1]:
                self.drop(table[-1], len(tokens))
                table[-1] = self.hold(known)

    def release(self, index: int) -> None:
        table, tokens = self.tables.pop(index), self.tokens.pop(index)
        for position, block_id in enumerate(table):
            self.drop(block_id, min((position + 1) * SIZE, len(tokens)))


class AllocatorMachine(RuleBasedStateMachine):
    """Chains of blocks come, grow, fork and go."""

    caching = False

    def __init__(self) -> None:
        super().__init__()
        self.allocator: NaiveBlockAllocator = (
            PrefixCachingBlockAllocator(NUM_BLOCKS, SIZE)
            if self.caching
            else NaiveBlockAllocator(None, NUM_BLOCKS, SIZE)
        )
        self.model = Model(caching=self.caching)
        self.chains: list[list[Block]] = []
        self.now = 0.0

    @rule(tokens=token_lists)
    def allocate(self, tokens: list[int]) -> None:
        if self.model.num_needed(tokens) > self.model.num_free:
            with pytest.raises(NoFreeBlocksError):
                self.allocator.allocate_chain(tokens)
            return
        self.chains.append(self.allocator.allocate_chain(tokens))
        self.model.allocate(tokens)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.chains) - 1))

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        index = self.pick(data)
        last = self.chains[index][-1]
        shared = self.model.references[self.model.tables[index][-1]] > 1
        if last.is_full:
            with pytest.raises(ImmutableBlockError, match=f"block {last.block_id} "):
                last.append_token_ids([token])
        elif shared and not self.model.num_free:
            with pytest.raises(NoFreeBlocksError):
                last.append_token_ids([token])
        else:
            last.append_token_ids([token])
            self.model.append(index, token)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        index = self.pick(data)
        chain = self.chains[index]
        if not chain[-1].is_full:
            return
        if not self.model.num_free:
            with pytest.raises(NoFreeBlocksError):
                self.allocator.allocate_mutable_block(chain[-1])
            return
        chain.append(self.allocator.allocate_mutable_block(chain[-1]))
        self.model.tables[index].append(self.model.take())

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        index = self.pick(data)
        self.chains.append(self.allocator.fork(self.chains[index][-1]))
        table = list(self.model.tables[index])
        self.model.references.update(table)
        self.model.tables.append(table)
        self.model.tokens.append(list(self.model.tokens[index]))

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), accessed=st.booleans())
    def free(self, data: st.DataObject, accessed: bool) -> None:
        index = self.pick(data)
        chain = self.chains.pop(index)
        if accessed and self.caching:
            self.now += 1
            ids = self.model.tables[index]
            self.allocator.mark_blocks_as_accessed(ids, self.now)
            self.model.last_access |= dict.fromkeys(ids, self.now)
        for block in chain:
            self.allocator.free(block)
        self.model.release(index)
        with pytest.raises(DoubleFreeError):
            self.allocator.free(chain[0])

    @precondition(lambda self: self.caching and not self.chains)
    @rule()
    def reset(self) -> None:
        assert self.allocator.reset_prefix_cache()
        order = sorted(
            self.model.evictable, key=lambda held: self.model.evictable[held]
        )
        self.model.free = order[::-1] + self.model.free
        self.model.evictable.clear()
        self.model.cached.clear()

    @invariant()
    def equals_the_model(self) -> None:
        tables = [[block.block_id for block in chain] for chain in self.chains]
        assert tables == self.model.tables
        for chain, tokens in zip(self.chains, self.model.tokens, strict=True):
            assert [t for block in chain for t in block.token_ids] == tokens
        assert self.allocator.get_num_free_blocks() == self.model.num_free
        self.allocator.check(Counter(i for table in tables for i in table))
        if isinstance(self.allocator, PrefixCachingBlockAllocator):
            assert self.allocator.num_cached_blocks == len(self.model.cached)


class CachingMachine(AllocatorMachine):
    """The same with prefix caching."""

    caching = True


TestNaive = AllocatorMachine.TestCase
TestNaive.settings = settings(stateful_step_count=40)
TestCaching = CachingMachine.TestCase
TestCaching.settings = settings(stateful_step_count=40)
