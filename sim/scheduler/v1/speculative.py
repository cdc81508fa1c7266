"""The scheduler of V1 engines with speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import require
from sim.scheduler.batch import VerifyingShape
from sim.scheduler.v1.batch_queue import BatchQueueScheduler
from sim.scheduler.v1.drafts import DraftsInFlight
from sim.scheduler.v1.limits import drafts_error
from sim.scheduler.v1.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.in_flight import Delivery
    from sim.scheduler.v1.scheduler import Shape
    from sim.scheduler.v1.settings import Settings


class DraftingPlan(Plan):
    """A `Plan` in which every request has slots of its drafter, too.

    Parameters
    ----------
    budget, counts_decodes
        See `Plan`.
    batch_size
        Slots of a batch: its tokens and those of the drafter.
    num_draft_slots
        Slots of the drafter for each request.
    """

    __slots__ = ("_num_draft_slots", "_num_left", "_num_slots_left")

    def __init__(
        self,
        budget: int,
        *,
        batch_size: int,
        num_draft_slots: int,
        counts_decodes: bool,
    ) -> None:
        super().__init__(budget, counts_decodes=counts_decodes)
        self._num_left = budget
        self._num_slots_left = batch_size
        self._num_draft_slots = num_draft_slots
        self._take(0, 0)

    def _take(self, num_tokens: int, num_slots: int) -> None:
        self._num_left -= num_tokens
        self._num_slots_left -= num_tokens + num_slots
        num_slots_left = self._num_slots_left - self._num_draft_slots
        self.budget = max(min(self._num_left, num_slots_left), 0)

    def add(self, request: Request, num_tokens: int, *, is_decode: bool) -> None:
        super().add(request, num_tokens, is_decode=is_decode)
        self._take(num_tokens, self._num_draft_slots)

    def give_back(self, victim: Request, *, is_decode: bool) -> None:
        num_tokens = self.num_tokens.get(victim)
        super().give_back(victim, is_decode=is_decode)
        if num_tokens is not None:
            self._take(-num_tokens, -self._num_draft_slots)


class SpeculativeScheduler(BatchQueueScheduler):
    """`BatchQueueScheduler` of an engine whose steps verify draft tokens.

    There may be one step in flight or several. What is different follows from
    `DraftsInFlight`; and

    - a drafter with a cache has slots behind those of a step's tokens, which its tables
      know of;
    - a request that lacks one token is admitted with empty drafts behind it, so that
      all requests of a step have as many tokens;
    - tokens computed for drafts that were not accepted count no more.

    Parameters
    ----------
    settings, cache
        See `Scheduler`; `settings` have a ``speculative_config``.

    Attributes
    ----------
    num_speculative_tokens
        Most drafts of a request in a step.
    proposes_ahead
        Whether drafts are scheduled before they are known; nothing is proposed then.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/scheduler.py`` and ``async_scheduler.py``.
    """

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        config = settings.speculative_config
        assert config is not None
        self.num_speculative_tokens = config.num_speculative_tokens
        self.proposes_ahead = settings.async_scheduling
        self.num_unquestioned_tokens = 0
        self._in_flight = self._drafts = DraftsInFlight(
            config.num_speculative_tokens, awaits_outputs=settings.async_scheduling
        )
        self._num_draft_slots = config.num_draft_slots
        is_plain = self.groups.is_plain and self._chunks.cut is None
        self._takes_decodes_together = is_plain and not self._num_draft_slots
        num_slots = 1 + config.num_speculative_tokens + config.num_lookahead_tokens
        self._most_new_blocks = num_slots // self.block_size + 2
        self._runs_decodes = False
        self._stale: list[Request] = []

    def stall_reason(self) -> str | None:
        """Return what holds a queue for ever in spite of the admission check, or None.

        Not known when a prompt comes: it may hit, or not.
        """
        return drafts_error(self.settings)

    # -- a call ---------------------------------------------------------------

    def _plan(self, budget: int, *, counts_decodes: bool) -> Plan:
        batch_size = self.settings.max_num_batched_tokens
        self._current = (
            DraftingPlan(
                budget,
                batch_size=batch_size,
                num_draft_slots=self._num_draft_slots,
                counts_decodes=counts_decodes,
            )
            if self._num_draft_slots
            else Plan(min(budget, batch_size), counts_decodes=counts_decodes)
        )
        return self._current

    def _schedule_running(self) -> int:
        budget = super()._schedule_running()
        self._chunks.pad = None if self._computes_chunk else self._padded
        self._runs_decodes = bool(self.prompts)
        return budget

    def _serve(
        self, requests: Iterable[Request], budget: int, *, counts_decodes: bool = False
    ) -> int:
        found = self._takes_decodes_together and self._decodes_that_get_on(budget)
        if not found:
            return super()._serve(requests, budget, counts_decodes=counts_decodes)
        chunks, budget = found
        groups, scheduled = self.groups, self._drafts.scheduled
        for request, before, after in chunks:
            if not groups.changes_nothing(
                request, after, min(after, request.num_tokens)
            ):
                self._extend(request, after, before)
        for request, before, after in chunks:
            request.num_computed_tokens = after
            self.num_chunk_tokens += after - before
            if scheduled(request, after - before):
                self._brings_output.append(request)
        self.prompts = chunks
        self._current = Plan(budget, counts_decodes=counts_decodes)
        return budget

    def _decodes_that_get_on(
        self, budget: int
    ) -> tuple[list[tuple[Request, int, int]], int] | None:
        """Return the chunks of running requests if all are decodes, with their drafts.

        As in `prompts`; and the budget that is left. None where one is a prompt in
        mid-way or might find no block, or the budget does not suffice. Of requests of
        which the last token is in flight nothing is computed.
        """
        budget = min(budget, self.settings.max_num_batched_tokens)
        most_blocks = self._most_new_blocks * len(self.running)
        if most_blocks > self.tables.num_free_blocks:
            return None
        most, last = 1 + self.num_speculative_tokens, self.max_model_len - 1
        num_missing_tokens = self._drafts.num_missing_tokens
        is_chunk, chunks = self._drafts.is_chunk, []
        for request in self.running:
            num_tokens = num_missing_tokens(request)
            before = request.num_computed_tokens
            after = before + num_tokens
            budget -= num_tokens
            if (
                not before >= request.num_recompute_tokens
                or not num_tokens <= most
                or after > last
                or budget < 0
                or is_chunk(request)
            ):
                return None
            if num_tokens:
                chunks.append((request, before, after))
        return chunks, budget

    def _padded(self, num_hits: int) -> int:
        num_tokens = 1 + self.num_speculative_tokens
        is_padded = self._runs_decodes or num_hits > 0
        fits = num_hits + num_tokens < self.max_model_len
        return num_tokens if is_padded and fits else 1

    def _left(self, budget: int, request: Request, num_new_tokens: int) -> int:
        self._current.add(request, num_new_tokens, is_decode=False)
        return self._current.budget

    def output(self, shape: Shape) -> SchedulerOutput:
        output = super().output(shape)
        output.drafts = drafts = self._drafts.take_scheduled()
        if drafts.num_tokens:
            output.shape = VerifyingShape.of(output.shape, drafts.queries())
        return output

    # -- between calls --------------------------------------------------------

    def deliver(self, output: SchedulerOutput) -> Delivery:
        delivery = super().deliver(output)
        self._stale = delivery.stale
        return delivery

    def reject(self, request: Request, num_drafts: int, num_outputs: int = 0) -> None:
        """Count tokens of a running request as not computed.

        Parameters
        ----------
        request
            Of the step that has ended, and not preempted since.
        num_drafts
            Drafts that were not accepted.
        num_outputs
            Outputs behind the request's end.
        """
        request.num_computed_tokens -= num_drafts + num_outputs
        self.num_chunk_tokens -= num_drafts + num_outputs

    def propose(self, request: Request, num_tokens: int) -> None:
        """Take drafts for a request's next step; see `DraftsInFlight.propose`."""
        self._drafts.propose(request, num_tokens)

    def num_draft_blocks(self) -> int:
        """Return the blocks of running requests beyond those of their tokens.

        A drafter writes there, rejected drafts have left them, or drafts in flight
        will. O(running).
        """
        num_blocks, size = 0, self.block_size
        num_entries = self.groups.num_entries if len(self.layout.groups) > 1 else None
        for request in self.running:
            num_tokens = min(request.num_tokens, request.num_computed_tokens)
            if num_entries is None:
                (own,) = request.table.groups
                num_beyond = len(own.blocks) + -num_tokens // size
            else:
                num_held = sum(len(own.blocks) for own in request.table.groups)
                num_beyond = num_held - num_entries(num_tokens)
            if num_beyond > 0:
                num_blocks += num_beyond
        return num_blocks

    def update(self, finished: Sequence[Request]) -> None:
        forget_rejected(self._stale)
        super().update(finished)

    def _check_blocks(self, request: Request) -> None:
        num_blocks = len(self.tables.block_ids(request))
        require(
            num_blocks >= self._num_needed_blocks(request),
            f"request {request.request_id}: {self.num_computed_tokens(request)} tokens "
            f"computed, {num_blocks} blocks held",
        )


def forget_rejected(stale: Iterable[Request]) -> None:
    """Let preempted requests compute again only what had been accepted of their tokens.

    Parameters
    ----------
    stale
        Got outputs of a step from before their preemption.
    """
    for request in stale:
        num_lost = min(request.num_recompute_tokens, request.num_tokens - 1)
        request.num_recompute_tokens = num_lost
