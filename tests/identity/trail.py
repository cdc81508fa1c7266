"""Effects of a run on its cache, noted while it happens, on either path."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cache.errors import UnallocatedSequenceError
from cache.sequences import SequenceStatus
from cache.v1.id_tables import IdTables

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import simpy

    from sim.engine.loop import Engine

PROOF_EVERY = 8
"""Notes of the state from one proof of all invariants to the next."""


class State(NamedTuple):
    """Queues and cache between two steps."""

    step: int
    now_s: float
    running: list[int]
    """Request ids in running order."""
    waiting: list[int]
    """Request ids in queue order."""
    tables: list[list[int]]
    """Block ids of each running request."""
    num_registered: list[int]
    """Leading blocks of each that prefix caching can find."""
    free: list[int]
    """Block ids of the free queue, the next one to be taken first."""
    moved: dict[str, list[int]]
    """Sorted ids of blocks taken, released, revived and evicted since the last note."""


class Watched(Protocol):
    """A watched run: a `sim.simulation.run.Simulation`, or one that stands for it."""

    env: simpy.Environment
    engine: Engine
    scheduler: Any

    def check(self) -> None:
        """Prove all invariants."""
        ...


class Cache(Protocol):
    """The blocks behind a scheduler."""

    owner: Any
    """Its `free` gives up the table of a request."""
    pool: Any
    """Its `observer` hears of blocks."""

    def block_ids(self, request: Any) -> list[int]:
        """Return the table of a request."""
        ...

    def free_block_ids(self) -> list[int]:
        """Return the free queue."""
        ...

    def num_registered(self, request: Any) -> int:
        """Return how many leading blocks of a table can be found."""
        ...


class StepwiseCache:
    """Of the reference: `tests.oracles.v1_manager.KVCacheManager`."""

    def __init__(self, manager: Any) -> None:
        self.owner = manager
        self.pool = manager.block_pool

    def block_ids(self, request: Any) -> list[int]:
        return self.owner.get_block_ids(request)  # type: ignore[no-any-return]

    def free_block_ids(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue]

    def num_registered(self, request: Any) -> int:
        return request.num_cached_blocks  # type: ignore[no-any-return]


class FastCache:
    """Of the fast path: `cache.v1.tables.Tables`."""

    def __init__(self, tables: Any) -> None:
        self.owner = self.pool = tables
        if isinstance(tables, IdTables):
            tables.keeps_ids = True

    def block_ids(self, request: Any) -> list[int]:
        return self.owner.block_ids(request)  # type: ignore[no-any-return]

    def free_block_ids(self) -> list[int]:
        return self.owner.free_block_ids()  # type: ignore[no-any-return]

    def num_registered(self, request: Any) -> int:
        return self.owner.num_registered_blocks(request)  # type: ignore[no-any-return]


class SequenceCache:
    """Of the generations that schedule sequence groups: `GroupBlockManager`."""

    def __init__(self, scheduler: Any) -> None:
        self.owner = scheduler.block_manager
        self.pool = scheduler.tiers()[0].store

    def block_ids(self, request: Any) -> list[int]:
        """Return the tables of a running group, or that of a sequence."""
        if hasattr(request, "seq_id"):
            try:
                return self.owner.get_block_table(request)  # type: ignore[no-any-return]
            except UnallocatedSequenceError:
                return []
        seqs = request.get_seqs(SequenceStatus.RUNNING)
        return [id_ for seq in seqs for id_ in self.owner.get_block_table(seq)]

    def free_block_ids(self) -> list[int]:
        return [block.block_id for block in self.pool._stack.free_blocks]

    def num_registered(self, request: Any) -> int:
        del request
        return 0


def cache_of(scheduler: Any) -> Cache | None:
    """Return the blocks of a scheduler of either path; None of those not known."""
    if getattr(scheduler, "schedules_groups", False):
        return SequenceCache(scheduler)
    if hasattr(scheduler, "tables"):
        return FastCache(scheduler.tables)
    if hasattr(scheduler, "kv_cache_manager"):
        return StepwiseCache(scheduler.kv_cache_manager)
    return None


class BlockEvents:
    """A `cache.stats.BlockObserver`: block ids by kind of event since the last look.

    Within an operation their order means nothing, so none is kept.
    """

    def __init__(self) -> None:
        self.ids: dict[str, array[int]] = {}
        self.look()

    def look(self) -> dict[str, list[int]]:
        """Return the sorted ids by kind, and begin anew."""
        seen = {kind: sorted(ids) for kind, ids in self.ids.items()}
        kinds = ("taken", "released", "revived", "evicted")
        self.ids = {kind: array("i") for kind in kinds}
        return seen

    def taken(self, block_ids: Iterable[int]) -> None:
        self.ids["taken"].extend(block_ids)

    def released(self, block_ids: Iterable[int]) -> None:
        self.ids["released"].extend(block_ids)

    def revived(self, block_ids: Iterable[int]) -> None:
        self.ids["revived"].extend(block_ids)

    def evicted(self, block_ids: Iterable[int]) -> None:
        self.ids["evicted"].extend(block_ids)


class Trail:
    """Notes of one run; attach it before the run begins.

    Parameters
    ----------
    simulation
        A run that has not begun.
    every_steps
        Note the state after each so many steps; 0 for at the end only, which leaves
        the fast path as free as it can be.
    told
        Hear of every block that moves, too; a cache may take another way then.

    Attributes
    ----------
    given_up
        Request or sequence id and table, whenever a request finishes or is preempted.
    states
        As `every_steps` says, and at the end.
    """

    def __init__(self, simulation: Watched, every_steps: int, *, told: bool) -> None:
        self.given_up: list[tuple[int, array[int]]] = []
        self.states: list[State] = []
        self._events = BlockEvents()
        self._simulation = simulation
        self._cache = cache_of(simulation.scheduler)
        if self._cache is None:
            return
        self._note_tables_given_up(self._cache)
        if told:
            self._cache.pool.observer = self._events
        if every_steps:
            simulation.engine.observe(every_steps, lambda _: self._note())

    def _note_tables_given_up(self, cache: Cache) -> None:
        free = cache.owner.free

        def noted(request: Any) -> Any:
            ids = array("i", cache.block_ids(request))
            if ids:  # one that only waited has none
                name = "seq_id" if hasattr(request, "seq_id") else "request_id"
                self.given_up.append((getattr(request, name), ids))
            return free(request)

        cache.owner.free = noted
        scheduler: Any = self._simulation.scheduler
        if getattr(scheduler, "_free", None) == free:  # it was asked for once
            scheduler._free = noted

    @property
    def keeps_ids(self) -> bool:
        """Whether blocks have ids because it looks at them."""
        return bool(getattr(self._cache and self._cache.owner, "keeps_ids", False))

    def close(self) -> None:
        """Note the end of the run, and prove all invariants."""
        self._simulation.check()
        if self._cache is not None:
            self._note_state(self._cache)

    def _note(self) -> None:
        assert self._cache is not None
        self._note_state(self._cache)
        if len(self.states) % PROOF_EVERY == 0:
            self._simulation.check()

    def _note_state(self, cache: Cache) -> None:
        """Note queues, tables and free queue."""
        simulation = self._simulation
        scheduler = simulation.scheduler
        running: Sequence[Any] = list(scheduler.running)
        self.states.append(
            State(
                step=simulation.engine.num_steps,
                now_s=simulation.env.now,
                running=[each.request_id for each in running],
                waiting=[each.request_id for each in scheduler.waiting],
                tables=[cache.block_ids(each) for each in running],
                num_registered=[cache.num_registered(each) for each in running],
                free=cache.free_block_ids(),
                moved=self._events.look(),
            )
        )
