"""Decision logs of the `hf_fifo` generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.scheduler.log.lines import Line, Names, TableChanges, names_of, preemptions

if TYPE_CHECKING:
    from sim.scheduler.hf_fifo.batch import HfFifoOutput
    from sim.scheduler.hf_fifo.scheduler import FIFOScheduler
    from sim.scheduler.request import Request


class HfFifoLog:
    """Lines of the `hf_fifo` generation.

    An entry of the batch is ``[request, tokens, kind, computed tokens]``; the kind is
    ``n`` (new), ``c`` (computed again), ``s`` (back from the CPU) or ``r`` (running).
    """

    def __init__(self, scheduler: FIFOScheduler, names: Names) -> None:
        self.scheduler = scheduler
        self.names = names
        self._tables = TableChanges()

    def batch(self, output: HfFifoOutput) -> Line:
        cached: dict[str, int] = {}
        line: Line = {"sched": self._entries(output, cached)}
        line["nbt"] = output.num_batched_tokens
        if cached and self.scheduler.cache.enable_caching:
            line["cached"] = cached
        if preempted := preemptions(output, self.names):
            line["preempt"] = preempted
        for key, pairs in (
            ("swap_out", output.blocks_to_swap_out),
            ("swap_in", output.blocks_to_swap_in),
        ):
            if pairs:
                line[key] = [list(pair) for pair in pairs]
        if tables := self._changed_tables(output):
            line["bt"] = tables
        return line

    def _entries(self, output: HfFifoOutput, cached: dict[str, int]) -> list[list[Any]]:
        """Return the batch; `cached` takes the hits of those that looked up."""
        admitted, restored = set(output.admitted), set(output.restored)
        entries = []
        for request, num_tokens in zip(
            output.scheduled, output.num_scheduled_tokens, strict=True
        ):
            name = self.names[request.request_id]
            computed = request.num_computed_tokens - num_tokens
            kind = "r"
            if request in restored:
                kind = "s"
            elif request in admitted:
                kind = "c" if request.num_recompute_tokens else "n"
                cached[name] = computed
            entries.append([name, num_tokens, kind, computed])
        return entries

    def _changed_tables(self, output: HfFifoOutput) -> dict[str, list[Any]]:
        tables = {}
        for request in output.scheduled:
            name = self.names[request.request_id]
            ids = list(self.scheduler.cache.table(request))
            if change := self._tables.change(name, ids):
                tables[name] = change
        return tables

    def requests(self) -> list[Request]:
        scheduler = self.scheduler
        return [*scheduler.waiting, *scheduler.running, *scheduler.swapped]

    def queries(self, output: HfFifoOutput) -> Line:
        del output
        return {}  # one query a request: the batch says it

    def queues(self) -> Line:
        scheduler = self.scheduler
        line: Line = {
            "waiting": names_of(scheduler.waiting, self.names),
            "running": names_of(scheduler.running, self.names),
            "swapped": names_of(scheduler.swapped, self.names),
            "free": self.free(),
        }
        if scheduler.cache.enable_caching:
            line["hashes"] = scheduler.cache.block_manager.num_cached_blocks
        return line

    def free(self) -> list[int]:
        cache = self.scheduler.cache
        return [cache.num_free_blocks, cache.cpu_pool.num_free_blocks]

    def forget(self, request: Request) -> None:
        self._tables.forget(self.names[request.request_id])
