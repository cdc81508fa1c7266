"""Block tables of the V1 engine with prefix caching, by runs of blocks."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from cache.errors import CacheError, NoFreeBlocksError, require
from cache.hashing import BlockRuns
from cache.v1.runs.extents import walk
from cache.v1.runs.pool import RunPool
from cache.v1.runs.table import FAR, NOT_GROWING, RunTable, check_contents
from cache.v1.tables import NOTHING_FOUND, Found

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from cache.stats import BlockObserver
    from cache.v1.runs.extents import Extent
    from cache.v1.tables import TableRequest


class RunTables:
    """Block tables with prefix caching, at a cost of runs, not of blocks.

    Equal to `cache.v1.block_tables.BlockTables` without a sliding window and in the
    release's own order of eviction, block by block. A prompt's blocks inside one
    segment are found, shared, freed and evicted together (`cache.hashing`); tokens
    that are no segments have runs of one block.

    ::

        request.tokens --runs--> (run key, blocks) --first[key]--> extents
        table  | part | part | part | unregistered ids |

    Parameters
    ----------
    num_gpu_blocks
        Size of the pool, the null block included; at least 2.
    block_size
        Tokens a block, at least 1.
    unhashed_first
        See `cache.v1.block_pool.BlockPool`.

    Raises
    ------
    CacheError
        If the pool is too small or a block has no token.
    """

    def __init__(
        self, num_gpu_blocks: int, block_size: int, *, unhashed_first: bool
    ) -> None:
        if block_size < 1:
            raise CacheError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.num_usable_blocks = num_gpu_blocks - 1
        self.num_free_blocks = num_gpu_blocks - 1
        self.num_logical_blocks = 0
        self.watch_hit = False
        self._num_registered = 0  # so far
        self._pool = RunPool(num_gpu_blocks, unhashed_first=unhashed_first)
        self._index = self._pool.index
        self._first = self._index.first
        self._watched: dict[int, int] = {}  # run key to blocks of it that are wanted
        # Of the latest request that was watched: it, up to which block, and the above.
        self._latest: tuple[TableRequest | None, int, dict[int, int]] = (None, 0, {})
        # Runs of requests that were looked up and wait, by request id; a table keeps
        # its own, and they go with it.
        self._runs: dict[int, BlockRuns] = {}

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were taken for new content."""
        return self._pool.num_evictions

    @property
    def observer(self) -> BlockObserver | None:
        """Told which blocks move, or None."""
        return self._pool.observer

    @observer.setter
    def observer(self, observer: BlockObserver | None) -> None:
        self._pool.observer = observer

    # -- a prompt -------------------------------------------------------------

    def find(self, request: TableRequest, num_tokens: int) -> Found:
        """See `Tables.find`. O(runs hit), and O(all runs) the first time."""
        limit = (num_tokens - 1) // self.block_size
        parts: list[Extent] = []
        starts: list[int] = []
        position = num_revived = 0
        if limit > 0:
            runs = self._runs_of(request, limit)
            get = self._first.get
            for key, run_end in zip(runs.keys, runs.ends, strict=True):
                extent = get(key)
                if extent is None:
                    break
                parts.append(extent)
                starts.append(position)
                end = run_end if run_end < limit else limit
                if len(extent.ids) == end - position:
                    if not extent.num_refs:
                        num_revived += end - position
                    position = end
                else:
                    position, revived = walk(extent, position, end)
                    num_revived += revived
                    if position < end:
                        break
                if end == limit:
                    break
        return Found(position, num_revived, parts, starts) if parts else NOTHING_FOUND

    def num_cached(self, runs: BlockRuns, num_blocks: int) -> int:
        """Return how many of the first blocks are cached, to others than requests."""
        return self._index.num_cached(runs, num_blocks)

    def _runs_of(self, request: TableRequest, num_blocks: int) -> BlockRuns:
        """Return the runs of a waiting request, over `num_blocks` blocks at least."""
        runs = self._runs.get(request.request_id)
        if runs is None:
            runs = request.tokens.block_runs(self.block_size)
            self._runs[request.request_id] = runs
        if not runs.ends or num_blocks > runs.ends[-1]:
            runs.cover(num_blocks)
        return runs

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
        del request, is_whole, num_external_tokens
        num_blocks = -(-num_tokens // self.block_size) - found.num_blocks
        return found.num_revived + max(num_blocks, 0)

    def begin(
        self,
        request: TableRequest,
        num_tokens: int,
        found: Found,
        *,
        num_tokens_to_cache: int | None = None,
    ) -> None:
        """See `BlockTables.begin`. O(runs)."""
        num_new_blocks = -(-num_tokens // self.block_size) - found.num_blocks
        if num_new_blocks + found.num_revived > self.num_free_blocks:
            raise self._lack_of_blocks(num_new_blocks + found.num_revived)
        runs = self._runs_of(request, num_tokens // self.block_size)
        del self._runs[request.request_id]
        table = request.table = RunTable(runs, found)
        if found.parts:
            self.num_free_blocks -= found.num_revived
            self.num_logical_blocks += found.num_blocks
            self._pool.share(found.parts, found.starts, found.num_blocks)
        if num_tokens_to_cache is not None:
            num_tokens = num_tokens_to_cache
        self._lengthen(table, num_new_blocks, num_tokens)

    def register(self, request: TableRequest, num_tokens: int) -> None:
        """Make findable what the first `num_tokens` tokens of a request fill."""
        self._lengthen(request.table, 0, num_tokens)

    def extend(
        self, request: TableRequest, num_tokens: int, num_computed_tokens: int
    ) -> bool:
        """See `Tables.extend`. O(runs)."""
        del num_computed_tokens
        return self.extend_known(request, num_tokens, num_tokens)

    def extend_known(
        self, request: TableRequest, num_tokens: int, num_known_tokens: int
    ) -> bool:
        """Do as `extend`, and register only what known tokens fill. O(runs)."""
        table: RunTable = request.table
        num_held = table.num_registered + len(table.unregistered)
        num_new_blocks = -(-num_tokens // self.block_size) - num_held
        if num_new_blocks > self.num_free_blocks:
            return False
        self._lengthen(table, num_new_blocks, num_known_tokens)
        return True

    def _lack_of_blocks(self, num_blocks: int) -> NoFreeBlocksError:
        return NoFreeBlocksError(
            f"cannot take {num_blocks} blocks: {self.num_free_blocks} of "
            f"{self.num_usable_blocks} are free"
        )

    def _lengthen(self, table: RunTable, num_new_blocks: int, num_tokens: int) -> None:
        """Add blocks to a table and register what `num_tokens` tokens fill."""
        if num_new_blocks > 0:
            ids = self._pool.take(num_new_blocks)
            if table.unregistered:
                table.unregistered += ids
            else:
                table.unregistered = ids
            self.num_free_blocks -= num_new_blocks
            self.num_logical_blocks += num_new_blocks
        num_full = num_tokens // self.block_size - table.num_registered
        if num_full > 0:
            self._num_registered += num_full
            self._register(table, num_full)

    # -- decodes --------------------------------------------------------------

    def append_blocks(self, tables: Collection[RunTable]) -> None:
        num_blocks = len(tables)
        if num_blocks > self.num_free_blocks:
            raise self._lack_of_blocks(num_blocks)
        self._open(tables)

    def append_known_rounds(
        self,
        buckets: Sequence[Mapping[Any, RunTable]],
        first: int,
        num_rounds: int,
        filling: Collection[RunTable],
    ) -> list[int]:
        """Do as `append_rounds`, registering a block when the next one is opened.

        In the first round, those of `filling` alone.
        """
        start = first % len(buckets)
        rounds = list(islice(cycle(buckets), start, start + num_rounds))
        num_opened = [*map(len, rounds)]
        later = [table for opening in rounds[1:] for table in opening.values()]
        self._open([*rounds[0].values(), *later])
        self._num_registered += len(filling) + len(later)
        self._register_filled(filling)
        self._register_filled(later)
        return num_opened

    def append_rounds(
        self, buckets: Sequence[Mapping[Any, RunTable]], first: int, num_rounds: int
    ) -> list[int]:
        start = first % len(buckets)
        rounds = list(islice(cycle(buckets), start, start + num_rounds + 1))
        num_opened = [*map(len, rounds[:-1])]
        later = [table for filling in rounds[1:] for table in filling.values()]
        self._open([*rounds[0].values(), *later[: sum(num_opened[1:])]])
        self._num_registered += len(later)
        self._register_filled(later)
        return num_opened

    def _open(self, tables: Collection[RunTable]) -> None:
        """Give each a block, in order; what is registered later takes none away."""
        num_blocks = len(tables)
        self.num_free_blocks -= num_blocks
        self.num_logical_blocks += num_blocks
        for table, block_id in zip(tables, self._pool.take(num_blocks), strict=True):
            table.unregistered.append(block_id)

    def register_blocks(self, tables: Collection[RunTable]) -> None:
        self._num_registered += len(tables)
        self._register_filled(tables)

    def _register_filled(self, tables: Collection[RunTable]) -> None:
        watched = self._watched
        for table in tables:
            extent = table.growing
            if (
                extent.num_refs == 1
                and extent.after is None
                and not (watched and extent.key in watched)
            ):
                extent.ids.append(table.unregistered.pop(0))
                table.num_registered += 1
            else:
                self._register(table, 1)

    # -- registration ---------------------------------------------------------

    def _register(self, table: RunTable, num_blocks: int) -> None:
        """Make the next `num_blocks` blocks of a table findable. O(runs)."""
        ids = table.unregistered
        table.unregistered = ids[num_blocks:]
        del ids[num_blocks:]
        keys, ends = table.runs.keys, table.runs.ends
        run, position = table.run, table.num_registered
        stop = position + num_blocks
        if not ends or stop > ends[-1]:
            table.runs.cover(stop)
        while ids:
            while position >= ends[run]:
                run += 1
            key, end = keys[run], ends[run]
            fresh = ids if stop <= end else ids[: end - position]
            if key in self._first:
                num_done = self._go_on(table, run, fresh)
            else:
                num_done = len(fresh)
                self._add_part(table, self._index.append(key, None, fresh))
            position += num_done
            table.num_registered = position
            ids = ids[num_done:]
        table.run = run
        if ends[run] < FAR:
            table.growing = NOT_GROWING

    def _add_part(self, table: RunTable, extent: Extent) -> None:
        """Register an extent that a table begins."""
        table.parts.append(extent)
        table.starts.append(table.num_registered)
        table.growing = extent
        if extent.key in self._watched:
            self._tell_watcher(extent.key, extent.start)

    def _go_on(self, table: RunTable, run: int, ids: list[int]) -> int:
        """Register blocks of a run of which some are cached; return how many."""
        key = table.runs.keys[run]
        last = self._index.last(key)
        num_cached = last.start + len(last.ids)
        index = table.num_registered - (table.runs.ends[run - 1] if run else 0)
        if index < num_cached:  # computed, although it was cached meanwhile
            copy = self._index.add_copy(key, index, ids[0])
            table.parts.append(copy)
            table.starts.append(table.num_registered)
            table.growing = NOT_GROWING
            return 1
        if last.num_refs == 1 and not table.parts[-1].is_copy:  # it is the table's own
            last.ids += ids
            table.growing = last
            if key in self._watched:
                self._tell_watcher(key, index)
        else:
            self._add_part(table, self._index.append(key, last, ids))
        return len(ids)

    def _tell_watcher(self, key: int, index: int) -> None:
        """Note that block `index` of a watched run, and maybe more, became findable."""
        if index < self._watched[key]:
            self.watch_hit = True

    def watch(
        self, request: TableRequest | None, num_tokens: int, found: Found
    ) -> None:
        """See `Tables.watch`. O(runs)."""
        del found  # whatever becomes findable of a prompt lengthens its cached prefix
        self.watch_hit = False
        limit = (num_tokens - 1) // self.block_size
        if request is None or limit <= 0:
            self._watched = {}
            return
        latest, latest_limit, self._watched = self._latest
        if latest is request and latest_limit == limit:
            return
        watched: dict[int, int] = {}
        runs = self._runs_of(request, limit)
        start = 0
        for key, end in zip(runs.keys, runs.ends, strict=True):
            watched[key] = (end if end < limit else limit) - start
            start = end
            if end >= limit:
                break
        self._watched, self._latest = watched, (request, limit, watched)

    def will_fill_watched(self, requests: Iterable[TableRequest]) -> bool:
        """See `Tables.will_fill_watched`. O(requests)."""
        watched = self._watched
        if not watched:
            return False
        for request in requests:
            table: RunTable = request.table
            key = table.growing.key
            if key is not None and key not in watched:
                continue  # it fills nothing else
            runs = table.runs
            if type(runs) is not BlockRuns:
                return True  # its keys are not known before they are hashed
            first = table.run
            if first < len(runs.ends) and runs.ends[first] <= table.num_registered:
                first += 1
            index = table.num_registered - (runs.ends[first - 1] if first else 0)
            for key in runs.keys[first:]:
                if index < watched.get(key, 0):
                    return True
                index = 0
        return False

    # -- release --------------------------------------------------------------

    def leave_behind(self, request: TableRequest, num_computed_tokens: int) -> None:
        """Do nothing: attention reads all blocks of a request."""

    def free_as_one(self, request: TableRequest) -> None:
        """See `BlockTables.free_as_one`; there is one group."""
        self.free(request)

    def free(self, request: TableRequest) -> int:
        """See `Tables.free`. O(runs)."""
        table: RunTable | None = request.table
        if table is None:
            self._runs.pop(request.request_id, None)  # looked up, and aborted since
            return 0
        request.table = None
        pool = self._pool
        num_freed = len(table.unregistered)
        self.num_logical_blocks -= table.num_registered + num_freed
        if num_freed:
            pool.put_unhashed(table.unregistered)
        num_freed += pool.release(table.parts, table.starts, table.num_registered)
        self.num_free_blocks += num_freed
        return num_freed

    # -- looking in -----------------------------------------------------------

    def next_cached(self, num_blocks: int) -> Iterator[Extent]:
        """Yield the cached ones among so many blocks that are taken next."""
        return self._pool.next_cached(num_blocks)

    def block_ids(
        self, request: TableRequest, first: int = 0, stop: int | None = None
    ) -> list[int]:
        table: RunTable | None = request.table
        return [] if table is None else table.block_ids(first, stop)

    def free_block_ids(self) -> list[int]:
        return self._pool.free_block_ids()

    def cached_block_ids(self) -> Iterable[int]:
        extents = self._pool.index.extents()
        return [block_id for extent in extents for block_id in extent.ids]

    def num_blocks(self, request: TableRequest) -> int:
        table: RunTable = request.table
        return table.num_registered + len(table.unregistered)

    def num_shared_blocks(self, request: TableRequest) -> int:
        num_shared = 0
        for extent in request.table.extents():
            if extent.num_refs < 2:
                break
            num_shared += len(extent.ids)
        return num_shared

    @property
    def num_contents(self) -> int:
        num_copies = sum(map(len, self._index.copies.values()))
        return self._num_registered - self.num_evictions - num_copies

    def num_registered_blocks(self, request: TableRequest) -> int:
        table: RunTable | None = request.table
        return 0 if table is None else table.num_registered

    def check(self, requests: Iterable[TableRequest]) -> None:
        requests = list(requests)
        check_contents(requests, self.block_size)
        num_refs: Counter[Extent] = Counter()
        loose: list[int] = []
        num_logical = 0
        for request in requests:
            table: RunTable = request.table
            num_refs.update(table.extents())
            loose += table.unregistered
            num_logical += len(table.block_ids())
            table.check(f"request {request.request_id}")
        self._pool.check(num_refs, loose)
        num_free = len(self._pool.free_block_ids())
        require(
            num_free == self.num_free_blocks and num_logical == self.num_logical_blocks,
            f"tables: {num_free} blocks are free and {num_logical} entries held, "
            f"{self.num_free_blocks} and {self.num_logical_blocks} counted",
        )
