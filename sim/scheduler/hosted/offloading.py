"""The scheduler of an installed vLLM with its offloading connector and CPU tier.

Both are theirs, unmodified; what the workers report is handed in. Some of their methods
are listened to, which tells look-ups, refused lots and evicted chunks in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cache.tiers.extents import Hold
from cache.tiers.places import NO_KEYS, as_ints
from sim.errors import SchedulerError
from sim.scheduler.hosted.batch_queue import QueuedVllmScheduler
from sim.scheduler.hosted.scheduler import VllmScheduler, request_key
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.connectors.base import (
    JobKind,
    StepTransfers,
    TransferJob,
    TransferReport,
)
from sim.scheduler.v1.connectors.heads import Look
from sim.scheduler.v1.dialect import LAST_MINOR, dialect_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.hosted.engine import HostedEngine
    from sim.scheduler.hosted.scheduler import HostedSettings
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig


class OrderedIds(dict[str, None]):
    """Stands for a set of theirs that is walked: in the order of adding."""

    def add(self, key: str) -> None:
        self[key] = None


class HostedPolicy:
    """What logs say of the parts of their policy."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def sizes(self) -> tuple[float, ...]:
        """Return the sizes of ARC's lists and its target; nothing for LRU."""
        policy = self._policy
        if not hasattr(policy, "target_t1_size"):
            return ()
        lists = (policy.t1, policy.t2, policy.b1, policy.b2)
        return (*map(len, lists), policy.target_t1_size)


class HostedTier:
    """Counts of their CPU tier."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.policy = HostedPolicy(manager._policy)

    @property
    def num_used_chunks(self) -> int:
        manager = self._manager
        num_free: int = manager._get_num_free_chunks()
        num_chunks: int = manager._num_chunks
        return num_chunks - num_free

    @property
    def num_evictable_chunks(self) -> int:
        number: int = self._manager._num_evictable_cache_chunks
        return number

    @property
    def num_writing_chunks(self) -> int:
        number: int = self._manager._num_write_pending_chunks
        return number


class HostedConnector(NamedTuple):
    """The part of their connector that logs read."""

    tier: HostedTier


class HostedQueues:
    """Their queues of requests that do not run."""

    def __init__(self, holding: list[Request], fresh: list[Request]) -> None:
        self.holding, self.fresh = holding, fresh

    def __len__(self) -> int:
        return len(self.holding) + len(self.fresh)

    def __iter__(self) -> Iterator[Request]:
        yield from self.holding
        yield from self.fresh


class ConnectedVllmScheduler(VllmScheduler):
    """`VllmScheduler` with the offloading connector.

    See `sim.scheduler.v1.connectors.scheduler.ConnectorScheduler` for what that is, and
    for the attributes.
    """

    def __init__(self, settings: HostedSettings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        dialect = dialect_of(settings.engine_version)
        if not dialect.knows_offloading:
            raise SchedulerError(
                f"a CPU tier is hosted of 0.{LAST_MINOR} only, got {dialect.release}; "
                f"host another release, or leave the CPU tier out"
            )
        self.transfers = StepTransfers()
        self.looks: list[Look] = []
        self.received: list[Request] = []
        self.failed: list[Request] = []
        self._all: dict[str, Request] = {}
        self._jobs: dict[int, TransferJob] = {}
        self._finished: Sequence[Request] = ()
        api, scheduler = self.engine.api, self.engine.scheduler
        connector = api.attribute(scheduler, "connector")
        self._theirs = api.attribute(connector, "connector_scheduler")
        self._manager = api.attribute(self._theirs, "manager")
        self.connector = HostedConnector(HostedTier(self._manager))
        self._listen(connector)
        scheduler.finished_req_ids = OrderedIds()

    def _listen(self, connector: Any) -> None:
        look_up = self.engine.api.attribute(connector, "get_num_new_matched_tokens")
        offer = self.engine.api.attribute(self._manager, "prepare_store")
        leave = self.engine.api.attribute(self._manager, "_free_chunk")

        def look_up_and_note(request: Any, num_local: int) -> Any:
            found = look_up(request, num_local)
            ours = self._all[request.request_id]
            self.looks.append(Look(ours, num_local, found[0]))
            return found

        def offer_and_note(keys: Any, context: Any) -> Any:
            prepared = offer(keys, context)
            if prepared is None:
                lot = (self._all[context.req_id], len(keys))
                self.transfers.refused.append(lot)
            return prepared

        def leave_and_note(chunk: Any) -> None:
            self.transfers.evicted_lots.append(as_ints([chunk.chunk_id]))
            leave(chunk)

        connector.get_num_new_matched_tokens = look_up_and_note
        self._manager.prepare_store = offer_and_note
        self._manager._free_chunk = leave_and_note

    # -- queues ---------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        self._all[request_key(request)] = request
        super().add_request(request)

    @property
    def waiting(self) -> HostedQueues:  # type: ignore[override]
        scheduler = self.engine.scheduler
        return HostedQueues(
            [self._all[each.request_id] for each in scheduler.kv_holding_waiting],
            [self._all[each.request_id] for each in scheduler.waiting],
        )

    @property
    def delayed(self) -> list[Request]:
        """Requests that have ended and still hold blocks."""
        requests = self.engine.scheduler.requests
        return [self._all[key] for key, each in requests.items() if each.is_finished()]

    @property
    def has_finish_notice(self) -> bool:
        """Whether the engine must step, whatever the queues hold."""
        return bool(self.engine.scheduler.has_requests())

    @property
    def awaits_transfers(self) -> bool:
        """Whether jobs in flight will change what can be scheduled."""
        scheduler = self.engine.scheduler
        return bool(self._theirs.has_pending_push_work() or scheduler.finished_req_ids)

    # -- a step ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput:
        self.looks = []
        self.transfers = transfers = StepTransfers()
        num_skipped = self._manager.stores_skipped_in_current_batch
        output = super().schedule(now_s)
        self.engine.scheduler.finished_req_ids = OrderedIds()
        step = self._step
        assert step is not None
        meta = self.engine.api.attribute(step.output, "kv_connector_metadata")
        transfers.loads = [
            self._job(job_id, job, job.dst_spec, job.src_spec)
            for job_id, job in meta.load_jobs.items()
        ]
        transfers.stores = [
            self._job(job_id, job, job.src_spec, job.dst_spec)
            for job_id, job in meta.store_jobs.items()
        ]
        transfers.flush = sorted(meta.jobs_to_flush or ())
        transfers.num_below_threshold = (
            self._manager.stores_skipped_in_current_batch - num_skipped
        )
        return output

    def _job(self, job_id: int, theirs: Any, gpu: Any, cpu: Any) -> TransferJob:
        kind = JobKind.SYNC_LOAD if theirs.sync else JobKind.LOAD
        job = self._jobs[job_id] = TransferJob(
            job_id,
            kind if self._theirs._jobs[job_id].is_store is False else JobKind.STORE,
            self._all[theirs.req_id],
            gpu.block_indices[0],
            [int(each) for each in gpu.block_ids],
            Hold([], as_ints([int(each) for each in cpu.block_ids])),
            NO_KEYS,
        )
        return job

    def update(self, finished: Sequence[Request]) -> None:
        self._finished = finished  # handed on with what the workers report

    def receive(self, report: TransferReport) -> None:
        """Hand on the output of a step, and what the workers report with it."""
        jobs = [self._jobs.pop(job_id) for job_id in report.done]
        self.received = [job.request for job in jobs if job.kind is JobKind.LOAD]
        received = [request_key(request) for request in self.received]
        self.engine.kv_connector_output = _worker_output(self.engine, report, received)
        super().update(self._finished)
        self.failed = [
            request
            for key, request in self._requests.items()
            if not self.engine.holds(key)
        ]
        for request in self.failed:
            request.move_to(RequestStatus.WAITING_FOR_REMOTE_KVS)  # unseen until now
            request.move_to(RequestStatus.FINISHED_ERROR)
            del self._requests[request_key(request)]

    def check(self) -> None:
        """Prove nothing: blocks are held in queues, too, and theirs are theirs."""


class QueuedConnectedVllmScheduler(ConnectedVllmScheduler, QueuedVllmScheduler):
    """`ConnectedVllmScheduler` behind an engine core's queue of batches."""


def _worker_output(
    engine: HostedEngine, report: TransferReport, received: list[str]
) -> Any:
    api = engine.api
    done = api.call(
        "OffloadingWorkerMetadata", {"completed_jobs": dict.fromkeys(report.done, 1)}
    )
    return api.call(
        "KVConnectorOutput",
        {
            "finished_recving": received,  # walked in this order
            "kv_connector_worker_meta": done,
            "invalid_block_ids": set(report.invalid_block_ids),
        },
    )
