"""The paged cache of transformers' continuous batching: tables in two tiers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from cache.errors import BlockTableError, CacheConfigError, require
from cache.hf_fifo.blocks import BlockManager, CpuPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.tokens import TokenIds

LEAST_BLOCK_SIZE = 4
"""The release takes no smaller blocks."""

BlockPairs = list[tuple[int, int]]
"""Block ids ``(from, to)`` in the order in which they are copied."""


class PagedRequest(Protocol):
    """A request as the cache reads it."""

    @property
    def request_id(self) -> int:
        """Names its table."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache, on the GPU or the CPU."""
        ...

    @property
    def tokens(self) -> TokenIds:
        """Identity of the tokens."""
        ...

    @property
    def block_hashes(self) -> list[int]:
        """Keys of the leading full blocks; extended here."""
        ...


def num_blocks_held(num_tokens: int, block_size: int) -> int:
    """Return how many blocks a request owns right after an allocation.

    A block more than the tokens fill where they end one short of a block, or with it:
    the release adds one token, rounds down and adds a block.
    """
    return (num_tokens + 1) // block_size + 1


class PagedAttentionCache:
    """The blocks of each request, on the GPU and in the CPU pool.

    Blocks are taken for the tokens of a step, when the present ones do not hold them;
    nothing is taken ahead, nothing is given back before the end or an eviction.

    Source: transformers 5.17, ``generation/continuous_batching/cache.py``
    (`PagedAttentionCache`), models with full attention in all layers.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        num_cpu_blocks: int = 0,
        enable_caching: bool = True,
    ) -> None:
        if block_size < LEAST_BLOCK_SIZE:
            raise CacheConfigError(
                f"block_size must be at least {LEAST_BLOCK_SIZE} in hf_fifo, got "
                f"{block_size}; transformers' own default is 256"
            )
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.block_manager = BlockManager(num_gpu_blocks)
        self.cpu_pool = CpuPool(num_cpu_blocks)
        self.num_logical_blocks = 0
        self._tables: dict[int, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Size of the GPU pool."""
        return self.block_manager.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """GPU blocks that no table holds."""
        return self.block_manager.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """GPU blocks that tables hold."""
        return self.num_blocks - self.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the GPU pool that tables hold."""
        return self.num_used_blocks / self.num_blocks

    def table(self, request: PagedRequest) -> Sequence[int]:
        """Return the GPU blocks of a request, in the order of its tokens."""
        return self._tables.get(request.request_id, ())

    # -- the GPU --------------------------------------------------------------

    def num_missing_blocks(self, request: PagedRequest, num_new_tokens: int) -> int:
        """Return how many blocks `num_new_tokens` more tokens take; 0 if they fit.

        Of a request on the CPU, those of its computed tokens are counted as well.
        """
        num_held = len(self._tables.get(request.request_id, ()))
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_held and num_tokens <= num_held * self.block_size:
            return 0
        return num_blocks_held(num_tokens, self.block_size) - num_held

    def allocate_blocks(self, request: PagedRequest, num_blocks: int) -> bool:
        """Append free blocks to a table; False, and no change, if they are short."""
        if num_blocks > self.num_free_blocks:
            return False
        if num_blocks:
            taken = self.block_manager.take(num_blocks)
            self._tables.setdefault(request.request_id, []).extend(taken)
            self.num_logical_blocks += num_blocks
        return True

    def free_blocks(self, request: PagedRequest) -> int:
        """Give up a table, first block first; return how many blocks came free."""
        table = self._tables.pop(request.request_id, [])
        self.num_logical_blocks -= len(table)
        return self.block_manager.release(table)

    # -- sharing --------------------------------------------------------------

    def search_prefix_match(self, request: PagedRequest) -> int:
        """Give a request without a table the complete blocks that begin like it."""
        if request.request_id in self._tables:
            raise BlockTableError(
                f"request {request.request_id} has blocks; only one without can begin "
                f"with a prefix match"
            )
        found: list[int] = []
        for key in self._keys(request, request.num_tokens // self.block_size):
            block_id = self.block_manager.find(key)
            if block_id is None:
                break
            found.append(block_id)
        for block_id in found:
            self.block_manager.hold(block_id)
        if found:
            self._tables[request.request_id] = found
            self.num_logical_blocks += len(found)
        return len(found) * self.block_size

    def mark_shareable_blocks_as_complete(self, request: PagedRequest) -> None:
        """Let others find the blocks that computed tokens fill.

        Complete blocks lead a table. A block whose content is known is replaced by
        the one that holds it.
        """
        end = request.num_computed_tokens // self.block_size
        manager = self.block_manager
        table = self._tables[request.request_id]
        if not (self.enable_caching and end) or manager.is_complete(table[end - 1]):
            return
        begin = end - 1
        while begin and not manager.is_complete(table[begin - 1]):
            begin -= 1
        keys = self._keys(request, end)
        for index in range(begin, end):
            table[index] = manager.complete(table[index], keys[index])

    def _keys(self, request: PagedRequest, num_blocks: int) -> list[int]:
        """Return keys of at least the leading `num_blocks` full blocks."""
        keys = request.block_hashes
        if len(keys) < num_blocks:
            request.tokens.extend_block_hashes(keys, num_blocks, self.block_size)
        return keys[:num_blocks]

    # -- the CPU --------------------------------------------------------------

    def offload(self, requests: Iterable[PagedRequest]) -> dict[int, BlockPairs]:
        """Copy the tables of as many requests as fit into the CPU pool, in order.

        One that does not fit is left out, and a smaller one behind it may still be
        taken. GPU blocks stay held; free them afterwards.
        """
        moved: dict[int, BlockPairs] = {}
        for request in requests:
            table = self._tables.get(request.request_id, [])
            if table and len(table) <= self.cpu_pool.num_free_blocks:
                places = self.cpu_pool.put(request.request_id, len(table))
                moved[request.request_id] = list(zip(table, places, strict=True))
        return moved

    def restore(self, request: PagedRequest) -> BlockPairs:
        """Take a request's blocks from the CPU pool into its new table."""
        places = self.cpu_pool.pop(request.request_id)
        return list(zip(places, self._tables[request.request_id], strict=False))

    # -- proof ----------------------------------------------------------------

    def check(self, requests: Iterable[PagedRequest]) -> None:
        """Prove tables and pools in O(n)."""
        references = Counter(
            block_id for table in self._tables.values() for block_id in table
        )
        self.block_manager.check(references)
        self.cpu_pool.check()
        require(
            references.total() == self.num_logical_blocks,
            f"{references.total()} table entries, {self.num_logical_blocks} counted",
        )
        ids = set()
        for request in requests:
            ids.add(request.request_id)
            num_slots = len(self.table(request)) * self.block_size
            require(
                request.num_computed_tokens <= num_slots,
                f"request {request.request_id} has {request.num_computed_tokens} "
                f"computed tokens in {num_slots} slots",
            )
        require(
            ids >= self._tables.keys(),
            f"requests {sorted(self._tables.keys() - ids)} hold blocks and do not run",
        )
