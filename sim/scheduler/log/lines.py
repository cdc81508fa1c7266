"""Decision logs: one line a step, in the words of each generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from cache.sequences import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.groups.output import GroupSchedulerOutput
    from sim.scheduler.groups.scheduler import GroupScheduler
    from sim.scheduler.request import Request
    from sim.scheduler.v1.scheduler import V1Scheduler

Line = dict[str, Any]

NO_DECISIONS = ("start_s", "end_s", "seqs")
"""Fields of a recorded schedule that decision logs do not have: times, and what follows
from the other lines."""


class Names(Protocol):
    """What requests are called, by request id."""

    def __getitem__(self, request_id: int, /) -> str:
        """Return the name of a request."""
        ...


class StepLog(Protocol):
    """What a generation's line says."""

    def batch(self, output: Any) -> Line:
        """Return the batch, what was preempted and moved, and changed tables."""
        ...

    def queues(self) -> Line:
        """Return queues and free blocks, right after the call."""
        ...

    def free(self) -> list[int]:
        """Return the number of free blocks of each tier."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has left."""
        ...


class TableChanges:
    """Block tables as last logged, to log changes only."""

    def __init__(self) -> None:
        self._logged: dict[str, list[int]] = {}

    def length(self, key: str) -> int:
        """Return how many blocks the table had when it was last logged."""
        return len(self._logged.get(key, ()))

    def grow(self, key: str, new_ids: list[int]) -> list[Any] | None:
        """Do as `change` for a table that is known to have grown at its end only."""
        if not new_ids:
            return None
        logged = self._logged.setdefault(key, [])
        keep = len(logged)
        logged += new_ids
        return [keep, new_ids]

    def forget(self, key: str) -> None:
        """Drop a table; it counts as empty from now on."""
        self._logged.pop(key, None)

    def change(self, key: str, ids: list[int]) -> list[Any] | None:
        """Return ``[keep, ids behind them]``, or None if nothing changed."""
        last = self._logged.get(key, [])
        if ids == last:
            return None
        keep = 0
        for now, before in zip(ids, last, strict=False):
            if now != before:
                break
            keep += 1
        self._logged[key] = ids
        return [keep, ids[keep:]]


class V1Lines(ABC):
    """What the lines of the `v1` generation have in common, on either path.

    Parameters
    ----------
    names
        Of the requests.
    enable_caching
        Whether hits are logged.
    """

    def __init__(self, names: Names, *, enable_caching: bool) -> None:
        self.names = names
        self.enable_caching = enable_caching
        self._tables = TableChanges()

    def batch(self, output: Any) -> Line:
        """See `StepLog.batch`."""
        admitted = {request.request_id for request in output.admitted}
        cached: dict[str, int] = {}
        tables: dict[str, list[Any]] = {}
        sched = self._decodes(tables)
        for request, num_tokens in zip(
            output.scheduled, output.num_scheduled_tokens, strict=True
        ):
            name = self.names[request.request_id]
            computed = request.num_computed_tokens - num_tokens
            is_new = request.request_id in admitted
            kind = "r"
            if is_new:
                kind = "c" if request.num_preemptions else "n"
                cached[name] = computed
            sched.append([name, num_tokens, kind, computed])
            if change := self._change(request, name, is_new=is_new):
                tables[name] = change
        line: Line = {"sched": sched, "nbt": output.num_batched_tokens}
        if cached and self.enable_caching:
            line["cached"] = cached
        if preempted := preemptions(output, self.names):
            line["preempt"] = preempted
        if tables:
            line["bt"] = tables
        return line

    @abstractmethod
    def _decodes(self, tables: dict[str, list[Any]]) -> list[list[Any]]:
        """Return entries of decodes ahead of what the output lists as scheduled.

        Parameters
        ----------
        tables
            Takes what changed of theirs, by name.
        """

    @abstractmethod
    def _change(self, request: Request, name: str, *, is_new: bool) -> list[Any] | None:
        """Return what to log of the table of a scheduled request, if it changed."""

    def forget(self, request: Request) -> None:
        """See `StepLog.forget`."""
        self._tables.forget(self.names[request.request_id])


class V1Log(V1Lines):
    """Lines of the `v1` generation.

    Parameters
    ----------
    scheduler
        Whose calls are logged.
    names
        Of the requests.
    """

    def __init__(self, scheduler: V1Scheduler, names: Names) -> None:
        super().__init__(
            names, enable_caching=scheduler.kv_cache_manager.enable_caching
        )
        self.scheduler = scheduler

    def _decodes(self, tables: dict[str, list[Any]]) -> list[list[Any]]:
        del tables
        return []  # the output lists them all

    def _change(self, request: Request, name: str, *, is_new: bool) -> list[Any] | None:
        manager = self.scheduler.kv_cache_manager
        if not is_new and manager.window is None:
            new_blocks = request.block_table[self._tables.length(name) :]
            return self._tables.grow(name, [block.block_id for block in new_blocks])
        return self._tables.change(name, manager.get_block_ids(request))

    def queues(self) -> Line:
        """See `StepLog.queues`."""
        scheduler = self.scheduler
        line: Line = {
            "waiting": names_of(scheduler.waiting, self.names),
            "running": names_of(scheduler.running, self.names),
            "free": self.free(),
        }
        if self.enable_caching:
            line["hashes"] = len(scheduler.kv_cache_manager.block_pool.cached_blocks)
        return line

    def free(self) -> list[int]:
        """See `StepLog.free`."""
        return [self.scheduler.kv_cache_manager.block_pool.num_free_blocks]


class GroupLog:
    """Lines of the generations that schedule sequence groups.

    Parameters
    ----------
    generation
        ``"cacheflow"``, ``"v0_2"`` or ``"v0"``: each has its own batch entries.
    """

    def __init__(
        self, scheduler: GroupScheduler, names: Names, generation: str
    ) -> None:
        self.scheduler = scheduler
        self.names = names
        self.generation = generation
        self._tables = TableChanges()
        self._keys: dict[int, set[str]] = {}  # of tables logged, by request id

    def batch(self, output: GroupSchedulerOutput) -> Line:
        """See `StepLog.batch`."""
        line: Line = {}
        if self.generation == "v0_2":
            line["kind"] = "prompt" if output.prompt_run else "decode"
        line["sched"] = self._entries(output)
        line["nbt"] = output.num_budgeted_tokens
        if output.num_hit_tokens:
            line["cached"] = {
                self.names[int(request_id)]: num_tokens
                for request_id, num_tokens in output.num_hit_tokens.items()
            }
        if preempted := preemptions(output, self.names):
            line["preempt"] = preempted
        if output.ignored:
            line["ignored"] = names_of(output.ignored, self.names)
        for key, mapping in (
            ("swap_out", output.blocks_to_swap_out),
            ("swap_in", output.blocks_to_swap_in),
            ("copy", output.blocks_to_copy),
        ):
            if mapping:
                line[key] = [list(pair) for pair in mapping]
        if tables := self._changed_tables(output):
            line["bt"] = tables
        return line

    def _entries(self, output: GroupSchedulerOutput) -> list[list[Any]]:
        entries: list[list[Any]] = []
        for scheduled in output.scheduled_seq_groups:
            request = scheduled.seq_group.request
            assert request is not None
            name = self.names[request.request_id]
            num_tokens = scheduled.token_chunk_size
            kind = "p" if scheduled.is_prefill else "d"
            if self.generation == "v0_2":
                entries.append([name, num_tokens])
            elif self.generation == "cacheflow":
                entries.append([name, num_tokens, kind])
            elif scheduled.is_prefill:
                entries.append([name, num_tokens, kind, scheduled.num_computed_tokens])
            else:
                entries.append([name, 1, kind, 0])
        return entries

    def _changed_tables(self, output: GroupSchedulerOutput) -> dict[str, list[Any]]:
        tables: dict[str, list[Any]] = {}
        for scheduled in output.scheduled_seq_groups:
            request = scheduled.seq_group.request
            assert request is not None
            for seq in scheduled.seq_group.get_seqs(SequenceStatus.RUNNING):
                key = str(seq.seq_id)
                ids = list(self.scheduler.block_manager.get_block_table(seq))
                if change := self._tables.change(key, ids):
                    tables[key] = change
                    self._keys.setdefault(request.request_id, set()).add(key)
        return tables

    def queues(self) -> Line:
        """See `StepLog.queues`."""
        scheduler = self.scheduler
        return {
            name: [self.names[int(group.request_id)] for group in queue]
            for name, queue in (
                ("waiting", scheduler.waiting),
                ("running", scheduler.running),
                ("swapped", scheduler.swapped),
            )
        } | {"free": self.free()}

    def free(self) -> list[int]:
        """See `StepLog.free`."""
        manager = self.scheduler.block_manager
        return [manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()]

    def forget(self, request: Request) -> None:
        """See `StepLog.forget`."""
        for key in self._keys.pop(request.request_id, ()):
            self._tables.forget(key)


def preemptions(output: Any, names: Names) -> list[list[str]]:
    """Return victims and modes, in the order performed."""
    return [
        [names[preemption.request.request_id], preemption.mode.value]
        for preemption in output.preemptions
    ]


def names_of(requests: Iterable[Request], names: Names) -> list[str]:
    """Return the names of requests, in order."""
    return [names[request.request_id] for request in requests]
