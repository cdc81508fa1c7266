"""The offloading connector: blocks that leave the GPU for a CPU tier and come back."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.tiers import CPUTier, TierHierarchy
from cache.tiers.places import Lot
from cache.tiers.sessions import KeepTTL
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.connectors.base import (
    JobKind,
    Match,
    StepTransfers,
    TransferJob,
)
from sim.scheduler.v1.connectors.offload import GroupOffer, Offload, limit_of
from sim.scheduler.v1.connectors.offload_groups import OffloadGroups
from sim.scheduler.v1.connectors.offload_lookup import OffloadLookup
from sim.scheduler.v1.connectors.watched import WatchedBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cache.tiers.access import SessionHint
    from cache.v1.specs import KVCacheLayout
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import Batch, BlockIds, TransferReport
    from sim.scheduler.v1.connectors.settings import OffloadSettings

_ASK_AGAIN = Match(None, is_async=False)
_NOTHING = Match(0, is_async=False)


class OffloadingConnector:
    """Stores chunks as they are computed, and loads what later requests share.

    Chunk i of a request covers, in each KV cache group, its blocks from
    ``i * blocks_per_chunk`` on; its key is the identity of the last of them, which
    chains all before it.

    Parameters
    ----------
    settings
        Tier and limits.
    layout
        The groups.
    interval
        ``prefix_cache_retention_interval``: which windows are stored.
    tables
        Of requests; see `cache.v1.block_tables.BlockTables`.
    enable_prefix_caching
        Of the GPU's pool. With it, a chunk is loaded once, and others wait to hit it.

    Attributes
    ----------
    tier
        The chunks.
    jobs
        In flight, by number.
    behind
        The tiers behind it; None where there are none.
    hints
        What is known of sessions, by the number of a request in the workload.

    Notes
    -----
    Source: vLLM 0.33,
    ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``. Requests
    that ended since the last call are walked in the order of their ends; the release
    walks a set of strings.
    """

    def __init__(
        self,
        settings: OffloadSettings,
        layout: KVCacheLayout,
        *,
        tables: Any,
        enable_prefix_caching: bool,
        interval: int | None = None,
    ) -> None:
        self._settings = settings
        self._groups = groups = OffloadGroups(layout, settings, interval)
        self._tables = tables
        self.tier = CPUTier(
            settings.num_chunks,
            eviction_policy=settings.eviction_policy,
            store_threshold=settings.store_threshold,
            max_tracker_size=settings.max_tracker_size,
        )
        if isinstance(self.tier.policy, KeepTTL):
            self.tier.policy.ttl_s = settings.eviction_ttl_s
        self.behind = (
            TierHierarchy(self.tier, settings.secondary_tiers)
            if settings.secondary_tiers
            else None
        )
        self.hints: Mapping[int | None, SessionHint] = {}
        self._num_loaded: Counter[str] = Counter()  # tokens that came from behind
        self.jobs: dict[int, TransferJob] = {}
        self._num_jobs = 0
        self._offloads: dict[Request, Offload] = {}
        self._storing: dict[Request, Offload] = {}  # running, with more to store
        self._ended: list[Offload] = []  # and what they have left is to be stored
        self._some_left = False  # whether anything is
        self._waits_for_loads = enable_prefix_caching
        self._loading: dict[int, TransferJob] = {}  # what others wait to hit
        self._lookup = OffloadLookup(groups, self.tier, self.behind)
        self._windows = {group.number for group in groups.with_windows}
        self._watched = WatchedBlocks(self._windows)
        self._sync_budget = settings.sync_load_budget_tokens
        self._loads: list[TransferJob] = []

    fills_blocks = True
    requires_kv_delivery = False
    pairing = None

    @property
    def offloading(self) -> OffloadingConnector:
        return self

    def keeps_loads(self, request: Request) -> bool:
        del request
        return True

    @property
    def keeps_still(self) -> bool:
        return self.behind is None  # others bring chunks by themselves

    @property
    def has_pending_work(self) -> bool:
        behind = self.behind
        is_behind = behind is not None and behind.has_pending_work
        return bool(self.jobs or self._ended or is_behind)

    @property
    def is_quiet(self) -> bool:
        """Whether steps of decodes alone store and flush nothing."""
        return not (self._storing or self._watched or self._some_left)

    @property
    def ends_quietly(self) -> bool:
        return self.behind is None

    @property
    def _watches(self) -> bool:
        """Whether it matters which blocks are taken in this call."""
        stores_windows = bool(self._windows and self._storing)
        return self._some_left or bool(self._watched) or stores_windows

    # -- loading --------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Do nothing: it is known from its first look-up on."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> Match:
        offload = self._offload_of(request)
        offload.begin()
        if offload.jobs:
            return _ASK_AGAIN
        offload.num_local_tokens = num_computed_tokens
        offload.loads_in_step = False
        loading = self._loading.values()
        num_tokens = self._lookup.num_found(offload, num_computed_tokens, loading)
        if num_tokens is None:
            return _ASK_AGAIN
        if not num_tokens:
            return _NOTHING
        # A token at least is left to be computed, or there is nothing to schedule.
        if (
            num_tokens <= self._sync_budget
            and num_computed_tokens + num_tokens < request.num_tokens
        ):
            self._sync_budget -= num_tokens
            offload.loads_in_step = True
        return Match(num_tokens, is_async=not offload.loads_in_step)

    def _offload_of(self, request: Request) -> Offload:
        offload = self._offloads.get(request)
        if offload is None:
            most = request.max_num_tokens
            if self._settings.offload_prompt_only:
                most = min(most, request.num_prompt_tokens)
            if not self._settings.stores:
                most = 0
            limit = limit_of(request, "max_offload_tokens")
            most = most if limit is None else min(most, limit)
            hint = self.hints.get(request.parent_id) if self.hints else None
            offload = Offload(request, most, self._groups.all, hint)
            self._offloads[request] = offload
        return offload

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        if self._watches:
            self._watched.hand_out(block_ids())
        offload = self._offload_of(request)
        if self._windows:
            offload.junction = self._tables.junction(request)
        if num_external_tokens:
            self._load(offload, block_ids, num_external_tokens)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return  # for what it loads, here or elsewhere, and in no batch yet
        self._may_store(offload)

    def _load(self, offload: Offload, block_ids: BlockIds, num_tokens: int) -> None:
        num_local = offload.num_local_tokens
        num_cached = num_local + num_tokens
        lots: list[Lot] = []
        first_blocks: list[int] = []
        table: list[int] = []
        num_by_group: list[int] = []
        for own in offload.groups:
            group = own.group
            size, stop = group.block_size, -(-num_cached // group.block_size)
            first = -(-num_local // size)
            ids = block_ids(first, stop, group=group.number)
            num_null = next((n for n, each in enumerate(ids) if each), len(ids))
            first += num_null  # blocks that no window reads any more
            num_chunks = -(-num_cached // group.chunk_tokens)
            if first < stop:
                start = first // group.blocks_per_chunk
                lots.append(Lot(own.keys, start, num_chunks))
            first_blocks.append(first)
            table += ids[num_null:]
            num_by_group.append(stop - first)
            own.next_chunk = num_chunks
        hold = self.tier.load(lots, offload.access)
        if self.behind is not None:
            keys = [number for lot in lots for number in lot.numbers()]
            moved = self.behind.loaded(keys, offload.access)
            for name, number in moved.items():
                chunk_tokens = self._groups.all[0].chunk_tokens
                self._num_loaded[name] += number * chunk_tokens
        kind = JobKind.SYNC_LOAD if offload.loads_in_step else JobKind.LOAD
        job = TransferJob(
            *(self._num_jobs, kind, offload.request),
            first_blocks,
            num_by_group,
            table,
            hold,
            lots,
        )
        self._begin(job, offload)
        self._loads.append(job)
        if self._waits_for_loads and not offload.loads_in_step:
            self._loading[job.job_id] = job

    def _begin(self, job: TransferJob, offload: Offload) -> None:
        self._num_jobs += 1
        self.jobs[job.job_id] = offload.jobs[job.job_id] = job

    # -- the end of a call ----------------------------------------------------

    def build_connector_meta(self, batch: Batch) -> StepTransfers:
        transfers = StepTransfers(loads=self._loads)
        flush: set[int] = set()
        for request in batch.preempted():
            self._storing.pop(request, None)
            if request in self._offloads:
                self._offloads[request].begin()
                flush.update(self._offloads[request].jobs)
        if self._watches:
            for block_ids in batch.new_block_ids():
                self._watched.hand_out(block_ids)
            flush |= self._watched.taken_from()
        num_skipped = self.tier.num_stores_skipped
        self.tier.policy.now_s = batch.now_s
        self._store(batch, transfers, flush)
        transfers.num_below_threshold = self.tier.num_stores_skipped - num_skipped
        transfers.flush = sorted(flush)
        self._loads = []
        self._sync_budget = self._settings.sync_load_budget_tokens
        self._watched.end_call()
        if self.behind is not None:
            self.behind.end_call()
        return transfers

    # -- storing --------------------------------------------------------------

    def _may_store(self, offload: Offload) -> None:
        """Let a running request store as long as there may be something to store."""
        if offload.may_store:
            self._storing[offload.request] = offload
        else:
            self._storing.pop(offload.request, None)

    def _store(self, batch: Batch, transfers: StepTransfers, flush: set[int]) -> None:
        """Store what the batch computes, then what requests that ended have left."""
        storing = self._storing
        computed = batch.num_tokens_after(storing)
        if self._windows and (storing or self._ended):
            self._follow_windows(batch, computed)
        for request, num_tokens in computed.items():
            offload = storing[request]
            if offload.has_more(num_tokens) and self._offer(
                offload, num_tokens, batch, transfers
            ):
                self._may_store(offload)
        for offload in self._ended:
            job = self._offer(offload, offload.num_ended_tokens, batch, transfers)
            if isinstance(job, TransferJob):
                self._watched.add(job)
                if self._watched.was_taken_from(job):
                    flush.add(job.job_id)
        for offload in self._ended:  # when all of them have stored
            offload.access.end_s = batch.now_s
            self.tier.finish(offload.access)
            self._forget(offload)
        self._ended, self._some_left = [], False

    def _follow_windows(self, batch: Batch, computed: Mapping[Request, int]) -> None:
        """Note blocks of windows that were handed out, and those taken from others."""
        taken = self._watched.handed_out
        for offload in chain(self._storing.values(), self._ended):
            is_computed = offload.request in computed
            for number in self._windows:
                own = offload.groups[number]
                num_known = len(own.block_ids)
                if is_computed:
                    own.follow(partial(batch.block_ids, offload.request))
                own.drop(taken, num_known)

    def _offer(
        self,
        offload: Offload,
        num_tokens: int,
        batch: Batch,
        transfers: StepTransfers,
    ) -> TransferJob | bool:
        """Offer the chunks of so many tokens; return the job, or whether all is said.

        What is refused is offered again in the request's next batch.
        """
        num_stored = offload.num_stored_tokens(num_tokens)
        offers = [
            GroupOffer.of(own, offload, num_stored, dense=self._groups.is_dense)
            for own in offload.groups
        ]
        lots = [lot for offer in offers for lot in offer.lots]
        if not lots:
            return _passed_over(offers)
        prepared = self.tier.offer(lots, offload.access)
        if prepared is None:
            num_refused = sum(lot.num_chunks for lot in lots)
            transfers.refused.append((offload.request, num_refused))
            return False
        transfers.evicted_lots.append(prepared.evicted_ids)
        _passed_over(offers)
        if not prepared.lots:
            return True
        first_blocks: list[int] = []
        num_by_group: list[int] = []
        table: list[int] = []
        for own in offload.groups:
            number = own.group.number
            spans = [lot.span for lot in prepared.lots if lot.keys.group == number]
            stored = own.blocks_of(spans, partial(batch.block_ids, offload.request))
            first_blocks.append(stored[0][0] if stored else 0)
            table += [block_id for _, block_id in stored]
            num_by_group.append(len(stored))
        job = TransferJob(
            *(self._num_jobs, JobKind.STORE, offload.request),
            first_blocks,
            num_by_group,
            table,
            prepared.hold,
            prepared.lots,
        )
        self._begin(job, offload)
        self._watched.begin(job)
        transfers.stores.append(job)
        return job

    # -- ends -----------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: BlockIds, num_computed_tokens: int
    ) -> bool:
        self._storing.pop(request, None)
        offload = self._offloads.get(request)
        if offload is not None:
            offload.has_ended = True
            num_tokens = min(num_computed_tokens, request.num_tokens)  # the known ones
            offload.num_ended_tokens = num_tokens
            num_tokens = offload.num_stored_tokens(num_tokens)
            for own in offload.groups:
                self._some_left |= own.end(block_ids, num_tokens)
            self._ended.append(offload)
            for job in offload.jobs.values():
                if job.kind is JobKind.STORE:
                    self._watched.add(job)
        return False

    def _forget(self, offload: Offload) -> None:
        if not offload.jobs and offload.access.is_finished:
            del self._offloads[offload.request]
            if self.behind is not None:
                self.behind.finish(offload.access)

    def update_connector_output(self, report: TransferReport) -> list[Request]:
        received = []
        for job_id in report.done:
            job = self.jobs.pop(job_id)
            offload = self._offloads[job.request]
            del offload.jobs[job_id]
            if job.kind is JobKind.STORE:
                self.tier.complete_store(job.hold)
                if self.behind is not None:
                    self.behind.stored(job.hold, offload.access)
                if self._watched:
                    self._watched.remove(job)
            else:
                self.tier.complete_load(job.hold)
                self._loading.pop(job_id, None)
                if job.kind is JobKind.LOAD:
                    received.append(job.request)
            self._forget(offload)
        return received

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the tiers for a run's summary."""
        tier = self.tier
        told: dict[str, Any] = {
            "num_tier_chunks": tier.num_chunks,
            "num_tier_evictions": tier.num_evictions,
        }
        if self.behind is None:
            return told
        behind = {
            name: {
                "num_chunks": each.num_chunks,
                "num_used_chunks": each.num_used_chunks,
                "num_loaded_tokens": self._num_loaded[name],
                "num_promoted_chunks": self.behind.num_promoted_chunks[name],
                "num_evictions": each.num_evictions,
                "num_expired": each.num_expired,
                "num_refused": each.num_refused,
                "read_bytes": each.device.num_bytes[True],
                "written_bytes": each.device.num_bytes[False],
                "busy_s": each.device.busy_s,
            }
            for name, each in self.behind.tiers.items()
        }
        return told | {"secondary_tiers": behind}

    # -- proof ----------------------------------------------------------------

    def check(self) -> None:
        """Prove the tier, and that jobs hold just what it says is read and written.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        self.tier.check()
        stores = self._jobs_of(JobKind.STORE)
        written = [place for job in stores for place in job.chunk_ids.tolist()]
        kinds = JobKind.LOAD, JobKind.SYNC_LOAD
        loads = chain.from_iterable(map(self._jobs_of, kinds))
        read = {place for job in loads for place in job.chunk_ids.tolist()}
        num_promoting = 0
        if self.behind is not None:
            self.behind.check()
            num_promoting = self.behind.num_promoting_chunks
            read |= self.behind.cascading_chunks()
        require(
            len(written) == len(set(written))
            and len(written) + num_promoting == self.tier.num_writing_chunks,
            f"offloading: stores of {len(written)} chunks are in flight, the tier "
            f"counts {self.tier.num_writing_chunks}",
        )
        require(
            len(read) == self.tier.num_reading_chunks,
            f"offloading: loads of {len(read)} chunks are in flight, the tier counts "
            f"{self.tier.num_reading_chunks}",
        )
        offloads = self._offloads.items()
        ended = {request for request, offload in offloads if offload.has_ended}
        self._watched.check(self._jobs_of(JobKind.STORE), ended)

    def _jobs_of(self, kind: JobKind) -> Iterable[TransferJob]:
        return (job for job in self.jobs.values() if job.kind is kind)


def _passed_over(offers: Iterable[GroupOffer]) -> bool:
    """Note that all chunks that were looked at are stored, or never will be."""
    for offer in offers:
        own = offer.own
        own.next_chunk = max(own.next_chunk, offer.stop)
    return True
