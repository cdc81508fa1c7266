"""The KV-cache manager of vLLM's V1 engine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from cache.block_pool import BlockPool
from cache.errors import CacheError, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.block import KVCacheBlock
    from cache.tokens import TokenIds

NO_BLOCKS: tuple[KVCacheBlock, ...] = ()


class PagedRequest(Protocol):
    """What the manager reads of a request, and the table that it keeps there.

    Attributes
    ----------
    num_tokens
        Tokens known so far, prompt and generated.
    num_computed_tokens
        Tokens whose KV entries are in the cache.
    block_table
        Physical blocks, logical order; the manager's own.
    block_hashes
        Keys of the leading full blocks; the manager's own, kept over a preemption.
    num_cached_blocks
        Leading blocks of the table that are in the prefix cache; the manager's own.
    num_quiet_tokens
        Until this many tokens are computed the table needs no attention: the next
        token has its slot and completes no block. The manager's own.
    """

    request_id: int
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
    ``single_type_kv_cache_manager.py``, full attention.
    """

    def __init__(
        self, num_gpu_blocks: int, block_size: int, *, enable_caching: bool
    ) -> None:
        if block_size < 1:
            raise CacheError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.block_pool = BlockPool(num_gpu_blocks, enable_caching=enable_caching)
        self.num_logical_blocks = 0
        """Entries of all tables."""

    @property
    def usage(self) -> float:
        """Share of the pool that tables hold, 0 to 1."""
        return self.block_pool.usage

    def get_computed_blocks(self, request: PagedRequest) -> Sequence[KVCacheBlock]:
        """Return the longest cached prefix of `request`, as whole blocks.

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
        hits: list[KVCacheBlock] = []
        for index in range(num_blocks):
            block = get(hashes[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate_slots(
        self,
        request: PagedRequest,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] = NO_BLOCKS,
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

        Returns
        -------
        bool
            False if the free blocks do not suffice; then nothing changed.
        """
        block_size = self.block_size
        pool = self.block_pool
        table = request.block_table
        num_tokens = (
            request.num_computed_tokens
            + len(new_computed_blocks) * block_size
            + num_new_tokens
        )
        num_new_blocks = (
            -(-num_tokens // block_size) - len(table) - len(new_computed_blocks)
        )
        # A hit that waits in the free queue is used up as a new block would be.
        num_revived = sum(block.ref_cnt == 0 for block in new_computed_blocks)
        if num_new_blocks + num_revived > pool.num_free_blocks:
            return False
        if new_computed_blocks:
            pool.touch(new_computed_blocks)
            table.extend(new_computed_blocks)
            request.num_cached_blocks = len(table)
            self.num_logical_blocks += len(new_computed_blocks)
        if num_new_blocks > 0:
            table += pool.get_new_blocks(num_new_blocks)
            self.num_logical_blocks += num_new_blocks
        request.num_quiet_tokens = len(table) * block_size
        if self.enable_caching:
            self._cache_blocks(request, min(num_tokens, request.num_tokens))
        return True

    def _cache_blocks(self, request: PagedRequest, num_tokens: int) -> None:
        """Register the blocks that `num_tokens` tokens fill."""
        num_full_blocks = num_tokens // self.block_size
        first = request.num_cached_blocks
        if num_full_blocks > first:
            hashes = self._block_hashes(request, num_full_blocks)
            self.block_pool.cache_full_blocks(
                request.block_table[first:num_full_blocks],
                hashes[first:num_full_blocks],
            )
            request.num_cached_blocks = num_full_blocks
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
        num_free_before = self.block_pool.num_free_blocks
        self.block_pool.free_blocks(table[::-1])
        self.num_logical_blocks -= len(table)
        table.clear()
        request.num_cached_blocks = 0
        request.num_quiet_tokens = 0
        return self.block_pool.num_free_blocks - num_free_before

    def get_block_ids(self, request: PagedRequest) -> list[int]:
        """Return the block table as physical block ids."""
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
        references: Counter[int] = Counter()
        num_logical_blocks = 0
        for request in requests:
            table = request.block_table
            num_logical_blocks += len(table)
            references.update(block.block_id for block in table)
            require(
                request.num_computed_tokens <= len(table) * self.block_size,
                f"request {request.request_id}: {request.num_computed_tokens} tokens "
                f"computed, {len(table)} blocks held",
            )
            cached = [b.block_hash for b in table if b.block_hash is not None]
            require(
                cached == request.block_hashes[: request.num_cached_blocks],
                f"request {request.request_id}: its cached blocks do not carry the "
                f"hashes of its leading {request.num_cached_blocks} blocks",
            )
        require(
            num_logical_blocks == self.num_logical_blocks,
            f"manager: {num_logical_blocks} table entries, "
            f"{self.num_logical_blocks} counted",
        )
        for block in self.block_pool.blocks[1:]:
            require(
                block.ref_cnt == references[block.block_id],
                f"block {block.block_id}: {block.ref_cnt} references counted, "
                f"{references[block.block_id]} tables hold it",
            )
