"""`Tables` and `KVCacheManager` side by side, compared after every call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cache.tokens import SegmentTokens
from cache.v1.id_tables import IdTables
from cache.v1.runs.tables import RunTables
from cache.v1.tables import NOTHING_FOUND
from tests.oracles.v1_manager import KVCacheManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.block import KVCacheBlock
    from cache.tokens import Segment, TokenIds
    from cache.v1.tables import Tables


@dataclass(eq=False)
class Twin:
    """A request of both managers at once."""

    request_id: int
    num_tokens: int
    tokens: TokenIds
    num_computed_tokens: int = 0
    block_table: list[KVCacheBlock] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_quiet_tokens: int = 0
    table: Any = None

    def quoted(self, num_output_tokens: int) -> list[Segment] | None:
        """A prompt that quotes prompt and answer, which may still be written."""
        if not isinstance(self.tokens, SegmentTokens):
            return None
        *prompt, (answer, _) = self.tokens.segments
        return [*prompt, (answer, num_output_tokens)]


class Calls:
    """A `BlockObserver` that counts what it is told."""

    def __init__(self) -> None:
        self.told: Counter[tuple[str, int]] = Counter()

    def _add(self, kind: str, block_ids: Sequence[int]) -> None:
        assert block_ids
        self.told.update((kind, block_id) for block_id in block_ids)

    def taken(self, block_ids: Sequence[int]) -> None:
        self._add("taken", block_ids)

    def released(self, block_ids: Sequence[int]) -> None:
        self._add("released", block_ids)

    def revived(self, block_ids: Sequence[int]) -> None:
        self._add("revived", block_ids)

    def evicted(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert not self.told["taken", block_id]
        self._add("evicted", block_ids)


class ScantIds(IdTables):
    """Ids that come onto the stack a few at a time."""

    _least_ids_added = 3


class Twins:
    """Both managers, the requests that hold tables, and those preempted."""

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        unhashed_first: bool,
        enable_caching: bool = True,
        observed: bool = False,
    ) -> None:
        self.block_size = block_size
        self.slow = KVCacheManager(
            num_gpu_blocks,
            block_size,
            enable_caching=enable_caching,
            unhashed_first=unhashed_first,
        )
        make = RunTables if enable_caching else ScantIds
        self.fast: Tables = make(
            num_gpu_blocks, block_size, unhashed_first=unhashed_first
        )
        self.slow_calls, self.fast_calls = Calls(), Calls()
        if observed:
            self.slow.block_pool.observer = self.slow_calls
            self.fast.observer = self.fast_calls
        self.live: list[Twin] = []
        self.waiting: list[Twin] = []
        self.watched: Twin | None = None
        self.watch_hit = False
        self.num_hit_blocks = 0
        self._spy_on_registrations()

    def _spy_on_registrations(self) -> None:
        """Learn of each registration whether it lengthens the watched prefix."""
        pool = self.slow.block_pool
        register = pool.cache_full_blocks

        def spy(blocks: Sequence[KVCacheBlock], block_hashes: Sequence[int]) -> None:
            for block, block_hash in zip(blocks, block_hashes, strict=True):
                before = self.num_found(self.watched)
                register([block], [block_hash])
                self.watch_hit |= self.num_found(self.watched) > before

        pool.cache_full_blocks = spy  # type: ignore[method-assign]

    def num_found(self, request: Twin | None) -> int:
        return 0 if request is None else len(self.slow.get_computed_blocks(request))

    @property
    def num_copies(self) -> int:
        """Cached blocks whose content is cached in an older block, too."""
        pool = self.slow.block_pool
        num_hashed = sum(block.block_hash is not None for block in pool.blocks)
        return num_hashed - len(pool.cached_blocks)

    # -- calls ----------------------------------------------------------------

    def admit(self, request: Twin, most_new_tokens: int) -> bool:
        """Look a request up and give it a table, if its blocks fit."""
        hits = self.slow.get_computed_blocks(request)
        found = self.fast.find(request, request.num_tokens)
        assert found.num_blocks == len(hits)
        if isinstance(self.fast, RunTables):
            limit = (request.num_tokens - 1) // self.block_size
            runs = request.tokens.block_runs(self.block_size)
            runs.cover(limit)
            assert self.fast.num_cached(runs, limit) == len(hits)
        assert found.num_revived == sum(block.ref_cnt == 0 for block in hits)
        num_hits = len(hits) * self.block_size
        num_new_tokens = min(most_new_tokens, request.num_tokens - num_hits)
        num_tokens = num_hits + num_new_tokens
        num_new_blocks = -(-num_tokens // self.block_size) - found.num_blocks
        fits = num_new_blocks + found.num_revived <= self.fast.num_free_blocks
        assert self.slow.allocate_slots(request, num_new_tokens, hits) == fits
        if fits:
            self.num_hit_blocks += found.num_blocks
            request.num_computed_tokens = num_tokens
            self.fast.begin(request, num_tokens, found)
            self.live.append(request)
        return fits

    def extend(self, request: Twin, most_new_tokens: int) -> bool:
        """Compute a later chunk of a prompt, if its blocks fit."""
        missing = request.num_tokens - request.num_computed_tokens
        num_new_tokens = min(most_new_tokens, missing)
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_new_blocks = -(-num_tokens // self.block_size) - len(request.block_table)
        fits = num_new_blocks <= self.fast.num_free_blocks
        before = request.num_computed_tokens
        assert self.slow.allocate_slots(request, num_new_tokens) == fits
        assert self.fast.extend(request, num_tokens, before) == fits
        if fits:
            request.num_computed_tokens = num_tokens
        return fits

    def decode(self, requests: Sequence[Twin]) -> list[Twin]:
        """Compute one generated token each; return those that find no block."""
        size = self.block_size
        opening = [r for r in requests if r.num_computed_tokens % size == 0]
        starved = opening[self.fast.num_free_blocks :]
        opening = opening[: self.fast.num_free_blocks]
        others = [r for r in requests if r.num_computed_tokens % size]
        was_hit = self.fast.watch_hit
        may_hit = self.fast.will_fill_watched(requests)
        for request in opening + others:
            request.num_tokens = request.num_computed_tokens + 1
            # A block of one token is opened and filled at once: keep the order.
            if size == 1:
                self.fast.append_blocks([request.table])
                self.fast.register_blocks([request.table])
            assert self.slow.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        if size > 1:
            self.fast.append_blocks([r.table for r in opening])
            self.fast.register_blocks(
                [r.table for r in others if r.num_computed_tokens % size == 0]
            )
        assert may_hit or self.fast.watch_hit == was_hit
        return starved

    def free(self, request: Twin) -> None:
        assert self.slow.free(request) == self.fast.free(request)
        self.live.remove(request)
        request.num_computed_tokens = 0

    def preempt(self, request: Twin) -> None:
        """Free a request that will come back with what it has generated."""
        self.free(request)
        self.waiting.append(request)

    def partly_computed(self) -> list[Twin]:
        """Requests whose prompt is not computed yet."""
        return [r for r in self.live if r.num_computed_tokens < r.num_tokens]

    def decoding(self) -> list[Twin]:
        """Requests that generate."""
        return [r for r in self.live if r.num_computed_tokens >= r.num_tokens]

    def watch(self, request: Twin | None) -> None:
        self.watched = request
        self.watch_hit = False
        if request is None:
            self.fast.watch(None, 0, NOTHING_FOUND)
            return
        found = self.fast.find(request, request.num_tokens)
        self.fast.watch(request, request.num_tokens, found)

    # -- comparison -----------------------------------------------------------

    def compare(self) -> None:
        """Everything that can be seen is equal."""
        slow, fast = self.slow, self.fast
        for request in self.live:
            assert fast.block_ids(request) == slow.get_block_ids(request)
            assert fast.num_registered_blocks(request) == request.num_cached_blocks
        queue = slow.block_pool.free_block_queue
        assert fast.free_block_ids() == [block.block_id for block in queue]
        cached = sorted(slow.block_pool.cached_block_ids())
        assert sorted(fast.cached_block_ids()) == cached
        self.compare_counts()
        assert self.fast_calls.told == self.slow_calls.told
        self.fast_calls.told.clear()
        self.slow_calls.told.clear()
        for request in self.waiting:
            hits = slow.get_computed_blocks(request)
            found = fast.find(request, request.num_tokens)
            assert found.num_blocks == len(hits)
            assert found.num_revived == sum(block.ref_cnt == 0 for block in hits)

    def compare_counts(self) -> None:
        slow, fast = self.slow, self.fast
        assert fast.num_free_blocks == slow.block_pool.num_free_blocks
        assert fast.num_usable_blocks == slow.block_pool.num_usable_blocks
        assert fast.num_logical_blocks == slow.num_logical_blocks
        assert fast.num_evictions == slow.block_pool.num_evictions
        assert fast.watch_hit == self.watch_hit

    def check(self) -> None:
        self.fast.check(self.live)
        self.slow.check(self.live)
