"""Decision logs of the `v1` generation, ours and hosted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from sim.scheduler.log.lines import Line, Names, TableChanges, names_of, preemptions

if TYPE_CHECKING:
    from sim.scheduler.hosted.scheduler import VllmScheduler
    from sim.scheduler.request import Request
    from sim.scheduler.v1.scheduler import V1Scheduler


class V1Lines(ABC):
    """What the lines of the `v1` generation have in common, on either path."""

    def __init__(self, names: Names, *, enable_caching: bool) -> None:
        self.names = names
        self.enable_caching = enable_caching
        self._tables = TableChanges()

    def batch(self, output: Any) -> Line:
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
        """Return entries of decodes ahead of what the output lists as scheduled."""

    @abstractmethod
    def _change(self, request: Request, name: str, *, is_new: bool) -> list[Any] | None:
        """Return what to log of the table of a scheduled request, if it changed."""

    def queries(self, output: Any) -> Line:
        del output
        return {}  # one query a request: the batch says it

    def forget(self, request: Request) -> None:
        self._tables.forget(self.names[request.request_id])


class V1Log(V1Lines):
    """Lines of the `v1` generation."""

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

    def requests(self) -> list[Request]:
        return [*self.scheduler.waiting, *self.scheduler.running]

    def queues(self) -> Line:
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
        return [self.scheduler.kv_cache_manager.block_pool.num_free_blocks]


class VllmLog(V1Lines):
    """Lines of the `v1` generation, as the installed vLLM decides."""

    def __init__(self, scheduler: VllmScheduler, names: Names) -> None:
        super().__init__(names, enable_caching=scheduler.enable_caching)
        self.scheduler = scheduler

    def _decodes(self, tables: dict[str, list[Any]]) -> list[list[Any]]:
        del tables
        return []  # the output lists them all

    def _change(self, request: Request, name: str, *, is_new: bool) -> list[Any] | None:
        del is_new
        return self._tables.change(name, self.scheduler.block_ids(request))

    def requests(self) -> list[Request]:
        return [*self.scheduler.waiting, *self.scheduler.running]

    def queues(self) -> Line:
        scheduler = self.scheduler
        line: Line = {
            "waiting": names_of(scheduler.waiting, self.names),
            "running": names_of(scheduler.running, self.names),
            "free": self.free(),
        }
        if self.enable_caching:
            line["hashes"] = scheduler.engine.num_cached_hashes
        return line

    def free(self) -> list[int]:
        return [self.scheduler.engine.num_free_blocks]
