"""The KV connector in decision logs: look-ups, transfers, and the other end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import islice
from typing import TYPE_CHECKING, Any

from sim.scheduler.log.lines import Line, Names, names_of
from sim.scheduler.v1.connectors.base import JobKind, StepPulls, StepTransfers
from sim.scheduler.v1.connectors.settings import KVRole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.tiers import CPUTier
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import Pull, TransferJob, TransferReport
    from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler


def transfer_lines_of(scheduler: Any, names: Names) -> TransferLines | None:
    """Return the log of a scheduler's connector; None without one."""
    if getattr(scheduler, "transfers", None) is None:
        return None
    settings = scheduler.settings
    if settings.kv_transfer is None:
        return TierLines(scheduler, names)
    return (PullLines if settings.offload is None else TierPullLines)(scheduler, names)


class TransferLines(ABC):
    """The fields of a connector, in the order of the format.

    Parameters
    ----------
    scheduler
        Its calls are logged.
    names
        Of the requests.
    """

    def __init__(self, scheduler: ConnectorScheduler, names: Names) -> None:
        self._scheduler = scheduler
        self._names = names

    def asked(self) -> Line:
        """Return the look-ups of a call, and what it asks of the workers."""
        names = self._names
        line: Line = {
            "look": [
                [names[request.request_id], num_local, num_external]
                for request, num_local, num_external in self._scheduler.looks
            ]
        } | self._transfers()
        return {key: value for key, value in line.items() if value}

    @abstractmethod
    def _transfers(self) -> Line:
        """Return the transfers that a call asks for; empty ones are not logged."""

    @abstractmethod
    def loading(self) -> list[Request]:
        """Return the requests that begin to load, and are in no batch."""

    def queues(self, rest: Line) -> Line:
        """Return the queues with what the line says besides, and the other end."""
        scheduler, names = self._scheduler, self._names
        line: Line = {"waiting": names_of(scheduler.waiting.fresh, names)}
        if holding := names_of(scheduler.waiting.holding, names):
            line["holding"] = holding
        line["running"] = rest["running"]
        if delayed := names_of(_by_arrival(scheduler.delayed), names):
            line["delayed"] = delayed
        return line | {key: rest[key] for key in rest if key not in line}

    @abstractmethod
    def ends(self, report: TransferReport) -> Line:
        """Return the transfers that ended with a step's output."""

    def tier_end(self) -> Line:
        """Return the other end after a step's output."""
        return {}


class TierLines(TransferLines):
    """Of a connector with a CPU tier."""

    def _transfers(self) -> Line:
        transfers, names = self._scheduler.transfers, self._names
        assert isinstance(transfers, StepTransfers)
        return {
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

    def loading(self) -> list[Request]:
        transfers = self._scheduler.transfers
        assert isinstance(transfers, StepTransfers)
        loads = transfers.loads
        return [job.request for job in loads if job.kind is JobKind.LOAD]

    def _job(self, job: TransferJob) -> list[Any]:
        name = self._names[job.request.request_id]
        fields: list[Any] = [job.job_id, name]
        if len(job.num_by_group) == 1:
            fields += [job.first_blocks[0], job.block_ids]
        else:
            fields += [list(job.first_blocks), _split(job)]
        fields.append(job.chunk_ids.tolist())
        return [*fields, "sync"] if job.kind is JobKind.SYNC_LOAD else fields

    def queues(self, rest: Line) -> Line:
        line = super().queues(rest)
        line["cpu"] = self._usage()
        if sizes := list(self._tier.policy.sizes()):
            line["arc"] = [*sizes[:-1], round(sizes[-1], 6)]
        return line

    def ends(self, report: TransferReport) -> Line:
        scheduler = self._scheduler
        line: Line = {
            "done": list(report.done),
            "recv": names_of(scheduler.received, self._names),
            "bad": list(report.invalid_block_ids),
            "errors": names_of(scheduler.failed, self._names),
        }
        return {key: value for key, value in line.items() if value}

    def tier_end(self) -> Line:
        return {"cpu_end": self._usage()}

    @property
    def _tier(self) -> CPUTier:
        tier: CPUTier = self._scheduler.connector.offloading.tier
        return tier

    def _usage(self) -> list[int]:
        tier = self._tier
        return [
            tier.num_used_chunks,
            tier.num_evictable_chunks,
            tier.num_writing_chunks,
        ]


class PullLines(TransferLines):
    """Of an engine that is one of a pair."""

    def _transfers(self) -> Line:
        transfers, names = self._scheduler.transfers, self._names
        assert isinstance(transfers, StepPulls)
        return {
            "send": [
                [names[request.request_id], round(expiry_s)]
                for request, expiry_s in transfers.sends
            ],
            "pull": [self._pull(pull) for pull in transfers.pulls],
            "heartbeat": self._heartbeat(transfers.heartbeat or {}),
        }

    def _heartbeat(self, wanted: dict[Any, list[Request]]) -> list[str] | Line:
        """Return names, by producer where there are several."""
        found = {
            source: sorted(names_of(requests, self._names))
            for source, requests in wanted.items()
        }
        return found.get(None) or dict(sorted(found.items()))

    def loading(self) -> list[Request]:
        transfers = self._scheduler.transfers
        assert isinstance(transfers, StepPulls)
        return [pull.request for pull in transfers.pulls if pull.waits]

    def _pull(self, pull: Pull) -> list[Any]:
        name = self._names[pull.request.request_id]
        own, remote = _by_group(pull.block_ids), _by_group(pull.remote_block_ids)
        fields = [name, own, remote, pull.waits]
        return fields if pull.remote_engine is None else [*fields, pull.remote_engine]

    def ends(self, report: TransferReport) -> Line:
        names = self._names
        transfer = self._scheduler.settings.kv_transfer
        assert transfer is not None
        moved = "sent" if transfer.kv_role is KVRole.PRODUCER else "recv"
        line: Line = {
            "expired": names_of(report.expired, names),
            moved: names_of(report.moved, names),
            "bad": names_of(report.failed, names),
            "errors": names_of(self._scheduler.failed, names),
        }
        return {key: value for key, value in line.items() if value}


class TierPullLines(TierLines, PullLines):
    """Of an engine of a pair with a CPU tier; each says its own, by other names."""

    def _transfers(self) -> Line:
        return TierLines._transfers(self) | PullLines._transfers(self)

    def loading(self) -> list[Request]:
        return [*TierLines.loading(self), *PullLines.loading(self)]

    def ends(self, report: TransferReport) -> Line:
        pulls = PullLines.ends(self, report)
        if "bad" in pulls:
            pulls["failed"] = pulls.pop("bad")
        line = pulls | TierLines.ends(self, report)
        moved = names_of(report.moved, self._names)
        if loaded := [each for each in line.pop("recv", ()) if each not in moved]:
            line["loaded"] = loaded
        return line | {key: pulls[key] for key in ("recv",) if key in pulls}


def _by_group(block_ids: Sequence[list[int]]) -> list[Any]:
    """Return blocks by group; those of the only one by themselves."""
    return block_ids[0] if len(block_ids) == 1 else list(block_ids)


def _split(job: TransferJob) -> list[list[int]]:
    """Return the blocks of a job by group."""
    ids = iter(job.block_ids)
    return [[*islice(ids, number)] for number in job.num_by_group]


def _by_arrival(requests: Iterable[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: request.request_id)
