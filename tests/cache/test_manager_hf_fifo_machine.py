"""The cache of transformers' continuous batching under random calls (invariant 2)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cache.hf_fifo.manager import PagedAttentionCache
from tests.cache.test_manager_hf_fifo import Paged, paged

BLOCK_SIZE = 4


class CacheMachine(RuleBasedStateMachine):
    """Requests grow, share, move to the CPU and back, and end."""

    cache: PagedAttentionCache

    @initialize(
        num_blocks=st.integers(1, 12),
        num_cpu_blocks=st.integers(0, 8),
        caching=st.booleans(),
    )
    def set_up(self, *, num_blocks: int, num_cpu_blocks: int, caching: bool) -> None:
        self.cache = PagedAttentionCache(
            num_blocks,
            BLOCK_SIZE,
            num_cpu_blocks=num_cpu_blocks,
            enable_caching=caching,
        )
        self.on_gpu: list[Paged] = []
        self.on_cpu: list[Paged] = []
        self.num_added = 0

    @rule(begin=st.integers(0, 1), length=st.integers(1, 20), own=st.integers(0, 9))
    def begin(self, begin: int, length: int, own: int) -> None:
        # Few prompts, so that many begin alike; their answers are their own.
        token_ids = [begin] * length + [100 + own] * 30
        request = paged(self.num_added, token_ids)
        request.num_tokens = length
        self.num_added += 1
        if self.cache.enable_caching:
            num_hits = self.cache.search_prefix_match(request)
            assert num_hits % BLOCK_SIZE == 0
            assert num_hits <= length
            request.num_computed_tokens = min(num_hits, length - 1)
        self.on_gpu.append(request)

    @precondition(lambda self: self.on_gpu)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        cache, request = self.cache, data.draw(st.sampled_from(self.on_gpu))
        before, num_free = list(cache.table(request)), cache.num_free_blocks
        num_blocks = cache.num_missing_blocks(request, num_tokens)
        if not cache.allocate_blocks(request, num_blocks):
            assert num_blocks > num_free == cache.num_free_blocks
            assert list(cache.table(request)) == before
            return
        assert cache.table(request)[: len(before)] == before
        assert cache.num_free_blocks == num_free - num_blocks
        request.num_computed_tokens += num_tokens
        request.num_tokens = max(request.num_tokens, request.num_computed_tokens)
        assert request.num_computed_tokens <= len(cache.table(request)) * BLOCK_SIZE
        if request.num_computed_tokens <= 30:  # as far as its tokens are known
            cache.mark_shareable_blocks_as_complete(request)

    @precondition(lambda self: self.on_gpu)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.on_gpu))
        num_free = self.cache.num_free_blocks
        assert self.cache.free_blocks(request) == self.cache.num_free_blocks - num_free
        self.on_gpu.remove(request)

    @precondition(lambda self: self.on_gpu)
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        victims = data.draw(
            st.lists(st.sampled_from(self.on_gpu), unique_by=id, min_size=1)
        )
        moved = self.cache.offload(victims)
        for victim in victims:
            if victim.request_id in moved:
                pairs = moved[victim.request_id]
                assert [gpu for gpu, _ in pairs] == self.cache.table(victim)
                self.on_cpu.append(victim)
            self.cache.free_blocks(victim)
            self.on_gpu.remove(victim)

    @precondition(lambda self: self.on_cpu)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.on_cpu))
        places = self.cache.cpu_pool.table(request.request_id)
        num_blocks = self.cache.num_missing_blocks(request, 1)
        if self.cache.allocate_blocks(request, num_blocks):
            pairs = self.cache.restore(request)
            assert [cpu for cpu, _ in pairs] == places
            assert [gpu for _, gpu in pairs] == self.cache.table(request)[: len(places)]
            self.on_cpu.remove(request)
            self.on_gpu.append(request)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check(self.on_gpu)
            for request in self.on_cpu:
                assert request.request_id in self.cache.cpu_pool


TestCache = CacheMachine.TestCase
TestCache.settings = settings(stateful_step_count=40)
