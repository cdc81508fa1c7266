"""Lines of a hosted vLLM: those of `v1`, read from vLLM's own objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.scheduler.log.lines import Line, Names, V1Lines, names_of

if TYPE_CHECKING:
    from sim.scheduler.hosted.scheduler import VllmScheduler
    from sim.scheduler.request import Request


class VllmLog(V1Lines):
    """Lines of the `v1` generation, as the installed vLLM decides.

    Parameters
    ----------
    scheduler
        Whose calls are logged.
    names
        Of the requests.
    """

    def __init__(self, scheduler: VllmScheduler, names: Names) -> None:
        super().__init__(names, enable_caching=scheduler.enable_caching)
        self.scheduler = scheduler

    def _decodes(self, tables: dict[str, list[Any]]) -> list[list[Any]]:
        del tables
        return []  # the output lists them all

    def _change(self, request: Request, name: str, *, is_new: bool) -> list[Any] | None:
        del is_new
        return self._tables.change(name, self.scheduler.block_ids(request))

    def queues(self) -> Line:
        """See `StepLog.queues`."""
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
        """See `StepLog.free`."""
        return [self.scheduler.engine.num_free_blocks]
