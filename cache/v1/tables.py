"""The role of V1's block tables: called for changes only, not for every decode.

A scheduler that knows when a table needs attention calls these where a prompt begins or
goes on, where a decode opens a block or fills one, and where a table is given up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from cache.stats import BlockObserver
    from cache.tokens import TokenIds


class TableRequest(Protocol):
    """A request as block tables see it: the facts they read, the table they keep.

    Attributes
    ----------
    request_id
        No other request that waits has it.
    parent_id
        The workload's request, for eviction policies.
    num_tokens, num_prompt_tokens
        Tokens of a prompt in mid-way, outputs of before a preemption included; and of
        the prompt alone.
    num_computed_tokens
        Those whose entries are in the cache, of a request that is freed.
    tokens
        Prompt and output.
    table
        From `Tables.begin` to `Tables.free`; None before and after.
    """

    request_id: int
    parent_id: int
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    tokens: TokenIds
    table: Any


class Found(NamedTuple):
    """The cached prefix of a request, as of the moment it was looked up.

    Attributes
    ----------
    num_blocks
        Leading full blocks that are cached, or lie behind a sliding window; of
        `BlockTables.hit_alignment` tokens each.
    num_revived
        Those of them that are free now: each uses up a free block.
    parts, starts
        What `Tables.begin` takes from it.
    """

    num_blocks: int
    num_revived: int
    parts: list[Any]
    starts: list[int]


NOTHING_FOUND = Found(0, 0, [], [])
"""No cached prefix; its lists are not to be changed."""


class Tables(Protocol):
    """Block tables of an engine.

    Attributes
    ----------
    block_size
        Tokens a block.
    num_usable_blocks
        Size of the pool without the null block.
    num_free_blocks
        Blocks that no table holds, cached ones included.
    num_logical_blocks
        Entries of all tables, but for those that a sliding window has left behind.
    observer
        Told which blocks move, if it is set.
    watch_hit
        See `watch`. The caller may set it back to False.
    """

    block_size: int
    num_usable_blocks: int
    observer: BlockObserver | None
    watch_hit: bool

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_logical_blocks(self) -> int: ...

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were taken for new content so far."""
        ...

    def find(self, request: TableRequest, num_tokens: int) -> Found:
        """Return the longest cached prefix of the first `num_tokens` tokens.

        At most ``(num_tokens - 1) // block_size`` blocks: one token is left to be
        computed. Reserves nothing, and holds until the next change.
        """
        ...

    def begin(self, request: TableRequest, num_tokens: int, found: Found) -> None:
        """Give a request its table: the hits, and new blocks up to `num_tokens`.

        Full blocks become findable at once, so that an equal prompt later in the same
        call hits them already.

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

    def extend(
        self, request: TableRequest, num_tokens: int, num_computed_tokens: int
    ) -> bool:
        """Lengthen a table to `num_tokens` tokens, and register what they fill.

        Parameters
        ----------
        request
            Has a table.
        num_tokens
            Tokens that the table is to hold.
        num_computed_tokens
            Those computed in earlier steps. A sliding window gives up the blocks that
            lie behind the next one.

        Returns
        -------
        bool
            False if the free blocks do not suffice; then nothing has changed, but for
            blocks behind the window.
        """
        ...

    def free(self, request: TableRequest) -> int:
        """Give up the table of a request, its last block first to be reused.

        A request without a table is only forgotten, as one that leaves the queue must
        be if it was looked up.

        Returns
        -------
        int
            Number of blocks that became free; shared ones stay with others.
        """
        ...

    def watch(
        self, request: TableRequest | None, num_tokens: int, found: Found
    ) -> None:
        """Let `watch_hit` turn True when `find` would find more of a request.

        It turns True when a block becomes findable that the look-up of `request`
        would ask for and did not find, and stays False until then. One request is
        watched at a time; None ends it. `watch_hit` is False afterwards.
        """
        ...

    def will_fill_watched(self, requests: Iterable[TableRequest]) -> bool:
        """Whether one of these, as it goes on, may make `watch_hit` turn True.

        True wherever that is not known.
        """
        ...

    def num_blocks(self, request: TableRequest) -> int:
        """Return how many blocks a request holds."""
        ...

    def num_shared_blocks(self, request: TableRequest) -> int:
        """Return how many leading findable blocks other tables hold, too."""
        ...

    def block_ids(self, request: TableRequest) -> list[int]:
        """Return the block table as physical block ids; empty without a table."""
        ...

    def free_block_ids(self) -> list[int]:
        """Return the free blocks in the order in which they will be taken."""
        ...

    def cached_block_ids(self) -> Iterable[int]:
        """Return all blocks that can be found by their content. O(n)."""
        ...

    @property
    def num_contents(self) -> int:
        """Different contents that can be found."""
        ...

    def num_registered_blocks(self, request: TableRequest) -> int:
        """Return how many leading blocks of the table are findable."""
        ...

    def check(self, requests: Iterable[TableRequest]) -> None:
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


class QuickTables(Tables, Protocol):
    """Tables that serve many decodes at once."""

    def append_blocks(self, tables: Collection[Any]) -> None:
        """Give each table one new block, in order: of decodes whose block is full.

        Raises
        ------
        NoFreeBlocksError
            If more tables are given than blocks are free; nothing changes.
        """
        ...

    def register_blocks(self, tables: Collection[Any]) -> None:
        """Make the oldest unregistered block of each table findable, in order.

        The caller knows that a decode has just filled it.
        """
        ...

    def append_rounds(
        self, buckets: Sequence[Mapping[Any, Any]], first: int, num_rounds: int
    ) -> list[int]:
        """Let decodes go on for some steps: append and register, step after step.

        Parameters
        ----------
        buckets
            Tables, by request, that open a block in the same steps, and have filled
            their last one in the step before; by step, modulo the number of buckets.
        first, num_rounds
            Steps to go through; the caller has tested that the free blocks suffice.

        Returns
        -------
        list of int
            Number of new blocks of each step.
        """
        ...
