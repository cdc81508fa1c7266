"""A block table by runs of blocks."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from cache.errors import require
from cache.v1.runs.extents import Extent, chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cache.hashing import BlockRuns
    from cache.v1.tables import Found, TableRequest

FAR = 1 << 40
"""More blocks than any table has: a run that ends behind it grows with its request."""

NOT_GROWING = Extent(None, 0, [], 0)
"""Stands for "no extent grows"."""


class RunTable:
    """The blocks of a request: registered ones as parts, then the rest as ids.

    Attributes
    ----------
    parts, starts
        The first extent of each part, and the part's first block in the table. A part
        reaches to the next one; it is as many extents of a run's chain as that takes.
    num_registered
        Leading blocks that are findable, or copies of such.
    unregistered
        Ids of the blocks behind these.
    runs
        Identity of all full blocks.
    run
        Index in `runs` of the run of the last registered block, or of one before it.
    growing
        An extent of a run without an end, which the next block lengthens unless others
        hold the extent as well, or something is cached behind it.
    """

    __slots__ = (
        "growing",
        "num_registered",
        "parts",
        "run",
        "runs",
        "starts",
        "unregistered",
    )

    def __init__(self, runs: BlockRuns, found: Found) -> None:
        self.runs = runs
        self.parts: list[Extent] = found.parts.copy()
        self.starts = found.starts.copy()
        self.num_registered = found.num_blocks
        self.unregistered: list[int] = []
        self.run = max(len(self.parts) - 1, 0)
        self.growing = NOT_GROWING

    def extents(self, first: int = 0) -> Iterator[Extent]:
        """Yield the extents of all parts, from a part on, in logical order."""
        parts, starts = self.parts[first:], self.starts[first:]
        ends = [*self.starts, self.num_registered][first + 1 :]
        for part, start, end in zip(parts, starts, ends, strict=True):
            yield from chain(part, end - start)

    def block_ids(self, first: int = 0, stop: int | None = None) -> list[int]:
        """Return the table as block ids, from a block on and before another one."""
        start = end = self.num_registered
        ids: list[int] = []
        if first < end:
            starts, parts = self.starts, self.parts
            part = bisect_right(starts, first) - 1
            start = starts[part]
            for extent, stops in zip(
                parts[part:], [*starts[part + 1 :], end], strict=True
            ):
                ids += extent.ids
                num_missing = stops - start - len(ids)
                if num_missing:
                    for each in chain(extent, num_missing + len(extent.ids))[1:]:
                        ids += each.ids
                if stop is not None and stops >= stop:
                    return ids[first - start : stop - start]
        ids += self.unregistered
        return ids[first - start : None if stop is None else stop - start]

    def check(self, who: str) -> None:
        """Prove that the extents are those of the runs, block by block.

        Parameters
        ----------
        who
            Whose table it is, for the message.

        Raises
        ------
        InvariantError
            With the rule, the owner and the extent.
        """
        runs, position, run = self.runs, 0, 0
        for extent in self.extents():
            while position >= runs.ends[run]:
                run += 1
            index = position - (runs.ends[run - 1] if run else 0)
            require(
                (extent.key, extent.start) == (runs.keys[run], index),
                "{}: {} stands for block {} of run {}",
                who,
                extent,
                index,
                runs.keys[run],
            )
            position += len(extent.ids)
            require(position <= runs.ends[run], "{}: {} leaves its run", who, extent)
        require(
            position == self.num_registered,
            f"{who}: {position} blocks in extents, {self.num_registered} registered",
        )


def check_contents(requests: Iterable[TableRequest], block_size: int) -> None:
    """Prove that registered blocks are equal if, and only if, runs say so. O(blocks).

    Raises
    ------
    InvariantError
        With the rule, and the request and block.
    """
    places: dict[int, tuple[int | None, int]] = {}
    keys: dict[tuple[int | None, int], int] = {}
    for request in requests:
        table: RunTable = request.table
        own = [(e.key, e.start + i) for e in table.extents() for i in range(len(e.ids))]
        block_hashes: list[int] = []
        request.tokens.extend_block_hashes(block_hashes, len(own), block_size)
        for index, (key, place) in enumerate(zip(block_hashes, own, strict=True)):
            require(
                places.setdefault(key, place) == place
                and keys.setdefault(place, key) == key,
                "request {}: block {} is not what its run says",
                request.request_id,
                index,
            )
