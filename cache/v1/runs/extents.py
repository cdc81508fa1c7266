"""Extents: neighbouring blocks that share their fate, and the queue of free ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterator


class Extent:
    """Consecutive blocks of one run that the same tables hold.

    Attributes
    ----------
    key
        Key of the run, or None: these blocks have no findable content.
    start
        Index in the run of the first block.
    ids
        Block ids, logical order; never empty while the extent is in use.
    num_refs
        Number of tables that hold the blocks. An extent without any is in the free
        queue, where it stands for its blocks in *reverse* logical order.
    is_copy
        Whether other blocks of the same content were cached earlier and are findable
        in its place (`cache.v1.runs.index.RunIndex`).
    before, after
        Neighbours in the run, among the findable extents.
    prev, next
        Neighbours in the free queue.
    """

    __slots__ = (
        "after",
        "before",
        "ids",
        "is_copy",
        "key",
        "next",
        "num_refs",
        "prev",
        "start",
    )

    prev: Extent
    next: Extent

    def __init__(
        self, key: int | None, start: int, ids: list[int], num_refs: int
    ) -> None:
        self.key = key
        self.start = start
        self.ids = ids
        self.num_refs = num_refs
        self.is_copy = False
        self.before: Extent | None = None
        self.after: Extent | None = None

    def __repr__(self) -> str:
        return (
            f"Extent(key={self.key}, start={self.start}, ids={self.ids}, "
            f"num_refs={self.num_refs})"
        )


class ExtentQueue:
    """Free extents in the order in which their blocks will be reused.

    Doubly linked through the extents, as `cache.v1.free_queue.FreeKVCacheBlockQueue` is
    through blocks, since hits take extents from the middle. Links are plain
    attributes of the sentinel: ``end.next`` is the front, ``end.prev`` the back.
    """

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.end = end = Extent(None, 0, [], 0)
        end.prev = end.next = end

    def append(self, extent: Extent) -> None:
        """Put an extent at the back. O(1)."""
        self.insert_before(extent, self.end)

    def insert_before(self, extent: Extent, place: Extent) -> None:
        """Put an extent in front of one that is queued. O(1)."""
        before = place.prev
        before.next = extent
        extent.prev = before
        extent.next = place
        place.prev = extent

    def remove(self, extent: Extent) -> None:
        """Take an extent out, wherever it is. O(1)."""
        before, after = extent.prev, extent.next
        before.next = after
        after.prev = before

    def __iter__(self) -> Iterator[Extent]:
        """Walk the extents, front first."""
        extent = self.end.next
        while extent is not self.end:
            yield extent
            extent = extent.next

    def check(self) -> None:
        """Prove that links agree and that no extent is empty or held, in O(n).

        Raises
        ------
        InvariantError
            With the rule and the extent.
        """
        before = self.end
        for extent in self:
            require(extent.prev is before, "queue: {} does not link back", extent)
            require(extent.ids, "queue: {} holds no block", extent)
            require(not extent.num_refs, "queue: {} is held", extent)
            before = extent
        require(self.end.prev is before, f"queue: its end does not link to {before}")


def chain(extent: Extent, num_blocks: int) -> list[Extent]:
    """Return the findable extents that hold `num_blocks` blocks of a run.

    Parameters
    ----------
    extent
        The first of them.
    num_blocks
        They must be cached, and the last of them must end an extent.
    """
    found = [extent]
    num_blocks -= len(extent.ids)
    while num_blocks > 0:
        assert extent.after is not None
        extent = extent.after
        found.append(extent)
        num_blocks -= len(extent.ids)
    return found


def walk(extent: Extent, position: int, end: int) -> tuple[int, int]:
    """Go along a run from its first extent, at block `position`, up to `end`.

    Returns
    -------
    (int, int)
        Block behind the last cached one, and how many of these no table holds.
    """
    num_revived = 0
    at: Extent | None = extent
    while at is not None and position < end:
        num_blocks = min(len(at.ids), end - position)
        position += num_blocks
        if not at.num_refs:
            num_revived += num_blocks
        at = at.after
    return position, num_revived


def num_revived(parts: list[Extent], starts: list[int], end: int) -> int:
    """Return how many blocks of these parts, up to a block of the table, are free.

    Parameters
    ----------
    parts, starts, end
        See `cache.v1.runs.pool.RunPool.share`.
    """
    total = 0
    for extent, start in zip(reversed(parts), reversed(starts), strict=True):
        total += walk(extent, start, end)[1]
        end = start
    return total
