"""The scheduler of vLLM's V1 engine, releases 0.8 to 0.33."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from cache.v1.id_tables import IdTables
from cache.v1.runs.tables import RunTables
from sim.scheduler.admission import Conservative, FullPrompt, Watermark
from sim.scheduler.base import SchedulerOutput
from sim.scheduler.batch import BatchShape
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.clock import DecodeColumns
from sim.scheduler.v1.holdings import Holdings
from sim.scheduler.v1.plan import Plan
from sim.scheduler.v1.policies import (
    NEVER,
    AdmissionDesk,
    PrefillInterval,
    SharedPrefillInterval,
)
from sim.scheduler.v1.queues import FCFSRequestQueue, urgency
from sim.scheduler.victims import LatestArrival, LowestPriority, VictimChoice
from sim.scheduler.views import WaitingRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cache.v1.tables import Found, QuickTables
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.in_flight import TokensInFlight
    from sim.scheduler.v1.settings import Settings

Shape = tuple[int, int, int, int, int, int]
"""The first six fields of `BatchShape`: V1 moves no blocks."""

# Looked up once: members of an enum are found by a call.
_RUNNING, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED
_running_order = attrgetter("order")


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
    prompts
        What `prefilling` computes in the latest batch, in order: request, and tokens
        computed before and after.
    passed_over
        Decodes that run and get no token in the latest batch.
    num_recomputed_tokens
        Tokens of that batch that had been computed before.
    copies
        Blocks to copy before its step, source and target.
    num_blocks_by_group
        Blocks that each group holds after the first of the latest quiet steps, after
        the second, and so on.

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
    _in_flight: TokensInFlight | None = None
    _plan: Callable[..., Plan] = Plan
    _pads_heads = False

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        self.dialect = dialect = settings.dialect
        self.prompts: list[tuple[Request, int, int]] = []
        self.passed_over: list[Request] = []
        self.num_recomputed_tokens = 0
        self._first_admitted = 0
        tables = self.tables
        self._quick: QuickTables | None = (
            tables
            if isinstance(tables, IdTables | RunTables) and self.groups is None
            else None
        )
        self._append_rounds: Callable[..., list[int]] | None = (
            None if self._quick is None else self._quick.append_rounds
        )
        self.foresees_usage = self._append_rounds is not None
        self._budget = settings.token_budget
        self._most_running = settings.most_running
        groups = self.groups
        self.copies: list[tuple[int, int]] = []
        self.num_blocks_by_group: list[int] = []
        self.moves_blocks = self.layout.has_hits_inside_blocks
        self._phases = () if groups is None else groups.phases
        self._hit_tokens = cache.block_size if groups is None else groups.hit_alignment
        has_ends = groups is not None and groups.chunk_ends is not None
        self._cut = groups.cut_chunk if groups is not None and has_ends else None
        self._threshold = settings.long_prefill_token_threshold
        self._has_threshold = self._threshold > 0
        self._interval = (
            PrefillInterval(settings.prefill_schedule_interval)
            if settings.prefill_schedule_interval > 1 and dialect.spaces_prefills
            else None
        )
        self._holds_prefill = self._carries_prefill = False
        self._skips_heads = (
            not settings.enable_chunked_prefill and dialect.skips_over_budget_heads
        )
        self._set_policies(settings, cache.num_gpu_blocks)

    def _set_policies(self, settings: Settings, num_gpu_blocks: int) -> None:
        victim, admission = settings.preemption_victim, settings.admission
        self._by_priority = settings.scheduling_policy == "priority"
        self._chooses_victims = self._by_priority or victim is not None
        if victim is not None:
            self._choice = VictimChoice(victim, self)
        self._reason = (
            self._choice.reason
            if self._choice is not None
            else LowestPriority.reason
            if self._by_priority
            else LatestArrival.reason
        )
        # Two admission rules are those of newer releases under other names.
        self._watermark_blocks = int(settings.watermark * num_gpu_blocks)
        self._reserves_all = settings.reserve_full_isl
        self._asks_for_full_prompt = type(admission) is FullPrompt
        if type(admission) is Watermark:
            self._watermark_blocks += admission.num_spare_blocks(num_gpu_blocks)
        elif admission is not None and not self._asks_for_full_prompt:
            has_columns = (
                isinstance(admission, Conservative) and self.layout.keeps_all_blocks
            )
            if has_columns:
                self.clock.columns = DecodeColumns()
            columns = self if has_columns else None
            self._desk = AdmissionDesk(
                admission, self, num_gpu_blocks, self.block_size, columns
            )
        # Whether what keeps the head out cannot end by itself; see `_fits`.
        self._heads_stay_blocked = (
            self._quick is not None
            and (self._desk is None or self._desk.refusals_stand)
            and self._interval is None
            and not self._skips_heads
            and not settings.long_prefill_token_threshold_adaptive
        )

        # Where admission asks for nothing but free blocks, and nothing is cached.
        tables, waiting = self.tables, self.waiting
        self._admit_waiting: Callable[[int, float], None] = (
            partial(self._admit_plainly, tables, waiting)
            if isinstance(tables, IdTables)
            and isinstance(waiting, FCFSRequestQueue)
            and self._heads_stay_blocked
            and self._desk is None
            and not settings.long_prefill_token_threshold
            else self._schedule_waiting
        )

    def space_prefills_by(self, num_turns: Callable[[], int]) -> None:
        """Space prefills by turns that ranks count together, if they are spaced."""
        interval = self.settings.prefill_schedule_interval
        if interval > 1:
            self._interval = SharedPrefillInterval(interval, num_turns)
            self._heads_stay_blocked = False
            self._admit_waiting = self._schedule_waiting

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
        interval = self._interval
        if self._has_threshold:
            self._set_threshold()
        if interval is not None:
            self._carries_prefill = False
            self._holds_prefill = interval.holds(has_decodes=self._has_decodes())
        budget = self._schedule_running()
        step = self.step
        self.step = step + 1
        self._first_admitted = self._num_admitted
        if self.waiting and not self.preemptions:
            self._admit_waiting(budget, now_s)
        if self.groups is not None:
            self.copies = self.groups.end_call()

        # Decodes on the clock, and prompts beside them.
        clock = self.clock
        num_decodes = clock.num_decodes
        num_context_tokens = clock.num_base_tokens + num_decodes * step
        for request in self.passed_over:
            num_decodes -= 1
            num_context_tokens -= request.base_tokens + step
        num_prefills = num_tokens = num_prefill_context_tokens = num_pairs = 0
        for _, before, after in self.prompts:
            num_new_tokens = after - before
            if num_new_tokens == 1:
                num_decodes += 1
                num_context_tokens += after
            else:
                num_prefills += 1
                num_tokens += num_new_tokens
                num_prefill_context_tokens += after
                # Query j of a chunk sees all keys before it and j of its own.
                num_pairs += num_new_tokens * (before + after + 1) // 2
        if interval is not None:
            if not (self.preemptions or self._holds_prefill):
                interval.saw_queue(self._num_backlog())
            interval.stepped(
                num_decodes + num_tokens, carries_prefill=self._carries_prefill
            )
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

    def _set_threshold(self) -> None:
        """Note the most tokens of one request in the call that begins."""
        self._threshold = self.settings.long_prefill_token_threshold
        if self.dialect.spares_lone_requests:
            num_requests = len(self.running) + len(self.waiting)
            if num_requests <= 1:
                self._threshold = 0
            elif self.settings.long_prefill_token_threshold_adaptive:
                share = self.settings.max_num_batched_tokens // num_requests
                self._threshold = max(self._threshold, share)

    # -- running requests -----------------------------------------------------

    def _schedule_running(self) -> int:
        """Let running requests catch up, in order; return the budget that is left."""
        step, clock, quick = self.step, self.clock, self._quick
        budget = self._budget - clock.num_decodes
        prefilling = self.prefilling
        if budget < 0 or (prefilling and not self._all_decodes_get_on(budget)):
            return self._serve(list(self.running), self._budget, counts_decodes=True)
        opening = clock.buckets[step % self.block_size]
        if (
            quick is None
            or (prefilling and not self._runs_behind_decodes(next(iter(prefilling))))
            or (self._chooses_victims and len(opening) > quick.num_free_blocks)
        ):
            if not self._decodes_go_on(step):
                return self._serve(self._in_need(step), budget)
            return self._serve(list(prefilling), budget) if prefilling else budget
        if len(opening) > quick.num_free_blocks:
            self._append_or_preempt(quick, list(opening))
            budget = self._budget - clock.num_decodes
        elif opening:
            quick.append_blocks(opening)
        if self.enable_caching:
            quick.register_blocks(clock.filling(step))
        return self._serve(list(prefilling), budget) if prefilling else budget

    def _decodes_go_on(self, step: int) -> bool:
        """Let decodes compute a token each, in several groups; False if they may not.

        Blocks must suffice, and no prompt in mid-way stand between them.
        """
        groups, clock, prefilling = self.groups, self.clock, self.prefilling
        if groups is None or groups.decodes is None or groups.observer is not None:
            return False
        if groups.decodes.num_opened(clock.buckets, step) > groups.num_free_blocks or (
            prefilling and not self._runs_behind_decodes(next(iter(prefilling)))
        ):
            return False
        groups.decodes.go_on(clock.buckets, step, self._first_steps())
        return True

    def _first_steps(self) -> list[Request]:
        """Return decodes whose tables were not looked at yet; they are from now on."""
        unseen, self._unseen = self._unseen, []
        if unseen:
            running, prefilling = self.running, self.prefilling
            return [r for r in unseen if r in running and r not in prefilling]
        return unseen

    def _append_or_preempt(self, tables: QuickTables, opening: list[Request]) -> None:
        """Give decodes a block each, in running order, preempting from the tail."""
        running = self.running
        for request in opening:
            if request not in running:
                return  # and those behind it went before it
            while not tables.num_free_blocks:
                victim = next(reversed(running))
                self._preempt(victim, request, self._reason)
                if victim is request:
                    return
            tables.append_blocks((request,))

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

    def _in_need(self, step: int) -> list[Request]:
        """Return what opens, fills or gives up a block, or has a chunk to compute.

        With a sliding window, a decode gives up a block every `block_size` steps, and
        all those behind its prompt's window in its first.
        """
        clock = self.clock
        if self.groups is None:
            in_need = self.prefilling | clock.opening(step)
            if self.enable_caching:
                in_need |= clock.filling(step)
            return sorted(in_need, key=_running_order)
        in_need = self.prefilling.copy()
        for phase in self._phases:
            in_need |= clock.opening(step - phase)
        in_need |= dict.fromkeys(self._first_steps())
        return sorted(in_need, key=_running_order)

    def _next_chunk(self, request: Request) -> int:
        """Tokens that a prompt in mid-way asks for, whatever the budget; 0 for none."""
        if self._holds_prefill:
            return 0
        return self._limited(request, request.num_tokens - request.num_computed_tokens)

    def _limited(self, request: Request, num_tokens: int) -> int:
        """Return how many of its next tokens a running request may ask for."""
        if 0 < self._threshold < num_tokens:
            num_tokens = self._threshold
        # The last position is never computed: nothing can be sampled behind it. So
        # a prompt of that length, admitted unchecked, stays in mid-way for ever.
        most = self.max_model_len - 1 - request.num_computed_tokens
        return max(min(num_tokens, most), 0)

    def _chunk_within(self, budget: int, request: Request) -> int:
        """Return how many tokens a prompt in mid-way gets."""
        num_tokens = min(self._next_chunk(request), budget)
        if self._cut is None or not num_tokens:
            return num_tokens
        return self._cut(request, request.num_computed_tokens, num_tokens)

    def _serve(
        self, requests: Iterable[Request], budget: int, *, counts_decodes: bool = False
    ) -> int:
        """Get running requests their slots, in order; return the budget that is left.

        A victim may stand ahead, with its tokens planned already, so nothing advances
        before all is planned. `requests` are all that run if decodes are counted;
        otherwise other decodes get their token without a look.
        """
        plan = self._plan(budget, counts_decodes=counts_decodes)
        running, prefilling = self.running, self.prefilling
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
                num_new_tokens = self._chunk_within(plan.budget, request)
                if not num_new_tokens:
                    continue
            if self._allocate_or_preempt(request, num_new_tokens, plan):
                self._carries_prefill |= not is_decode
                plan.add(request, num_new_tokens, is_decode=is_decode)
            elif plan.ends or not self.dialect.passes_over_self_preempted:
                if not counts_decodes:
                    order = request.order
                    self._pass_over(each for each in running if each.order > order)
                break
        if counts_decodes:
            self._pass_over(each for each in running if each not in plan.num_tokens)
        for request, num_new_tokens in plan.num_tokens.items():
            if request in prefilling:
                self._compute(request, num_new_tokens)
        return plan.budget

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
            if self._is_written(victim):
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

    def _is_written(self, request: Request) -> bool:
        """Whether a step in flight keeps the blocks of a request from coming free."""
        del request
        return False

    def _victim(self, needs: Request) -> Request:
        """Choose the running request that loses its blocks; it may be `needs`."""
        if self._choice is not None:
            return self._choice.victim(self.running, needs)
        if self._by_priority:
            return max(self.running, key=urgency)
        return next(reversed(self.running))

    def _pass_over(self, requests: Iterable[Request]) -> None:
        """Let the decodes among running requests get no token in this step."""
        self.passed_over = [each for each in requests if each not in self.prefilling]
        for request in self.passed_over:
            self.clock.wait(request)
        if self._gives_up_blocks:
            self._unseen = self.passed_over.copy()

    # -- waiting requests -----------------------------------------------------

    def _schedule_waiting(  # noqa: PLR0912, PLR0915 - calls would cost more
        self, budget: int, now_s: float
    ) -> None:
        """Admit from the head of the queue while everything lasts."""
        waiting, running, tables = self.waiting, self.running, self.tables
        groups = self.groups
        set_aside: list[Request] = []
        self._is_admitting = True
        while waiting and budget and len(running) < self._most_running:
            request = waiting.peek_request()
            if (
                request is self._blocked_head
                and self.step <= self._blocked_until
                and not tables.watch_hit
            ):
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
            num_missing_tokens = request.num_tokens - num_hits
            if self._holds_prefill and num_missing_tokens > 1:
                break
            num_new_tokens = num_missing_tokens
            if num_missing_tokens == 1 and self._pads_heads:
                num_new_tokens = self._padded(num_hits)
                if num_new_tokens > budget:
                    break
            if 0 < self._threshold < num_new_tokens:
                num_new_tokens = self._threshold
            if num_new_tokens > budget:
                if self._skips_heads:
                    set_aside.append(waiting.pop_request())
                    continue
                if not self.settings.enable_chunked_prefill:
                    break
                num_new_tokens = budget
            if self._cut is not None:
                num_cut_tokens = self._cut(request, num_hits, num_new_tokens)
                if not num_cut_tokens:
                    break
                if num_cut_tokens < num_new_tokens:  # drafts stay whole, or away
                    num_new_tokens = min(num_cut_tokens, num_missing_tokens)
            num_tokens = num_hits + num_new_tokens
            if not self._fits(request, num_tokens, found):
                break
            waiting.pop_request()
            if self._blocked_head is not None:
                self._look_again()
            tables.begin(request, min(num_tokens, self._most_slots), found)
            self._admit(request, num_hits, now_s)
            self._carries_prefill |= num_missing_tokens > 1
            budget = self._left(budget, request, num_new_tokens)
            self._compute(request, num_new_tokens)
        if set_aside:
            waiting.prepend_requests(set_aside)
        self._is_admitting = False

    def _padded(self, num_hits: int) -> int:
        """Return the tokens to schedule of a waiting request that lacks one token.

        One; with speculative decoding, empty drafts may follow it.
        """
        del num_hits
        return 1

    def _left(self, budget: int, request: Request, num_new_tokens: int) -> int:
        """Return what an admission leaves of the budget."""
        del request
        return budget - num_new_tokens

    def _admit_plainly(
        self, ids: IdTables, waiting: FCFSRequestQueue, budget: int, now_s: float
    ) -> None:
        """Do as `_schedule_waiting` where nothing is cached, in half the time."""
        if waiting[0] is self._blocked_head:
            return
        running, block_size = self.running, self.block_size
        num_spare = self._watermark_blocks
        reserves_all = self._reserves_all or self._asks_for_full_prompt
        while waiting and budget and len(running) < self._most_running:
            request = waiting[0]
            num_whole = num_tokens = request.num_tokens
            if num_whole > self.max_model_len:
                self._schedule_waiting(budget, now_s)
                return
            if num_tokens > budget:
                if not self.settings.enable_chunked_prefill:
                    return
                num_tokens = budget
            num_needed = num_blocks = -(-num_tokens // block_size)
            if reserves_all and num_tokens < num_whole:
                num_needed = -(-num_whole // block_size)
            if num_needed + num_spare > ids.num_free_blocks:
                if not self._reserves_all:
                    num_needed = num_blocks
                if running or num_needed > ids.num_free_blocks:
                    self._blocked_head, self._blocked_until = request, NEVER
                    return
            waiting.pop_request()
            request.table = ids.take(num_blocks)
            if request.status is not _PREEMPTED:
                request.first_scheduled_s = now_s
            request.status = _RUNNING
            request.order = self._num_admitted
            self._num_admitted += 1
            running[request] = self.prefilling[request] = None
            budget -= num_tokens
            if request.num_recompute_tokens:
                self._compute(request, num_tokens)
                continue
            request.num_computed_tokens = num_tokens
            self.num_chunk_tokens += num_tokens
            self.prompts.append((request, 0, num_tokens))
            if num_tokens == num_whole:
                self.completing.append(request)

    def _fits(self, request: Request, num_tokens: int, found: Found) -> bool:
        """Whether the head gets its first slots, up to token `num_tokens`.

        If not, it is not looked at again before that could change: more blocks are
        needed, and fewer free, with every block that decodes take, whether or not
        it is one that was found. Only where the budget cuts the prompt, a hit that
        is lost might lower what is needed now, so there every call looks.
        """
        block_size, is_alone = self.block_size, not self.running
        num_free = self.tables.num_free_blocks
        if not is_alone:
            num_free -= self._watermark_blocks
        num_slots = min(num_tokens, self._most_slots)
        num_whole = request.num_tokens
        num_all_slots = min(num_whole, self._most_slots)
        if self.groups is None:
            num_beside = found.num_revived - found.num_blocks
            num_blocks = -(-num_slots // block_size) + num_beside
            num_all = -(-num_all_slots // block_size) + num_beside
        else:
            needed = self.groups.num_needed_blocks
            num_blocks = needed(request, num_slots, found, is_whole=False)
            num_all = needed(request, num_all_slots, found, is_whole=True)
        reserves_all = self._reserves_all or (
            self._asks_for_full_prompt and not is_alone
        )
        num_needed = max(num_blocks, num_all) if reserves_all else num_blocks
        num_standing_steps = NEVER
        if num_needed <= num_free:
            if self._desk is None or is_alone:
                return True
            head = WaitingRequest(
                request, num_needed_blocks=num_needed, num_full_blocks=num_all
            )
            if self._desk.admits(head, num_free, self.running):
                return True
            if found.num_blocks:
                return False  # a free block's copy, held by others, may be found next
            if self._heads_stay_blocked:
                num_standing_steps = self._desk.num_standing_steps
        if self.groups is not None and reserves_all:
            self.groups.refused(request, num_all_slots)
        if (
            self._heads_stay_blocked
            and num_standing_steps
            and (reserves_all or num_tokens == num_whole or not self.enable_caching)
        ):
            self._blocked_head = request
            self._blocked_until = self.step + num_standing_steps
            self.tables.watch(request, num_whole, found)
        return False

    # -- the batch ------------------------------------------------------------

    def _compute(self, request: Request, num_new_tokens: int) -> None:
        """Put tokens of `request`, whose slots are there, into the batch."""
        before = request.num_computed_tokens
        after = request.num_computed_tokens = before + num_new_tokens
        self.num_chunk_tokens += num_new_tokens
        if before < request.num_recompute_tokens:
            num_again = min(after, request.num_recompute_tokens) - before
            request.num_recomputed_tokens += num_again
            self.num_recomputed_tokens += num_again
        self.prompts.append((request, before, after))
        if after == request.num_tokens:
            self.completing.append(request)

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
        return SchedulerOutput(
            scheduled=scheduled,
            num_scheduled_tokens=[chunks.get(request, 1) for request in scheduled],
            admitted=[each for each in scheduled if each.order >= self._first_admitted],
            preemptions=self.preemptions,
            shape=BatchShape(*shape, num_copied_blocks=len(self.copies)),
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
            if self._blocked_head is None and len(self.running) < self._most_running:
                return 0
            most = min(most, self._num_steps_unasked())
        clock = self.clock
        num_decodes = clock.num_decodes
        if most <= 0 or self.prefilling or not 0 < num_decodes <= self._budget:
            return 0
        if self._gives_up_blocks:
            return self._num_steps_of_groups(most)
        num_free, block_size = self.tables.num_free_blocks, self.block_size
        if (most // block_size + 1) * num_decodes <= num_free:
            return most
        buckets, step = clock.buckets, self.step
        for num_steps in range(most):
            num_free -= len(buckets[(step + num_steps) % block_size])
            if num_free < 0:
                return num_steps
        return most

    def _num_steps_unasked(self) -> int:
        """Return for how many steps nothing asks whether the head may be admitted."""
        if self._interval is not None:
            return 0
        head = self._blocked_head
        if head is None or head is not self.waiting.peek_request():
            return 0 if len(self.running) < self._most_running else NEVER
        # It looks again in the step that fills a block it waits for.
        if self.enable_caching and self.tables.will_fill_watched(self.running):
            return 0
        return self._blocked_until - self.step

    def _num_steps_of_groups(self, most: int) -> int:
        """Return how many steps, at most `most`, surely have their blocks."""
        clock = self.clock
        if self.groups is None or (decodes := self.groups.decodes) is None:
            return 0
        return decodes.num_steps(clock.buckets, clock.num_decodes, self.step, most)

    def usage_after(self, num_steps: int) -> float:
        """See `ClockedScheduler.usage_after`."""
        tables, buckets, step = self.tables, self.clock.buckets, self.step
        num_rounds, num_left = divmod(num_steps, self.block_size)
        num_used = tables.num_usable_blocks - tables.num_free_blocks
        num_used += num_rounds * self.clock.num_decodes
        for now in range(step, step + num_left):
            num_used += len(buckets[now % self.block_size])
        return num_used / tables.num_usable_blocks

    def advance(self, num_steps: int) -> list[int]:
        """Take `num_steps` quiet steps; return how many blocks each opens.

        With several groups blocks are left behind, too: then `usage_facts` after each.
        """
        step, append_rounds = self.step, self._append_rounds
        self.step = step + num_steps
        if self._interval is not None:
            self._interval.stepped_quietly(num_steps)
        if append_rounds is not None:
            return append_rounds(self.clock.buckets, step, num_steps)
        groups, clock = self.groups, self.clock
        assert groups is not None
        num_tokens = clock.num_base_tokens + clock.num_decodes * step
        facts: list[int] = []
        by_group = self.num_blocks_by_group = []
        for now in range(step, step + num_steps):
            if groups.decodes is not None:
                groups.decodes.go_on(clock.buckets, now, self._first_steps())
            else:
                for request in self._in_need(now):
                    num_computed = request.base_tokens + now
                    self._extend(request, num_computed, num_computed - 1)
            used = groups.num_used_blocks_by_group()
            by_group += used
            num_stored = groups.num_stored_tokens(num_tokens)
            facts += sum(used), groups.num_logical_blocks, num_stored
            num_tokens += clock.num_decodes
        return facts
