"""A tier that is written when the pool is about to give blocks up, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.tiers import RequestAccess
from cache.tiers.places import Keys
from cache.v1.runs.tables import RunTables
from sim.errors import SchedulerError
from sim.scheduler.v1.connectors.base import JobKind, TransferJob
from sim.scheduler.v1.connectors.offload import Offload
from sim.scheduler.v1.connectors.offloading import OffloadingConnector

if TYPE_CHECKING:
    from cache.v1.runs.extents import Extent
    from cache.v1.specs import KVCacheLayout
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import Batch, StepTransfers
    from sim.scheduler.v1.connectors.settings import OffloadSettings


class _Unowned:
    """Stands for the request of blocks that none holds any more."""

    request_id = -1
    num_tokens = 0

    def __init__(self) -> None:
        self.tokens = self

    def block_runs(self, block_size: int) -> None:
        del block_size


class WriteBackConnector(OffloadingConnector):
    """Stores blocks that are free and next to be taken, whichever request they were of.

    At the end of a call it looks at so many blocks at the front of the free queue as
    two full batches may take, and stores those that the tier lacks. What is found again
    before it comes there is never written. A block that is taken while its store is in
    flight holds the step up, as those of ended requests do.

    Parameters
    ----------
    settings, layout, more
        See `OffloadingConnector`; chunks of one block.
    tables
        The pool.
    most_tokens
        Of a batch.

    Raises
    ------
    SchedulerError
        If the pool has no queue of cached blocks by the run.

    Notes
    -----
    Not of the native connector. How far it looks is that of ``lazy_offload`` of vLLM
    0.25's `SimpleCPUOffloadConnector` (``vllm/v1/simple_kv_offload/manager.py``), which
    keeps a block from being taken meanwhile, instead of waiting.
    """

    def __init__(
        self,
        settings: OffloadSettings,
        layout: KVCacheLayout,
        *,
        tables: Any,
        most_tokens: int,
        **more: Any,
    ) -> None:
        if not isinstance(tables, RunTables):
            raise SchedulerError(
                "write_policy: write_back needs the release's prefix cache of one "
                "group, on the fast path; set enable_prefix_caching, leave evictor out"
            )
        if settings.blocks_per_chunk > 1:
            raise SchedulerError(
                f"write_policy: write_back stores blocks one by one, got chunks of "
                f"{settings.blocks_per_chunk}; leave blocks_per_chunk out"
            )
        super().__init__(settings, layout, tables=tables, **more)
        self._num_ahead = 2 * -(-most_tokens // layout.block_size)
        self._looked_at: set[Extent] = set()  # in the queue, and stored

    @property
    def is_quiet(self) -> bool:
        return False  # what decodes take changes what is next

    @property
    def keeps_still(self) -> bool:
        return False  # what others free is stored by itself

    def _offload_of(self, request: Request) -> Offload:
        offload = super()._offload_of(request)
        offload.most_tokens = 0  # nothing is stored because it was computed
        return offload

    def build_connector_meta(self, batch: Batch) -> StepTransfers:
        transfers = super().build_connector_meta(batch)
        if self._settings.stores:
            self._store_next(batch.now_s, transfers)
        return transfers

    def _store_next(self, now_s: float, transfers: StepTransfers) -> None:
        """Store what will be taken next."""
        looked_at: set[Extent] = set()
        for extent in self._tables.next_cached(self._num_ahead):
            if extent in self._looked_at or self._save(extent, now_s, transfers):
                looked_at.add(extent)
        self._looked_at = looked_at

    def _save(self, extent: Extent, now_s: float, transfers: StepTransfers) -> bool:
        """Offer the blocks of an extent; say whether they are stored, or were."""
        assert extent.key is not None
        start, num_blocks = extent.start, len(extent.ids)
        keys, offered = Keys([extent.key], [-start, num_blocks]), RequestAccess()
        prepared = self.tier.prepare_store(keys, offered)
        offered.end_s = now_s
        if prepared is not None and prepared.spans:
            owner: Any = _Unowned()
            offload = Offload(owner, 0, self._groups.all)
            offload.access, offload.has_ended = offered, True
            self._offloads[owner] = offload
            block_ids = [
                each
                for first, stop in prepared.spans
                for each in extent.ids[first:stop]
            ]
            job = TransferJob(
                self._num_jobs,
                JobKind.STORE,
                owner,
                [0],
                [len(block_ids)],
                block_ids,
                prepared.hold,
                prepared.lots,
            )
            self._begin(job, offload)
            self._watched.add(job)
            transfers.stores.append(job)
            transfers.evicted_lots.append(prepared.evicted_ids)
        self.tier.finish(offered)
        return prepared is not None
