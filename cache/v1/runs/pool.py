"""The pool of physical blocks as extents: references, free queue, eviction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import CacheError, require
from cache.v1.runs.extents import Extent, ExtentQueue, chain
from cache.v1.runs.index import RunIndex

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from cache.stats import BlockObserver


class RunPool:
    """All GPU blocks of an engine with prefix caching, handled by the extent.

    Block by block it does what `cache.v1.block_pool.BlockPool` does. The free queue is
    a
    stack of loose ids in front of a queue of extents::

        next <- loose[-1] ... loose[0] | queue: [9 8 7] [4 3] ...    (reverse order)

    The stack begins with all ids. Blocks without findable content that are freed go on
    it (`unhashed_first`), or to the back of the queue as an extent without key.

    Parameters
    ----------
    num_gpu_blocks
        Size of the pool, the null block included; at least 2.
    unhashed_first
        See `cache.v1.block_pool.BlockPool`.

    Attributes
    ----------
    index
        What is findable.
    num_evictions
        Cached blocks that were taken for new content.
    observer
        Told which blocks move, or None.

    Raises
    ------
    CacheError
        If the pool is too small.
    """

    def __init__(self, num_gpu_blocks: int, *, unhashed_first: bool) -> None:
        if num_gpu_blocks < 2:
            raise CacheError(
                f"a pool needs at least 2 blocks (one is the null block), "
                f"got {num_gpu_blocks}"
            )
        self.num_usable_blocks = num_gpu_blocks - 1
        self.unhashed_first = unhashed_first
        self.index = RunIndex()
        self.num_evictions = 0
        self.observer: BlockObserver | None = None
        self._loose = list(range(num_gpu_blocks - 1, 0, -1))
        self._queue = ExtentQueue()

    # -- taking blocks --------------------------------------------------------

    def take(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the free queue, evicting what they cached.

        O(extents taken), and a copy of the ids. The caller knows that they are there.
        """
        loose = self._loose
        taken = loose[: -num_blocks - 1 : -1]
        del loose[len(loose) - len(taken) :]
        if len(taken) < num_blocks:
            taken = _joined(taken, self._take_queued(num_blocks - len(taken)))
        if self.observer is not None and taken:
            self.observer.taken(taken)
        return taken

    def _take_queued(self, num_missing: int) -> list[int]:
        """Take blocks from the front of the queue of extents."""
        end, first = self._queue.end, self.index.first
        is_watched = self.observer is not None or self.index.copies
        extent = end.next
        taken: list[int] = []
        while num_missing:
            ids, key = extent.ids, extent.key
            num_blocks = len(ids)
            if num_blocks > num_missing:
                self._evict(extent, num_missing)
                taken = _joined(taken, ids[: -num_missing - 1 : -1])
                del ids[-num_missing:]
                break
            if key is None:
                pass
            elif is_watched or extent.before is not None or extent.after is not None:
                self._evict(extent, num_blocks)
            else:  # as that does with a whole run, without a call
                self.num_evictions += num_blocks
                del first[key]
            num_missing -= num_blocks
            ids.reverse()
            taken = _joined(taken, ids)
            after = extent.next
            extent.next = after.prev = end  # what is gone keeps nothing else alive
            extent = after
        end.next = extent
        return taken

    def _evict(self, extent: Extent, num_blocks: int) -> None:
        """Forget the content of the last blocks of an extent that are being taken."""
        if extent.key is None:
            return
        self.num_evictions += num_blocks
        if self.observer is not None:
            self.observer.evicted(extent.ids[-num_blocks:])
        self.index.evict(extent, num_blocks)

    def ids_to_pop(self, num_blocks: int) -> list[int]:
        """Return a list that gives the next `num_blocks` ids by as many ``pop()``.

        All of these are taken with the call; the list may hold more, which the caller
        leaves in place. Mostly O(1).
        """
        if self.observer is None:
            loose = self._loose
            if loose:
                if len(loose) >= num_blocks:
                    return loose
            elif not self.index.copies:
                extent = self._queue.end.next
                if len(extent.ids) > num_blocks:
                    if extent.key is not None:
                        self.num_evictions += num_blocks
                    return extent.ids
        taken = self.take(num_blocks)
        taken.reverse()
        return taken

    def next_cached(self, num_blocks: int) -> Iterator[Extent]:
        """Yield the cached extents among so many blocks that are taken next, whole."""
        num_blocks -= len(self._loose)
        for extent in self._queue:
            if num_blocks <= 0:
                return
            num_blocks -= len(extent.ids)
            if extent.key is not None:
                yield extent

    # -- references -----------------------------------------------------------

    def share(self, parts: list[Extent], starts: list[int], end: int) -> None:
        """Give a table findable blocks, as parts; free ones leave the queue.

        O(extents).

        Parameters
        ----------
        parts, starts
            First extent of each part, and its first block in the table.
        end
            Where the last part ends.
        """
        for extent, start in zip(reversed(parts), reversed(starts), strict=True):
            if len(extent.ids) == end - start:
                if extent.num_refs:
                    extent.num_refs += 1
                else:
                    self._revive(extent)
            else:
                self._share_chain(extent, end - start)
            end = start

    def _share_chain(self, extent: Extent, num_blocks: int) -> None:
        """Share the blocks from an extent's first on, cutting where they end."""
        while True:
            if len(extent.ids) > num_blocks:
                rest = self.index.split(extent, num_blocks)
                if not rest.num_refs:
                    self._queue.insert_before(rest, extent)
            if extent.num_refs:
                extent.num_refs += 1
            else:
                self._revive(extent)
            num_blocks -= len(extent.ids)
            if not num_blocks:
                return
            assert extent.after is not None
            extent = extent.after

    def _revive(self, extent: Extent) -> None:
        extent.num_refs = 1
        self._queue.remove(extent)
        if self.observer is not None:
            self.observer.revived(extent.ids)

    def release(self, parts: list[Extent], starts: list[int], end: int) -> int:
        """Drop a table's parts, the last block first. O(extents).

        Parameters
        ----------
        parts, starts, end
            As of `share`.

        Returns
        -------
        int
            Number of blocks that no table holds any more.
        """
        num_freed = 0
        queue_end, is_watched = self._queue.end, self.observer is not None
        for extent, start in zip(reversed(parts), reversed(starts), strict=True):
            num_blocks = end - start
            if len(extent.ids) != num_blocks:
                for each in reversed(chain(extent, num_blocks)):
                    num_freed += self.drop(each)
            elif extent.num_refs > 1:
                extent.num_refs -= 1
            elif is_watched or extent.after is not None:
                num_freed += self.drop(extent)
            else:  # as that does with the end of a run, without a call
                extent.num_refs = 0
                num_freed += num_blocks
                extent.prev = back = queue_end.prev
                extent.next = queue_end
                back.next = queue_end.prev = extent
            end = start
        return num_freed

    def drop(self, extent: Extent) -> int:
        """Drop a reference; an extent that has none left joins the free queue."""
        extent.num_refs -= 1
        if extent.num_refs:
            return 0
        num_blocks = len(extent.ids)
        if self.observer is not None:
            self.observer.released(extent.ids)
        end = self._queue.end
        back = end.prev
        if extent.after is back:  # neighbours in the run and in the queue: one extent
            back = back.prev
            self.index.merge(extent, end.prev)
        extent.prev = back
        back.next = extent
        extent.next = end
        end.prev = extent
        return num_blocks

    def put_unhashed(self, ids: list[int]) -> None:
        """Free blocks without findable content, given in logical order, last first."""
        if self.observer is not None:
            self.observer.released(ids)
        if self.unhashed_first:
            self._loose += ids
        else:
            self._queue.append(Extent(None, 0, ids, 0))

    # -- looking in -----------------------------------------------------------

    def free_block_ids(self) -> list[int]:
        """Return the free blocks, the next to be taken first. O(n)."""
        ids = self._loose[::-1]
        for extent in self._queue:
            ids += extent.ids[::-1]
        return ids

    def check(self, num_refs: Counter[Extent], held_ids: list[int]) -> None:
        """Prove that tables, free queue and index agree, in O(n).

        Parameters
        ----------
        num_refs
            How many tables hold each extent.
        held_ids
            Blocks of tables that are in no extent.

        Raises
        ------
        InvariantError
            With the rule, and the block or extent.
        """
        self.index.check()
        self._queue.check()
        ids = self.free_block_ids() + held_ids
        for extent in num_refs:
            ids += extent.ids
        require(
            sorted(ids) == list(range(1, self.num_usable_blocks + 1)),
            "pool: a block is lost, or stands twice in tables and free queue",
        )
        cached = set(self.index.extents())
        for extent in cached:
            require(
                extent.num_refs == num_refs[extent],
                "pool: {} tables hold {}",
                num_refs[extent],
                extent,
            )
        for extent in [*num_refs, *self._queue]:
            require(
                extent.key is None or extent in cached,
                "pool: {} has a key and is not indexed",
                extent,
            )


def _joined(ids: list[int], more: list[int]) -> list[int]:
    """Join two lists of ids that nothing else needs; mostly the first is empty."""
    if not ids:
        return more
    ids += more
    return ids
