"""The V1 cache manager: small literals, and a machine against invariants 2 and 9."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import CacheError, InvariantError
from cache.tokens import Segment, SegmentTokens, TokenIds
from tests.oracles.v1_manager import KVCacheManager

if TYPE_CHECKING:
    from cache.block import KVCacheBlock


@dataclass(eq=False)
class Stub:
    """The least that is a `PagedRequest`."""

    request_id: int
    num_tokens: int
    tokens: TokenIds
    num_computed_tokens: int = 0
    block_table: list[KVCacheBlock] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_quiet_tokens: int = 0


def stub(request_id: int, *prompt: Segment) -> Stub:
    num_tokens = sum(n for _, n in prompt)
    return Stub(request_id, num_tokens, SegmentTokens(prompt, 1000 + request_id))


def admit(manager: KVCacheManager, request: Stub, num_new: int | None = None) -> bool:
    """Look up, allocate and compute, as a scheduler does with its queue's head."""
    hits = manager.get_computed_blocks(request)
    num_hits = len(hits) * manager.block_size
    missing = request.num_tokens - num_hits
    num_new = missing if num_new is None else min(num_new, missing)
    if not manager.allocate_slots(request, num_new, hits):
        return False
    request.num_computed_tokens = num_hits + num_new
    return True


def test_blocks_follow_the_tokens() -> None:
    manager = KVCacheManager(6, 16, enable_caching=False)
    request = stub(0, (2, 33))
    assert admit(manager, request)
    assert manager.get_block_ids(request) == [1, 2, 3]
    assert request.num_quiet_tokens == 48
    assert manager.usage == pytest.approx(3 / 5)


def test_a_failed_allocation_leaves_no_trace() -> None:
    manager = KVCacheManager(4, 16, enable_caching=True)
    first, second = stub(0, (2, 32)), stub(1, (2, 32), (4, 32))
    assert admit(manager, first)
    before = list(manager.block_pool.free_block_queue)
    assert not admit(manager, second)  # two hits, but two more blocks are missing
    assert second.block_table == []
    assert [b.ref_cnt for b in first.block_table] == [1, 1]
    assert list(manager.block_pool.free_block_queue) == before


def test_a_hit_on_a_free_block_is_paid_for_as_a_new_one() -> None:
    manager = KVCacheManager(4, 16, enable_caching=True)
    first = stub(0, (2, 32))
    assert admit(manager, first)
    manager.free(first)
    # 3 free blocks; 2 hits are among them, so 2 new ones do not fit.
    assert not admit(manager, stub(1, (2, 32), (4, 32)))
    assert admit(manager, stub(2, (2, 32), (4, 16)))


def test_an_equal_prompt_of_the_same_call_hits_what_is_only_scheduled() -> None:
    manager = KVCacheManager(10, 16, enable_caching=True)
    assert admit(manager, stub(0, (2, 40)))
    twin = stub(1, (2, 40))
    assert [b.block_id for b in manager.get_computed_blocks(twin)] == [1, 2]


def test_of_a_full_hit_the_last_block_is_computed_again() -> None:
    manager = KVCacheManager(10, 16, enable_caching=True)
    assert admit(manager, stub(0, (2, 32)))
    assert len(manager.get_computed_blocks(stub(1, (2, 32)))) == 1
    assert len(manager.get_computed_blocks(stub(2, (2, 33)))) == 2


def test_a_block_filled_by_a_sampled_token_is_registered_with_it() -> None:
    manager = KVCacheManager(10, 16, enable_caching=True)
    request = stub(0, (2, 15))
    assert admit(manager, request)
    assert request.num_quiet_tokens == 15
    request.num_tokens = 16  # sampled, not scheduled yet
    assert len(manager.block_pool.cached_blocks) == 0
    assert manager.allocate_slots(request, 1)
    assert len(manager.block_pool.cached_blocks) == 1


def test_the_tail_is_reused_first() -> None:
    manager = KVCacheManager(5, 16, enable_caching=True)
    first = stub(0, (2, 48))
    assert admit(manager, first)
    assert manager.free(first) == 3
    assert [b.block_id for b in manager.block_pool.free_block_queue] == [4, 3, 2, 1]


def test_freeing_counts_only_blocks_that_nobody_else_holds() -> None:
    manager = KVCacheManager(10, 16, enable_caching=True)
    first, second = stub(0, (2, 40)), stub(1, (2, 40))
    assert admit(manager, first)
    assert admit(manager, second)
    assert manager.free(first) == 1
    assert manager.free(first) == 0  # its table is empty
    manager.check([second])


def test_a_block_size_of_zero_is_refused() -> None:
    with pytest.raises(CacheError, match="block_size must be at least 1, got 0"):
        KVCacheManager(4, 0, enable_caching=False)


def test_check_finds_a_table_that_nobody_counted() -> None:
    manager = KVCacheManager(6, 16, enable_caching=False)
    request = stub(0, (2, 16))
    assert admit(manager, request)
    with pytest.raises(InvariantError, match="2 table entries and 0 null"):
        manager.check([request, request])


class ManagerMachine(RuleBasedStateMachine):
    """Random admissions, growth and release, in a cache that is nearly always full."""

    sliding_window: int | None = None
    unhashed_first = False

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(
            13,
            4,
            enable_caching=True,
            sliding_window=self.sliding_window,
            unhashed_first=self.unhashed_first,
        )
        self.live: list[Stub] = []
        self.next_id = 0

    @rule(
        prompt=st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=3
        ),
        num_new=st.integers(1, 30),
    )
    def admit(self, prompt: list[Segment], num_new: int) -> None:
        request = stub(self.next_id, *prompt)
        self.next_id += 1
        free_before = [b.block_id for b in self.manager.block_pool.free_block_queue]
        if admit(self.manager, request, num_new):
            self.live.append(request)
        else:
            queue = self.manager.block_pool.free_block_queue
            assert [b.block_id for b in queue] == free_before
            assert request.block_table == []

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new=st.integers(1, 6))
    def grow(self, data: st.DataObject, num_new: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        request.num_tokens = max(
            request.num_tokens, request.num_computed_tokens + num_new
        )
        before = list(request.block_table)
        if self.manager.allocate_slots(request, num_new):
            request.num_computed_tokens += num_new
        elif self.sliding_window is None:
            assert request.block_table == before
        null_block = self.manager.block_pool.null_block
        for old, new in zip(before, request.block_table, strict=False):
            assert new in (old, null_block)  # append-only, but for the window
        if self.sliding_window is None:
            assert null_block not in request.block_table

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.manager.free(request)
        request.num_computed_tokens = 0

    @invariant()
    def holds(self) -> None:
        self.manager.check(self.live)
        pool = self.manager.block_pool
        assert pool.num_free_blocks + pool.num_used_blocks == pool.num_usable_blocks

    @invariant()
    def cached_blocks_hold_what_their_hash_says(self) -> None:
        for request in self.live:
            for index, block in enumerate(
                request.block_table[: request.num_cached_blocks]
            ):
                if block is not self.manager.block_pool.null_block:
                    assert block.block_hash == request.block_hashes[index]

    @invariant()
    def quiet_tables_have_their_slots(self) -> None:
        for request in self.live:
            slots = len(request.block_table) * self.manager.block_size
            assert request.num_quiet_tokens <= slots


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(stateful_step_count=40)


class WindowMachine(ManagerMachine):
    """The same with a sliding window, and the free order of vLLM 0.24."""

    sliding_window = 7
    unhashed_first = True

    @invariant()
    def no_table_holds_more_than_its_window_and_its_chunk(self) -> None:
        assert self.manager.window is not None
        for request in self.live:
            kept = sum(block.block_id > 0 for block in request.block_table)
            assert kept <= self.manager.window.most_held_blocks(30, 1000)


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(stateful_step_count=40)
