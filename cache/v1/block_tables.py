"""Block tables of the V1 engine, block by block: windows and eviction policies."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cache.errors import CacheError, require
from cache.v1.block_pool import BlockPool
from cache.v1.policy_pool import PolicyBlockPool
from cache.v1.sliding_window import SlidingWindow
from cache.v1.tables import NOTHING_FOUND, Found

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.block import KVCacheBlock
    from cache.stats import BlockObserver
    from cache.v1.policies.base import CachePolicy
    from cache.v1.tables import TableRequest


class BlockTable:
    """The blocks of a request.

    Attributes
    ----------
    blocks
        In logical order; the null block stands for those behind a sliding window.
    hashes
        Keys of the leading full blocks.
    num_cached
        Leading blocks that are in the prefix cache.
    """

    __slots__ = ("blocks", "hashes", "num_cached")

    def __init__(self, blocks: list[KVCacheBlock], hashes: list[int]) -> None:
        self.blocks = blocks
        self.hashes = hashes
        self.num_cached = len(blocks)


class BlockTables:
    """Tables over a `BlockPool`, in which every block is an object of its own.

    ::

        request.tokens --hash--> keys --find--> hit blocks --touch--+
                                                                    v
        free queue --popleft--> new blocks ------------------> request.table
             ^                                                      |
             +------------- free, last block first -----------------+

    Parameters
    ----------
    num_gpu_blocks
        Size of the pool, the null block included.
    block_size
        Tokens a block, at least 1.
    enable_caching
        Prefix caching.
    sliding_window
        Tokens that attention looks back, the token itself included; None for all.
    unhashed_first
        See `BlockPool`.
    policy
        What is evicted, of prefix caching; None for the release's own order.

    Notes
    -----
    Source: vLLM 0.11.2, ``vllm/v1/core/kv_cache_manager.py`` and
    ``single_type_kv_cache_manager.py``, one group of layers.
    """

    watch_hit = True
    """A waiting request is looked up in every step: nothing is watched."""

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        enable_caching: bool,
        sliding_window: int | None = None,
        unhashed_first: bool = False,
        policy: CachePolicy | None = None,
    ) -> None:
        if block_size < 1:
            raise CacheError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.window = (
            None
            if sliding_window is None
            else SlidingWindow(sliding_window, block_size)
        )
        self._policy_pool = (
            PolicyBlockPool(num_gpu_blocks, policy, unhashed_first=unhashed_first)
            if policy is not None and enable_caching
            else None
        )
        self.pool = self._policy_pool or BlockPool(
            num_gpu_blocks, enable_caching=enable_caching, unhashed_first=unhashed_first
        )
        self.num_usable_blocks = self.pool.num_usable_blocks
        self.num_logical_blocks = 0
        self.num_skipped_blocks = 0
        self._hashes: dict[int, list[int]] = {}  # of requests looked up, by request id

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
    def observer(self) -> BlockObserver | None:
        return self.pool.observer

    @observer.setter
    def observer(self, observer: BlockObserver | None) -> None:
        self.pool.observer = observer

    # -- a request's table ----------------------------------------------------

    def find(self, request: TableRequest, num_tokens: int) -> Found:
        if not self.enable_caching:
            return NOTHING_FOUND
        num_blocks = (num_tokens - 1) // self.block_size
        hashes = self._hashes.setdefault(request.request_id, [])
        self._hash(request, hashes, num_blocks)
        get, null_block = self.pool.get_cached_block, self.pool.null_block
        hits: list[KVCacheBlock] = []
        if self.window is not None:
            hits = self.window.longest_hit(hashes, num_blocks, get, null_block)
        else:
            for index in range(num_blocks):
                block = get(hashes[index])
                if block is None:
                    break
                hits.append(block)
        # A hit in the free queue is used up as a new block would be.
        num_revived = sum(
            block.ref_cnt == 0 and block is not null_block for block in hits
        )
        return Found(len(hits), num_revived, hits, [])

    def begin(self, request: TableRequest, num_tokens: int, found: Found) -> None:
        hits: list[KVCacheBlock] = found.parts
        hashes = self._hashes.pop(request.request_id, [])
        table = request.table = BlockTable([], hashes)
        if self._policy_pool is not None:
            self._policy_pool.begins(request.parent_id)
            self._expect(request, self._policy_pool, found.num_blocks, num_tokens)
        if hits:
            table.blocks += hits
            table.num_cached = len(hits)
            null_block = self.pool.null_block
            held = [block for block in hits if block is not null_block]
            self.num_skipped_blocks += len(hits) - len(held)
            self.num_logical_blocks += len(held)
            self.pool.touch(held)
        self._lengthen(request, num_tokens)

    def extend(
        self, request: TableRequest, num_tokens: int, num_computed_tokens: int
    ) -> bool:
        table: BlockTable = request.table
        if self.window is not None:
            num_skipped = self.window.num_skipped_blocks(num_computed_tokens)
            self._give_up(table.blocks, num_skipped)
        num_held = len(table.blocks)
        if -(-num_tokens // self.block_size) - num_held > self.num_free_blocks:
            return False
        if self._policy_pool is not None:
            self._expect(request, self._policy_pool, num_held, num_tokens)
        self._lengthen(request, num_tokens)
        return True

    def _expect(
        self,
        request: TableRequest,
        pool: PolicyBlockPool,
        num_held_blocks: int,
        num_tokens: int,
    ) -> None:
        """Tell the eviction policy what the blocks that are taken next will hold."""
        num_full_blocks = num_tokens // self.block_size
        self._hash(request, request.table.hashes, num_full_blocks)
        pool.expect(request.table.hashes[num_held_blocks:num_full_blocks])

    def _give_up(self, blocks: list[KVCacheBlock], num_skipped: int) -> None:
        """Put the null block in place of leading blocks that nobody reads any more."""
        null_block = self.pool.null_block
        skipped = []
        for index in range(num_skipped - 1, -1, -1):
            if blocks[index] is null_block:
                break  # and so are those before it
            skipped.append(blocks[index])
            blocks[index] = null_block
        if skipped:
            self.pool.free_blocks(skipped)
            self.num_logical_blocks -= len(skipped)
            self.num_skipped_blocks += len(skipped)

    def _lengthen(self, request: TableRequest, num_tokens: int) -> None:
        """Add the blocks that are missing, and register those that tokens fill."""
        table: BlockTable = request.table
        num_new_blocks = -(-num_tokens // self.block_size) - len(table.blocks)
        if num_new_blocks > 0:
            table.blocks += self.pool.get_new_blocks(num_new_blocks)
            self.num_logical_blocks += num_new_blocks
        first, stop = table.num_cached, num_tokens // self.block_size
        if not self.enable_caching or stop <= first:
            return
        self._hash(request, table.hashes, stop)
        blocks, hashes = table.blocks[first:stop], table.hashes[first:stop]
        table.num_cached = stop
        if self._policy_pool is None:
            self.pool.cache_full_blocks(blocks, hashes)
        else:
            self._policy_pool.cache_full_blocks(blocks, hashes, first)

    def _hash(self, request: TableRequest, hashes: list[int], num_blocks: int) -> None:
        """Extend keys to at least `num_blocks` full blocks."""
        if num_blocks > len(hashes):
            request.tokens.extend_block_hashes(hashes, num_blocks, self.block_size)

    def free(self, request: TableRequest) -> int:
        table: BlockTable | None = request.table
        if table is None:
            self._hashes.pop(request.request_id, None)
            return 0
        request.table = None
        pool = self.pool
        held = [block for block in table.blocks[::-1] if block is not pool.null_block]
        num_free_before = pool.num_free_blocks
        pool.free_blocks(held)
        self.num_skipped_blocks -= len(table.blocks) - len(held)
        self.num_logical_blocks -= len(held)
        return pool.num_free_blocks - num_free_before

    def watch(
        self, request: TableRequest | None, num_tokens: int, found: Found
    ) -> None:
        pass  # see `watch_hit`

    def will_fill_watched(self, requests: Iterable[TableRequest]) -> bool:
        del requests
        return True

    # -- looking in -----------------------------------------------------------

    def num_blocks(self, request: TableRequest) -> int:
        """See `Tables.num_blocks`; O(blocks) with a sliding window."""
        blocks = request.table.blocks
        if self.window is None:
            return len(blocks)
        null_block = self.pool.null_block
        return sum(block is not null_block for block in blocks)

    def num_shared_blocks(self, request: TableRequest) -> int:
        table: BlockTable = request.table
        num_shared = 0
        for block in table.blocks[: table.num_cached]:
            if block.ref_cnt < 2:
                break
            num_shared += 1
        return num_shared

    def block_ids(self, request: TableRequest) -> list[int]:
        table: BlockTable | None = request.table
        return [] if table is None else [block.block_id for block in table.blocks]

    def free_block_ids(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue]

    def cached_block_ids(self) -> Iterable[int]:
        return self.pool.cached_block_ids()

    def num_registered_blocks(self, request: TableRequest) -> int:
        table: BlockTable | None = request.table
        return 0 if table is None else table.num_cached

    def check(self, requests: Iterable[TableRequest]) -> None:
        self.pool.check()
        null_block = self.pool.null_block
        references: Counter[int] = Counter()
        num_skipped_blocks = 0
        for request in requests:
            table: BlockTable = request.table
            held = [block for block in table.blocks if block is not null_block]
            num_skipped = len(table.blocks) - len(held)
            num_skipped_blocks += num_skipped
            references.update(block.block_id for block in held)
            require(
                all(block is null_block for block in table.blocks[:num_skipped]),
                f"request {request.request_id}: a null block behind others",
            )
            hashes = table.hashes[: table.num_cached]
            hashes += [None] * (len(table.blocks) - len(hashes))  # type: ignore[list-item]
            require(
                all(
                    block.block_hash == key
                    for block, key in zip(table.blocks, hashes, strict=True)
                    if block is not null_block
                ),
                f"request {request.request_id}: its cached blocks do not carry the "
                f"hashes of its leading {table.num_cached} blocks",
            )
        num_logical_blocks = references.total()
        require(
            num_logical_blocks == self.num_logical_blocks
            and num_skipped_blocks == self.num_skipped_blocks,
            f"tables: {num_logical_blocks} entries and {num_skipped_blocks} null "
            f"blocks, {self.num_logical_blocks} and {self.num_skipped_blocks} counted",
        )
        for block in self.pool.blocks[1:]:
            require(
                block.ref_cnt == references[block.block_id],
                "block {}: {} references counted, {} tables hold it",
                block.block_id,
                block.ref_cnt,
                references[block.block_id],
            )
