"""The cached blocks of runs, by run key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import require
from cache.v1.runs.extents import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cache.hashing import BlockRuns


class RunIndex:
    """From run key to the cached blocks of that run, those cached first in front.

    The findable extents of a run are chained from ``first[key]`` on and cover it
    without a gap: a block is cached only while all blocks before it are, since tables
    register front to back and are freed back to front.

    Several blocks may hold equal content (a fully cached prompt computes its last
    block again). As in `cache.v1.block_pool.PrefixCacheIndex` the one cached first is
    found; later ones wait in `copies`, one block an extent, and the oldest of them
    takes the place of a findable block that is evicted::

        first[key] -> [0 1 2 3] <-> [4] <-> [5 6]        copies[key, 4] = [4'], [4'']

    Attributes
    ----------
    first
        Chain of findable extents by run key. To be read only.
    copies
        Further blocks by run key and index, oldest first. To be read only.
    """

    __slots__ = ("copies", "first")

    def __init__(self) -> None:
        self.first: dict[int, Extent] = {}
        self.copies: dict[tuple[int, int], list[Extent]] = {}

    def last(self, key: int) -> Extent:
        """Return the last findable extent of a cached run. O(extents of the run)."""
        extent = self.first[key]
        while extent.after is not None:
            extent = extent.after
        return extent

    def num_cached(self, runs: BlockRuns, num_blocks: int) -> int:
        """Return how many of the first `num_blocks` blocks are cached. O(extents)."""
        position = 0
        for key, run_end in zip(runs.keys, runs.ends, strict=True):
            extent = self.first.get(key)
            if extent is None:
                break
            end = run_end if run_end < num_blocks else num_blocks
            while extent is not None and position < end:
                position += len(extent.ids)
                extent = extent.after
            if position < end:
                break
            position = end
            if end == num_blocks:
                break
        return position

    def append(self, key: int, before: Extent | None, ids: list[int]) -> Extent:
        """Add blocks held by one table behind `before`, the last extent of the run."""
        if before is None:
            extent = self.first[key] = Extent(key, 0, ids, 1)
            return extent
        extent = Extent(key, before.start + len(before.ids), ids, 1)
        extent.before = before
        before.after = extent
        return extent

    def add_copy(self, key: int, index: int, block_id: int) -> Extent:
        """Add a block, held by one table, whose content is cached already."""
        extent = Extent(key, index, [block_id], 1)
        extent.is_copy = True
        self.copies.setdefault((key, index), []).append(extent)
        return extent

    def split(self, extent: Extent, num_blocks: int) -> Extent:
        """Cut an extent behind its first `num_blocks` blocks; return the rest."""
        ids = extent.ids
        rest = Extent(
            extent.key, extent.start + num_blocks, ids[num_blocks:], extent.num_refs
        )
        del ids[num_blocks:]
        _link(rest, extent.after)
        _link(extent, rest)
        return rest

    def merge(self, extent: Extent, rest: Extent) -> None:
        """Join an extent and the one behind it; `rest` is gone then."""
        extent.ids += rest.ids
        _link(extent, rest.after)

    def evict(self, extent: Extent, num_blocks: int) -> None:
        """Forget the last `num_blocks` blocks of an extent; its `ids` stay. O(1).

        O(`num_blocks`) if there are copies anywhere.
        """
        if extent.is_copy:
            self._drop_copy(extent)
            return
        if self.copies:
            self._promote(extent, num_blocks)
        if num_blocks == len(extent.ids):
            self._unlink(extent)

    def _unlink(self, extent: Extent) -> None:
        before, after, key = extent.before, extent.after, extent.key
        assert key is not None
        if before is not None:
            _link(before, after)
        elif after is not None:
            self.first[key] = after
            after.before = None
        else:
            del self.first[key]

    def _drop_copy(self, extent: Extent) -> None:
        assert extent.key is not None
        place = extent.key, extent.start
        copies = self.copies[place]
        copies.remove(extent)
        if not copies:
            del self.copies[place]

    def _promote(self, extent: Extent, num_blocks: int) -> None:
        """Put the oldest copy of each block that goes behind `extent`, in its place."""
        assert extent.key is not None
        end = extent.start + len(extent.ids)
        for index in range(end - 1, end - num_blocks - 1, -1):
            copies = self.copies.get((extent.key, index))
            if copies is not None:
                heir = copies[0]
                self._drop_copy(heir)
                heir.is_copy = False
                _link(heir, extent.after)
                _link(extent, heir)

    def extents(self) -> Iterator[Extent]:
        """Yield all extents, findable ones and copies."""
        for first in self.first.values():
            extent: Extent | None = first
            while extent is not None:
                yield extent
                extent = extent.after
        for copies in self.copies.values():
            yield from copies

    def check(self) -> None:
        """Prove that chains cover their runs from 0 on, and copies stand by, in O(n).

        Raises
        ------
        InvariantError
            With the rule and the extent.
        """
        ends: dict[int, int] = {}
        for key, first in self.first.items():
            end, before = 0, None
            extent: Extent | None = first
            while extent is not None:
                require(
                    extent.key == key and extent.start == end,
                    "index: {} does not go on at block {} of run {}",
                    extent,
                    end,
                    key,
                )
                require(extent.before is before, "index: {} does not link back", extent)
                require(
                    extent.ids and not extent.is_copy,
                    "index: {} is findable, and is empty or a copy",
                    extent,
                )
                end += len(extent.ids)
                before, extent = extent, extent.after
            ends[key] = end
        for (key, index), copies in self.copies.items():
            require(
                copies and index < ends.get(key, 0),
                "index: block {} of run {} has copies {} only",
                index,
                key,
                copies,
            )
            for copy in copies:
                require(
                    copy.is_copy and (copy.key, copy.start) == (key, index),
                    "index: {} is among the copies of block {} of {}",
                    copy,
                    index,
                    key,
                )
                require(len(copy.ids) == 1, "index: {} is not one block", copy)


def _link(extent: Extent, after: Extent | None) -> None:
    """Make two findable extents of a run neighbours, or one the last."""
    extent.after = after
    if after is not None:
        after.before = extent
