"""The KV-cache manager of vLLM's V1 engine."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from cache.errors import CacheError, require
from cache.v1.block_pool import BlockPool
from cache.v1.policy_pool import PolicyBlockPool
from tests.oracles.windows import BlockWindow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.block import KVCacheBlock
    from cache.tokens import TokenIds
    from cache.v1.policies.base import CachePolicy

NO_BLOCKS: tuple[KVCacheBlock, ...] = ()


class PagedRequest(Protocol):
    """A request as the manager reads it, with the table that the manager keeps there.

    Attributes
    ----------
    parent_id
        The workload's request, for eviction policies.
    num_tokens
        Tokens known so far, prompt and generated.
    num_computed_tokens
        Tokens whose KV entries are in the cache.
    block_table
        Physical blocks, logical order; the manager's own. The null block stands for
        blocks that a sliding window has left behind.
    block_hashes
        Keys of the leading full blocks; the manager's own, kept over a preemption.
    num_cached_blocks
        Leading blocks of the table that are in the prefix cache; the manager's own.
    num_quiet_tokens
        Until this many tokens are computed the table needs no attention: the next
        token has its slot and completes no block. The manager's own.
    """

    request_id: int
    parent_id: int
    num_tokens: int
    num_computed_tokens: int
    tokens: TokenIds
    block_table: list[KVCacheBlock]
    block_hashes: list[int]
    num_cached_blocks: int
    num_quiet_tokens: int


class KVCacheManager:
    """Gives requests slots for their tokens, and finds prefixes computed before.

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
    max_model_len
        Longest sequence: positions beyond get no slots. None for no such limit.
    policy
        Eviction policy of prefix caching; None for the release's own order. New, and
        shared with no other manager.

    Notes
    -----
    A table while `num_new_tokens` are being scheduled::

        | computed             | new computed | new        |
        | block_table          | hits         | allocated  |
        | full, cached | rest  | full, cached | full | part |

    Blocks are registered in the cache when they are *scheduled*, so that an equal
    prompt later in the same call hits them already; a block completed by a sampled
    token is registered with that token, one step later.
    Source: vLLM 0.11.2, ``vllm/v1/core/kv_cache_manager.py`` and
    ``single_type_kv_cache_manager.py``, one group of layers.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        enable_caching: bool,
        sliding_window: int | None = None,
        unhashed_first: bool = False,
        max_model_len: int | None = None,
        policy: CachePolicy | None = None,
    ) -> None:
        if block_size < 1:
            raise CacheError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.max_model_len = sys.maxsize if max_model_len is None else max_model_len
        self.window = (
            None if sliding_window is None else BlockWindow(sliding_window, block_size)
        )
        self._policy_pool = (
            PolicyBlockPool(num_gpu_blocks, policy, unhashed_first=unhashed_first)
            if policy is not None and enable_caching
            else None
        )
        self.block_pool = self._policy_pool or BlockPool(
            num_gpu_blocks, enable_caching=enable_caching, unhashed_first=unhashed_first
        )
        self.num_logical_blocks = 0
        """Entries of all tables, but for the null block."""
        self.num_skipped_blocks = 0
        """Entries of all tables that are the null block."""

    @property
    def usage(self) -> float:
        """Share of the pool that tables hold, 0 to 1."""
        return self.block_pool.usage

    def get_computed_blocks(self, request: PagedRequest) -> Sequence[KVCacheBlock]:
        """Return the longest cached prefix of `request`, as whole blocks.

        With a sliding window, blocks that no token to come reads are the null block.
        At least one token is left to compute, since the engine needs its logits: of
        a prompt that is cached whole and ends with a block, the last block is
        computed again. Nothing is reserved; give the blocks to `allocate_slots`.
        O(hit blocks), and O(all blocks) hashing the first time.
        """
        if not self.enable_caching:
            return NO_BLOCKS
        num_blocks = (request.num_tokens - 1) // self.block_size
        hashes = self._block_hashes(request, num_blocks)
        get = self.block_pool.get_cached_block
        if self.window is not None:
            null_block = self.block_pool.null_block
            found = self.window.longest_hit(hashes, num_blocks, get, null_block)
            # A window of one token does not read the last of them either.
            passed = self.window.num_skipped_blocks(len(found) * self.block_size)
            return [null_block] * passed + found[passed:]
        hits: list[KVCacheBlock] = []
        for index in range(num_blocks):
            block = get(hashes[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def can_hold_all(
        self,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *,
        num_spare_blocks: int = 0,
        most_blocks: int | None = None,
    ) -> bool:
        """Whether a sequence without a table would fit whole. Nothing is set aside.

        Parameters
        ----------
        num_tokens
            Length of the sequence.
        new_computed_blocks
            Its hits.
        num_spare_blocks
            Free blocks that must be left.
        most_blocks
            Most blocks that it ever holds at a time (sliding window), or None.
        """
        num_missing_blocks = self.num_missing_blocks(
            num_tokens, new_computed_blocks, most_blocks=most_blocks
        )
        return num_missing_blocks + num_spare_blocks <= self.block_pool.num_free_blocks

    def num_missing_blocks(
        self,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *,
        most_blocks: int | None = None,
    ) -> int:
        """Return the free blocks that a sequence without a table would use up.

        Parameters
        ----------
        num_tokens, new_computed_blocks, most_blocks
            See `can_hold_all`.
        """
        num_blocks = self.num_blocks_for(min(num_tokens, self.max_model_len))
        if most_blocks is not None:
            num_blocks = min(num_blocks, most_blocks)
        num_new_blocks = max(num_blocks - len(new_computed_blocks), 0)
        return num_new_blocks + self._num_revived(new_computed_blocks)

    def _num_revived(self, hits: Sequence[KVCacheBlock]) -> int:
        """Hits in the free queue: each is used up as a new block would be."""
        null_block = self.block_pool.null_block
        return sum(block.ref_cnt == 0 and block is not null_block for block in hits)

    def allocate_slots(
        self,
        request: PagedRequest,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] = NO_BLOCKS,
        num_spare_blocks: int = 0,
    ) -> bool:
        """Make room for the next `num_new_tokens` tokens of `request`.

        Parameters
        ----------
        request
            Its `num_computed_tokens` does not count the hits yet.
        num_new_tokens
            Tokens to be computed in this step, at least 1.
        new_computed_blocks
            Hits from `get_computed_blocks`, for a request without a table.
        num_spare_blocks
            Free blocks that must be left.

        Returns
        -------
        bool
            False if the free blocks do not suffice; then nothing changed, but for
            blocks behind the sliding window, which are given up in any case.
        """
        block_size = self.block_size
        pool = self.block_pool
        table = request.block_table
        if self.window is not None and table:
            self._give_up_skipped(request, self.window)
        num_known_tokens = (
            request.num_computed_tokens
            + len(new_computed_blocks) * block_size
            + num_new_tokens
        )
        num_tokens = min(num_known_tokens, self.max_model_len)
        num_new_blocks = (
            -(-num_tokens // block_size) - len(table) - len(new_computed_blocks)
        )
        num_needed_blocks = num_new_blocks + num_spare_blocks
        if new_computed_blocks:
            num_needed_blocks += self._num_revived(new_computed_blocks)
        if num_needed_blocks > pool.num_free_blocks:
            return False
        if self._policy_pool is not None:
            num_full = min(num_known_tokens, request.num_tokens) // block_size
            self._announce(request, self._policy_pool, new_computed_blocks, num_full)
        if new_computed_blocks:
            self._share(request, new_computed_blocks)
        if num_new_blocks > 0:
            table += pool.get_new_blocks(num_new_blocks)
            self.num_logical_blocks += num_new_blocks
        request.num_quiet_tokens = len(table) * block_size
        if self.enable_caching:
            # Not cut at max_model_len: of a prompt that is longer, the last slots
            # may be in a block that the tokens beyond fill.
            self._cache_blocks(request, min(num_known_tokens, request.num_tokens))
        if self.window is not None:
            # One token more than may be computed without giving up a block.
            most = self.window.num_tokens_before_next_skip(request.num_computed_tokens)
            request.num_quiet_tokens = min(request.num_quiet_tokens, most + 1)
        return True

    def _announce(
        self,
        request: PagedRequest,
        pool: PolicyBlockPool,
        hits: Sequence[KVCacheBlock],
        num_full_blocks: int,
    ) -> None:
        """Tell the eviction policy the request of blocks, and hashes of new ones."""
        num_held_blocks = len(request.block_table) + len(hits)
        if not request.block_table:
            pool.begins(request.parent_id)
        hashes = self._block_hashes(request, num_full_blocks)
        pool.expect(hashes[num_held_blocks:num_full_blocks])

    def _share(self, request: PagedRequest, hits: Sequence[KVCacheBlock]) -> None:
        """Begin the table of `request` with hits."""
        table = request.block_table
        table.extend(hits)
        request.num_cached_blocks = len(table)
        if self.window is not None:
            null_block = self.block_pool.null_block
            hits = [block for block in hits if block is not null_block]
            self.num_skipped_blocks += len(table) - len(hits)
        self.block_pool.touch(hits)
        self.num_logical_blocks += len(hits)

    def _give_up_skipped(self, request: PagedRequest, window: BlockWindow) -> None:
        """Put the null block in place of blocks that are not read any more."""
        table = request.block_table
        null_block = self.block_pool.null_block
        skipped = []
        last = window.num_skipped_blocks(request.num_computed_tokens) - 1
        for index in range(last, -1, -1):
            if table[index] is null_block:
                break  # and so are those before it
            skipped.append(table[index])
            table[index] = null_block
        if skipped:
            self.block_pool.free_blocks(skipped)
            self.num_logical_blocks -= len(skipped)
            self.num_skipped_blocks += len(skipped)

    def _cache_blocks(self, request: PagedRequest, num_tokens: int) -> None:
        """Register the blocks that `num_tokens` tokens fill, as far as there are."""
        num_full_blocks = num_tokens // self.block_size
        first = request.num_cached_blocks
        if num_full_blocks > first:
            hashes = self._block_hashes(request, num_full_blocks)
            blocks = request.block_table[first:num_full_blocks]
            request.num_cached_blocks = first + len(blocks)
            own = hashes[first : request.num_cached_blocks]
            if self._policy_pool is None:
                self.block_pool.cache_full_blocks(blocks, own)
            else:
                self._policy_pool.cache_full_blocks(blocks, own, first)
        # The token that completes the next block wants us back, to register it.
        request.num_quiet_tokens = min(
            request.num_quiet_tokens,
            (request.num_cached_blocks + 1) * self.block_size - 1,
        )

    def _block_hashes(self, request: PagedRequest, num_blocks: int) -> list[int]:
        """Return the keys of at least `num_blocks` full blocks of `request`."""
        hashes = request.block_hashes
        if num_blocks > len(hashes):
            request.tokens.extend_block_hashes(hashes, num_blocks, self.block_size)
        return hashes

    def free(self, request: PagedRequest) -> int:
        """Give up the table of `request`, its last block first to be reused.

        Returns
        -------
        int
            Number of blocks that became free; shared ones stay with others.
        """
        table = request.block_table
        blocks = table[::-1]
        if self.window is not None:
            null_block = self.block_pool.null_block
            blocks = [block for block in blocks if block is not null_block]
        num_free_before = self.block_pool.num_free_blocks
        self.block_pool.free_blocks(blocks)
        self.num_skipped_blocks -= len(table) - len(blocks)
        self.num_logical_blocks -= len(blocks)
        table.clear()
        request.num_cached_blocks = 0
        request.num_quiet_tokens = 0
        return self.block_pool.num_free_blocks - num_free_before

    def get_block_ids(self, request: PagedRequest) -> list[int]:
        """Return the block table as physical block ids, 0 for the null block."""
        return [block.block_id for block in request.block_table]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def check(self, requests: Iterable[PagedRequest]) -> None:
        """Prove invariant 2 over pool and tables in O(n).

        Parameters
        ----------
        requests
            Every request that holds a table.

        Raises
        ------
        InvariantError
            With the rule, the block and the request.
        """
        self.block_pool.check()
        null_block = self.block_pool.null_block
        references: Counter[int] = Counter()
        num_skipped_blocks = 0
        for request in requests:
            table = request.block_table
            held = [block.block_id for block in table if block is not null_block]
            num_skipped_blocks += len(table) - len(held)
            references.update(held)
            self._check_table(request)
        num_logical_blocks = references.total()
        require(
            num_logical_blocks == self.num_logical_blocks
            and num_skipped_blocks == self.num_skipped_blocks,
            f"manager: {num_logical_blocks} table entries and {num_skipped_blocks} "
            f"null blocks, {self.num_logical_blocks} and {self.num_skipped_blocks} "
            f"counted",
        )
        for block in self.block_pool.blocks[1:]:
            require(
                block.ref_cnt == references[block.block_id],
                f"block {block.block_id}: {block.ref_cnt} references counted, "
                f"{references[block.block_id]} tables hold it",
            )

    def _check_table(self, request: PagedRequest) -> None:
        """Prove that a table holds the blocks it must, under the right hashes."""
        table = request.block_table
        who = f"request {request.request_id}"
        require(
            min(request.num_computed_tokens, self.max_model_len)
            <= len(table) * self.block_size,
            f"{who}: {request.num_computed_tokens} tokens computed, {len(table)} "
            f"blocks held",
        )
        null_block = self.block_pool.null_block
        num_skipped = sum(block is null_block for block in table)
        most = (
            self.window.num_skipped_blocks(request.num_computed_tokens)
            if self.window is not None
            else 0
        )
        require(
            num_skipped <= most
            and all(block is null_block for block in table[:num_skipped]),
            f"{who}: {num_skipped} null blocks, of which at most {most}, the leading "
            f"ones, lie behind the window",
        )
        num_cached = request.num_cached_blocks
        hashes = request.block_hashes
        require(
            all(
                block.block_hash == (hashes[index] if index < num_cached else None)
                for index, block in enumerate(table)
                if block is not null_block
            ),
            f"{who}: its cached blocks do not carry the hashes of its leading "
            f"{num_cached} blocks",
        )
