"""The V1 scheduler on the virtual decode clock."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from sim.costs.base import BatchShape
from sim.scheduler.admission import FullPrompt, Watermark
from sim.scheduler.base import SchedulerOutput
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.exact import check_exact, check_order
from sim.scheduler.v1.fast_state import FastV1State
from sim.scheduler.v1.scheduler import V1Scheduler
from sim.scheduler.v1.settings import V1Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.v1.fast_tables import Found
    from cache.v1.id_tables import IdTables
    from cache.v1.policies.base import CachePolicy
    from sim.scheduler.admission import AdmissionRule
    from sim.scheduler.request import Request
    from sim.scheduler.victims import VictimPolicy

Shape = tuple[int, int, int, int, int, int]
"""The first six fields of `BatchShape`: the fast path moves no blocks."""

_RUNNING, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED


class FastV1Scheduler(FastV1State):
    """`V1Scheduler`, decision by decision, for quiet decodes.

    What makes it exact: every running request but the last decodes one token in every
    step. That holds for first come, first served with a budget that the batch cannot
    use up, for then at most one prompt is in mid-way, and it was admitted last. So

    - a step looks at the decodes that open or fill a block, and at no other;
    - `running` is a dict in running order: its last request is the victim;
    - a queue head that waits for blocks is not looked at again before something could
      change the answer.

    Parameters
    ----------
    num_gpu_blocks, block_size, enable_prefix_caching, sliding_window, evictor,
    preemption_victim, admission
        See `sim.scheduler.v1.scheduler.V1Scheduler`.
    **settings
        Its other parameters.

    Raises
    ------
    NotExactError
        If the settings break the conditions; nothing has been built then.
    SchedulerError
        If the settings are refused anyway.
    """

    generation = "v1"
    # The twin's arguments, for who builds either from a table.
    __signature__ = signature(V1Scheduler)

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        sliding_window: int | None = None,
        evictor: Callable[[], CachePolicy] | None = None,
        preemption_victim: VictimPolicy | None = None,
        admission: AdmissionRule | None = None,
        **settings: Any,
    ) -> None:
        checked = V1Settings(**settings)
        check_exact(checked, sliding_window, preemption_victim, admission)
        if evictor is not None and enable_prefix_caching:
            check_order(evictor())
        super().__init__(
            checked,
            num_gpu_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._most_running = checked.most_running
        self._budget = checked.token_budget
        self._chunks = checked.enable_chunked_prefill
        # The rules that are exact here are those of newer releases under other names;
        # an idle engine has room for whatever passed the admission check.
        self._reserve_full_isl = checked.reserve_full_isl or isinstance(
            admission, FullPrompt
        )
        self._watermark_blocks = int(checked.watermark * num_gpu_blocks)
        if isinstance(admission, Watermark):
            self._watermark_blocks += admission.num_spare_blocks(num_gpu_blocks)

    # -- a step ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Form the batch of the next step; see `V1Scheduler.schedule`.

        `SchedulerOutput.scheduled` holds the prompts only; all other running requests
        decode.
        """
        went_on = self.partial
        return self.output(self.form(now_s), went_on)

    def form(self, now_s: float) -> Shape:
        """Form the batch of the next step; return its shape.

        Moves blocks and queues as `V1Scheduler.schedule` does, and makes no object:
        what was decided stands in `prompts`, `completing` and `preemptions`.
        """
        step, clock = self.step, self.clock
        self.step = step + 1
        if self.preemptions:
            self.preemptions = []
        opening = clock.buckets[step % self.block_size]
        if opening:
            if len(opening) <= self.tables.num_free_blocks:
                self.tables.append_blocks(opening)
            else:
                self._append_or_preempt(list(opening), step)
        if self.enable_caching:
            self.tables.register_blocks(clock.filling(step))
        self.prompts = []
        self.num_recomputed_tokens = 0
        num_decodes = clock.num_decodes
        num_context_tokens = clock.num_base_tokens + num_decodes * step
        if self.partial is None:
            if not self.waiting or self.preemptions:
                return num_decodes, num_context_tokens, 0, 0, 0, 0
            if self._ids is not None and not self.head_is_blocked:
                return self._form_plain(
                    self._ids, now_s, num_decodes, num_context_tokens
                )
        budget = self._budget - num_decodes
        if self.partial is not None:
            budget = self._go_on(self.partial, budget)
        if self.waiting and not self.preemptions:
            self._schedule_waiting(budget, now_s)
        return self._advance(num_decodes, num_context_tokens)

    def output(self, shape: Shape, went_on: Request | None = None) -> SchedulerOutput:
        """Return the decisions of the latest `form` as an object.

        Parameters
        ----------
        shape
            What it returned.
        went_on
            The prompt that was in mid-way before it.
        """
        scheduled = [request for request, _, _ in self.prompts]
        num_went_on = bool(scheduled) and scheduled[0] is went_on
        return SchedulerOutput(
            scheduled=scheduled,
            num_scheduled_tokens=[after - before for _, before, after in self.prompts],
            admitted=scheduled[num_went_on:],
            preemptions=self.preemptions,
            shape=BatchShape(*shape),
            num_recomputed_tokens=self.num_recomputed_tokens,
            stuck=not (shape[0] or scheduled or (self.preemptions and self.running)),
        )

    def _append_or_preempt(self, opening: list[Request], step: int) -> None:
        """Give decodes a block each, in running order, preempting from the tail."""
        tables, running = self.tables, self.running
        for request in opening:
            if request not in running:
                return  # and those behind it went before it
            while not tables.num_free_blocks:
                victim, _ = running.popitem()
                self._preempt(victim, request, step)
                if victim is request:
                    return
            tables.append_blocks((request,))

    def _advance(self, num_decodes: int, num_context_tokens: int) -> Shape:
        """Count prompts, whose slots are there, beside decodes; return the shape."""
        num_prefills = num_tokens = num_prefill_context_tokens = num_pairs = 0
        for request, before, after in self.prompts:
            num_new_tokens = after - before
            request.num_computed_tokens = after
            self.num_chunk_tokens += num_new_tokens
            if before < request.num_recompute_tokens:
                self._recompute(request, before, after)
            if num_new_tokens == 1:
                num_decodes += 1
                num_context_tokens += after
            else:
                num_prefills += 1
                num_tokens += num_new_tokens
                num_prefill_context_tokens += after
                # Query j of a chunk sees all keys before it and j of its own.
                num_pairs += num_new_tokens * before
                num_pairs += num_new_tokens * (num_new_tokens + 1) // 2
            if after < request.num_tokens:
                self.partial = request
            else:
                self.completing.append(request)
        return (
            num_decodes,
            num_context_tokens,
            num_prefills,
            num_tokens,
            num_prefill_context_tokens,
            num_pairs,
        )

    def _go_on(self, request: Request, budget: int) -> int:
        """Compute the next chunk of the prompt in mid-way; return the budget left.

        It runs last, so that it is its own victim.
        """
        block_size = self.block_size
        before, after = request.num_computed_tokens, request.num_tokens
        after = min(after, before + budget)
        num_new_blocks = -(-after // block_size) - -(-before // block_size)
        if num_new_blocks > self.tables.num_free_blocks:
            del self.running[request]
            self._preempt(request, request, self.step - 1)
            return budget
        self.tables.extend(request, after)
        self.partial = None
        self.prompts.append((request, before, after))
        return budget - (after - before)

    def _schedule_waiting(self, budget: int, now_s: float) -> None:
        """Admit from the head of the queue while everything lasts."""
        waiting, running, tables = self.waiting, self.running, self.tables
        while waiting and budget and len(running) < self._most_running:
            if self.head_is_blocked and not tables.watch_hit:
                return
            request = waiting[0]
            if not tables.num_free_blocks:
                self.head_is_blocked = True
                return
            found = tables.find(request, request.num_tokens)
            num_hits = found.num_blocks * self.block_size
            num_new_tokens = request.num_tokens - num_hits
            if num_new_tokens > budget:
                if not self._chunks:
                    return
                num_new_tokens = budget
            num_tokens = num_hits + num_new_tokens
            if not self._fits(request, num_tokens, found):
                return
            waiting.popleft()
            self.look_again()
            tables.begin(request, num_tokens, found)
            self._admit(request, num_hits, now_s)
            self.prompts.append((request, num_hits, num_tokens))
            budget -= num_new_tokens

    def _form_plain(
        self,
        tables: IdTables,
        now_s: float,
        num_decodes: int,
        num_context_tokens: int,
    ) -> Shape:
        """Do so, and count as `_advance`, where nothing is cached or in mid-way.

        Nothing is found then, and every prompt begins at its first token.
        """
        waiting, running, block_size = self.waiting, self.running, self.block_size
        budget = first_budget = self._budget - num_decodes
        num_prefills = num_prefill_tokens = num_pairs = 0
        while waiting and budget and len(running) < self._most_running:
            request = waiting[0]
            num_tokens = num_whole = request.num_tokens
            if num_tokens > budget:
                if not self._chunks:
                    break
                num_tokens = budget
            num_blocks = num_needed = -(-num_tokens // block_size)
            if self._reserve_full_isl and num_tokens < num_whole:
                num_needed = -(-num_whole // block_size)
            if running:
                num_needed += self._watermark_blocks
            if num_needed > tables.num_free_blocks:
                self.head_is_blocked = True
                break
            waiting.popleft()
            request.table = tables.take(num_blocks)
            if request.status is not _PREEMPTED:
                request.first_scheduled_s = now_s
            request.status = _RUNNING
            running[request] = None
            self.prompts.append((request, 0, num_tokens))
            budget -= num_tokens
            request.num_computed_tokens = num_tokens
            if request.num_recompute_tokens:
                self._recompute(request, 0, num_tokens)
            if num_tokens == 1:
                num_decodes += 1
                num_context_tokens += 1
            else:
                num_prefills += 1
                num_prefill_tokens += num_tokens
                num_pairs += num_tokens * (num_tokens + 1) // 2
            if num_tokens < num_whole:
                self.partial = request
            else:
                self.completing.append(request)
        self.num_chunk_tokens += first_budget - budget
        return (
            num_decodes,
            num_context_tokens,
            num_prefills,
            num_prefill_tokens,
            num_prefill_tokens,
            num_pairs,
        )

    def _fits(self, request: Request, num_tokens: int, found: Found) -> bool:
        """Whether the head gets its first slots, up to token `num_tokens`.

        If not, it is not looked at again before that could change: more blocks are
        needed, and fewer free, with every block that decodes take, whether or not
        it is one that was found. Only where the budget cuts the prompt, a hit that
        is lost might lower what is needed now, so there every call looks.
        """
        tables, block_size = self.tables, self.block_size
        num_spare = self._watermark_blocks if self.running else 0
        num_free = tables.num_free_blocks - num_spare - found.num_revived
        num_free += found.num_blocks
        whole = request.num_tokens
        if self._reserve_full_isl and -(-whole // block_size) > num_free:
            fits = False
        else:
            fits = -(-num_tokens // block_size) <= num_free
        if fits:
            return True
        self.head_is_blocked = (
            self._reserve_full_isl or num_tokens == whole or not self.enable_caching
        )
        tables.watch(request, whole, found)
        return False

    # -- quiet steps ----------------------------------------------------------

    def quiet_steps(self, most: int) -> int:
        """Return how many steps, at most `most`, are quiet and have all their blocks.

        None where a decode may fill a block that the head of the queue waits for: the
        step that fills it looks at the head. Changes nothing.
        """
        clock = self.clock
        num_decodes = clock.num_decodes
        if self.partial is not None or not num_decodes:
            return 0
        if self.head_is_blocked:
            if self.tables.will_fill_watched(self.running):
                return 0
        elif self.waiting and len(self.running) < self._most_running:
            return 0
        num_free = self.tables.num_free_blocks
        if (most // self.block_size + 1) * num_decodes <= num_free:
            return most
        for num_steps in range(most):
            num_free -= len(clock.opening(self.step + num_steps))
            if num_free < 0:
                return num_steps
        return most

    def advance(self, num_steps: int) -> list[int]:
        """Take `num_steps` quiet steps; return how many blocks each opens."""
        step = self.step
        self.step = step + num_steps
        if self._ids is not None:
            return self._ids.append_rounds(self.clock.buckets, step, num_steps)
        tables, buckets, block_size = self.tables, self.clock.buckets, self.block_size
        num_opened: list[int] = []
        for now in range(step, step + num_steps):
            opening = buckets[now % block_size]
            if opening:
                tables.append_blocks(opening)
            num_opened.append(len(opening))
            filling = buckets[(now + 1) % block_size]
            if filling:
                tables.register_blocks(filling)
        return num_opened
