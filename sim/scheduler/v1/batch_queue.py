"""The scheduler of V1 engines that have several steps in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.v1.in_flight import TokensInFlight
from sim.scheduler.v1.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.v1.block_tables import BlockTables
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.in_flight import Delivery
    from sim.scheduler.v1.plan import Plan
    from sim.scheduler.v1.scheduler import Shape
    from sim.scheduler.v1.settings import Settings


class BatchQueueScheduler(Scheduler):
    """`Scheduler` of an engine core that forms steps before it knows earlier outputs.

    What is different follows from `TokensInFlight`. A request has its turn in each call
    and its tokens are written down in each, so that none stands on the decode clock.

    - A decode of which an output is awaited is scheduled on, with asynchronous
      scheduling, unless that output is its last; otherwise it is passed over.
    - Blocks are findable once their tokens are known, and windows move on with the
      steps that have ended.
    - A preempted request gets the tokens that are under way, and waits for them before
      it may be admitted again. It may end with one.

    Parameters
    ----------
    settings, cache
        See `Scheduler`.

    Attributes
    ----------
    stepwise_reason
        Why decodes could not be left on a clock, if that was asked for.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/async_scheduler.py`` and ``scheduler.py``.
    """

    groups: BlockTables
    keeps_decode_clock = False

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        self.max_concurrent_batches = settings.max_concurrent_batches
        self._some_left = False
        self.stepwise_reason = ""
        self._in_flight: TokensInFlight = TokensInFlight(
            awaits_outputs=settings.async_scheduling,
            decode_interval=settings.pipeline_parallel_size,
        )
        self._extend = self._extend_known
        self._brings_output: list[Request] = []
        self._computes_chunk = False

    @property
    def has_finish_notice(self) -> bool:
        """Whether workers are to be told with the next call that requests have left."""
        return self._some_left

    # -- a call ---------------------------------------------------------------

    def form(self, now_s: float) -> Shape:
        self._in_flight.begin_call()
        self._some_left = False
        self._brings_output = []
        shape = super().form(now_s)
        self.completing = []  # what that says is not what is known
        return shape

    def output(self, shape: Shape) -> SchedulerOutput:
        output = super().output(shape)
        output.completing = self._brings_output
        return output

    def _has_decodes(self) -> bool:
        return not all(map(self._in_flight.is_chunk, self.running))

    def _num_backlog(self) -> int:
        return len(self.waiting) - len(self._in_flight.deferred)

    def _schedule_running(self) -> int:
        self._computes_chunk = False
        budget = self._serve(list(self.running), self._budget, counts_decodes=True)
        self._chunks.carries_prefill = self._computes_chunk
        return budget

    def _next_chunk(self, request: Request) -> int:
        if self._chunks.holds_prefill and self._in_flight.is_chunk(request):
            return 0
        num_missing_tokens = self._in_flight.num_missing_tokens(request)
        return self._chunks.limited(request, num_missing_tokens)

    def _extend_known(self, request: Request, num_tokens: int, before: int) -> bool:
        return self.groups.extend(
            request,
            num_tokens,
            before,
            num_processed_tokens=self._in_flight.num_processed_tokens(request),
            num_tokens_to_cache=min(num_tokens, request.num_tokens),
        )

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, plan: Plan
    ) -> bool:
        has_slots = super()._allocate_or_preempt(request, num_new_tokens, plan)
        if has_slots:  # counts even if it is a victim later in the call
            self._computes_chunk |= self._in_flight.is_chunk(request)
        return has_slots

    def compute(self, request: Request, num_new_tokens: int) -> None:
        super().compute(request, num_new_tokens)
        if self._in_flight.scheduled(request, num_new_tokens):
            self._brings_output.append(request)

    def _admit(self, request: Request, num_hits: int, now_s: float) -> None:
        super()._admit(request, num_hits, now_s)
        self._in_flight.deferred.discard(request)

    def _preempt(self, victim: Request, for_request: Request, reason: str) -> None:
        super()._preempt(victim, for_request, reason)
        self._in_flight.preempted(victim)

    # -- between calls --------------------------------------------------------

    def abort(self, request: Request) -> None:
        super().abort(request)
        self._in_flight.ended(request)
        self._some_left = True

    def deliver(self, output: SchedulerOutput) -> Delivery:
        """Take the oldest step out of flight; see `TokensInFlight.deliver`."""
        return self._in_flight.deliver(output)

    def update(self, finished: Sequence[Request]) -> None:
        """Note the tokens and ends that the step taken out of flight has made known."""
        groups, in_flight = self.groups, self._in_flight
        for request in in_flight.take_delivered():
            groups.register(request, in_flight.num_processed_tokens(request))
        groups.end_call()  # what was registered just now can be hit in the next call
        if not finished:
            return
        self._some_left = True
        for request in finished:
            in_flight.ended(request)
            if request not in self.running:  # its last token came after a preemption
                self.waiting.remove(request)
                self._free(request)
        super().update([request for request in finished if request in self.running])

    @property
    def num_wasted_tokens(self) -> int:
        """Outputs that were dropped so far, their requests having ended."""
        return self._in_flight.num_wasted_tokens

    def num_placeholders(self, request: Request) -> int:
        """Return how many outputs of steps in flight a request awaits."""
        return self._in_flight.num_placeholders(request)
