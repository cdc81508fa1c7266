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
_COUNTED: tuple[int, ...] = ()  # the table of a request whose blocks are only counted
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

    No decision depends on ids. Where nothing looks at them either, `count_only` lets
    them go: how many blocks a request holds follows from its computed tokens then.

    Parameters
    ----------
    num_gpu_blocks
        Size of the pool, the null block included; at least 2.
    block_size
        Tokens a block.
    unhashed_first
        Whether freed blocks are reused first; see `cache.v1.block_pool.BlockPool`.

    Attributes
    ----------
    keeps_ids
        Set it, before a run begins, to look at ids without an observer.

    Raises
    ------
    CacheError
        If the pool is too small or a block has no token.
    """

    keeps_ids = False
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
        self._observer: BlockObserver | None = None
        self._counts_only = False
        self._most_tokens = 0
        self._num_opening: Sequence[int] = ()
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

    # -- whether ids are kept -------------------------------------------------

    def count_only(self, most_tokens: int, num_opening: Sequence[int]) -> None:
        """Keep no ids from now on, only counts.

        The caller frees requests with the tokens written down for which they have
        blocks, in `num_computed_tokens`, of which those beyond `most_tokens` have none.
        It keeps the lengths of the buckets of `append_rounds` in `num_opening`, which
        are looked at in their place.

        Raises
        ------
        CacheError
            If blocks are held or observed.
        """
        if self.num_logical_blocks or self._observer is not None:
            raise CacheError("blocks that are held or observed have ids; count earlier")
        self._counts_only, self._most_tokens = True, most_tokens
        self._num_opening = num_opening
        self._free = []

    @property
    def counts_only(self) -> bool:
        """Whether blocks have no ids."""
        return self._counts_only

    @property
    def observer(self) -> BlockObserver | None:
        """Told which blocks move, or None."""
        return self._observer

    @observer.setter
    def observer(self, observer: BlockObserver | None) -> None:
        if observer is not None:
            self._require_ids()
        self._observer = observer

    def _require_ids(self) -> None:
        if self._counts_only:
            raise CacheError(
                "blocks have no ids in a run that nothing looked at when it began: "
                "set `observer` or `keeps_ids` before"
            )

    # -- a request's table ----------------------------------------------------

    def find(self, request: TableRequest, num_tokens: int) -> Found:
        del request, num_tokens
        return NOTHING_FOUND

    def num_needed_blocks(
        self,
        request: TableRequest,
        num_tokens: int,
        found: Found,
        *,
        is_whole: bool,
        num_external_tokens: int = 0,
    ) -> int:
        """See `cache.v1.groups.needs.Needs.of_head`."""
        del request, found, is_whole, num_external_tokens
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
        num_blocks = -(-num_tokens // self.block_size)
        if self._counts_only:
            num_blocks -= -(-num_computed_tokens // self.block_size)
        else:
            num_blocks -= len(request.table)
        if num_blocks > self.num_free_blocks:
            return False
        if num_blocks > 0:
            request.table += self.take(num_blocks)
        return True

    def append_blocks(self, tables: Collection[list[int]]) -> None:
        num_blocks = len(tables)
        if self._counts_only:
            if num_blocks > self.num_free_blocks:
                raise self._lack_of_blocks(num_blocks)
        elif not self._is_stack or self._observer is not None:
            block_ids = self.take(num_blocks)
            for table, block_id in zip(tables, block_ids, strict=True):
                table.append(block_id)
            return
        else:
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
        period = len(buckets)
        start = first % period
        stop = start + num_rounds
        sizes = [*(self._num_opening or map(len, buckets))]
        if stop <= period:
            sizes = sizes[start:stop]
        else:
            sizes = (sizes[start:] + sizes * (stop // period))[:num_rounds]
        num_blocks = sum(sizes)
        if self._counts_only:
            if num_blocks > self.num_free_blocks:
                raise self._lack_of_blocks(num_blocks)
        elif not self._is_stack or self._observer is not None:
            for number in range(first, first + num_rounds):
                self.append_blocks(buckets[number % period].values())
            return sizes
        else:
            if num_blocks > len(self._free):
                self._add_unused(num_blocks)
            pop = self._free.pop
            for number in range(first, first + num_rounds):
                for table in buckets[number % period].values():
                    table.append(pop())
        self.num_free_blocks -= num_blocks
        self.num_logical_blocks += num_blocks
        return sizes

    def register(self, request: TableRequest, num_tokens: int) -> None:
        pass  # as below

    def register_blocks(self, tables: Iterable[list[int]]) -> None:
        pass  # without prefix caching there is nothing to register

    def leave_behind(self, request: TableRequest, num_computed_tokens: int) -> None:
        """Do nothing: attention reads all blocks of a request."""

    def free_as_one(self, request: TableRequest) -> None:
        """See `BlockTables.free_as_one`; there is one group."""
        self.free(request)

    def free(self, request: TableRequest) -> int:
        table = request.table
        if table is None:
            return 0
        request.table = None
        if self._counts_only:
            num_tokens, most = request.num_computed_tokens, self._most_tokens
            num_blocks = -(-min(num_tokens, most) // self.block_size)
        else:
            num_blocks = len(table)
        self.num_free_blocks += num_blocks
        self.num_logical_blocks -= num_blocks
        if self._counts_only:
            return num_blocks
        if self._observer is not None:
            self._observer.released(table[::-1])
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

    def take(self, num_blocks: int) -> Sequence[int]:
        """Take blocks from the front of the queue; return their ids, if they have any.

        Raises
        ------
        NoFreeBlocksError
            If fewer blocks are free; nothing changes.
        """
        if not num_blocks:
            return []
        free = self._free
        taken: Sequence[int] = _COUNTED
        if self._counts_only:
            if num_blocks > self.num_free_blocks:
                raise self._lack_of_blocks(num_blocks)
        elif self._is_stack:
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
        if self._observer is not None:
            self._observer.taken(taken)
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
        self._require_ids()
        return list((request.table or ())[first:stop])

    def num_blocks(self, request: TableRequest) -> int:
        self._require_ids()
        return len(request.table)

    def num_shared_blocks(self, request: TableRequest) -> int:
        del request
        return 0

    def num_registered_blocks(self, request: TableRequest) -> int:
        del request
        return 0

    def free_block_ids(self) -> list[int]:
        self._require_ids()
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
        if self._counts_only:
            require(
                self.num_free_blocks >= 0
                and self.num_free_blocks + self.num_logical_blocks
                == self.num_usable_blocks,
                f"tables: {self.num_free_blocks} blocks are free and "
                f"{self.num_logical_blocks} held, of {self.num_usable_blocks}",
            )
            return
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

    def check_count(self, num_blocks: int) -> None:
        """Prove that requests hold so many blocks, where these have no ids.

        Raises
        ------
        InvariantError
            If they do not.
        """
        require(
            num_blocks == self.num_logical_blocks,
            f"tables: tokens need {num_blocks} blocks, {self.num_logical_blocks} held",
        )
