"""The role of a KV-cache manager that is called for changes only.

`cache.v1.manager.KVCacheManager` is asked about every request in every step. A
scheduler that knows when a table needs attention calls these instead: where a prompt
begins or goes on, where a decode opens a block or fills one, and where a table is
given up. Whatever the calls are, block ids, order of the free queue, hits and
evictions are those of `KVCacheManager` for the same calls in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cache.stats import BlockObserver
    from cache.tokens import TokenIds


class FastRequest(Protocol):
    """What such a manager reads of a request, and the table that it keeps there.

    Attributes
    ----------
    request_id
        No other request that waits has it.
    tokens
        Prompt and output.
    table
        The manager's own, from `FastTables.begin` to `FastTables.free`; None before
        and after.
    """

    request_id: int
    tokens: TokenIds
    table: Any


class Found(NamedTuple):
    """The cached prefix of a request, as of the moment it was looked up.

    Attributes
    ----------
    num_blocks
        Leading full blocks that are cached.
    num_revived
        Those of them that no table holds now: each uses up a free block.
    parts, starts
        The manager's own.
    """

    num_blocks: int
    num_revived: int
    parts: list[Any]
    starts: list[int]


NOTHING_FOUND = Found(0, 0, [], [])
"""No cached prefix; its lists are not to be changed."""


class FastTables(Protocol):
    """Block tables of an engine, changed by calls that their caller has tested.

    Callers count free blocks themselves (`num_free_blocks`) and preempt before they
    call; nothing here answers "no".

    Attributes
    ----------
    block_size
        Tokens a block.
    num_usable_blocks
        Size of the pool without the null block.
    num_free_blocks
        Blocks that no table holds, cached ones included.
    num_logical_blocks
        Entries of all tables.
    observer
        Told which blocks move, if it is set.
    watch_hit
        See `watch`. The caller may set it back to False.
    """

    block_size: int
    num_usable_blocks: int
    num_free_blocks: int
    num_logical_blocks: int
    observer: BlockObserver | None
    watch_hit: bool

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were taken for new content so far."""
        ...

    def find(self, request: FastRequest, num_tokens: int) -> Found:
        """Return the longest cached prefix of the first `num_tokens` tokens.

        At most ``(num_tokens - 1) // block_size`` blocks: one token is left to be
        computed. Reserves nothing, and holds until the next change.
        """
        ...

    def begin(self, request: FastRequest, num_tokens: int, found: Found) -> None:
        """Give a request its table: the hits, and new blocks up to `num_tokens`.

        Full blocks become findable at once, as they are in `KVCacheManager`.

        Parameters
        ----------
        request
            Has no table.
        num_tokens
            Tokens that the table is to hold, hits included.
        found
            What `find` has just returned. The caller has tested that the blocks
            missing and ``found.num_revived`` are at most `num_free_blocks`.

        Raises
        ------
        NoFreeBlocksError
            If more new blocks are needed than are free.
        """
        ...

    def extend(self, request: FastRequest, num_tokens: int) -> None:
        """Lengthen a table to `num_tokens` tokens: a later chunk of a prompt.

        Raises
        ------
        NoFreeBlocksError
            If more blocks are needed than are free; nothing changes.
        """
        ...

    def append_blocks(self, requests: Collection[FastRequest]) -> None:
        """Give each request one new block, in order: decodes whose block is full.

        Raises
        ------
        NoFreeBlocksError
            If more requests are given than blocks are free; nothing changes.
        """
        ...

    def register_blocks(self, requests: Collection[FastRequest]) -> None:
        """Make the oldest unregistered block of each request findable, in order.

        The caller knows that a decode has just filled it.
        """
        ...

    def free(self, request: FastRequest) -> int:
        """Give up the table of a request, its last block first to be reused.

        A request without a table is only forgotten, as one that leaves the queue must
        be if it was looked up.

        Returns
        -------
        int
            Number of blocks that became free; shared ones stay with others.
        """
        ...

    def watch(self, request: FastRequest | None, num_tokens: int, found: Found) -> None:
        """Let `watch_hit` turn True when `find` would find more of a request.

        It turns True when a block becomes findable that the look-up of `request`
        would ask for and did not find, and stays False until then. One request is
        watched at a time; None ends it. `watch_hit` is False afterwards.
        """
        ...

    def will_fill_watched(self, requests: Iterable[FastRequest]) -> bool:
        """Whether one of these, as it goes on, may make `watch_hit` turn True.

        True wherever that is not known.
        """
        ...

    def block_ids(self, request: FastRequest) -> list[int]:
        """Return the block table as physical block ids; empty without a table."""
        ...

    def free_block_ids(self) -> list[int]:
        """Return the free blocks in the order in which they will be taken."""
        ...

    def cached_block_ids(self) -> Iterable[int]:
        """Return all blocks that can be found by their content. O(n)."""
        ...

    def num_registered_blocks(self, request: FastRequest) -> int:
        """Return how many leading blocks of the table are findable."""
        ...

    def check(self, requests: Iterable[FastRequest]) -> None:
        """Prove all invariants in O(n).

        Parameters
        ----------
        requests
            Every request that holds a table.

        Raises
        ------
        InvariantError
            With the rule, the block and the request.
        """
        ...
