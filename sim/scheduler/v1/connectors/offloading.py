"""The offloading connector: blocks that leave the GPU for a CPU tier and come back."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.tiers import CPUTier, TierHierarchy
from cache.tiers.places import Keys
from cache.tiers.sessions import KeepTTL
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.connectors.base import (
    JobKind,
    Match,
    StepTransfers,
    TransferJob,
)
from sim.scheduler.v1.connectors.offload import Offload, limit_of
from sim.scheduler.v1.connectors.watched import WatchedBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cache.tiers.access import SessionHint
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import Batch, BlockIds, TransferReport
    from sim.scheduler.v1.connectors.settings import OffloadSettings

_ASK_AGAIN = Match(None, is_async=False)
_NOTHING = Match(0, is_async=False)


class OffloadingConnector:
    """Stores chunks as they are computed, and loads what later requests share.

    Chunk i of a request covers its blocks from ``i * blocks_per_chunk`` on; its key is
    the identity of the last of them, which chains all before it.

    Parameters
    ----------
    settings
        Tier and limits.
    block_size
        Tokens a block.
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
        self, settings: OffloadSettings, block_size: int, *, enable_prefix_caching: bool
    ) -> None:
        self._settings = settings
        self._block_size = block_size
        self._blocks_per_chunk = settings.blocks_per_chunk
        self._chunk_tokens = settings.blocks_per_chunk * block_size
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
        self._ended: list[tuple[Offload, list[int]]] = []  # and what is left to store
        self._some_left = False  # whether anything is
        self._waits_for_loads = enable_prefix_caching
        self._loading: dict[int, TransferJob] = {}  # what others wait to hit
        self._watched = WatchedBlocks()
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
        return self._some_left or bool(self._watched)

    # -- loading --------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Do nothing: it is known from its first look-up on."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> Match:
        offload = self._offload_of(request)
        offload.next_chunk = 0
        if offload.jobs:
            return _ASK_AGAIN
        offload.num_local_tokens = num_computed_tokens
        offload.loads_in_step = False
        num_tokens = self._num_found(offload, num_computed_tokens)
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
                most = request.num_prompt_tokens
            if not self._settings.stores:
                most = 0
            limit = limit_of(request, "max_offload_tokens")
            most = most if limit is None else min(most, limit)
            hint = self.hints.get(request.parent_id) if self.hints else None
            offload = Offload(request, most, self._block_size, hint)
            self._offloads[request] = offload
        return offload

    def _num_found(self, offload: Offload, num_local: int) -> int | None:
        """Return how many tokens beyond the local hit can be loaded, if it is known."""
        request, chunk_tokens = offload.request, self._chunk_tokens
        self._know_keys(offload, request.num_tokens)
        most = offload.keys.stop * chunk_tokens
        limit = limit_of(request, "max_load_tokens")
        if limit is not None:
            most = min(most, num_local + limit) // chunk_tokens * chunk_tokens
        if most - num_local < chunk_tokens:
            return 0
        first, last = num_local // chunk_tokens, most // chunk_tokens
        keys, access = offload.keys, offload.access
        if self.behind is not None:
            found = self.behind.longest_prefix(keys, access, first, last)
        else:
            found = self.tier.longest_prefix(keys, first, last)
        num_chunks, all_there = found
        if not num_chunks:
            return 0
        if not all_there:
            return None
        last = first + num_chunks
        num_tokens = last * chunk_tokens - num_local
        if num_tokens < chunk_tokens:
            return 0  # a part of a chunk is not loaded alone
        return None if self._is_loading(keys, first, last) else num_tokens

    def _is_loading(self, keys: Keys, first: int, last: int) -> bool:
        """Whether a request waits for some of these chunks of another one."""
        for job in self._loading.values():
            start = job.first_block // self._blocks_per_chunk
            # Keys chain: two prompts that part never meet again.
            at, stop = max(first, start), start + len(job.hold.chunk_ids)
            if at < min(last, stop) and keys.has_in_common(at, job.keys):
                return True
        return False

    def _know_keys(self, offload: Offload, num_tokens: int) -> None:
        """Extend the keys to the whole chunks of so many tokens."""
        num_chunks = num_tokens // self._chunk_tokens
        if num_chunks > offload.keys.stop:
            size = self._blocks_per_chunk
            offload.keys = Keys.of_runs(offload.runs, num_chunks, size)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        if self._watches:
            self._watched.hand_out(block_ids())
        offload = self._offload_of(request)
        if num_external_tokens:
            self._load(offload, block_ids, num_external_tokens)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return  # for what it loads, here or elsewhere, and in no batch yet
        self._may_store(offload)

    def _load(self, offload: Offload, block_ids: BlockIds, num_tokens: int) -> None:
        num_local, chunk_tokens = offload.num_local_tokens, self._chunk_tokens
        first = num_local // chunk_tokens
        last = (num_local + num_tokens) // chunk_tokens
        keys = offload.keys
        hold = self.tier.prepare_load(keys, offload.access, first, last)
        if self.behind is not None:
            moved = self.behind.loaded(keys.numbers(first, last), offload.access)
            for name, number in moved.items():
                self._num_loaded[name] += number * chunk_tokens
        offload.next_chunk = last
        first_block = num_local // self._block_size
        kind = JobKind.SYNC_LOAD if offload.loads_in_step else JobKind.LOAD
        table = block_ids(first_block, last * self._blocks_per_chunk)
        job = TransferJob(
            self._num_jobs, kind, offload.request, first_block, table, hold, keys
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
        if offload.most_tokens >= (offload.next_chunk + 1) * self._chunk_tokens:
            self._storing[offload.request] = offload
        else:
            self._storing.pop(offload.request, None)

    def _store(self, batch: Batch, transfers: StepTransfers, flush: set[int]) -> None:
        """Store what the batch computes, then what requests that ended have left."""
        storing = self._storing
        for request, num_tokens in batch.num_tokens_after(storing).items():
            offload = storing[request]
            if self._last_chunk(offload, num_tokens) > offload.next_chunk:
                held = batch.block_ids(request, *self._next_blocks(offload, num_tokens))
                self._offer(offload, held, transfers)
                self._may_store(offload)
        for offload, held in self._ended:
            if held:
                job = self._offer(offload, held, transfers)
                if job is not None:
                    self._watched.add(job)
                    if self._watched.was_taken_from(job):
                        flush.add(job.job_id)
        for offload, _ in self._ended:  # when all of them have stored
            offload.access.end_s = batch.now_s
            self.tier.finish(offload.access)
            self._forget(offload)
        self._ended, self._some_left = [], False

    def _last_chunk(self, offload: Offload, num_tokens: int) -> int:
        """Return the chunk behind those that may be stored of so many tokens."""
        return min(num_tokens, offload.most_tokens) // self._chunk_tokens

    def _next_blocks(self, offload: Offload, num_tokens: int) -> tuple[int, int]:
        """Return where the blocks begin and end that may be stored next."""
        size = self._blocks_per_chunk
        return offload.next_chunk * size, self._last_chunk(offload, num_tokens) * size

    def _offer(
        self, offload: Offload, held: list[int], transfers: StepTransfers
    ) -> TransferJob | None:
        """Offer the chunks of the next blocks as one lot; return the job, if any."""
        size, first = self._blocks_per_chunk, offload.next_chunk
        last = first + len(held) // size
        if last <= first:
            return None
        self._know_keys(offload, last * self._chunk_tokens)
        keys, access = offload.keys, offload.access
        prepared = self.tier.prepare_store(keys, access, first, last)
        if prepared is None:  # and offered again in the request's next batch
            transfers.refused.append((offload.request, last - first))
            return None
        offload.next_chunk = last
        transfers.evicted_lots.append(prepared.evicted_ids)
        if not prepared.spans:
            return None
        tables = [
            held[(start - first) * size : (stop - first) * size]
            for start, stop in prepared.spans
        ]
        job = TransferJob(
            self._num_jobs,
            JobKind.STORE,
            offload.request,
            prepared.spans[0][0] * size,
            tables[0] if len(tables) == 1 else [*chain.from_iterable(tables)],
            prepared.hold,
            keys,
        )
        self._begin(job, offload)
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
            first, stop = self._next_blocks(offload, num_tokens)
            held = block_ids(first, stop) if stop > first else []
            self._ended.append((offload, held))
            self._some_left |= bool(held)
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
                if offload.has_ended:
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
        self._watched.check(
            job
            for job in self._jobs_of(JobKind.STORE)
            if self._offloads[job.request].has_ended
        )

    def _jobs_of(self, kind: JobKind) -> Iterable[TransferJob]:
        return (job for job in self.jobs.values() if job.kind is kind)
