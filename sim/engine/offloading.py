"""An engine with a tier behind its pool: stores and loads on the clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, nan
from typing import TYPE_CHECKING, Any, Protocol, cast

from sim.costs.pricing import batch_total_of
from sim.engine.beside import ReportedSteps, nothing
from sim.engine.links import Copy, Link
from sim.scheduler.batch import EMPTY_SHAPE
from sim.scheduler.v1.connectors.base import JobKind, StepTransfers, TransferReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cache.tiers import TierHierarchy
    from sim.costs.base import CostModel, StepCost
    from sim.costs.transfers import JobTransfer, Moved
    from sim.engine.links import LinkRules
    from sim.results.recording.step_log import StepLog
    from sim.results.recording.transfers import TransferLog
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.v1.connectors.base import TransferJob
    from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler


class FailsLoad(Protocol):
    """Says which loads fail."""

    def __call__(self, num_blocks: int) -> int | None:
        """Return the first block that a load does not fill; None if it fills all."""
        ...


@dataclass(frozen=True, slots=True)
class Worker:
    """The worker that copies: its prices, its rules and its failures.

    Parameters
    ----------
    load, store
        The price of a job alone, each way, by its blocks of each KV cache group.
    rules
        How jobs share the link, and the GPU with steps.
    fails
        Which loads fail.
    """

    load: JobTransfer
    store: JobTransfer
    rules: LinkRules
    fails: FailsLoad | None = None


class OffloadedSteps(ReportedSteps):
    """Steps beside which blocks are copied.

    ::

        step t       the stores that t - 1 asked for are submitted; what must be
                     flushed, and in-step loads, are waited for; then the batch runs,
                     and the copies with it
        its end      the loads that t asked for begin, in an empty step at once
        reported     with the output of the first step that begins when they have ended

    An engine without a batch looks after its copies once an empty step. Submitting a
    store delays the step by the host's part of it; submitting a load is hidden behind
    the step, as long as that lasts. A long call is still being made when its first
    blocks are copied.

    Parameters
    ----------
    scheduler
        Says what is copied, and is told what has ended.
    worker
        Copies.
    cost_model
        Prices the batch.
    steps, transfers
        Told what copies add to steps; told of copies and of the tier.

    Attributes
    ----------
    worker
        See above.
    link
        Over which it copies.
    on_copies
        Called where copies run: with the time from which on, in seconds, and with the
        link, as it is when the step ends, or when all have run if there is none. Loads
        that begin behind a step are told by themselves.

    Notes
    -----
    Source: vLLM 0.33,
    ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py``.
    """

    def __init__(
        self,
        scheduler: ConnectorScheduler,
        worker: Worker,
        cost_model: CostModel,
        steps: StepLog,
        transfers: TransferLog,
    ) -> None:
        super().__init__(scheduler)
        self.worker = worker
        self._cost_model = cost_model
        self._batch_total = batch_total_of(cost_model)
        self._steps, self._transfers = steps, transfers
        self._idle_s = cost_model.step(EMPTY_SHAPE).total_s
        self.link = Link(worker.rules)
        self._stores: list[TransferJob] = []  # of the latest call, to be submitted
        self._loads: list[TransferJob] = []  # the same, when its step has ended
        self._polled: list[Copy] = []  # to be reported when the step ends
        self._bad_blocks: dict[int, int] = {}  # by job
        # By direction and blocks of each group: its seconds, and if by a kernel.
        self._prices: dict[tuple[bool, *tuple[int, ...]], tuple[Moved, bool]] = {}
        self._formed_s = self._end_s = 0.0  # of the latest step
        self._behind: TierHierarchy | None = scheduler.connector.offloading.behind
        self._has_news = False  # from behind, that no call has seen
        self._rests = False  # since the latest call
        self._wake_s = nan  # as it was when it began to wait
        self.on_copies: Callable[[float, Link], object] = nothing
        self._told_busy = False  # by the latest of these
        if self._behind is not None:
            self._behind.on_end = transfers.note_behind

    def leave(self) -> None:
        if self._behind is not None:
            self._behind.leave(self._formed_s)
        latest_s = self._steps.ends_s[-1:]  # quiet steps may have come since
        self._transfers.note_gone(max(self._formed_s, self._end_s, *latest_s))

    @property
    def has_news(self) -> bool:
        return bool(self._polled)

    @property
    def asks(self) -> bool:
        # a failed request's end is an event of its own
        return self.worker.fails is not None

    @property
    def awaits(self) -> bool:
        return self.scheduler.num_waiting > 0 and self._next_look_s(0.0) < inf

    # -- a step ---------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        self._has_news = self._rests = False
        self._submit_asked(now_s)

    def quiet_steps(self, most: int) -> int:
        link, behind = self.link, self._behind
        if self._stores or link.is_busy:
            return 0
        if behind is not None and behind.has_pending_work:  # each step follows it
            return 0
        if self._polled and not self._decodes_go_on(self._polled):
            return 0
        if link.has_ended:  # the first of them sees that, and ends with a report
            most = min(most, 1)
        return self.scheduler.quiet_steps(most)

    def _decodes_go_on(self, copies: Iterable[Copy]) -> bool:
        """Whether a report of these copies changes nothing that quiet steps see.

        What a store has brought is found by heads that are looked at, in a call.
        """
        is_store = all(copy.job.kind is JobKind.STORE for copy in copies)
        return is_store and self._behind is None

    def go_on(self, now_s: float) -> bool:
        if not self._settle(now_s):
            return False
        self._polled = self.link.poll()
        self._note_tier(now_s)
        return True

    def _settle(self, now_s: float) -> bool:
        """Report ended copies as `form` does; return whether there were any."""
        has_ended = self.scheduler.has_ended_requests
        if not (self.has_news or self.link.has_ended or has_ended):
            return False
        self.report(now_s)
        if has_ended:
            self.scheduler.now_s = now_s
            self.scheduler.form_between()
        return True

    def batch_total(self, *shape: int) -> float:
        total_s = self._batch_total(*cast("Any", shape))
        more_s = self._run(total_s, computes=bool(shape[0] or shape[3]))
        if more_s:
            self._steps.added.append((len(self._steps.ends_s), more_s))
        return total_s + more_s

    def step(self, shape: BatchShape) -> StepCost:
        cost = self._cost_model.step(shape)
        more_s = self._run(cost.total_s, computes=bool(shape[0] or shape[3]))
        if not more_s:
            return cost
        if self._steps.is_priced:
            self._steps.added.append((len(self._steps.ends_s), more_s))
        return cost._replace(
            total_s=cost.total_s + more_s,
            swap_s=cost.swap_s + more_s,
            lo_s=cost.lo_s + more_s,
            hi_s=cost.hi_s + more_s,
        )

    # -- what is copied -------------------------------------------------------

    def _submit_asked(self, now_s: float) -> None:
        """Submit stores, and wait for what the batch needs."""
        asked, link = self.scheduler.transfers, self.link
        assert isinstance(asked, StepTransfers)  # those of a tier
        link.follow(now_s)
        flush = asked.flush
        self._submit_now(self._stores)
        self._stores = asked.stores
        if flush:
            self._stores = [job for job in asked.stores if job.job_id not in flush]
            self._submit_now(job for job in asked.stores if job.job_id in flush)
            link.wait_for(flush)
        self._loads = []
        in_step: list[int] = []
        for job in asked.loads:
            if job.kind is JobKind.SYNC_LOAD:
                self._submit_now([job])
                in_step.append(job.job_id)
            else:
                self._loads.append(job)
                self._note_failure(job)
        if in_step:
            link.wait_for(in_step)
        self._polled = link.poll()
        self._note_tier(now_s)

    def _note_tier(self, now_s: float) -> None:
        """Write down the chunks that the tier holds."""
        tier = self.scheduler.connector.offloading.tier
        self._transfers.note_tier(
            now_s,
            tier.num_used_chunks,
            tier.num_writing_chunks,
            tier.num_reading_chunks,
        )

    def _submit_now(self, jobs: Iterable[TransferJob]) -> None:
        """Let jobs begin one after the other while the engine waits for the calls."""
        for job in jobs:
            self.link.follow(self._submit(job, self.link.now_s))

    def _submit(self, job: TransferJob, called_s: float) -> float:
        """Let a job begin that the host asks for then; return when its call ends."""
        is_store, blocks = job.kind is JobKind.STORE, job.num_by_group
        price = self._prices.get((is_store, *blocks))
        if price is None:
            way = self.worker.store if is_store else self.worker.load
            price = self._prices[is_store, *blocks] = way.at(blocks)
        moved, by_kernel = price
        self.link.follow(called_s + moved.begin_s)
        self.link.submit(Copy(job, moved.copy_s, by_kernel=by_kernel))
        return called_s + moved.host_s

    def _note_failure(self, job: TransferJob) -> None:
        fails = self.worker.fails
        index = None if fails is None else fails(len(job.block_ids))
        if index is not None:
            self._bad_blocks[job.job_id] = job.block_ids[index]

    def _run(self, total_s: float, *, computes: bool) -> float:
        """Let copies run beside the step; return the seconds that they add to it."""
        link, loads = self.link, self._loads
        if not (link.is_busy or loads) and link.now_s <= self._formed_s:
            if self._told_busy:  # they ended while it waited
                self._tell_copies(self._formed_s, link)
            self._end_s = self._formed_s + total_s
            return 0.0
        self._loads = []
        called_s = link.now_s
        end_s = link.step(total_s) if computes else called_s + total_s
        if computes:
            self._tell_copies(self._formed_s, link)
        for job in loads:
            called_s = self._submit(job, called_s)
        self._end_s = max(end_s, called_s)
        link.follow(self._end_s)
        more_s = max(self._end_s - self._formed_s - total_s, 0.0)
        self._end_s = self._formed_s + (total_s + more_s)  # as the engine adds it up
        if loads or not computes:
            self._tell_copies(end_s if computes else self._formed_s, link)
        return more_s

    def _tell_copies(self, begin_s: float, link: Link) -> None:
        self._told_busy = link.is_busy
        self.on_copies(begin_s, link)

    # -- what has ended -------------------------------------------------------

    def taken(self, now_s: float) -> TransferReport | None:
        self._formed_s = now_s
        self._wake_s = nan
        if self._behind is not None:
            self._has_news |= self._behind.follow(now_s)
        copies = self._polled
        if now_s > self._end_s:  # it was idle, and has looked again and again
            self._end_s = now_s
            self.link.follow(now_s)
            copies = copies + self.link.poll()
        if not copies:
            return None
        self._polled = []
        done = [copy.job.job_id for copy in copies]
        bad = [self._bad_blocks.pop(each) for each in done if each in self._bad_blocks]
        for copy in copies:
            self._transfers.note(copy.job, copy.begin_s, copy.end_s, now_s)
        return TransferReport(done, bad)

    def taken_to_rest(self, now_s: float) -> TransferReport | None:
        if self._rests:  # what has arrived since was rejected
            return None
        taken = self.taken(now_s)
        self._rests = True
        return taken

    def begin_to_rest(self, now_s: float) -> None:
        """Let the last stores of requests that have ended begin."""
        self._submit_asked(now_s)
        self._wake_s = nan
        self.link.follow(now_s)

    def rested(self, now_s: float) -> TransferReport | None:
        self._submit_now(self._stores)
        self._stores = []
        if self.link.is_busy or self._told_busy:
            self._tell_copies(now_s, self.link.drained())
        return None

    def wake_s(self, now_s: float) -> float:
        if self._wake_s != self._wake_s:
            waits = self.scheduler.num_waiting > 0
            self._wake_s = self._next_look_s(now_s) if waits else inf
        return self._wake_s

    def _next_look_s(self, now_s: float) -> float:
        """Return when the next end is reported to an engine that waits from now on."""
        if self._polled or self.link.has_ended:
            return now_s + self._idle_s
        wake_s = self._wake_behind_s(now_s)
        end_s = self.link.next_end_s()
        if end_s == inf:
            return wake_s
        num_looks = ceil((end_s - now_s) / self._idle_s) + 1
        return min(now_s + num_looks * self._idle_s, wake_s)

    def _wake_behind_s(self, now_s: float) -> float:
        """Return when a look-up may be told more by the tiers behind the host."""
        if self._behind is None:
            return inf
        if self._has_news:
            return now_s + self._idle_s
        news_s = self._behind.next_news_s(self._idle_s)
        if news_s == inf:
            return inf
        num_looks = max(ceil((news_s - now_s) / self._idle_s), 1)
        return max(now_s + num_looks * self._idle_s, news_s)
