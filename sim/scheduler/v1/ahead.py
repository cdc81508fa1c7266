"""The scheduler of V1 engines that form a step while the one before runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.v1.runs.tables import RunTables
from sim.scheduler.v1.clock import AheadDecodeClock
from sim.scheduler.v1.decode_blocks import (
    AheadDecodeBlocks,
    AheadGroupDecodeBlocks,
    running_order,
)
from sim.scheduler.v1.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.scheduler import Shape
    from sim.scheduler.v1.settings import Settings
    from sim.scheduler.views import RunningColumns


class AheadScheduler(Scheduler):
    """`Scheduler` with asynchronous scheduling: a call does not know the last output.

    It decides as `sim.scheduler.v1.batch_queue.BatchQueueScheduler` does, without a
    look at each decode. One on the clock (`AheadDecodeClock`) always has one token in
    flight, so what is known of it follows from the step as well. Off the clock, among
    `prefilling` with its tokens written down, stands

    - a decode whose token in flight is surely its last: it gets no more, and leaves;
    - a decode that was passed over for lack of budget: its token arrives meanwhile.

    Attributes
    ----------
    max_concurrent_batches
        Steps in flight at most.
    passed_over
        Always empty: decodes without a token are in `set_aside`.
    set_aside
        Decodes that calls have taken off the clock, with a token in flight; the loop
        empties it when it takes note of them.
    num_wasted_tokens
        Outputs that were dropped so far, their requests having ended.
    drops_stale
        Whether tokens in flight of what is preempted are dropped as well, and computed
        again.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/async_scheduler.py`` and ``scheduler.py``.
    """

    max_concurrent_batches = 2
    drops_stale = False
    counts_blocks = True
    _clock = AheadDecodeClock

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        self.set_aside: list[Request] = []
        self.num_wasted_tokens = 0
        self._may_end_waiting = False  # a preempted request, by its token in flight
        if self.groups is not None:
            self._group_decodes = self._decodes = AheadGroupDecodeBlocks(
                *(self.clock, self.groups, self.running, self.prefilling),
                keeps_all_blocks=self.layout.keeps_all_blocks,
            )
            self._extend = self._group_decodes.extend
            self.form = self._form_in_groups  # type: ignore[method-assign]
            self.advance = self._advance_in_groups  # type: ignore[method-assign]
        elif isinstance(self.tables, RunTables):
            self._extend = self._extend_known
            self._decodes = AheadDecodeBlocks(self.clock, self.tables)

    @staticmethod
    def reason_not_to(settings: Settings, cache: CacheConfig) -> str:
        """Return why decodes are looked at one by one, empty if they are not."""
        for reason, is_known in (
            ("of a pipeline", settings.pipeline_parallel_size == 1),
            ("of requests with drafts", settings.speculative_config is None),
            ("with hits inside blocks", not cache.groups.has_hits_inside_blocks),
            (
                "that prefill_schedule_interval looks at",
                settings.prefill_schedule_interval == 1,
            ),
        ):
            if not is_known:
                return reason
        return ""

    # -- a call ---------------------------------------------------------------

    form = Scheduler.form  # which the methods below belong to

    def _extend_known(self, request: Request, num_tokens: int, before: int) -> bool:
        assert isinstance(self.tables, RunTables)
        num_known = request.num_tokens if request in self.prefilling else before
        return self.tables.extend_known(request, num_tokens, min(num_tokens, num_known))

    def _form_in_groups(self, now_s: float) -> Shape:
        self._group_decodes.note_in_flight(self.prompts)
        return type(self).form(self, now_s)

    def _advance_in_groups(self, num_steps: int) -> list[int]:
        self._group_decodes.note_in_flight(self.prompts)
        self.prompts = []
        return type(self).advance(self, num_steps)

    def _pass_over(self, requests: Iterable[Request]) -> None:
        set_aside = [each for each in requests if each not in self.prefilling]
        self.set_aside += set_aside
        self.take_off(set_aside)

    def take_off(self, requests: Sequence[Request]) -> None:
        """Take decodes off the clock; their tokens are those of the next call."""
        if not requests:
            return
        prefilling, clock = self.prefilling, self.clock
        in_order = sorted([*prefilling, *requests], key=running_order)
        for request in requests:
            clock.settle(request, self.step)
            clock.leave(request)
            self.num_chunk_tokens += request.num_computed_tokens
        prefilling.clear()
        prefilling.update(dict.fromkeys(in_order))

    def output(self, shape: Shape) -> SchedulerOutput:
        output = super().output(shape)
        for request in output.scheduled:
            if request not in self.prefilling:
                request.num_tokens -= 1  # the last output is not known yet
        return output

    # -- between calls --------------------------------------------------------

    def note_known(self, requests: Iterable[Request]) -> None:
        """Take note of tokens that have arrived of requests off the clock."""
        for request in requests:
            if request not in self.running:
                self._may_end_waiting = True
            elif self.enable_caching:
                num_tokens = min(request.num_computed_tokens, self._most_slots)
                if self.groups is not None:
                    self.groups.register(request, num_tokens)
                else:
                    self.tables.extend(request, num_tokens, num_tokens)
        if self.enable_caching and self.groups is not None:
            self.groups.end_call()  # a state can be hit in the next one

    _release = Scheduler.update  # a method of `self` is found sooner than a class's

    def update(self, finished: Sequence[Request]) -> None:
        if self._may_end_waiting:
            finished = self._running_of(finished)
        num_decodes, prefilling = len(finished), self.prefilling
        if prefilling:
            known = [request for request in finished if request in prefilling]
            if known:
                self.note_known(known)
                num_decodes -= len(known)
        # The step in flight computes another token of those that were decodes.
        self.num_wasted_tokens += num_decodes
        self._release(finished)

    def _running_of(self, finished: Sequence[Request]) -> Sequence[Request]:
        """Return those that run; the last tokens of others came after a preemption."""
        self._may_end_waiting = False
        for request in finished:
            if request not in self.running:
                self.waiting.remove(request)
                self.tables.free(request)
        return [request for request in finished if request in self.running]

    def abort(self, request: Request) -> None:
        if request in self.running:
            is_known = request in self.prefilling and (
                request.num_computed_tokens < request.num_tokens
            )
            self.num_wasted_tokens += not is_known
        super().abort(request)

    # -- what policies see ----------------------------------------------------

    def num_output_tokens(self, request: Request) -> int:
        num_tokens = super().num_output_tokens(request)
        return num_tokens if request in self.prefilling else num_tokens - 1

    def columns(self) -> RunningColumns:
        if self._columns_step != self.step:
            known = super().columns()
            self._columns = known._replace(
                num_tokens=known.num_tokens - 1,
                num_output_tokens=known.num_output_tokens - 1,
            )
        return self._columns
