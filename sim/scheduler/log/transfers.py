"""What decision logs say of a KV connector: look-ups, jobs, and the tier behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.scheduler.log.lines import Line, Names, names_of
from sim.scheduler.v1.connectors.base import JobKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.tiers import CPUTier
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import TransferJob, TransferReport
    from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler


class TransferLines:
    """The fields of a connector, in the order of the format.

    Parameters
    ----------
    scheduler
        Whose calls are logged.
    names
        Of the requests.
    """

    def __init__(self, scheduler: ConnectorScheduler, names: Names) -> None:
        self._scheduler = scheduler
        self._names = names

    def asked(self) -> Line:
        """Return the look-ups of a call, and what it asks of the workers."""
        scheduler, names = self._scheduler, self._names
        transfers = scheduler.transfers
        line: Line = {
            "look": [
                [names[request.request_id], num_local, num_external]
                for request, num_local, num_external in scheduler.looks
            ],
            "load": [self._job(job) for job in transfers.loads],
            "store": [self._job(job) for job in transfers.stores],
            "flush": transfers.flush,
            "refuse": [
                [names[request.request_id], num_chunks]
                for request, num_chunks in transfers.refused
            ],
            "below": transfers.num_below_threshold,
            "evict": transfers.evicted_ids,
        }
        return {key: value for key, value in line.items() if value}

    def loading(self) -> list[Request]:
        """Return the requests that begin to load, and are in no batch."""
        loads = self._scheduler.transfers.loads
        return [job.request for job in loads if job.kind is JobKind.LOAD]

    def _job(self, job: TransferJob) -> list[Any]:
        name = self._names[job.request.request_id]
        fields = [job.job_id, name, job.first_block, job.block_ids, job.chunk_ids]
        return [*fields, "sync"] if job.kind is JobKind.SYNC_LOAD else fields

    def queues(self, rest: Line) -> Line:
        """Return the queues with what the line says besides, and the tier."""
        scheduler, names = self._scheduler, self._names
        line: Line = {"waiting": names_of(scheduler.waiting.fresh, names)}
        if holding := names_of(scheduler.waiting.holding, names):
            line["holding"] = holding
        line["running"] = rest["running"]
        if delayed := names_of(_by_arrival(scheduler.delayed), names):
            line["delayed"] = delayed
        line |= {key: rest[key] for key in rest if key not in line}
        line["cpu"] = self._usage()
        if sizes := list(self._tier.policy.sizes()):
            line["arc"] = [*sizes[:-1], round(sizes[-1], 6)]
        return line

    def ends(self, report: TransferReport) -> Line:
        """Return what ended with a step's output."""
        scheduler = self._scheduler
        line: Line = {
            "done": list(report.done),
            "recv": names_of(scheduler.received, self._names),
            "bad": list(report.invalid_block_ids),
            "errors": names_of(scheduler.failed, self._names),
        }
        return {key: value for key, value in line.items() if value}

    def tier_end(self) -> Line:
        """Return the tier after a step's output."""
        return {"cpu_end": self._usage()}

    @property
    def _tier(self) -> CPUTier:
        return self._scheduler.connector.tier

    def _usage(self) -> list[int]:
        tier = self._tier
        return [
            tier.num_used_chunks,
            tier.num_evictable_chunks,
            tier.num_writing_chunks,
        ]


def _by_arrival(requests: Iterable[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: request.request_id)
