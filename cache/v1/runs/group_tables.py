"""Block tables with prefix caching of full attention beside windows, by runs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.v1.groups.kinds import check_layout, make_managers
from cache.v1.groups.window import SlidingWindowManager
from cache.v1.runs.decodes import RunDecodes
from cache.v1.runs.table import check_contents
from cache.v1.runs.tables import RunTables
from cache.v1.runs.windows import (
    GroupRunTable,
    Looked,
    WindowBucket,
    WindowGroup,
    behind,
    cut,
    num_free,
)
from cache.v1.specs import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from cache.v1.tables import Found

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.v1.groups.decodes import Decodes
    from cache.v1.groups.kinds import EngineLimits
    from cache.v1.runs.extents import Extent
    from cache.v1.specs import KVCacheLayout
    from cache.v1.tables import TableRequest


class GroupRunTables(RunTables):
    """`RunTables` of one group of full attention, and others with windows beside it.

    Equal to `cache.v1.block_tables.BlockTables`, block by block. What full attention
    keeps is run by run; a window holds few blocks at a time, and few of those can be
    found.

    Parameters
    ----------
    layout
        One that it `serves`.
    limits, retention_interval
        See `cache.v1.block_tables.BlockTables`.

    Attributes
    ----------
    hit_alignment, period, phases, chunk_ends, decodes
        See there.
    """

    chunk_ends = None
    enable_caching = True

    def __init__(
        self,
        layout: KVCacheLayout,
        limits: EngineLimits,
        *,
        retention_interval: int | None,
    ) -> None:
        check_layout(layout, retention_interval, enable_caching=True)
        size = layout.block_size
        super().__init__(layout.num_blocks, size, unhashed_first=True)
        self.layout = layout
        self.hit_alignment = self.period = size
        pool: Any = self._pool
        self.managers = make_managers(layout, limits, pool, retention_interval)
        self._interval = retention_interval
        self._num_full_used = 0
        self._in_order: list[WindowGroup | None] = []
        for manager in self.managers:
            place = len(self._in_order) - self._in_order.count(None)
            self._in_order.append(
                WindowGroup(manager, self._pool, place)
                if isinstance(manager, SlidingWindowManager)
                else None
            )
        self.windows = [each for each in self._in_order if each is not None]
        self._places = [None if w is None else w.place for w in self._in_order]
        by_spec: dict[Any, list[WindowGroup]] = {}
        for group, own in zip(layout.groups, self._in_order, strict=True):
            if own is not None:
                by_spec.setdefault(group.spec, []).append(own)
        self._buckets = [WindowBucket(own, self._pool) for own in by_spec.values()]
        phases = {phase for manager in self.managers for phase in manager.phases()}
        self.phases = tuple(sorted(phases | {size - 1}))
        self.decodes: Decodes | None = RunDecodes(self)
        self._looked: dict[int, Looked] = {}

    @staticmethod
    def serves(layout: KVCacheLayout) -> bool:
        """Whether one group of a layout keeps all blocks, and all others windows."""
        specs = [group.spec for group in layout.groups]
        windows = [each for each in specs if isinstance(each, SlidingWindowSpec)]
        return (
            len(windows) == len(specs) - 1 > 0
            and all(each.sliding_window > 1 for each in windows)
            and any(
                isinstance(each, FullAttentionSpec | MLAAttentionSpec) for each in specs
            )
            and {each.block_size for each in specs}
            == {layout.hash_block_size}
            == {layout.cache_hit_alignment}
        )

    # -- admission ------------------------------------------------------------

    def find(self, request: TableRequest, num_tokens: int) -> Found:
        """See `Tables.find`; parts are those of full attention, then of windows."""
        full = super().find(request, num_tokens)
        num_blocks = longest = full.num_blocks
        hits: list[list[Extent]] = [[] for _ in self.windows]
        if longest:
            runs = self._runs[request.request_id]
            while True:
                candidate = num_blocks
                for bucket in self._buckets:
                    candidate, rows = bucket.longest_hit(runs, candidate)
                    for place, row in zip(bucket.places, rows, strict=True):
                        hits[place] = row
                if candidate == num_blocks:
                    break
                num_blocks = candidate
                if len(self._buckets) == 1:
                    break
        size = self.block_size
        junction = longest * size if longest > num_blocks else 0
        self._looked[request.request_id] = Looked(junction, longest * size)
        if num_blocks < longest:
            full = cut(full, num_blocks)
        num_revived = full.num_revived + num_free(hits)
        return Found(num_blocks, num_revived, [full, *hits], [])

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
        del request
        num_hits = found.num_blocks
        if not num_external_tokens:
            needed = self._num_new_blocks(num_hits, num_tokens, is_whole=is_whole)
            return found.num_revived + needed
        num_computed = num_hits * self.block_size + num_external_tokens
        full, hits = behind(found, self.windows, num_computed)
        return (
            full.num_revived
            + num_free(hits)
            + self._num_new_blocks(
                *(num_hits, num_tokens),
                is_whole=is_whole,
                num_computed_tokens=num_computed,
            )
        )

    def _num_new_blocks(
        self,
        num_hit_blocks: int,
        num_tokens: int,
        *,
        is_whole: bool,
        num_computed_tokens: int = 0,
    ) -> int:
        num_blocks = -(-num_tokens // self.block_size)
        num_new_blocks = 0
        for manager in self.managers:
            most = manager.most_admitted_blocks if is_whole else None
            capped = num_blocks if most is None or most > num_blocks else most
            num_passed = manager.num_passed_tokens(num_computed_tokens)
            num_held = max(num_hit_blocks, num_passed // self.block_size)
            num_new_blocks += max(capped - num_held, 0)
        return num_new_blocks

    def num_missing_blocks(
        self,
        request: TableRequest,
        num_tokens: int,
        num_computed_tokens: int,
        *,
        is_whole: bool,
    ) -> int:
        """See `cache.v1.groups.needs.Needs.of_rest`."""
        del num_computed_tokens
        table: GroupRunTable | None = request.table
        held = () if table is None else (table.num_registered, len(table.unregistered))
        return self._num_new_blocks(sum(held), num_tokens, is_whole=is_whole)

    def refused(self, request: TableRequest, num_tokens: int) -> None:
        """See `cache.v1.refusals.Refusals.refused`."""
        looked = self._looked[request.request_id]
        longest = looked.longest // self.block_size
        looked.next_block = None
        if looked.longest + self.block_size < request.num_tokens:
            runs = self._runs_of(request, longest + 1)
            run = bisect_right(runs.ends, longest)
            start = runs.ends[run - 1] if run else 0
            looked.next_block = runs.keys[run], longest - start
        looked.least_blocks = self._num_new_blocks(longest, num_tokens, is_whole=True)

    def lacks(self, request: TableRequest) -> bool:
        """See `cache.v1.refusals.Refusals.lacks`."""
        looked = self._looked.get(request.request_id)
        if looked is None or looked.least_blocks <= self.num_free_blocks:
            return False
        if looked.next_block is None:
            return True
        key, index = looked.next_block
        extent = self._first.get(key)
        while extent is not None:
            if index < extent.start + len(extent.ids):
                return False
            extent = extent.after
        return True

    def begin(
        self,
        request: TableRequest,
        num_tokens: int,
        found: Found,
        *,
        num_tokens_to_cache: int | None = None,
        num_external_tokens: int = 0,
    ) -> None:
        """See `BlockTables.begin`."""
        num_hits = found.num_blocks
        num_computed = num_hits * self.block_size + num_external_tokens
        num_new_blocks = -(-num_tokens // self.block_size) - num_hits
        if num_tokens_to_cache is not None:
            num_external_tokens, num_computed = num_tokens - num_computed, num_tokens
        needed = num_new_blocks * len(self.managers) + found.num_revived
        if num_external_tokens:
            needed = self.num_needed_blocks(
                *(request, num_tokens, found),
                is_whole=False,
                num_external_tokens=num_external_tokens,
            )
        if needed > self.num_free_blocks:
            raise self._lack_of_blocks(needed)
        runs = self._runs_of(request, num_tokens // self.block_size)
        del self._runs[request.request_id]
        looked = self._looked.pop(request.request_id)
        full, hits = behind(found, self.windows, num_computed)
        table = request.table = GroupRunTable(runs, full, self._places, looked.junction)
        if num_computed:
            self._pool.share(full.parts, full.starts, num_hits)
            self._num_full_used += full.num_revived
            self.num_free_blocks -= full.num_revived + num_free(hits)
            self.num_logical_blocks += num_hits
            for window, own, row in zip(self.windows, table.windows, hits, strict=True):
                num_passed = window.num_passed_blocks(num_computed)
                window.adopt(own, row, max(num_passed, num_hits - len(row)))
                self.num_logical_blocks += len(row)
        if num_tokens_to_cache is not None:
            num_tokens = num_tokens_to_cache
        elif num_external_tokens:  # their blocks come first, group by group
            num_loaded = -(-num_computed // self.block_size) - num_hits
            self._grow(request, table, num_loaded, 0)
            num_new_blocks -= num_loaded
        self._grow(request, table, num_new_blocks, num_tokens)

    # -- growth ---------------------------------------------------------------

    def extend(
        self,
        request: TableRequest,
        num_tokens: int,
        num_computed_tokens: int,
        *,
        num_processed_tokens: int | None = None,
        num_tokens_to_cache: int | None = None,
    ) -> bool:
        """See `BlockTables.extend`."""
        table: GroupRunTable = request.table
        if num_processed_tokens is None:
            num_processed_tokens = num_computed_tokens
        self.give_up(table, num_processed_tokens)
        num_held = table.num_registered + len(table.unregistered)
        num_new_blocks = -(-num_tokens // self.block_size) - num_held
        if num_new_blocks * len(self.managers) > self.num_free_blocks:
            return False
        if num_tokens_to_cache is None:
            num_tokens_to_cache = num_tokens
        self._grow(request, table, num_new_blocks, num_tokens_to_cache)
        return True

    def register(self, request: TableRequest, num_tokens: int) -> None:
        """See `BlockTables.register`."""
        self._grow(request, request.table, 0, num_tokens)

    def give_up(self, table: GroupRunTable, num_computed_tokens: int) -> None:
        """Leave behind what lies before the windows."""
        for window, own in zip(self.windows, table.windows, strict=True):
            num_held = len(own.ids)
            self.num_free_blocks += window.give_up(own, num_computed_tokens)
            self.num_logical_blocks -= num_held - len(own.ids)

    def open_blocks(self, table: GroupRunTable) -> None:
        """Give a decode a block in each group; they are free."""
        num_groups = len(self._in_order)
        pop = self._pool.ids_to_pop(num_groups).pop
        for window in self._in_order:
            if window is None:
                table.unregistered.append(pop())
                self._num_full_used += 1
            else:
                table.windows[window.place].ids.append(pop())
                window.num_held_blocks += 1
                window.num_used_blocks += 1
        self.num_free_blocks -= num_groups
        self.num_logical_blocks += num_groups

    def _grow(
        self,
        request: TableRequest,
        table: GroupRunTable,
        num_new_blocks: int,
        num_tokens: int,
    ) -> None:
        """Add blocks to all groups, and register what so many tokens fill."""
        if num_new_blocks > 0:
            num_entries = table.num_registered + len(table.unregistered)
            num_entries += num_new_blocks
            num_blocks = num_new_blocks
            for window in self._in_order:
                if window is None:
                    table.unregistered += self._pool.take(num_new_blocks)
                    self._num_full_used += num_new_blocks
                    continue
                own = table.windows[window.place]
                ids = self._pool.take(num_entries - own.num_passed - len(own.ids))
                window.lengthen(own, ids)
                num_blocks += len(ids)
            self.num_free_blocks -= num_blocks
            self.num_logical_blocks += num_blocks
        first, stop = table.num_registered, num_tokens // self.block_size
        if stop > first:
            self._lengthen(table, 0, num_tokens)
            self.register_windows(request, table, first, stop)

    def register_windows(
        self, request: TableRequest, table: GroupRunTable, first: int, stop: int
    ) -> None:
        """Make full blocks of windows findable, where they are kept."""
        last, junction = request.num_prompt_tokens - 1, table.junction
        if self._interval == 0 and first * self.block_size >= max(last, junction):
            return
        boundaries = (last, junction) if junction else (last,)
        for window in self.windows:
            window.register(table, first, stop, boundaries)

    def end_call(self) -> list[tuple[int, int]]:
        """End a call of the scheduler; nothing is ever copied."""
        return []

    def cut_chunk(self, request: TableRequest, start: int, num_new_tokens: int) -> int:
        """Return how many tokens a chunk gets: there are no `chunk_ends`."""
        del request, start
        return num_new_tokens

    # -- release --------------------------------------------------------------

    def leave_behind(self, request: TableRequest, num_computed_tokens: int) -> None:
        """See `BlockTables.leave_behind`."""
        if request.table is not None:
            self.give_up(request.table, num_computed_tokens)

    def free(self, request: TableRequest) -> int:
        table: GroupRunTable | None = request.table
        if table is None:
            self._looked.pop(request.request_id, None)
            return super().free(request)
        return self._free_groups(request, self._in_order)

    def free_as_one(self, request: TableRequest) -> None:
        """See `BlockTables.free_as_one`."""
        table: GroupRunTable | None = request.table
        if table is None:
            return
        for window in self._in_order:
            if window is None:
                num_freed = len(table.unregistered)
                if num_freed:
                    self._pool.put_unhashed(table.unregistered)
                    table.unregistered = []
                self._num_full_used -= num_freed
            else:
                num_freed = window.free_unhashed(table.windows[window.place])
            self.num_free_blocks += num_freed
            self.num_logical_blocks -= num_freed
        self._free_groups(request, self._in_order[::-1])

    def _free_groups(
        self, request: TableRequest, groups: Iterable[WindowGroup | None]
    ) -> int:
        table: GroupRunTable = request.table
        num_free = self.num_free_blocks
        for window in groups:
            if window is None:
                self._num_full_used -= super().free(request)
            else:
                own = table.windows[window.place]
                self.num_logical_blocks -= len(own.ids)
                self.num_free_blocks += window.free(own)
        return self.num_free_blocks - num_free

    # -- looking in -----------------------------------------------------------

    @property
    def num_contents(self) -> int:
        return super().num_contents + sum([w.num_registered for w in self.windows])

    def num_stored_tokens(self, num_tokens: int) -> int:
        """See `BlockTables.num_stored_tokens`."""
        num_null_blocks = sum([window.num_null_blocks for window in self.windows])
        return num_tokens * len(self.managers) - num_null_blocks * self.block_size

    def num_used_blocks_by_group(self) -> list[int]:
        """See `BlockTables.num_used_blocks_by_group`."""
        return [
            self._num_full_used if window is None else window.num_used_blocks
            for window in self._in_order
        ]

    def num_entries(self, num_tokens: int) -> int:
        """See `BlockTables.num_entries`."""
        return -(-num_tokens // self.block_size) * len(self.managers)

    def junction(self, request: TableRequest) -> int:
        """See `BlockTables.junction`."""
        table: GroupRunTable | None = request.table
        if table is not None:
            return table.junction
        looked = self._looked.get(request.request_id)
        return 0 if looked is None else looked.junction

    def group_block_ids(self, request: TableRequest) -> list[list[int]]:
        """See `BlockTables.group_block_ids`."""
        table: GroupRunTable | None = request.table
        return [] if table is None else [*map(table.ids_of, range(len(self._places)))]

    def block_ids(
        self, request: TableRequest, first: int = 0, stop: int | None = None
    ) -> list[int]:
        ids = [each for ids in self.group_block_ids(request) for each in ids]
        return ids[first:stop]

    def num_blocks(self, request: TableRequest) -> int:
        windows = sum([len(own.ids) for own in request.table.windows])
        return super().num_blocks(request) + windows

    def num_shared_blocks(self, request: TableRequest) -> int:
        table: GroupRunTable = request.table
        return min(
            super().num_shared_blocks(request),
            *(
                window.num_shared_blocks(own, table.num_registered)
                for window, own in zip(self.windows, table.windows, strict=True)
            ),
        )

    def check(self, requests: Iterable[TableRequest]) -> None:
        requests = list(requests)
        check_contents(requests, self.block_size)
        num_refs: Counter[Extent] = Counter()
        loose: list[int] = []
        num_logical = 0
        for request in requests:
            table: GroupRunTable = request.table
            num_refs.update(table.extents())
            loose += table.unregistered
            num_logical += len(table.block_ids())
            table.check(f"request {request.request_id}")
        num_full = sum(len(extent.ids) for extent in num_refs) + len(loose)
        for window in self.windows:
            own = [request.table.windows[window.place] for request in requests]
            held, others = window.check(own)
            num_refs.update(held)
            loose += others
            num_logical += window.num_held_blocks
        self._pool.check(num_refs, loose)
        num_free = len(self._pool.free_block_ids())
        require(
            (num_free, num_logical, num_full)
            == (self.num_free_blocks, self.num_logical_blocks, self._num_full_used),
            f"tables: {num_free} blocks are free, {num_logical} entries held and "
            f"{num_full} in use by full attention, {self.num_free_blocks}, "
            f"{self.num_logical_blocks} and {self._num_full_used} counted",
        )
