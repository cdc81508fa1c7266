"""Block tables of the V1 engine without prefix caching: nothing but block ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cache.errors import CacheError, NoFreeBlocksError, require
from cache.v1.tables import NOTHING_FOUND, Found

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from cache.stats import BlockObserver
    from cache.v1.tables import TableRequest

_MOST_TAKEN_IDS_KEPT = 1 << 16
_ids: list[int] = [0]


def _ids_between(first: int, stop: int) -> list[int]:
    """Return ids in order; those of all pools are the same objects.

    An id is looked at whenever its block is taken or freed. The engines of a fleet take
    turns, and ids of their own would push one another out of the processor's cache.
    """
    if len(_ids) < stop:
        _ids.extend(range(len(_ids), stop))
    return _ids[first:stop]


class IdTables:
    """Tables as lists of ids, and the free queue as one more.

    Without prefix caching no block is shared and none is found again, so a block is
    its id, a table is freed as a whole, and lists are cut and joined at the speed of
    memory. Where freed blocks are reused first, the free queue is a stack; where they
    join the back, it is a list whose front moves on::

        stack   [ ..., 9, 8, 7 ]   next: 7, 8, 9     freed table [3, 4]: next 4, 3
        queue   [ 7, 8, 9, ... ]   next: 7, 8, 9     freed table [3, 4]: last ..., 4, 3

    The stack grows from below when it has too few: ids that were never taken are few
    numbers until they are needed.

    Parameters
    ----------
    num_gpu_blocks
        Size of the pool, the null block included; at least 2.
    block_size
        Tokens a block.
    unhashed_first
        Whether freed blocks are reused first; see `cache.v1.block_pool.BlockPool`.

    Raises
    ------
    CacheError
        If the pool is too small or a block has no token.
    """

    _least_ids_added: ClassVar = 1024

    def __init__(
        self, num_gpu_blocks: int, block_size: int, *, unhashed_first: bool
    ) -> None:
        if num_gpu_blocks < 2:
            raise CacheError(
                f"a pool needs at least 2 blocks (one is the null block), got "
                f"{num_gpu_blocks}"
            )
        if block_size < 1:
            raise CacheError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.num_usable_blocks = num_gpu_blocks - 1
        self.num_free_blocks = self.num_usable_blocks
        self.num_logical_blocks = 0
        self.num_evictions = 0
        self.num_contents = 0
        self.watch_hit = False
        self.observer: BlockObserver | None = None
        self._is_stack = unhashed_first
        self._free = [] if unhashed_first else _ids_between(1, num_gpu_blocks)
        self._first_unused = 1 if unhashed_first else num_gpu_blocks
        self._num_taken = 0  # leading entries of a queue that are no longer in it

    def _add_unused(self, num_blocks: int) -> None:
        """Let so many free blocks stand on the stack, on which there are fewer.

        Raises
        ------
        NoFreeBlocksError
            If there are not so many; nothing changes.
        """
        if num_blocks > self.num_free_blocks:
            raise self._lack_of_blocks(num_blocks)
        first, most = self._first_unused, self.num_usable_blocks + 1
        num_lacking = num_blocks - len(self._free)
        stop = min(first + max(num_lacking, self._least_ids_added), most)
        self._free[:0] = _ids_between(first, stop)[::-1]
        self._first_unused = stop

    # -- a request's table ----------------------------------------------------

    def find(self, request: TableRequest, num_tokens: int) -> Found:
        del request, num_tokens
        return NOTHING_FOUND

    def num_needed_blocks(
        self, request: TableRequest, num_tokens: int, found: Found, *, is_whole: bool
    ) -> int:
        """See `BlockTables.num_needed_blocks`."""
        del request, found, is_whole
        return -(-num_tokens // self.block_size)

    def begin(
        self,
        request: TableRequest,
        num_tokens: int,
        found: Found,
        *,
        num_tokens_to_cache: int | None = None,
    ) -> None:
        del found, num_tokens_to_cache
        request.table = self.take(-(-num_tokens // self.block_size))

    def extend(
        self, request: TableRequest, num_tokens: int, num_computed_tokens: int
    ) -> bool:
        del num_computed_tokens
        num_blocks = -(-num_tokens // self.block_size) - len(request.table)
        if num_blocks > self.num_free_blocks:
            return False
        if num_blocks > 0:
            request.table += self.take(num_blocks)
        return True

    def append_blocks(self, tables: Collection[list[int]]) -> None:
        num_blocks = len(tables)
        if not self._is_stack or self.observer is not None:
            block_ids = self.take(num_blocks)
            for table, block_id in zip(tables, block_ids, strict=True):
                table.append(block_id)
            return
        if num_blocks > len(self._free):
            self._add_unused(num_blocks)
        pop = self._free.pop
        for table in tables:
            table.append(pop())
        self.num_free_blocks -= num_blocks
        self.num_logical_blocks += num_blocks

    def append_rounds(
        self, buckets: Sequence[Mapping[Any, list[int]]], first: int, num_rounds: int
    ) -> list[int]:
        start = first % len(buckets)
        rounds = [*buckets[start : start + num_rounds]]
        while len(rounds) < num_rounds:
            rounds += buckets[: num_rounds - len(rounds)]
        sizes = [*map(len, rounds)]
        if not self._is_stack or self.observer is not None:
            for opening in rounds:
                self.append_blocks(opening.values())
            return sizes
        num_blocks = sum(sizes)
        if num_blocks > len(self._free):
            self._add_unused(num_blocks)
        pop = self._free.pop
        for opening in rounds:  # quicker than a chain of a few
            for table in opening.values():
                table.append(pop())
        self.num_free_blocks -= num_blocks
        self.num_logical_blocks += num_blocks
        return sizes

    def register(self, request: TableRequest, num_tokens: int) -> None:
        pass  # as below

    def register_blocks(self, tables: Iterable[list[int]]) -> None:
        pass  # without prefix caching there is nothing to register

    def free(self, request: TableRequest) -> int:
        table = request.table
        if table is None:
            return 0
        request.table = None
        num_blocks = len(table)
        self.num_free_blocks += num_blocks
        self.num_logical_blocks -= num_blocks
        if self.observer is not None:
            self.observer.released(table[::-1])
        if not self._is_stack:
            table.reverse()
        self._free += table
        return num_blocks

    def watch(
        self, request: TableRequest | None, num_tokens: int, found: Found
    ) -> None:
        pass  # nothing is ever found, so there is nothing to wait for

    def will_fill_watched(self, requests: Iterable[TableRequest]) -> bool:
        del requests
        return False

    def take(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the queue.

        Raises
        ------
        NoFreeBlocksError
            If fewer blocks are free; nothing changes.
        """
        if not num_blocks:
            return []
        free = self._free
        if self._is_stack:
            if num_blocks > len(free):
                self._add_unused(num_blocks)
            taken = free[: -num_blocks - 1 : -1]
            del free[-num_blocks:]
        elif num_blocks > self.num_free_blocks:
            raise self._lack_of_blocks(num_blocks)
        else:
            start = self._num_taken
            stop = start + num_blocks
            taken = free[start:stop]
            self._num_taken = stop
            if stop > _MOST_TAKEN_IDS_KEPT:
                del free[:stop]
                self._num_taken = 0
        self.num_free_blocks -= num_blocks
        self.num_logical_blocks += num_blocks
        if self.observer is not None:
            self.observer.taken(taken)
        return taken

    def _lack_of_blocks(self, num_blocks: int) -> NoFreeBlocksError:
        return NoFreeBlocksError(
            f"cannot take {num_blocks} blocks: {self.num_free_blocks} of "
            f"{self.num_usable_blocks} are free"
        )

    # -- looking in -----------------------------------------------------------

    def cached_block_ids(self) -> Iterable[int]:
        return ()

    def block_ids(
        self, request: TableRequest, first: int = 0, stop: int | None = None
    ) -> list[int]:
        return list((request.table or ())[first:stop])

    def num_blocks(self, request: TableRequest) -> int:
        return len(request.table)

    def num_shared_blocks(self, request: TableRequest) -> int:
        del request
        return 0

    def num_registered_blocks(self, request: TableRequest) -> int:
        del request
        return 0

    def free_block_ids(self) -> list[int]:
        if not self._is_stack:
            return self._free[self._num_taken :]
        unused = range(self._first_unused, self.num_usable_blocks + 1)
        return [*reversed(self._free), *unused]

    def check(self, requests: Iterable[Any]) -> None:
        """Prove invariant 2 in O(n).

        Parameters
        ----------
        requests
            Every request that holds a table.

        Raises
        ------
        InvariantError
            If a block is lost, or stands twice.
        """
        free = self.free_block_ids()
        held = [block_id for request in requests for block_id in request.table]
        require(
            len(free) == self.num_free_blocks and len(held) == self.num_logical_blocks,
            f"tables: {len(free)} blocks are free and {len(held)} held, "
            f"{self.num_free_blocks} and {self.num_logical_blocks} counted",
        )
        require(
            sorted(free + held) == list(range(1, self.num_usable_blocks + 1)),
            "tables: a block is lost, or stands twice in tables and free queue",
        )
