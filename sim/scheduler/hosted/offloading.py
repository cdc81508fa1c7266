"""The offloading connector of an installed vLLM, and its CPU tier.

Both are theirs, unmodified. Some of their methods are listened to, which tells refused
lots and evicted chunks in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.tiers.extents import Hold
from cache.tiers.places import as_ints
from sim.scheduler.hosted.parts import HostedPart
from sim.scheduler.hosted.scheduler import request_key
from sim.scheduler.v1.connectors.base import (
    JobKind,
    StepTransfers,
    TransferJob,
    TransferReport,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.scheduler.hosted.engine import HostedEngine, HostedStep
    from sim.scheduler.hosted.scheduler import HostedSettings
    from sim.scheduler.request import Request


class HostedPolicy:
    """The eviction policy of vLLM's CPU tier, as logs tell it."""

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


class HostedTierConnector(HostedPart):
    """Their offloading connector, of which refused lots and evictions are noted.

    Parameters
    ----------
    engine, settings
        The installed engine that has the connector, and its settings.
    requests
        All requests, by their ids.
    place
        See `HostedPart`.
    """

    def __init__(
        self,
        engine: HostedEngine,
        settings: HostedSettings,
        requests: dict[str, Request],
        place: int | None = None,
    ) -> None:
        del settings
        super().__init__(engine, place)
        self._requests = requests
        self._transfers = StepTransfers()
        self._jobs: dict[int, TransferJob] = {}
        self._num_skipped = 0
        self._manager = engine.api.attribute(self._theirs, "manager")
        self.tier = HostedTier(self._manager)
        self._listen()

    def _listen(self) -> None:
        offer = self._engine.api.attribute(self._manager, "prepare_store")
        leave = self._engine.api.attribute(self._manager, "_free_chunk")

        def offer_and_note(keys: Any, context: Any) -> Any:
            prepared = offer(keys, context)
            if prepared is None:
                lot = (self._requests[context.req_id], len(keys))
                self._transfers.refused.append(lot)
            return prepared

        def leave_and_note(chunk: Any) -> None:
            self._transfers.evicted_lots.append(as_ints([chunk.chunk_id]))
            leave(chunk)

        self._manager.prepare_store = offer_and_note
        self._manager._free_chunk = leave_and_note

    @property
    def offloading(self) -> HostedTierConnector:
        return self

    @property
    def awaits_transfers(self) -> bool:
        return bool(self._theirs.has_pending_push_work())

    def parameters(self, request: Request) -> Mapping[str, Any] | None:
        return request.kv_transfer_params

    def begin(self, now_s: float) -> StepTransfers:
        del now_s
        self._num_skipped = self._manager.stores_skipped_in_current_batch
        self._transfers = StepTransfers()
        return self._transfers

    def asked(self, step: HostedStep) -> None:
        transfers = self._transfers
        meta = self._metadata(step)
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
            self._manager.stores_skipped_in_current_batch - self._num_skipped
        )

    def _job(self, job_id: int, theirs: Any, gpu: Any, cpu: Any) -> TransferJob:
        kind = JobKind.SYNC_LOAD if theirs.sync else JobKind.LOAD
        job = self._jobs[job_id] = TransferJob(
            job_id,
            kind if self._theirs._jobs[job_id].is_store is False else JobKind.STORE,
            self._requests[theirs.req_id],
            list(gpu.block_indices),
            list(gpu.group_sizes),
            [int(each) for each in gpu.block_ids],
            Hold([], as_ints([int(each) for each in cpu.block_ids])),
            [],
        )
        return job

    def told(
        self, report: TransferReport, now_s: float
    ) -> tuple[dict[str, Any], list[Request]]:
        del now_s
        jobs = [self._jobs.pop(job_id) for job_id in report.done]
        received = [job.request for job in jobs if job.kind is JobKind.LOAD]
        done = self._engine.api.call(
            "OffloadingWorkerMetadata",
            {"completed_jobs": dict.fromkeys(report.done, 1)},
        )
        told = {
            "finished_recving": [request_key(each) for each in received],  # so ordered
            "kv_connector_worker_meta": done,
            "invalid_block_ids": set(report.invalid_block_ids),
        }
        return told, received
