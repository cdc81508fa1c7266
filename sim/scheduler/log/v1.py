"""Decision logs of the `v1` generation, ours and hosted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from sim.scheduler.log.lines import Line, Names, TableChanges, names_of, preemptions
from sim.scheduler.log.transfers import transfer_lines_of

if TYPE_CHECKING:
    from sim.scheduler.hosted.scheduler import VllmScheduler
    from sim.scheduler.request import Request
    from sim.scheduler.v1.scheduler import Scheduler


class V1Lines(ABC):
    """Base of the lines of both schedulers.

    Parameters
    ----------
    scheduler
        Its calls are logged.
    names
        Of the requests.
    """

    def __init__(self, scheduler: Any, names: Names) -> None:
        self.scheduler = scheduler
        self.names = names
        self.transfers = transfer_lines_of(scheduler, names)
        self._tables = TableChanges()
        self._group_tables: list[TableChanges] = []

    def batch(self, output: Any) -> Line:
        admitted = {request.request_id for request in output.admitted}
        cached: dict[str, int] = {}
        tables: dict[str, list[Any]] = {}
        junctions: dict[str, int] = {}
        sched: list[list[Any]] = []
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
            if is_new and (junction := self._junction(request)):
                junctions[name] = junction
        line: Line = {"sched": sched, "nbt": output.num_batched_tokens}
        line |= self._awaited(output)
        if cached and self.scheduler.enable_caching:
            line["cached"] = cached
        if preempted := preemptions(output, self.names):
            line["preempt"] = preempted
        if junctions:
            line["junction"] = junctions
        if copies := self.scheduler.copies:
            line["copy"] = [list(pair) for pair in copies]
        line |= self._transferred(tables)
        if tables:
            line["bt"] = tables
        return line

    @abstractmethod
    def _change(self, request: Request, name: str, *, is_new: bool) -> list[Any] | None:
        """Return the change of a scheduled request's table, if there is one."""

    def _transferred(self, tables: dict[str, list[Any]]) -> Line:
        """Return the work of a KV connector, adding to the changed `tables`."""
        if self.transfers is None:
            return {}
        for request in self.transfers.loading():
            name = self.names[request.request_id]
            if change := self._change(request, name, is_new=True):
                tables[name] = change
        return self.transfers.asked()

    def _awaited(self, output: Any) -> Line:
        """Return the batch's drafts, and what it awaits of steps in flight."""
        drafts = getattr(output, "drafts", None)
        if drafts is not None and drafts.num_tokens:
            spec = {
                self.names[request.request_id]: num_tokens
                for request, num_tokens in drafts.num_tokens.items()
            }
            return {"spec": spec} | self._placeholders(output)
        return self._placeholders(output)

    def _placeholders(self, output: Any) -> Line:
        """Return the outputs that each request awaits, of steps in flight too."""
        count = getattr(self.scheduler, "num_placeholders", None)
        if count is None or getattr(self.scheduler, "max_concurrent_batches", 1) == 1:
            return {}
        return {"ph": [count(request) for request in output.scheduled]}

    def _group_changes(self, name: str, tables: list[list[int]]) -> list[Any] | None:
        """Return the change of each group's table, or 0; None if there is none."""
        while len(self._group_tables) < len(tables):
            self._group_tables.append(TableChanges())
        changes = [
            logged.change(name, ids) or 0
            for logged, ids in zip(self._group_tables, tables, strict=True)
        ]
        return changes if any(changes) else None

    @abstractmethod
    def _junction(self, request: Request) -> int:
        """Return the junction of an admitted request, or 0."""

    @abstractmethod
    def _num_hashes(self) -> int:
        """Return how many different contents can be found."""

    @abstractmethod
    def free(self) -> list[int]: ...

    def queries(self, output: Any) -> Line:
        del output
        return {}  # one query a request: the batch says it

    def requests(self) -> list[Request]:
        return [*self.scheduler.waiting, *self.scheduler.running]

    def queues(self) -> Line:
        line: Line = {
            "waiting": names_of(self.scheduler.waiting, self.names),
            "running": names_of(self.scheduler.running, self.names),
            "free": self.free(),
        }
        if self.scheduler.enable_caching:
            line["hashes"] = self._num_hashes()
        return line if self.transfers is None else self.transfers.queues(line)

    def forget(self, request: Request) -> None:
        for tables in (self._tables, *self._group_tables):
            tables.forget(self.names[request.request_id])


class V1Log(V1Lines):
    """Lines of our scheduler."""

    scheduler: Scheduler

    def _change(self, request: Request, name: str, *, is_new: bool) -> list[Any] | None:
        groups = self.scheduler.groups
        if groups is not None and self.scheduler.has_layout:
            return self._group_changes(name, groups.group_block_ids(request))
        change = self._only_change(request, name, is_new=is_new)
        return [change] if change and self.scheduler.has_layout else change

    def _only_change(
        self, request: Request, name: str, *, is_new: bool
    ) -> list[Any] | None:
        tables = self.scheduler.tables
        if is_new or self.scheduler.groups is not None:
            return self._tables.change(name, tables.block_ids(request))
        num_logged = self._tables.length(name)
        if tables.num_blocks(request) == num_logged:
            return None
        return self._tables.grow(name, tables.block_ids(request)[num_logged:])

    def _junction(self, request: Request) -> int:
        groups = self.scheduler.groups
        return 0 if groups is None else groups.junction(request)

    def _num_hashes(self) -> int:
        return self.scheduler.tables.num_contents

    def free(self) -> list[int]:
        return [self.scheduler.tables.num_free_blocks]


class VllmLog(V1Lines):
    """Lines of the installed vLLM."""

    scheduler: VllmScheduler

    def _change(self, request: Request, name: str, *, is_new: bool) -> list[Any] | None:
        del is_new
        tables = self.scheduler.group_block_ids(request)
        if self.scheduler.has_layout:
            return self._group_changes(name, tables)
        return self._tables.change(name, tables[0])

    def _junction(self, request: Request) -> int:
        return self.scheduler.junction(request)

    def _num_hashes(self) -> int:
        return self.scheduler.engine.num_cached_hashes

    def free(self) -> list[int]:
        return [self.scheduler.engine.num_free_blocks]
