"""The scheduler of vLLM's V1 engine, releases 0.8 to 0.33."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from cache.v1.id_tables import IdTables
from sim.scheduler.base import SchedulerOutput
from sim.scheduler.batch import BatchShape
from sim.scheduler.v1.chunks import SET_ASIDE, Chunks
from sim.scheduler.v1.common_prefix import CommonPrefix
from sim.scheduler.v1.decode_blocks import running_order
from sim.scheduler.v1.holdings import Holdings
from sim.scheduler.v1.plain_admission import PlainAdmission
from sim.scheduler.v1.plan import Plan
from sim.scheduler.v1.queues import FCFSRequestQueue, urgency
from sim.scheduler.victims import LatestArrival, LowestPriority, VictimChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cache.v1.tables import QuickTables
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.in_flight import TokensInFlight
    from sim.scheduler.v1.settings import Settings

Shape = tuple[int, int, int, int, int, int]
"""The first six fields of `BatchShape`: V1 moves no blocks."""


class Scheduler(Holdings):
    """One token budget a step, shared out in the order of the queues.

    There is no prefill or decode phase: every request has tokens that are known and
    tokens that are computed, and each step lets the computed ones catch up as far as
    the budget goes. A prompt in chunks, a decode and a recomputation after a
    preemption are all the same to it.

    1. Running requests come first, in order. Where blocks run out, the last running
       request (or, by priority, the least urgent one) is preempted, and again, until
       the blocks suffice or the request has preempted itself.
    2. If none was preempted, waiting requests are admitted from the head of the
       queue, strictly in order, while budget, ``max_num_seqs`` and blocks last.

    A decode computes one token a step. It stands on a clock (`DecodeClock`), and is
    looked at only in steps in which it opens or fills a block, or if a rule has to
    choose among all that run.

    Parameters
    ----------
    settings
        The engine's arguments.
    cache
        The KV cache; its ``watermark`` is not read, that of `settings` is.

    Attributes
    ----------
    passed_over
        Decodes that run and get no token in the latest batch.
    copies
        Blocks to copy before its step, source and target.

    Raises
    ------
    SchedulerError
        If the release does not have a key that is used, or values are impossible.

    Notes
    -----
    Source: vLLM 0.11.2, ``vllm/v1/core/sched/scheduler.py``, synchronous scheduling;
    what other releases do differently is in `sim.scheduler.v1.dialect`.
    """

    generation = "v1"
    counts_blocks: ClassVar[bool] = True
    """Whether no rule looks at the ids of blocks; a derived class says so itself."""
    _in_flight: TokensInFlight | None = None
    common_prefix: CommonPrefix | None = None
    _plan: Callable[..., Plan] = Plan

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        self.dialect = settings.dialect
        self.passed_over: list[Request] = []
        self._first_admitted = 0
        self._budget = settings.token_budget
        self._most_running = settings.most_running
        groups = self.groups
        self.copies: list[tuple[int, int]] = []
        self.moves_blocks = self.layout.has_hits_inside_blocks
        self._hit_tokens = cache.block_size if groups is None else groups.hit_alignment
        self._chunks = Chunks(settings, groups)
        # Where all decodes of a step can be served at once, and the last one goes.
        self._preempts_from_tail = groups is None
        self._by_priority = settings.scheduling_policy == "priority"
        self._reason = LatestArrival.reason
        if settings.preemption_victim is not None:
            self._choice = VictimChoice(settings.preemption_victim, self)
            self._reason = self._choice.reason
            self._preempts_from_tail = False
        elif self._by_priority:
            self._reason = LowestPriority.reason
            self._preempts_from_tail = False
        self._admit_waiting: Callable[[int, float], None] = self._schedule_waiting
        if self.gate.is_plain and not self._chunks.vary:
            tables, waiting = self.tables, self.waiting
            if isinstance(tables, IdTables) and isinstance(waiting, FCFSRequestQueue):
                plain = PlainAdmission(self, tables, waiting, self._schedule_waiting)
                self._admit_waiting = plain.admit

    def space_prefills_by(self, num_turns: Callable[[], int]) -> None:
        """Space prefills by turns that ranks count together, if they are spaced."""
        if self.settings.prefill_schedule_interval > 1:
            self._chunks.space_by(num_turns)
            self.gate.keeps_heads = False
            self._admit_waiting = self._schedule_waiting

    def count_blocks(self) -> None:
        """Only count blocks, if that is the same to all rules: nothing looks at ids.

        It is where a victim has no tokens planned, being the last that runs: how many
        blocks a request gives back then follows from its computed tokens.
        """
        tables = self.tables
        if (
            vars(type(self)).get("counts_blocks", False)
            and isinstance(tables, IdTables)
            and not (tables.keeps_ids or tables.num_logical_blocks)
            and self._preempts_from_tail
            and self._desk is None
        ):
            tables.count_only(self._most_slots, self.clock.num_opening)

    def tell_common_prefixes(self) -> None:
        """Let shapes say from now on what their requests share: `common_prefix`."""
        self.common_prefix = CommonPrefix(self)

    # -- a step ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Form the batch of the next step as an object.

        Computed tokens advance at once, before the step's output exists, as the
        real engine does at the end of the call.
        """
        return self.output(self.form(now_s))

    def form(self, now_s: float) -> Shape:
        """Form the batch of the next step, moving blocks and queues; return its shape.

        What was decided stands in `prompts`, `completing`, `passed_over` and
        `preemptions`.
        """
        self.preemptions = []
        self.passed_over = []
        self.prompts = []
        self.num_recomputed_tokens = 0
        chunks = self._chunks
        if chunks.vary:
            num_requests = len(self.running) + len(self.waiting)
            chunks.begin_call(num_requests, self._has_decodes)
        budget = self._schedule_running()
        step = self.step
        self.step = step + 1
        self._first_admitted = self.num_admitted
        if self.waiting and not self.preemptions:
            admit_waiting = self._admit_waiting
            admit_waiting(budget, now_s)
        if self.groups is not None:
            self.copies = self.groups.end_call()
        if not chunks.are_spaced:
            return self._shape(step)
        shape = self._shape(step)
        num_backlog = None if self.preemptions else self._num_backlog()
        chunks.end_call(shape[0] + shape[3], num_backlog)
        return shape

    def _shape(self, step: int) -> Shape:
        """Count the decodes on the clock, and the prompts beside them."""
        clock = self.clock
        num_decodes = clock.num_decodes
        num_context_tokens = clock.num_base_tokens + num_decodes * step
        for request in self.passed_over:
            num_decodes -= 1
            num_context_tokens -= request.base_tokens + step
        num_prefills = num_tokens = num_prefill_context_tokens = num_pairs = 0
        for _, first, after in self.prompts:
            num_new_tokens = after - first
            if num_new_tokens == 1:
                num_decodes += 1
                num_context_tokens += after
            else:
                num_prefills += 1
                num_tokens += num_new_tokens
                num_prefill_context_tokens += after
                # Query j of a chunk sees all keys before it and j of its own.
                num_pairs += num_new_tokens * (first + after + 1) // 2
        return (
            num_decodes,
            num_context_tokens,
            num_prefills,
            num_tokens,
            num_prefill_context_tokens,
            num_pairs,
        )

    def _has_decodes(self) -> bool:
        return self.clock.num_decodes > 0

    def _num_backlog(self) -> int:
        return len(self.waiting)

    # -- running requests -----------------------------------------------------

    def _schedule_running(self) -> int:
        """Let running requests catch up, in order; return the budget that is left.

        All are walked only if a decode may go without a token. What needs blocks or a
        chunk is, if a prompt stands ahead of decodes, or if blocks lack and a rule
        chooses the victim. Else decodes go on at once, and prompts behind them.
        """
        prefilling, decodes = self.prefilling, self._decodes
        budget = self._budget - self.clock.num_decodes
        if budget < 0 or (prefilling and not self._all_decodes_get_on(budget)):
            return self._serve(list(self.running), self._budget, counts_decodes=True)
        if prefilling and not self._runs_behind_decodes(next(iter(prefilling))):
            return self._serve_in_need(budget)
        if not decodes.go_on(self.step):
            if not self._preempts_from_tail:
                return self._serve_in_need(budget)
            self._append_or_preempt()
            budget = self._budget - self.clock.num_decodes
        return self._serve(list(prefilling), budget) if prefilling else budget

    def _all_decodes_get_on(self, budget: int) -> bool:
        """Whether every decode gets its token, whichever requests are preempted.

        `budget` is what all decodes leave of it.
        """
        for request in self.prefilling:
            num_tokens = self._next_chunk(request)
            if not (num_tokens or self.dialect.steps_back_for_unplanned_victims):
                return False
            budget -= num_tokens
            if budget < 0:
                return self._runs_behind_decodes(request)
        return True

    def _runs_behind_decodes(self, request: Request) -> bool:
        for other in reversed(self.running):
            if other is request:
                break
            if other not in self.prefilling:
                return False
        return True

    def _serve_in_need(self, budget: int) -> int:
        """Serve prompts, and the decodes that open, fill or give up a block."""
        in_need = self.prefilling | self._decodes.in_need(self.step)
        return self._serve(sorted(in_need, key=running_order), budget)

    def _serve(
        self, requests: Iterable[Request], budget: int, *, counts_decodes: bool = False
    ) -> int:
        """Get running requests their slots, in order; return the budget that is left.

        A victim may stand ahead, with its tokens planned already, so nothing advances
        before all is planned. `requests` are all that run if decodes are counted;
        otherwise other decodes get their token without a look.
        """
        plan = self._plan(budget, counts_decodes=counts_decodes)
        running, prefilling, chunks = self.running, self.prefilling, self._chunks
        for request in requests:
            if request not in running:
                continue  # preempted for one ahead
            if counts_decodes and not plan.budget:
                break
            if plan.num_to_pass:
                plan.num_to_pass -= 1
                continue
            is_decode, num_new_tokens = request not in prefilling, 1
            if not is_decode:
                num_new_tokens = chunks.within(
                    plan.budget, request, self._next_chunk(request)
                )
                if not num_new_tokens:
                    continue
            if self._allocate_or_preempt(request, num_new_tokens, plan):
                chunks.carries_prefill |= not is_decode
                plan.add(request, num_new_tokens, is_decode=is_decode)
            elif plan.ends or not self.dialect.passes_over_self_preempted:
                if not counts_decodes:  # what is passed over had its share set aside
                    num_on_clock, order = self.clock.num_decodes, request.order
                    self._pass_over(each for each in running if each.order >= order)
                    plan.budget += num_on_clock - self.clock.num_decodes
                break
        if counts_decodes:
            self._pass_over(each for each in running if each not in plan.num_tokens)
        for request, num_new_tokens in plan.num_tokens.items():
            if request in prefilling:
                self.compute(request, num_new_tokens)
        return plan.budget

    def _next_chunk(self, request: Request) -> int:
        """Tokens that a prompt in mid-way asks for, whatever the budget; 0 for none."""
        if self._chunks.holds_prefill:
            return 0
        num_missing_tokens = request.num_tokens - request.num_computed_tokens
        return self._chunks.limited(request, num_missing_tokens)

    def _pass_over(self, requests: Iterable[Request]) -> None:
        """Let the decodes among running requests get no token in this step."""
        self.passed_over = [each for each in requests if each not in self.prefilling]
        for request in self.passed_over:
            self.clock.wait(request)
        if self._gives_up_blocks:
            self._decodes.unseen = self.passed_over.copy()

    # -- preemption -----------------------------------------------------------

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, plan: Plan
    ) -> bool:
        """Get slots for `request`; False if that took its own preemption.

        So it is, with `plan.ends`, where the victim's blocks would not be free at once.
        """
        before = self.num_computed_tokens(request)
        num_tokens = min(before + num_new_tokens, self._most_slots)
        while not self._extend(request, num_tokens, before):
            victim = self._victim(request)
            if not self.dialect.preempts_what_is_written and self._is_written(victim):
                plan.ends = True
                return False
            if plan.counts_decodes and victim.order < request.order:
                # It stands ahead, so the position moves back with the others. In some
                # releases it does not for one without tokens: the next is passed over.
                plan.num_to_pass += not (
                    victim in plan.num_tokens
                    or self.dialect.steps_back_for_unplanned_victims
                )
            plan.give_back(victim, is_decode=victim not in self.prefilling)
            if self._choice is not None:
                self._choice.note(victim)
            self._preempt(victim, request, self._reason)
            if victim is request:
                return False
        return True

    def _append_or_preempt(self) -> None:
        """Do so for all decodes that open a block, in one walk; the last one goes."""
        step = self.step
        tables: QuickTables = self.tables  # type: ignore[assignment]
        opening = list(self.clock.opening(step))
        while opening:
            num_free_blocks = tables.num_free_blocks
            if num_free_blocks:
                tables.append_blocks([r.table for r in opening[:num_free_blocks]])
                del opening[:num_free_blocks]
                continue
            victim = next(reversed(self.running))
            self._preempt(victim, opening[0], self._reason)
            if victim is opening[-1]:
                opening.pop()
        if self.enable_caching:
            tables.register_blocks(self.clock.filling(step).values())

    def _victim(self, needs: Request) -> Request:
        """Choose the running request that loses its blocks; it may be `needs`."""
        if self._choice is not None:
            return self._choice.victim(self.running, needs)
        if self._by_priority:
            return max(self.running, key=urgency)
        return next(reversed(self.running))

    def _is_written(self, request: Request) -> bool:
        """Whether a step in flight keeps the blocks of a request from coming free."""
        del request
        return False

    # -- waiting requests -----------------------------------------------------

    def _schedule_waiting(self, budget: int, now_s: float) -> None:
        """Admit from the head of the queue while everything lasts."""
        waiting, running, tables = self.waiting, self.running, self.tables
        groups, gate, chunks, step = self.groups, self.gate, self._chunks, self.step
        set_aside: list[Request] = []
        self._is_admitting = True
        while waiting and budget and len(running) < self._most_running:
            request = waiting.peek_request()
            if request is gate.head and gate.is_shut(step):
                break
            if groups is not None:
                in_flight = self._in_flight
                if in_flight is not None and in_flight.defers(request):
                    set_aside.insert(0, waiting.pop_request())  # they keep their order
                    continue
                if groups.lacks(request):
                    break
            found = tables.find(request, request.num_tokens)
            num_hits = found.num_blocks * self._hit_tokens
            num_new_tokens = chunks.first(request, num_hits, budget)
            if num_new_tokens == SET_ASIDE:
                set_aside.append(waiting.pop_request())
                continue
            num_tokens = num_hits + num_new_tokens
            if not (num_new_tokens and gate.lets_in(request, num_tokens, found, step)):
                if num_new_tokens and self.common_prefix is not None:
                    self.common_prefix.refused.add(request)
                break
            waiting.pop_request()
            if gate.head is not None:
                gate.look_again()
            tables.begin(request, min(num_tokens, self._most_slots), found)
            self._admit(request, num_hits, now_s)
            chunks.carries_prefill |= request.num_tokens - num_hits > 1
            budget = self._left(budget, request, num_new_tokens)
            self.compute(request, num_new_tokens)
        if set_aside:
            waiting.prepend_requests(set_aside)
        self._is_admitting = False

    def _left(self, budget: int, request: Request, num_new_tokens: int) -> int:
        """Return the budget that an admission leaves."""
        del request
        return budget - num_new_tokens

    # -- the batch ------------------------------------------------------------

    def output(self, shape: Shape) -> SchedulerOutput:
        """Return the decisions of the latest `form`, which returned `shape`. O(n)."""
        for request in self.passed_over:
            self.clock.settle(request, self.step)
            request.end_streak()
        chunks = {request: after - before for request, before, after in self.prompts}
        idle = {*self.passed_over, *self.prefilling} - chunks.keys()
        scheduled = [request for request in self.running if request not in idle]
        for request in scheduled:
            if request not in chunks:
                num_tokens = request.base_tokens + self.step - 1
                request.num_tokens = request.num_computed_tokens = num_tokens
        told = BatchShape if self.common_prefix is None else self.common_prefix.told
        return SchedulerOutput(
            scheduled=scheduled,
            num_scheduled_tokens=[chunks.get(request, 1) for request in scheduled],
            admitted=[each for each in scheduled if each.order >= self._first_admitted],
            preemptions=self.preemptions,
            shape=told(*shape, num_copied_blocks=len(self.copies)),
            num_recomputed_tokens=self.num_recomputed_tokens,
            # Nothing has moved, so nothing will. Or the last running request gave up
            # its own blocks with the pool to itself: it can never be served.
            stuck=not scheduled and not (self.preemptions and self.running),
        )

    # -- quiet steps ----------------------------------------------------------

    def quiet_steps(self, most: int) -> int:
        """Return how many steps, at most `most`, are quiet and have all their blocks.

        Changes nothing.
        """
        if self.waiting:
            most = self._num_steps_shut(most)
        num_decodes = self.clock.num_decodes
        if most <= 0 or self.prefilling or not 0 < num_decodes <= self._budget:
            return 0
        return self._decodes.num_steps(self.step, most)

    def _num_steps_shut(self, most: int) -> int:
        """Return for how many steps, at most `most`, none is let in that waits."""
        head = self.gate.head
        if head is not None and head is self.waiting.peek_request():
            return min(most, self.gate.num_steps_shut(self.step))
        if len(self.running) < self._most_running or self._chunks.are_spaced:
            return 0  # the next call looks at the head
        return most

    def advance(self, num_steps: int) -> list[int]:
        """Take `num_steps` quiet steps; return how many blocks each opens.

        With several groups blocks are left behind, too: then `usage_facts` after each.
        """
        step = self.step
        self.step = step + num_steps
        if self._chunks.are_spaced:
            self._chunks.pass_quietly(num_steps)
        rounds = self._decodes.rounds
        return rounds(self.clock.buckets, step, num_steps)

    @property
    def foresees_usage(self) -> bool:
        return self._decodes.foresees_usage

    def usage_after(self, num_steps: int) -> float:
        return self._decodes.usage_after(self.step, num_steps)

    @property
    def num_blocks_by_group(self) -> list[int]:
        return self._decodes.num_blocks_by_group
