"""The scheduler of V1 engines with speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import require
from sim.scheduler.batch import VerifyingShape
from sim.scheduler.v1.batch_queue import BatchQueueScheduler
from sim.scheduler.v1.drafts import DraftsInFlight
from sim.scheduler.v1.scheduler import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        self._runs_decodes = False
        self._stale: list[Request] = []

    # -- a call ---------------------------------------------------------------

    def _plan(self, budget: int, *, counts_decodes: bool) -> DraftingPlan:
        self._current = DraftingPlan(
            budget,
            batch_size=self.settings.max_num_batched_tokens,
            num_draft_slots=self._num_draft_slots,
            counts_decodes=counts_decodes,
        )
        return self._current

    def _schedule_running(self) -> int:
        budget = super()._schedule_running()
        self._pads_heads = not self._computes_chunk
        self._runs_decodes = bool(self._current.num_tokens)
        return budget

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
            output.shape = VerifyingShape.of(
                output.shape,
                (
                    (1 + num_drafts, request.num_computed_tokens)
                    for request, num_drafts in drafts.num_tokens.items()
                ),
            )
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
        num_entries, num_blocks = self.groups.num_entries, 0
        for request in self.running:
            num_tokens = min(request.num_computed_tokens, request.num_tokens)
            num_held = sum(len(own.blocks) for own in request.table.groups)
            num_blocks += max(num_held - num_entries(num_tokens), 0)
        return num_blocks

    def update(self, finished: Sequence[Request]) -> None:
        for request in self._stale:  # some of what was lost had not been accepted
            num_lost = min(request.num_recompute_tokens, request.num_tokens - 1)
            request.num_recompute_tokens = num_lost
        super().update(finished)

    def _check_blocks(self, request: Request) -> None:
        num_tokens = self.num_computed_tokens(request)
        num_blocks = len(self.tables.block_ids(request))
        require(
            num_blocks >= self.groups.num_entries(num_tokens),
            f"request {request.request_id}: {num_tokens} tokens computed, "
            f"{num_blocks} blocks held",
        )
