"""Block tables of the V1 engine, block by block: groups, windows, eviction policies."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cache.v1.block_table import BlockTable, Known
from cache.v1.groups.chunk_ends import ChunkEnds
from cache.v1.groups.decodes import BlockDecodes, Decodes, looks_of
from cache.v1.groups.finder import Finder
from cache.v1.groups.kinds import check_drafts, check_layout, make_managers
from cache.v1.groups.mamba import OneStateManager
from cache.v1.groups.needs import Needs
from cache.v1.policy_pool import PolicyBlockPool
from cache.v1.pools import make_pool
from cache.v1.refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cache.block import KVCacheBlock
    from cache.stats import BlockObserver
    from cache.v1.groups.kinds import EngineLimits
    from cache.v1.groups.table import Copies
    from cache.v1.policies.base import CachePolicy
    from cache.v1.specs import KVCacheLayout
    from cache.v1.tables import Found, TableRequest


class BlockTables:
    """Tables over a `BlockPool`, in which every block is an object of its own.

    Every group of layers has a table for each request; all draw from one pool. What
    groups of a kind do is said by their managers; one group is the usual case.

    ::

        request.tokens --hash--> keys --find--> hit blocks --touch--+
                                                                    v
        free queue --popleft--> new blocks ------------------> request.table
             ^                                                      |
             +------- free, group by group, last block first -------+

    Parameters
    ----------
    layout
        Groups and pool.
    limits, retention_interval
        See `cache.v1.groups.kinds.EngineLimits` and `cache.v1.groups.base.GroupTerms`.
    enable_caching
        Prefix caching.
    unhashed_first
        See `BlockPool`.
    policy
        What is evicted, of prefix caching and one group; None for the release's own
        order.

    Attributes
    ----------
    block_size
        Tokens of the smallest block.
    hit_alignment
        Tokens that the blocks of `Found` stand for.
    period, phases
        A decode needs `extend` when its computed tokens, modulo `period`, are one of
        `phases`, and in its first step; in others nothing would come of it.
    is_plain
        Whether there is one group, which keeps every block and is hit by whole ones.
    chunk_ends
        Where chunks of prompts must end, or None.
    decodes
        Takes decodes on together, or None where they must be looked at one by one.
    keep_copies
        Called with the blocks that are copied before a step, by group, if it is set:
        they are held until `free_copies`.

    Raises
    ------
    CacheConfigError
        If what is asked for does not go together.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/kv_cache_manager.py`` and
    ``kv_cache_coordinator.py``; one group, 0.11.2.
    """

    watch_hit = True
    """A waiting request is looked up in every step: nothing is watched."""

    def __init__(
        self,
        layout: KVCacheLayout,
        limits: EngineLimits,
        *,
        enable_caching: bool,
        retention_interval: int | None = 0,
        unhashed_first: bool = True,
        policy: CachePolicy | None = None,
    ) -> None:
        check_layout(layout, retention_interval, enable_caching=enable_caching)
        has_policy = policy is not None
        check_drafts(
            layout, limits, enable_caching=enable_caching, has_policy=has_policy
        )
        self.layout = layout
        self.enable_caching = enable_caching
        self.block_size = layout.block_size
        self.hit_alignment = layout.cache_hit_alignment
        self._hash_block_size = layout.hash_block_size
        self._most_tokens = limits.max_model_len
        self._num_lookahead_tokens = limits.num_lookahead_tokens
        self._has_drafts = limits.num_speculative_tokens > 0
        is_fine = layout.has_hits_inside_blocks
        self._registers_every = 1 if is_fine else layout.scheduler_block_size
        pool = self.pool = make_pool(
            layout, policy, enable_caching=enable_caching, unhashed_first=unhashed_first
        )
        self._policy_pool = pool if isinstance(pool, PolicyBlockPool) else None
        self.num_usable_blocks = self.pool.num_usable_blocks
        self._sizes = [group.spec.block_size for group in layout.groups]
        self.managers = make_managers(layout, limits, self.pool, retention_interval)
        self._num_proof_tokens = max(
            [m.block_size for m in self.managers if m.drops_eagle_block], default=0
        )
        self._has_equal_blocks = all(
            manager.block_size == self.block_size
            and not isinstance(manager, OneStateManager)
            for manager in self.managers
        )
        self._known: dict[int, Known] = {}  # of requests looked up, by request id
        finder = Finder(
            *(layout, self.managers, self.pool, self._known),
            enable_caching=enable_caching,
            num_lookahead_tokens=limits.num_hash_lookahead_tokens,
        )
        self.find, self.find_to_load = finder.find, finder.find_to_load
        self.without_tail, self._hash = finder.without_tail, finder.hash
        self._givers = [
            (number, manager)
            for number, manager in enumerate(self.managers)
            if manager.gives_up_blocks
        ]
        self._no_hits: list[list[KVCacheBlock]] = [[] for _ in layout.groups]
        self.keep_copies: Callable[[Sequence[Copies]], object] | None = None
        self.is_plain = len(self.managers) == 1 and not (
            self._givers or is_fine or has_policy
        )
        self.chunk_ends = ChunkEnds.of(layout, limits.most_chunk_tokens)
        has_bound = finder.first.is_full and self.chunk_ends is None
        refusals = Refusals(
            layout,
            self.managers,
            finder.first.manager if has_bound else None,
            self.pool,
            self._known,
        )
        self.refused, self.lacks = refusals.refused, refusals.lacks
        needs = Needs(self.managers, self.hit_alignment, self._num_slots)
        self.num_needed_blocks, self.num_missing_blocks = needs.of_head, needs.of_rest
        self.period, self.phases, ends = looks_of(
            self.managers, self._registers_every, enable_caching=enable_caching
        )
        self.decodes: Decodes | None = (
            BlockDecodes(self, ends, self.pool, self.register)
            if self._policy_pool is None and Decodes.are_known(self.managers)
            else None
        )

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def num_evictions(self) -> int:
        return self.pool.num_evictions

    @property
    def num_contents(self) -> int:
        return len(self.pool.cached_blocks)

    @property
    def num_logical_blocks(self) -> int:
        return sum([manager.num_held_blocks for manager in self.managers])

    def num_stored_tokens(self, num_tokens: int) -> int:
        """Return the slots of so many tokens in all groups; `block_size` a block."""
        size, managers = self.block_size, self.managers
        if self._has_equal_blocks:
            num_null_blocks = sum([manager.num_null_blocks for manager in managers])
            return num_tokens * len(managers) - num_null_blocks * size
        return sum([m.num_stored_tokens(num_tokens, size) for m in managers])

    @property
    def observer(self) -> BlockObserver | None:
        return self.pool.observer

    @observer.setter
    def observer(self, observer: BlockObserver | None) -> None:
        self.pool.observer = observer

    # -- admission ------------------------------------------------------------

    def _num_slots(self, num_tokens: int) -> int:
        """Return the slots for so many tokens, and for those that a drafter writes."""
        if not self._num_lookahead_tokens:
            return num_tokens
        return min(num_tokens + self._num_lookahead_tokens, self._most_tokens)

    def begin(
        self,
        request: TableRequest,
        num_tokens: int,
        found: Found,
        *,
        num_tokens_to_cache: int | None = None,
        num_external_tokens: int = 0,
    ) -> None:
        """See `Tables.begin`; what is to be loaded is not findable before it is there.

        Parameters
        ----------
        request, num_tokens, found
            As there.
        num_tokens_to_cache
            Leading tokens that were found, where the others are to be loaded.
        num_external_tokens
            Tokens behind the hits that are loaded before the step runs.
        """
        known = self._known.pop(request.request_id, None) or Known()
        table = request.table = BlockTable(len(self.managers), known)
        if self._policy_pool is not None:
            self._policy_pool.begins(request.parent_id)
            self._expect(request, self._policy_pool, found.num_blocks, num_tokens)
        num_hit_tokens = found.num_blocks * self.hit_alignment
        loads = num_tokens_to_cache is not None
        num_done = num_tokens if loads else num_hit_tokens + num_external_tokens
        parts = list(zip(self.managers, table.groups, strict=True))
        if found.parts or num_done:
            by_group = found.parts or self._no_hits
            for (manager, own), hits in zip(parts, by_group, strict=True):
                manager.adopt(own, hits, num_hit_tokens, num_done)
        if loads or num_external_tokens:  # and no drafter writes behind it
            early = [p for p in parts if p[0].num_passed_tokens(num_done) < num_done]
            for manager, own in early + parts if loads else early:
                manager.lengthen(own, request, *[num_done] * 3)
        if loads:
            return
        num_known = min(num_tokens, request.num_tokens) if self._has_drafts else None
        num_slots = self._num_slots(num_tokens)
        self._lengthen(request, num_done, num_tokens, num_slots, num_known)

    # -- growth ---------------------------------------------------------------

    def extend(
        self,
        request: TableRequest,
        num_tokens: int,
        num_computed_tokens: int,
        *,
        num_processed_tokens: int | None = None,
        num_tokens_to_cache: int | None = None,
    ) -> bool:
        """See `Tables.extend`; with steps in flight two more numbers matter.

        Parameters
        ----------
        request, num_tokens, num_computed_tokens
            As there.
        num_processed_tokens
            Computed tokens of steps that have ended: windows of steps in flight still
            read what lies behind.
        num_tokens_to_cache
            Leading tokens that are known.
        """
        table: BlockTable = request.table
        groups = table.groups
        num_given_up = (
            num_computed_tokens
            if num_processed_tokens is None
            else num_processed_tokens
        )
        for number, manager in self._givers:
            manager.give_up(groups[number], num_given_up)
        num_new_blocks, num_slots = 0, self._num_slots(num_tokens)
        for manager, own in zip(self.managers, groups, strict=True):
            num_new_blocks += manager.num_new_blocks(
                own, request, num_computed_tokens, num_tokens, num_slots
            )
        if num_new_blocks > self.pool.num_free_blocks:
            return False
        if self._policy_pool is not None:
            num_held = len(groups[0].blocks)
            self._expect(request, self._policy_pool, num_held, num_tokens)
        if num_new_blocks or self.enable_caching:
            self._lengthen(
                request, num_computed_tokens, num_tokens, num_slots, num_tokens_to_cache
            )
        return True

    def changes_nothing(
        self, request: TableRequest, num_tokens: int, num_tokens_to_cache: int
    ) -> bool:
        """Whether `extend` of a running request would leave everything as it is.

        Where that is not `is_plain`, it is not known.
        """
        table: BlockTable = request.table
        num_full = num_tokens_to_cache - num_tokens_to_cache % self._registers_every
        if self.enable_caching and num_full > table.num_registered_tokens:
            return False
        num_held = len(table.groups[0].blocks) * self.block_size
        return self._num_slots(num_tokens) <= num_held

    def _expect(
        self,
        request: TableRequest,
        pool: PolicyBlockPool,
        num_held_blocks: int,
        num_tokens: int,
    ) -> None:
        """Tell the eviction policy what the blocks that are taken next will hold."""
        hashes = request.table.known.hashes
        self._hash(request, hashes, num_tokens)
        pool.expect(hashes[num_held_blocks : num_tokens // self.block_size])

    def _lengthen(
        self,
        request: TableRequest,
        num_computed_tokens: int,
        num_tokens: int,
        num_slots: int,
        num_tokens_to_cache: int | None = None,
    ) -> None:
        """Add the blocks that are missing, and register those that tokens fill."""
        table: BlockTable = request.table
        for manager, own in zip(self.managers, table.groups, strict=True):
            manager.lengthen(own, request, num_computed_tokens, num_tokens, num_slots)
        self.register(
            request, num_tokens if num_tokens_to_cache is None else num_tokens_to_cache
        )

    def register(self, request: TableRequest, num_tokens: int) -> None:
        """Make findable what the first `num_tokens` tokens of a request fill."""
        if not self.enable_caching:
            return
        table: BlockTable = request.table
        num_full = most = num_tokens - num_tokens % self._registers_every
        if num_full and self._num_proof_tokens:
            most = min(num_full + self._num_proof_tokens, num_tokens)
            most -= most % self._hash_block_size
        if most <= table.num_registered_tokens:
            return
        known = table.known
        self._hash(request, known.hashes, most)
        num_keyed = len(known.hashes) * self._hash_block_size
        table.num_registered_tokens = min(most, num_keyed)
        for manager, own in zip(self.managers, table.groups, strict=True):
            num_own = num_full
            if manager.drops_eagle_block:  # and the block behind, which proves a hit
                num_own = min(num_full + manager.block_size, most)
            manager.register(own, request, known.hashes, num_own, known.junction)

    def cut_chunk(self, request: TableRequest, start: int, num_new_tokens: int) -> int:
        """See `cache.v1.groups.chunk_ends.ChunkEnds.cut`; there is a `chunk_ends`."""
        assert self.chunk_ends is not None
        junction = self.junction(request)
        return self.chunk_ends.cut(request, start, num_new_tokens, junction)

    def end_call(self) -> list[tuple[int, int]]:
        """End a call of the scheduler; return blocks to copy, source and target.

        They are copied before the step runs, and held no more but for `keep_copies`.
        """
        copies = [manager.end_call() for manager in self.managers]
        if not any(copies):
            return []
        (self.free_copies if self.keep_copies is None else self.keep_copies)(copies)
        return [(a.block_id, b.block_id) for pairs in copies for a, b in pairs]

    def free_copies(self, copies: Sequence[Copies]) -> None:
        """Let go of blocks that were copied, by group."""
        blocks = [block for pairs in copies for pair in pairs for block in pair]
        self.pool.free_blocks(blocks)
        for manager, pairs in zip(self.managers, copies, strict=True):
            manager.note_copied(pairs)

    # -- release --------------------------------------------------------------

    def leave_behind(self, request: TableRequest, num_computed_tokens: int) -> None:
        """Give up blocks that nothing reads once so many tokens are computed."""
        for number, manager in self._givers if request.table is not None else ():
            manager.give_up(request.table.groups[number], num_computed_tokens)

    def free(self, request: TableRequest) -> int:
        table: BlockTable | None = request.table
        if table is None:
            self._known.pop(request.request_id, None)
            return 0
        request.table = None
        num_free = self.pool.num_free_blocks
        for manager, own in zip(self.managers, table.groups, strict=True):
            manager.free(own)
        return self.pool.num_free_blocks - num_free

    def free_as_one(self, request: TableRequest) -> None:
        """Do as `free`, all groups in one: cached blocks of the last one go first."""
        table: BlockTable | None = request.table
        if table is None or len(self.managers) == 1:
            self.free(request)
            return
        request.table = None
        held: list[KVCacheBlock] = []
        for manager, own in zip(self.managers, table.groups, strict=True):
            held += manager.give_back(own)
        self.pool.free_blocks(held[::-1])

    def watch(
        self, request: TableRequest | None, num_tokens: int, found: Found
    ) -> None:
        pass  # see `watch_hit`

    def will_fill_watched(self, requests: Iterable[TableRequest]) -> bool:
        del requests
        return True

    # -- looking in -----------------------------------------------------------

    def junction(self, request: TableRequest) -> int:
        """Return the junction of the latest look-up of a request, or 0."""
        table: BlockTable | None = request.table
        known = self._known.get(request.request_id) if table is None else table.known
        return 0 if known is None else known.junction

    def num_entries(self, num_tokens: int) -> int:
        """Return the entries of the tables of a request of so many tokens."""
        return sum(-(-num_tokens // size) for size in self._sizes)

    def num_used_blocks_by_group(self) -> list[int]:
        """Return how many blocks of the pool the tables of each group hold."""
        return [manager.num_used_blocks for manager in self.managers]

    def num_blocks(self, request: TableRequest) -> int:
        """See `Tables.num_blocks`; O(blocks)."""
        null_block = self.pool.null_block
        groups = request.table.groups
        return sum(len(own.blocks) - own.blocks.count(null_block) for own in groups)

    def num_shared_blocks(self, request: TableRequest) -> int:
        """See `Tables.num_shared_blocks`; what all groups share, in `block_size`."""
        null_block = self.pool.null_block
        fewest = []
        for manager, own in zip(self.managers, request.table.groups, strict=True):
            num_shared = 0
            for block in own.blocks[: own.num_seen]:
                if block.ref_cnt < 2 and (
                    len(self.managers) == 1 or block is not null_block
                ):
                    break
                num_shared += 1
            fewest.append(num_shared * manager.block_size)
        return min(fewest) // self.block_size

    def block_ids(
        self, request: TableRequest, first: int = 0, stop: int | None = None
    ) -> list[int]:
        """See `Tables.block_ids`; one group after the other."""
        ids = [each for ids in self.group_block_ids(request) for each in ids]
        return ids[first:stop]

    def group_block_ids(
        self, request: TableRequest, *, behind_hits: bool = False
    ) -> list[list[int]]:
        """Return the block table of each group; nothing without a table.

        With `behind_hits` of one that has just begun: without its hits.
        """
        groups = [] if request.table is None else request.table.groups
        return [
            [block.block_id for block in own.blocks[own.num_seen * behind_hits :]]
            for own in groups
        ]

    def free_block_ids(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue]

    def cached_block_ids(self) -> Iterable[int]:
        return self.pool.cached_block_ids()

    def num_registered_blocks(self, request: TableRequest) -> int:
        return 0 if request.table is None else request.table.groups[0].num_seen

    def check(self, requests: Iterable[TableRequest]) -> None:
        self.pool.check()
        references, requests = Counter[int](), list(requests)
        for number, manager in enumerate(self.managers):
            tables = [(r, r.table.groups[number]) for r in requests]
            references.update(manager.check(tables))
        self.pool.check_references(references)
