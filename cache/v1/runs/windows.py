"""Blocks of layers with a sliding window, beside runs of blocks that are all kept."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING

from cache.errors import require
from cache.v1.runs.extents import num_revived
from cache.v1.runs.table import RunTable
from cache.v1.tables import Found

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.hashing import BlockRuns
    from cache.v1.groups.window import SlidingWindowManager
    from cache.v1.runs.extents import Extent
    from cache.v1.runs.pool import RunPool

Rows = list[list["Extent"]]
"""Blocks of a window from left to right, in each group of a bucket."""


class Looked:
    """The result of the latest lookup of a waiting request.

    Attributes
    ----------
    junction, longest
        See `cache.v1.groups.lookup.Hit`.
    least_blocks, next_block
        New blocks that it needs as long as this block, of a run, is not cached.
    """

    __slots__ = ("junction", "least_blocks", "longest", "next_block")

    def __init__(self, junction: int, longest: int) -> None:
        self.junction = junction
        self.longest = longest
        self.least_blocks = 0
        self.next_block: tuple[int, int] | None = None


class WindowTable:
    """The blocks of a request in a group with a window.

    Attributes
    ----------
    ids
        Of entries that are not left behind, in logical order.
    num_passed
        Entries before these.
    extents
        By index of the entry, those that can be found: extents of one block.
    """

    __slots__ = ("extents", "ids", "num_passed")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.num_passed = 0
        self.extents: dict[int, Extent] = {}


class GroupRunTable(RunTable):
    """The blocks of a request in all groups: those of full attention, and windows.

    Attributes
    ----------
    windows
        In order of the groups.
    junction
        See `cache.v1.groups.lookup.Hit`; of the look-up that it began with.
    """

    __slots__ = ("_places", "junction", "windows")

    def __init__(
        self,
        runs: BlockRuns,
        found: Found,
        places: Sequence[int | None],
        junction: int,
    ) -> None:
        super().__init__(runs, found)
        self._places = places  # of each group among windows
        self.windows = [WindowTable() for _ in range(len(places) - 1)]
        self.junction = junction

    def ids_of(self, group: int) -> list[int]:
        """Return the blocks in a group, 0 where none is."""
        place = self._places[group]
        if place is None:
            return self.block_ids()
        own = self.windows[place]
        return [0] * own.num_passed + own.ids


class WindowGroup:
    """A group of layers with a window: what its tables hold, and what is cached of it.

    A block is a run of its own, by the run that it lies in, its place in there and the
    group.

    Parameters
    ----------
    manager
        Knows the rules.
    pool
        Shared by all groups.
    place
        Which of the groups with windows it is.

    Attributes
    ----------
    num_held_blocks, num_null_blocks, num_used_blocks
        See `cache.v1.groups.base.GroupManager`.
    num_registered
        Blocks registered so far.
    """

    def __init__(
        self, manager: SlidingWindowManager, pool: RunPool, place: int
    ) -> None:
        self.manager = manager
        self.place = place
        self.num_held_blocks = 0
        self.num_null_blocks = 0
        self.num_used_blocks = 0
        self.num_registered = 0
        self._pool = pool
        self._block_size = manager.block_size
        self._num_passed = manager.num_passed_tokens

    def num_passed_blocks(self, num_computed_tokens: int) -> int:
        """Return how many leading blocks nothing reads any more."""
        return self._num_passed(num_computed_tokens) // self._block_size

    def adopt(self, own: WindowTable, hits: list[Extent], num_passed: int) -> None:
        """Begin a table with the hits behind a block, and hold on to them."""
        own.num_passed = num_passed
        self.num_null_blocks += own.num_passed
        self.num_used_blocks += sum([not extent.num_refs for extent in hits])
        for index, extent in enumerate(hits, own.num_passed):
            self._pool.share([extent], [0], 1)
            own.ids.append(extent.ids[0])
            own.extents[index] = extent
        self.num_held_blocks += len(hits)

    def lengthen(self, own: WindowTable, ids: list[int]) -> None:
        own.ids += ids
        self.num_held_blocks += len(ids)
        self.num_used_blocks += len(ids)

    def give_up(self, own: WindowTable, num_computed_tokens: int) -> int:
        """Leave behind what nothing reads any more; return how many blocks are free."""
        passed, ids = self._num_passed(num_computed_tokens) // self._block_size, own.ids
        first = own.num_passed
        num_left = min(passed - first, len(ids))
        if num_left <= 0:
            return 0
        own.num_passed = first + num_left
        self.num_null_blocks += num_left
        left = ids[:num_left]
        del ids[:num_left]
        return self._release(own, left, first)

    def free(self, own: WindowTable) -> int:
        """Give up a table; return how many blocks are free then."""
        self.num_null_blocks -= own.num_passed
        return self._release(own, own.ids, own.num_passed)

    def free_unhashed(self, own: WindowTable) -> int:
        """Give up the blocks of a table that cannot be found; return their number."""
        entries = sorted(own.extents)
        found = [own.extents[entry] for entry in entries]
        kept = {entry - own.num_passed for entry in entries}
        loose = [each for place, each in enumerate(own.ids) if place not in kept]
        if loose:
            self._pool.put_unhashed(loose)
        own.ids = [extent.ids[0] for extent in found]
        own.extents = dict(enumerate(found, own.num_passed))
        self.num_held_blocks -= len(loose)
        self.num_used_blocks -= len(loose)
        return len(loose)

    def _release(self, own: WindowTable, ids: list[int], first: int) -> int:
        """Drop blocks of entries from `first` on, the last first."""
        self.num_held_blocks -= len(ids)
        extents, pool, found = own.extents, self._pool, []
        if extents:
            found = [extents.pop(first + i, None) for i in range(len(ids))]
            ids = [i for i, each in zip(ids, found, strict=True) if each is None]
        num_freed = len(ids)
        if ids:
            pool.put_unhashed(ids)
        for extent in reversed(found):
            if extent is not None:
                num_freed += pool.drop(extent)
        self.num_used_blocks -= num_freed
        return num_freed

    def register(
        self, table: GroupRunTable, first: int, stop: int, boundaries: Sequence[int]
    ) -> None:
        """Make full blocks findable that are kept; see `GroupManager.kept`."""
        own, index = table.windows[self.place], self._pool.index
        ends, keys, salt = table.runs.ends, table.runs.keys, self.manager.salt
        for entry in self.manager.kept(first, stop, boundaries):
            if entry < own.num_passed:
                continue
            run = bisect_right(ends, entry)
            start = ends[run - 1] if run else 0
            key = hash((keys[run], entry - start, salt))
            block_id = own.ids[entry - own.num_passed]
            if key in index.first:
                own.extents[entry] = index.add_copy(key, 0, block_id)
            else:
                own.extents[entry] = index.append(key, None, [block_id])
            self.num_registered += 1

    def num_shared_blocks(self, own: WindowTable, num_registered: int) -> int:
        """Return how many leading entries are left behind, or held by others, too."""
        for entry in range(own.num_passed, num_registered):
            extent = own.extents.get(entry)
            if extent is None or extent.num_refs < 2:
                return entry
        return num_registered

    def check(self, tables: Iterable[WindowTable]) -> tuple[Counter[Extent], list[int]]:
        """Prove counts in O(n); return how often extents are held, and loose blocks."""
        num_refs: Counter[Extent] = Counter()
        loose: list[int] = []
        num_held = num_passed = 0
        for own in tables:
            num_held += len(own.ids)
            num_passed += own.num_passed
            num_refs.update(own.extents.values())
            stop = own.num_passed + len(own.ids)
            for entry, extent in own.extents.items():
                require(
                    own.num_passed <= entry < stop
                    and extent.ids == [own.ids[entry - own.num_passed]],
                    f"tables: entry {entry} of a window is not the block that is found",
                )
            loose += [
                block_id
                for entry, block_id in enumerate(own.ids, own.num_passed)
                if entry not in own.extents
            ]
        num_used = len(num_refs) + len(loose)
        require(
            (num_held, num_passed, num_used)
            == (self.num_held_blocks, self.num_null_blocks, self.num_used_blocks),
            f"tables: {num_held} blocks held, {num_passed} left behind and {num_used} "
            f"in use, {self.num_held_blocks}, {self.num_null_blocks} and "
            f"{self.num_used_blocks} counted",
        )
        return num_refs, loose


class WindowBucket:
    """Groups with equal windows, which are looked up together."""

    def __init__(self, groups: Sequence[WindowGroup], pool: RunPool) -> None:
        manager = groups[0].manager
        self.places = [group.place for group in groups]
        self._salts = [group.manager.salt for group in groups]
        self._num_needed = manager.window.num_blocks_for_hit
        self._get = pool.index.first.get

    def longest_hit(self, runs: BlockRuns, num_blocks: int) -> tuple[int, Rows]:
        """Return the longest prefix of which the window is cached, and the window.

        See `SlidingWindowManager.longest_hit`.
        """
        get, salts, num_needed = self._get, self._salts, self._num_needed
        first_salt, others = salts[0], salts[1:]
        found: Rows = []  # right to left
        stop = num_blocks
        for run in range(bisect_right(runs.ends, num_blocks - 1), -1, -1):
            start = runs.ends[run - 1] if run else 0
            key = runs.keys[run]
            for place in range(stop - start - 1, -1, -1):
                extent = get(hash((key, place, first_salt)))
                if extent is None:
                    if found:
                        found = []
                    continue
                row = [extent]
                for salt in others:
                    extent = get(hash((key, place, salt)))
                    if extent is not None:
                        row.append(extent)
                if len(row) < len(salts):
                    found = []
                    continue
                found.append(row)
                if len(found) == num_needed:
                    return start + place + num_needed, _columns(found)
            stop = start
        return len(found), _columns(found) if found else [[] for _ in salts]


def _columns(found: Rows) -> Rows:
    return [list(column) for column in zip(*reversed(found), strict=True)]


def behind(
    found: Found, windows: Sequence[WindowGroup], num_computed_tokens: int
) -> tuple[Found, list[list[Extent]]]:
    """Return the blocks found of full attention, and those that windows keep."""
    full, *hits = found.parts
    rows = []
    for window, row in zip(windows, hits, strict=True):
        num_passed = window.num_passed_blocks(num_computed_tokens)
        rows.append(row[max(num_passed - (found.num_blocks - len(row)), 0) :])
    return full, rows


def cut(found: Found, num_blocks: int) -> Found:
    """Return the blocks found of full attention, up to one of them."""
    num_parts = bisect_right(found.starts, num_blocks - 1)
    parts, starts = found.parts[:num_parts], found.starts[:num_parts]
    return Found(num_blocks, num_revived(parts, starts, num_blocks), parts, starts)


def num_free(rows: Iterable[list[Extent]]) -> int:
    """Return how many blocks of windows no table holds."""
    return sum([not extent.num_refs for row in rows for extent in row])
